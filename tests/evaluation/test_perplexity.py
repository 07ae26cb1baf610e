"""Perplexity with a sliding window equals a simple loop over the Hugging Face model."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.story_text import stories
from torch.nn.functional import cross_entropy

import layerjump as lj
from layerjump.errors import BadEvaluation
from layerjump.evaluation.model_variants import LinearizedModel, make_variant
from layerjump.evaluation.perplexity import perplexity, windows


@pytest.fixture(scope="module")
def tiny(data_folder):
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def text() -> str:
    return " \n ".join(stories(6).documents)


@torch.no_grad()
def simple_perplexity(model, text: str, window: int, stride: int) -> tuple[float, int]:
    """The loop of Hugging Face's guide to perplexity: labels leave out tokens that were scored before."""
    ids = model.tokenizer(text, return_tensors="pt").input_ids
    total, count, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : part.shape[1] - (end - before)] = -100
        # The model's own loss rounds float64 logits to float32.
        logits = model.hf(part).logits[0, :-1]
        total += float(cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count, before = count + int((labels[:, 1:] != -100).sum()), end
        if end == ids.shape[1]:
            break
    return math.exp(total / count), count


@pytest.mark.parametrize(("window", "stride"), [(32, 16), (32, 32), (20, 7), (128, 64), (5, 1)])
def test_perplexity_equals_the_simple_loop(tiny, text, window, stride):
    result = perplexity(tiny, text, window=window, stride=stride)
    value, count = simple_perplexity(tiny, text, window, stride)
    assert result.tokens == count
    assert result.value == pytest.approx(value, rel=1e-9)
    assert result.low <= result.value <= result.high


def test_a_real_model_with_a_bos(real_folder, text):
    model = lj.load(real_folder("stories260K"))
    value, count = simple_perplexity(model, text, 64, 32)
    result = perplexity(model, text, window=64, stride=32)
    assert (result.tokens, result.value) == (count, pytest.approx(value, rel=1e-5))


@pytest.mark.parametrize(("tokens", "window", "stride"), [(100, 10, 5), (101, 10, 10), (7, 10, 3)])
def test_every_token_is_scored_once(tokens, window, stride):
    scored = [position for begin, end, first in windows(tokens, window, stride) for position in range(first, end)]
    left_out = set(range(0, tokens, stride)) if stride == window else {0}
    assert scored == [position for position in range(tokens) if position not in left_out]
    assert all(end - begin <= window for begin, end, _ in windows(tokens, window, stride))


def test_the_default_window_is_the_context(tiny, text):
    result = perplexity(tiny, text, limit=1)
    assert (result.window, result.stride, result.windows) == (128, 64, 1)
    assert result.tokens == 127


def test_exit_rules_and_replaced_parts_apply(tiny, text):
    plain = perplexity(tiny, text, window=64)
    never = perplexity(tiny, text, window=64, variant=make_variant(tiny, exit="maxprob:1.1"))
    assert never.value == pytest.approx(plain.value, rel=1e-12)
    assert never.mean_level == tiny.n_blocks
    early = perplexity(tiny, text, window=64, variant=make_variant(tiny, exit="fixed:1"))
    assert early.mean_level == 1
    assert early.value > plain.value
    maps = lj.fit(tiny, stories(100), pairs="2.ffn.in:2.ffn.out", tokens=3_000)
    variant = LinearizedModel(maps, "ffn", (2,))
    with lj.linearize(tiny, maps, parts="ffn", blocks=[2]):
        expected, _ = simple_perplexity(tiny, text, 64, 32)
    assert perplexity(tiny, text, window=64, variant=variant).value == pytest.approx(expected, rel=1e-9)
    assert perplexity(tiny, text, window=64).value == plain.value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 1}, "2 to 128"),
        ({"window": 500}, "2 to 128"),
        ({"stride": 0}, "stride of 1 to 128, got 0"),
        ({"window": 8, "stride": 9}, "stride of 1 to 8, got 9"),
        ({"limit": 0}, "1 window"),
    ],
)
def test_bad_settings_are_refused(tiny, text, settings, message):
    with pytest.raises(BadEvaluation, match=message):
        perplexity(tiny, text, **settings)


def test_an_empty_text_is_refused(tiny):
    with pytest.raises(BadEvaluation, match="longer"):
        perplexity(tiny, "")
