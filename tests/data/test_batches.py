"""Batches hold every token once, draw the same picks however they are cut, and pad little."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from layerjump.data.batches import _group, make_batches
from layerjump.data.corpus import Corpus, load_text
from layerjump.data.positions import PAPER, Positions
from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText, TextTooShort

TEXT = Path(__file__).resolve().parents[2].parent / "shared" / "text"
LEIPZIG = TEXT / "leipzig" / "eng_wikipedia_2016_10K-sentences.txt"

TOKENS = {
    "bert": Tokenization.of(tokenizers.bert(), max_positions=16),
    "llama": Tokenization.of(tokenizers.llama(), max_positions=16),
    "gpt2": Tokenization.of(tokenizers.gpt2(), max_positions=16),
}
EVERY = Positions("all", skip_first=0)

tokens = st.sampled_from(sorted(TOKENS)).map(TOKENS.__getitem__)
kinds = st.sampled_from(["one", "all", "sample=3", "30%"])
corpora = st.lists(st.lists(st.integers(0, 999), min_size=3, max_size=60), min_size=1, max_size=20)

pytestmark = pytest.mark.filterwarnings("error")


def corpus_of(documents) -> Corpus:
    return Corpus("numbers", tuple(" ".join(map(str, d)) for d in documents), "")


def picks(found) -> list[tuple[int, int, int]]:
    """(document, position, original token) of every pick. Sequences of a document run together."""
    rows = [zip(b.document.tolist(), b.position.tolist(), b.token.tolist(), strict=True) for b in found]
    return sorted(pick for row in rows for pick in row)


@given(corpora, tokens)
def test_all_is_every_token_of_every_document_once(documents, tokens):
    found = make_batches(corpus_of(documents), tokens, EVERY)
    seen = Counter((document, token) for document, _, token in picks(found))
    written = Counter((i, n + 7) for i, document in enumerate(documents) for n in document)
    assert seen == written
    assert found.n_picks == seen.total()


@given(corpora, tokens, kinds, st.integers(1, 200), st.integers(1, 200), st.randoms())
def test_picks_do_not_depend_on_budget_or_order(documents, tokens, kind, a, b, random):
    corpus, positions = corpus_of(documents), Positions.parse(kind)
    order = list(range(len(documents)))
    random.shuffle(order)
    expected = picks(make_batches(corpus, tokens, positions, max_batch_tokens=a))
    shuffled = make_batches(corpus, tokens, positions, documents=order, max_batch_tokens=b)
    assert picks(shuffled) == expected


@given(corpora, tokens, kinds, st.integers(1, 100))
def test_a_batch_is_what_it_says(documents, tokens, kind, budget):
    found = make_batches(corpus_of(documents), tokens, Positions.parse(kind), max_batch_tokens=budget)
    for batch in found:
        rows, longest = batch.input_ids.shape
        assert rows == 1 or rows * longest <= budget
        lengths = batch.attention_mask.sum(1)
        right_padded = torch.arange(longest) < lengths[:, None]
        assert torch.equal(batch.attention_mask.bool(), right_padded)
        assert longest == lengths.max()
        assert (batch.input_ids[~right_padded] == tokens.pad).all()
        order = list(zip(batch.row.tolist(), batch.position.tolist(), strict=True))
        assert order == sorted(set(order))
        assert {t.dtype for t in vars(batch).values() if t is not None} == {torch.int64}
    assert found.n_tokens == sum(batch.n_tokens for batch in found)
    assert found.n_picks == sum(batch.n_picks for batch in found)
    assert found.n_sequences == sum(len(batch.input_ids) for batch in found)
    cells = sum(batch.input_ids.numel() for batch in found)
    assert found.padding_share == pytest.approx(1 - found.n_tokens / cells)


def test_a_long_document_is_cut_and_every_piece_wrapped():
    found = make_batches(corpus_of([range(30)]), TOKENS["bert"], EVERY, max_length=16)
    rows = sorted(row for batch in found for row in batch.input_ids.tolist())
    cls, sep, pad = tokenizers.CLS, tokenizers.SEP, tokenizers.PAD
    pieces = [[cls, *range(7, 21), sep], [cls, *range(21, 35), sep], [cls, 35, 36, sep]]
    assert [[t for t in row if t != pad] for row in rows] == sorted(pieces)


def test_max_length_cannot_exceed_the_models():
    found = make_batches(corpus_of([range(100)]), TOKENS["llama"], EVERY, max_length=10**6)
    assert max(batch.input_ids.shape[1] for batch in found) == 16


def test_one_reads_only_the_beginning():
    found = make_batches(corpus_of([range(100)] * 40), TOKENS["llama"], PAPER)
    assert found.n_sequences == found.n_picks == 40
    assert {position for _, position, _ in picks(found)} > {0, 15}


def test_nothing_is_run_after_a_causal_models_last_pick():
    """The same positions as for a masked model, which reads both ways and gets the whole text."""
    corpus = corpus_of([range(14)] * 40)
    for kind in ("one", "sample=3"):
        found = make_batches(corpus, TOKENS["llama"], Positions.parse(kind))
        last = {document: position for document, position, _ in sorted(picks(found))}
        assert found.n_tokens == sum(position + 1 for position in last.values())
    masked = Tokenization.of(tokenizers.bert(), max_positions=16, masked=True)
    assert make_batches(corpus, masked, Positions("one")).n_tokens == 40 * 16


def test_a_masked_model_sees_masks_exactly_where_we_look():
    corpus = corpus_of([range(10), range(20, 33)])
    for kind in ("one", "sample=4", "40%", "all"):
        positions = Positions.parse(kind)
        plain = Tokenization.of(tokenizers.bert(), max_positions=16, masked=True)
        for batch in make_batches(corpus, plain, positions):
            masked = batch.input_ids == tokenizers.MASK
            looked = torch.zeros_like(masked)
            looked[batch.row, batch.position] = positions.masks()
            assert torch.equal(masked, looked)
            original = batch.input_ids.clone()
            original[batch.row, batch.position] = batch.token
            assert (original != tokenizers.MASK).all()
            assert all(
                token == batch_document_token(corpus, document, position)
                for document, position, token in picks([batch])
            )


def batch_document_token(corpus: Corpus, document: int, position: int) -> int:
    """The token of a document that fits in one sequence, behind one [CLS]."""
    return int(corpus.documents[document].split()[position - 1]) + 7


def test_a_causal_model_sees_no_masks():
    for batch in make_batches(corpus_of([range(10)]), TOKENS["llama"], Positions("sample", 4)):
        (row,) = batch.input_ids.tolist()
        assert row == [tokenizers.BOS, *range(7, 17)][: len(row)]


def test_sequences_with_nothing_to_draw_are_left_out():
    corpus = corpus_of([[1], [1, 2], [1, 2, 3], []])
    found = make_batches(corpus, TOKENS["gpt2"], Positions("all", skip_first=2))
    assert picks(found) == [(2, 2, 10)]
    assert (found.n_sequences, found.n_tokens) == (1, 3)
    with pytest.raises(TextTooShort, match="4 documents of numbers") as caught:
        make_batches(corpus, TOKENS["gpt2"], Positions("all", skip_first=3))
    assert "\n" not in str(caught.value)


def test_documents_are_taken_in_order_until_there_are_enough_tokens():
    corpus = corpus_of([range(9)] * 6)  # 10 tokens each, with <s>
    found = make_batches(corpus, TOKENS["llama"], EVERY, documents=[4, 2, 0, 1], tokens=15)
    assert {document for document, _, _ in picks(found)} == {4, 2}
    exact = make_batches(corpus, TOKENS["llama"], EVERY, documents=[4, 2, 0, 1], tokens=20)
    assert exact.n_tokens == 20


def test_too_few_tokens():
    corpus = corpus_of([range(9)] * 6)
    with pytest.raises(TextTooShort) as caught:
        make_batches(corpus, TOKENS["llama"], EVERY, documents=[1, 2], tokens=20_000)
    assert str(caught.value) == (
        "expected 20,000 tokens in the 2 documents of numbers, got 20; pass more text, or tokens=20 or less"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"documents": [0, 7]}, "0 to 4 of numbers, got 7"),
        ({"documents": [-1]}, "0 to 4 of numbers, got -1"),
        ({"max_batch_tokens": 0}, "max_batch_tokens of 1 or more, got 0"),
        ({"tokens": 0}, "tokens of 1 or more, got 0"),
        ({"seed": -3}, "seed of 0 or more, got -3"),
        ({"max_length": 2}, "max_length of at least 3"),
    ],
)
def test_options_that_make_no_sense(options, said):
    with pytest.raises(BadText) as caught:
        make_batches(corpus_of([[1, 2, 3]] * 5), TOKENS["bert"], EVERY, **options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_seed_orders_the_batches_and_draws_the_picks():
    corpus = corpus_of([range(n % 14 + 1) for n in range(200)])

    def run(seed):
        every = make_batches(corpus, TOKENS["llama"], EVERY, seed=seed, max_batch_tokens=64)
        one = make_batches(corpus, TOKENS["llama"], Positions("one"), seed=seed, max_batch_tokens=64)
        return [batch.input_ids.tolist() for batch in every], picks(one)

    assert run(0) == run(0)
    (order, drawn), (other_order, other_drawn) = run(0), run(1)
    assert order != other_order
    assert sorted(order) == sorted(other_order)
    assert drawn != other_drawn


def test_the_first_batches_stand_for_all():
    corpus = corpus_of([range(n % 14 + 1) for n in range(3000)])
    found = make_batches(corpus, TOKENS["llama"], EVERY, max_batch_tokens=64)
    widths = torch.tensor([batch.input_ids.shape[1] for batch in found], dtype=torch.float64)
    tenth = widths[: len(widths) // 10].mean()
    assert abs(tenth / widths.mean() - 1) < 0.15


def test_sequences_of_one_document_are_drawn_apart():
    found = make_batches(corpus_of([range(15 * 20)]), TOKENS["llama"], Positions("sample", 1))
    assert len({position for _, position, _ in picks(found)}) > 5


def test_the_first_batches():
    found = make_batches(corpus_of([range(5)] * 9), TOKENS["llama"], EVERY, max_batch_tokens=12)
    assert [b.document.tolist() for b in found.first(2)] == [found[i].document.tolist() for i in range(2)]
    assert (len(found.first(0)), found.first(0).n_tokens, found.first(0).padding_share) == (0, 0, 0)


def test_indexing_is_like_a_lists():
    found = make_batches(corpus_of([range(5)] * 9), TOKENS["llama"], EVERY, max_batch_tokens=12)
    assert torch.equal(found[-1].input_ids, found[len(found) - 1].input_ids)
    with pytest.raises(IndexError):
        found[len(found)]


@pytest.mark.skipif(not LEIPZIG.exists(), reason=f"no real text at {LEIPZIG}")
def test_little_is_padding_where_sentences_stand_next_to_long_documents():
    sentences = load_text(LEIPZIG).documents
    long = tuple(" ".join(sentences[i : i + 24]) for i in range(0, 4000, 24))
    mixed = Corpus("mixed", sentences[4000:] + long, "")
    vocabulary = sorted({word for sentence in sentences for word in sentence.split()})
    tokens = Tokenization.of(tokenizers.llama(vocabulary), max_positions=512)
    found = make_batches(mixed, tokens, Positions("all"))
    assert max(batch.input_ids.shape[1] for batch in found) == 512
    assert found.padding_share < 0.05


def test_a_short_text_of_mixed_lengths_is_not_mostly_padding():
    lengths = np.random.default_rng(0).integers(5, 90, 80)
    groups = _group(lengths, 4096)
    assert sorted(np.concatenate(groups)) == list(range(80))
    for group in groups:
        cells = len(group) * lengths[group].max()
        assert cells <= 4096
        assert lengths[group].sum() >= 0.85 * cells


def test_looking_elsewhere_masks_the_same_tokens():
    share = Positions.parse("15%")
    found = make_batches(corpus_of([range(15)] * 9), TOKENS["bert"], share)
    for positions in (Positions("all"), Positions.parse("50%"), share):
        for ours, theirs in zip(found.with_picks_at(positions), found, strict=True):
            assert torch.equal(ours.input_ids, theirs.input_ids)


def test_picks_say_which_sequence_of_their_document_they_are_in():
    found = make_batches(corpus_of([range(15 * 4), range(5)]), TOKENS["llama"], EVERY)
    said = {(int(d), int(s)) for b in found for d, s in zip(b.document, b.sequence, strict=True)}
    assert said == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)}
