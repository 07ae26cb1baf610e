"""Perplexity with a sliding window is what a straightforward loop over Hugging Face's own model gives."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.story_text import stories
from torch.nn.functional import cross_entropy

import layerjump as lj
from layerjump.errors import BadEvaluation
from layerjump.evaluation.early_exit import LinearizedModel, make_variant
from layerjump.evaluation.perplexity import perplexity, windows


@pytest.fixture(scope="module")
def tiny(data_folder):
    return lj.load(data_folder / "tiny-gpt2", dtype="float64")


@pytest.fixture(scope="module")
def text() -> str:
    return " \n ".join(stories(6).documents)


@torch.no_grad()
def naive(model, text: str, window: int, stride: int) -> tuple[float, int]:
    """As Hugging Face's guide to perplexity does it: what was scored before is taken out of the labels."""
    ids = model.tokenizer(text, return_tensors="pt").input_ids
    total, count, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window, ids.shape[1])
        part = ids[:, begin:end]
        labels = part.clone()
        labels[:, : part.shape[1] - (end - before)] = -100
        # Their own loss would round float64 logits to float32.
        logits = model.hf(part).logits[0, :-1]
        total += float(cross_entropy(logits, labels[0, 1:], reduction="sum"))
        count, before = count + int((labels[:, 1:] != -100).sum()), end
        if end == ids.shape[1]:
            break
    return math.exp(total / count), count


@pytest.mark.parametrize(("window", "stride"), [(32, 16), (32, 32), (20, 7), (128, 64), (5, 1)])
def test_it_is_the_naive_loops(tiny, text, window, stride):
    found = perplexity(tiny, text, window=window, stride=stride)
    value, count = naive(tiny, text, window, stride)
    assert found.tokens == count
    assert found.value == pytest.approx(value, rel=1e-9)
    assert found.low <= found.value <= found.high


def test_a_real_model_with_a_bos(real_folder, text):
    model = lj.load(real_folder("stories260K"))
    value, count = naive(model, text, 64, 32)
    found = perplexity(model, text, window=64, stride=32)
    assert (found.tokens, found.value) == (count, pytest.approx(value, rel=1e-5))


@pytest.mark.parametrize(("tokens", "window", "stride"), [(100, 10, 5), (101, 10, 10), (7, 10, 3)])
def test_every_token_is_scored_once(tokens, window, stride):
    scored = [
        place
        for begin, end, first in windows(tokens, window, stride)
        for place in range(first, end)
    ]
    left_out = set(range(0, tokens, stride)) if stride == window else {0}
    assert scored == [place for place in range(tokens) if place not in left_out]
    assert all(end - begin <= window for begin, end, _ in windows(tokens, window, stride))


def test_the_context_is_the_window_unless_told(tiny, text):
    found = perplexity(tiny, text, limit=1)
    assert (found.window, found.stride, found.windows) == (128, 64, 1)
    assert found.tokens == 127


def test_exit_rules_and_parts_are_heeded(tiny, text):
    plain = perplexity(tiny, text, window=64)
    never = perplexity(tiny, text, window=64, variant=make_variant(tiny, exit="maxprob:1.1"))
    assert never.value == pytest.approx(plain.value, rel=1e-12)
    assert never.mean_level == tiny.n_blocks
    early = perplexity(tiny, text, window=64, variant=make_variant(tiny, exit="fixed:1"))
    assert early.mean_level == 1
    assert early.value > plain.value
    maps = lj.fit(tiny, stories(100), pairs="2.ffn.in:2.ffn.out", tokens=3_000)
    asked = LinearizedModel(maps, "ffn", (2,))
    with lj.linearize(tiny, maps, parts="ffn", blocks=[2]):
        expected, _ = naive(tiny, text, 64, 32)
    assert perplexity(tiny, text, window=64, variant=asked).value == pytest.approx(
        expected, rel=1e-9
    )
    assert perplexity(tiny, text, window=64).value == plain.value


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"window": 1}, "2 to 128"),
        ({"window": 500}, "2 to 128"),
        ({"stride": 0}, "stride of 1 to 128, got 0"),
        ({"window": 8, "stride": 9}, "stride of 1 to 8, got 9"),
        ({"limit": 0}, "1 window"),
    ],
)
def test_what_cannot_be_measured_is_said(tiny, text, settings, said):
    with pytest.raises(BadEvaluation, match=said):
        perplexity(tiny, text, **settings)


def test_a_text_of_one_token_predicts_nothing(tiny):
    with pytest.raises(BadEvaluation, match="longer"):
        perplexity(tiny, "")
