"""Whether a model needs BOS is measured: only a model that was trained with it, and always."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import tokenizers
from helpers.story_text import stories
from helpers.tiny_models import tiny_config, tiny_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import layerjump as lj
from layerjump.data.tokenization import Tokenization
from layerjump.models.bos import MARGIN, PASSAGE, BosLosses, measure_bos, needs_bos
from layerjump.models.model import Model

SIZES = {"vocab_size": len(tokenizers.characters()), "bos_token_id": tokenizers.BOS, "max_position_embeddings": 80}


def train(family: str, *, with_bos: bool) -> Model:
    """A tiny model that knows four texts by heart, every one of them after BOS, or every one without."""
    tokenizer = tokenizers.characters()
    hf = AutoModelForCausalLM.from_config(tiny_config(family, **SIZES)).eval()
    texts = [text[:65] for text in (PASSAGE, *stories(3).documents)]
    rows = torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)
    if with_bos:
        rows = torch.cat([torch.full((len(rows), 1), tokenizers.BOS), rows], dim=1)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-2)
    for _ in range(150):
        logits = hf(input_ids=rows).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Model.wrap(hf, tokenizer, name=family)


def of_tokenizer(model: Model) -> Tokenization:
    """The tokenization with nothing but what the tokenizer adds."""
    return Tokenization.of(model.tokenizer, max_positions=model.max_positions, masked=False)


def random_model(tokenizer=None, **changes) -> Model:
    return Model.wrap(tiny_model("gpt2", **(SIZES | changes)), tokenizer or tokenizers.characters(), name="random")


@pytest.fixture
def passes():
    """Count the forward passes of a model: passes(model) → a list that grows by its input ids."""

    def count(model: Model) -> list[torch.Tensor]:
        calls: list[torch.Tensor] = []
        model.hf.register_forward_pre_hook(lambda _, __, kwargs: calls.append(kwargs["input_ids"]), with_kwargs=True)
        return calls

    return count


@pytest.mark.parametrize("family", ["gpt2", "gemma"])
@pytest.mark.parametrize("with_bos", [True, False])
def test_a_model_needs_bos_if_it_was_always_trained_with_it(family, with_bos):
    model = train(family, with_bos=with_bos)
    losses = measure_bos(model, of_tokenizer(model))
    assert min(losses.without, losses.with_bos) < 1.0 < losses.chance
    assert (losses.without - losses.with_bos > MARGIN) == with_bos
    assert model.tokenization.prefix == ((tokenizers.BOS,) if with_bos else ())
    assert model.tokenization.wrap([9]) == [tokenizers.BOS, 9][not with_bos :]


@pytest.mark.parametrize(
    ("without", "with_bos", "needed"),
    [
        (6.5, 3.0, True),  # Gemma
        (3.50, 3.57, False),  # SmolLM2
        (3.9, 3.0, False),  # less than the margin
        (9.0, 5.0, False),  # no better than chance, with BOS or without
        (float("nan"), 3.0, False),
        (6.5, float("nan"), False),
    ],
)
def test_bos_must_save_more_than_the_margin_and_beat_chance(without, with_bos, needed):
    assert BosLosses(without, with_bos, chance=4.6).needs_bos == needed


def test_random_weights_never_need_bos():
    """Their losses differ by more than the margin; but they are no better than chance."""
    model, differences = random_model(), []
    for seed in range(30):
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in model.hf.parameters():
                weight.normal_(0, 10 ** (seed % 3 - 2))  # from the scale of an initialization to one that is absurd
        losses = measure_bos(model, of_tokenizer(model))
        differences.append(losses.without - losses.with_bos)
        assert not losses.needs_bos
    assert max(differences) > MARGIN


def test_the_same_tokens_are_scored_with_and_without(passes):
    model = random_model()
    calls = passes(model)
    losses = measure_bos(model, of_tokenizer(model))
    without, with_bos = (call[0] for call in calls)
    assert with_bos.tolist() == [tokenizers.BOS, *without.tolist()]
    for row, loss in ((without, losses.without), (with_bos, losses.with_bos)):
        with torch.no_grad():
            logits = model.hf(input_ids=row[None]).logits[0, -len(without) : -1]
        assert loss == pytest.approx(float(cross_entropy(logits, without[1:])), abs=1e-5)


def test_it_is_measured_once_for_a_model_and_when_first_needed(passes):
    model = random_model()
    calls = passes(model)
    assert calls == []
    for _ in range(3):
        assert model.tokenization.prefix == ()
    assert len(calls) == 2
    assert max(call.shape[1] for call in calls) <= 65


def adds_bos():
    return tokenizers.llama(PASSAGE.split())


def has_no_bos():
    tokenizer = tokenizers.characters()
    tokenizer.bos_token = None
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "changes"),
    [
        (adds_bos(), {"vocab_size": 2000}),
        (has_no_bos(), {}),
        (tokenizers.gpt2(), {"vocab_size": 2000}),  # every word of the passage is unknown to it
        (None, {"max_position_embeddings": 20}),  # too few tokens
        (None, {"vocab_size": 50}),  # the embedding has no rows for some characters
    ],
)
def test_nothing_is_measured_where_nothing_can_be_said(passes, tokenizer, changes):
    model = random_model(tokenizer, **changes)
    calls = passes(model)
    assert model.tokenization.prefix == of_tokenizer(model).prefix
    assert measure_bos(model, of_tokenizer(model)) is None
    assert calls == []


def test_models_that_predict_no_next_token_are_not_measured(passes):
    for family in ("bert", "t5"):
        tokenizer = tokenizers.characters(mask_token="[MASK]", pad_token="[PAD]")
        model = Model.wrap(tiny_model(family, **SIZES), tokenizer, name=family)
        calls = passes(model)
        assert tokenizers.BOS not in model.tokenization.prefix
        assert calls == []
    headless = replace(random_model(), no_predictions="it has no head")
    assert not needs_bos(headless, of_tokenizer(headless))


def test_a_model_in_training_is_left_as_it_is():
    model = random_model()
    expected = measure_bos(model, of_tokenizer(model))
    model.hf.train()
    model.hf.transformer.h[0].eval()
    modes = [module.training for module in model.hf.modules()]
    random_state = torch.get_rng_state()
    assert measure_bos(model, of_tokenizer(model)) == expected
    assert [module.training for module in model.hf.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(("name", "prefix"), [("stories15M", (1,)), ("stories260K", (1,))])
def test_real_models_read_what_their_tokenizers_say(real_folder, name, prefix):
    model = lj.load(real_folder(name))
    assert model.tokenization.prefix == prefix
    # Their tokenizers add BOS; the models, trained on packed stories, would do without it.
    losses = measure_bos(model, replace(of_tokenizer(model), prefix=()))
    assert abs(losses.without - losses.with_bos) < 0.3


def test_a_fixture_trained_on_packed_stories_needs_none(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    losses = measure_bos(model, of_tokenizer(model))
    assert abs(losses.without - losses.with_bos) < 0.3
    assert model.tokenization.prefix == ()
