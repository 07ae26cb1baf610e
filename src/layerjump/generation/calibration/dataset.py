"""The calibration set: what each level predicts on real or self-generated text.

Text that the model writes itself: what an exit rule meets in generation, which real documents do not show.

Behind its own tokens a model is surer, and its early levels are right more often, than behind real text: a threshold
found on documents is stricter there than it need be.

What levels say about positions of text, beside what the model says: the evidence that rules are chosen on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerjump.data.batches import Batch
from layerjump.data.corpus import Corpus, split_documents
from layerjump.errors import BadExit, TextTooShort
from layerjump.generation.generate import generate
from layerjump.generation.probes import probe_features
from layerjump.generation.rules import Shortlist
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import chunk_rows, chunks, top_two
from layerjump.models.activations import capture_states
from layerjump.models.model import Model
from layerjump.models.unembedding import can_restrict

SHORTLIST_LENGTH = 2048
"""Tokens of a shortlist at most."""
MIN_VOCAB_RATIO = 4
"""A vocabulary smaller than this many shortlists is read in full."""
COUNTED_DOCUMENTS = 4_000
"""Documents in which tokens are counted."""
OPENING = 12
"""Tokens of a document that the model goes on with."""
TOGETHER = 64
"""Texts that are written side by side."""


def generate_text(
    model: Model,
    corpus: Corpus,
    documents: Sequence[int],
    *,
    tokens: int,
    picks: int,
    seed: int = 0,
) -> list[Batch]:
    """Documents' first tokens and what the model says next, greedily; so many picks a document where it predicts.

    Where to look is drawn first, and no document is gone on with further than that.
    """
    room = model.tokenization.max_length - len(model.tokenization.wrap([])) - OPENING
    if not 1 <= tokens <= room:
        raise BadExit(
            f"{tokens} tokens of the model's own were asked for behind each opening; give 1 to {room}, which is what "
            f"its context holds"
        )
    orders = {each: np.random.default_rng([seed, each]).permutation(tokens) for each in documents}
    lengths = {each: 1 + int(order[:picks].max()) for each, order in orders.items()}
    queue = sorted(documents, key=lambda each: lengths[each])
    groups = [queue[start : start + TOGETHER] for start in range(0, len(queue), TOGETHER)]
    return [
        _written(
            model,
            corpus,
            {each: orders[each] for each in group},
            most=lengths[group[-1]],
            picks=picks,
        )
        for group in groups
    ]


def _written(
    model: Model, corpus: Corpus, orders: Mapping[int, NDArray[np.int64]], *, most: int, picks: int
) -> Batch:
    texts = model.tokenization.encode([corpus.documents[document] for document in orders])
    openings = [model.tokenization.wrap(ids[:OPENING]) for ids in texts]
    said = generate(
        model,
        None,
        model.tokenization.left_padded(openings),
        do_sample=False,
        max_new_tokens=most,
        pad_token_id=model.tokenization.pad,
    ).ids
    rows = [opening + new for opening, new in zip(openings, said, strict=True)]
    ids = _right_padded(rows, model.tokenization.pad)
    attention = _right_padded([[1] * len(row) for row in rows], 0)
    row, position = [], []
    for place, (new, order) in enumerate(zip(said, orders.values(), strict=True)):
        # The first of an order that fall into a text which ended early are as random as if drawn from it alone.
        drawn = np.sort(order[order < len(new)][:picks])
        row += [place] * len(drawn)
        # The state at a position tells the next token, so the first is the opening's last.
        position += (len(openings[place]) - 1 + drawn).tolist()
    rows_at, positions = torch.tensor(row), torch.tensor(position)
    document = torch.tensor(list(orders))[rows_at]
    return Batch(ids, attention, rows_at, positions, document, ids[rows_at, positions])


def _right_padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


CANDIDATES = 10
"""Levels at which stopping is considered."""


@dataclass(frozen=True)
class CalibrationSet:
    """Positions of some documents, read at some levels; tensors are (levels, positions) unless said."""

    levels: tuple[int, ...]
    right: Tensor
    """Whether the level's best token is the model's own."""
    gap: Tensor
    features: Tensor
    """(levels, positions, d + 3), what gates read."""
    document: Tensor
    """(positions,)."""
    tokens: Tensor | None = None
    """The shortlist that levels were read through; None: the whole vocabulary."""

    def __len__(self) -> int:
        return len(self.document)


def candidate_levels(levels: Sequence[int]) -> tuple[int, ...]:
    """Those worth considering: all if they are few, else ten from first to last, closest where most is saved."""
    last = len(levels) - 1
    if last < CANDIDATES:
        return tuple(levels)
    steps = (step / (CANDIDATES - 3) for step in range(CANDIDATES - 2))
    places = {0, 1} | {round(2 * (last / 2) ** step) for step in steps}
    return tuple(levels[place] for place in sorted(places))


def unseen_documents(jumps: Jumps | None, corpus: Corpus) -> tuple[int, ...]:
    """Documents of a text that these jumps were not fitted on."""
    everything = tuple(range(len(corpus.documents)))
    if jumps is None or jumps.provenance.text_sha256 != corpus.sha256:
        return everything
    known = jumps.provenance
    seen = set(split_documents(len(everything), known.split, seed=known.seed).fit)
    return tuple(document for document in everything if document not in seen)


def split_documents_by_role(documents: Sequence[int], seed: int) -> dict[str, list[int]]:
    """Deal documents out: to fit gates, to choose levels, to test thresholds, to show the outcome.

    Thresholds get most, since they may use one position of each: the more there are, the less the guarantee costs.
    """
    if len(documents) < 8:
        raise TextTooShort(
            f"{len(documents)} documents are left that the jumps have not seen, too few to calibrate on; give another "
            f"text"
        )
    first = split_documents(len(documents), "30/60/10", seed=seed)
    some = 3 * len(first.fit) // 8
    dealt = {
        "gates": first.fit[some:],
        "select": first.fit[:some],
        "thresholds": first.select,
        "test": first.test,
    }
    return {name: [documents[place] for place in places] for name, places in dealt.items()}


@torch.no_grad()
def build_calibration_set(
    model: Model,
    jumps: Jumps | None,
    batches: Iterable[Batch],
    levels: Sequence[int],
    shortlist: Shortlist | None = None,
) -> CalibrationSet:
    """Read the batches' picks at levels."""
    lens, last = (
        Lens(model if shortlist is None else shortlist.restrict(model), jumps),
        model.n_blocks,
    )
    tokens = None if shortlist is None else shortlist.tokens
    rows = chunk_rows(model)
    parts: list[tuple[Tensor, ...]] = []
    for batch in batches:
        at = next(iter(capture_states(model, [batch], [*levels, last])))
        for part in chunks(batch.n_picks, rows):
            own = model.logits(at[last][part]).argmax(-1)
            seen = [_look(lens, level, at[level][part], own, tokens) for level in levels]
            place = batch.position[part].to(own.device)
            features = torch.stack([probe_features(at[level][part], place) for level in levels])
            right, gap = (torch.stack(column) for column in zip(*seen, strict=True))
            parts.append((right.cpu(), gap.cpu(), features.float().cpu(), batch.document[part]))
    columns = [list(column) for column in zip(*parts, strict=True)]
    right, gap, features = (torch.cat(column, 1) for column in columns[:3])
    return CalibrationSet(tuple(levels), right, gap, features, torch.cat(columns[3]), tokens)


def _look(
    lens: Lens, level: int, state: Tensor, own: Tensor, tokens: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = lens.logits(level, state)
    ids, probability = top_two(logits)
    top = ids[:, 0] if tokens is None else tokens.to(own.device)[ids[:, 0]]
    return top == own, probability[:, 0] - probability[:, 1]


def build_shortlist(model: Model, corpus: Corpus, documents: Sequence[int]) -> Shortlist | None:
    """The most frequent tokens of these documents; None where a shorter unembedding is impossible or saves little."""
    vocab_size = model.structure.vocab_size
    if not can_restrict(model.structure) or vocab_size < MIN_VOCAB_RATIO * SHORTLIST_LENGTH:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    texts = [corpus.documents[index] for index in documents[:COUNTED_DOCUMENTS]]
    for ids in model.tokenization.encode(texts):
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    return Shortlist(order[: max(2, min(SHORTLIST_LENGTH, int((counts > 0).sum())))].sort().values)
