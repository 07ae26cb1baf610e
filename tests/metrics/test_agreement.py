"""Agreement of predictions: against a plain softmax in float64, at its edges, and as floating point allows."""

import pytest
import torch
from helpers.regression_data import random
from hypothesis import given, settings
from hypothesis import strategies as st

from layerjump.metrics.logits import KS, agreement, reference_logits


def plain(logits, true, top):
    """The other fields of `Agreement`, written out, for its best token (of several, either)."""
    p, q = true.double().softmax(-1), logits.double().softmax(-1)
    at_top = true.gather(1, top[:, None])
    best = q.sort(-1, descending=True).values
    return {
        "rank": (true > at_top).sum(-1).clamp(max=max(KS)),
        "surprisal": -p.gather(1, top[:, None])[:, 0].log(),
        "kl": (p * (true.double().log_softmax(-1) - logits.double().log_softmax(-1))).sum(-1),
        "confidence": best[:, 0] - best[:, 1],
    }


def assert_agrees(logits, true, *, atol):
    found = agreement(logits, reference_logits(true))
    wanted = plain(logits, true, found.top)
    assert torch.equal(logits.gather(1, found.top[:, None])[:, 0], logits.amax(-1))
    assert torch.equal(found.rank, wanted["rank"])
    for name in ("surprisal", "kl", "confidence"):
        value = getattr(found, name).double()
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=atol, msg=name)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 8),
    vocabulary=st.integers(2, 40),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.01, 1.0, 10.0, 100.0]),
    offset=st.sampled_from([0.0, -100.0, 5e4]),
    likeness=st.sampled_from([0.0, 0.9, 1.0]),
)
def test_agreement_is_a_plain_softmax_in_float64(rows, vocabulary, seed, scale, offset, likeness):
    true = random(rows, vocabulary, seed=seed) * scale
    other = likeness * true + (1 - likeness) * scale * random(rows, vocabulary, seed=seed + 1)
    for dtype, atol in ((torch.float64, 1e-9), (torch.float32, 2e-5 * max(1.0, scale))):
        assert_agrees((other + offset).to(dtype), (true + offset).to(dtype), atol=atol)


def test_the_truth_agrees_with_itself():
    logits = random(50, 300).float() * 5
    found = agreement(logits, reference_logits(logits))
    assert (found.rank == 0).all()
    assert found.kl.max() < 1e-5
    assert (found.kl >= 0).all()
    assert torch.equal(found.top, logits.argmax(-1))


def test_ties_count_as_hits():
    true = reference_logits(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]))
    for token, rank in ((1, 0), (2, 0), (3, 0), (0, 3), (4, 4)):
        logits = torch.zeros(1, 5)
        logits[0, token] = 1
        found = agreement(logits, true)
        assert int(found.top) == token
        assert int(found.rank) == rank
    flat = torch.zeros(3, 20)
    same = agreement(flat, reference_logits(flat))
    assert (same.rank == 0).all()
    assert (same.confidence == 0).all()


def test_a_token_outside_the_ten_best_is_no_hit_at_any_k():
    true = reference_logits(torch.arange(30.0)[None])
    logits = torch.zeros(1, 30)
    logits[0, 3] = 1
    assert int(agreement(logits, true).rank) == max(KS)


def test_certainty_is_finite():
    """Probabilities that underflow to 0, and a best one that is 1."""
    true, other = torch.full((2, 12), -1e4), torch.full((2, 12), -1e4)
    true[:, 0], other[0, 0], other[1, 5] = 1e4, 1e4, 1e4
    found = agreement(other, reference_logits(true))
    assert found.kl.tolist() == [0.0, pytest.approx(2e4)]
    assert found.surprisal.tolist() == [0.0, pytest.approx(2e4)]
    assert found.confidence.tolist() == [1.0, 1.0]


def test_logits_are_left_as_they_were():
    true, other = random(4, 20, seed=1), random(4, 20, seed=2)
    kept = true.clone(), other.clone()
    agreement(other, reference_logits(true))
    assert torch.equal(true, kept[0])
    assert torch.equal(other, kept[1])
