"""Reductions over the vocabulary: the same numbers as the plain way, on rows of every width."""

import math

import pytest
import torch

from layerjump.metrics.logits import KERNEL_ROWS, LogitComparison, reference_logits, top_k

NONE = torch.zeros(0, dtype=torch.long)


@pytest.mark.parametrize("width", [7, 64, 2_560, 2_623, 5_000])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_the_largest_are_those_of_topk(width, k):
    rows = torch.randn(9, width, dtype=torch.float64)
    wanted = rows.topk(k)
    values, indices = top_k(rows, k)
    assert torch.equal(values, wanted.values)
    assert torch.equal(indices, wanted.indices)


def test_the_largest_may_stand_side_by_side_or_at_the_end():
    rows = torch.zeros(2, 5_003)
    rows[0, 100:110] = torch.arange(1.0, 11.0)
    rows[1, -10:] = torch.arange(1.0, 11.0)
    values, indices = top_k(rows, 10)
    assert values.tolist() == [list(range(10, 0, -1))] * 2
    assert indices.tolist() == [list(range(109, 99, -1)), list(range(5_002, 4_992, -1))]


def test_ties_give_the_same_values_and_no_token_twice():
    rows = torch.randint(0, 4, (20, 4_096)).float()
    values, indices = top_k(rows, 10)
    assert torch.equal(values, rows.topk(10).values)
    assert torch.equal(rows.gather(1, indices), values)
    assert all(len(set(row)) == 10 for row in indices.tolist())


@pytest.fixture(scope="module")
def logits():
    """More rows than are read at once; far from zero, where differences lose digits."""
    draw = torch.Generator().manual_seed(1)
    shape = (2 * KERNEL_ROWS + 3, 3_001)
    return [3 * torch.randn(shape, generator=draw, dtype=torch.float64) + 500 for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_sweep_is_what_the_definitions_say(logits, dtype):
    mine, theirs = (each.to(dtype) for each in logits)
    targets = torch.randint(0, 3_001, (len(mine),))
    targets[4] = -1
    tracked = torch.tensor([3_000, 5])
    found = LogitComparison(
        reference_logits(theirs), k=4, targets=targets, tracked=tracked, entropy=True, jensen_shannon=True
    )(mine)

    log_p, log_q = mine.double().log_softmax(-1), theirs.double().log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    middle = ((p + q) / 2).log()
    best = p.topk(4)
    wanted = {
        "probability": best.values,
        "confidence": best.values[:, 0] - best.values[:, 1],
        "entropy": -(p * log_p).sum(-1),
        "kl": (q * (log_q - log_p)).sum(-1),
        "cross_entropy": -log_p.gather(1, targets.clamp_min(0)[:, None])[:, 0],
        "tracked": p[:, tracked],
        "jensen_shannon": ((p * (log_p - middle)).sum(-1) + (q * (log_q - middle)).sum(-1)) / 2,
    }
    wanted["cross_entropy"][4] = math.nan
    close = {"rtol": 1e-9, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 2e-3, "atol": 1e-4}
    for name, value in wanted.items():
        torch.testing.assert_close(getattr(found, name).double(), value, equal_nan=True, msg=name, **close)
    assert torch.equal(found.top, mine.topk(4).indices)
    assert torch.equal(found.rank, (mine[:, None] > mine[:, tracked, None]).sum(-1))


def test_jensen_shannon_is_symmetric_and_at_most_ln_2(logits):
    settings = {"k": 1, "targets": torch.full((len(logits[0]),), -1), "tracked": NONE, "jensen_shannon": True}
    one = LogitComparison(reference_logits(logits[0]), **settings)(logits[1]).jensen_shannon
    other = LogitComparison(reference_logits(logits[1]), **settings)(logits[0]).jensen_shannon
    torch.testing.assert_close(one, other)
    assert 0 < one.min() < one.max() < math.log(2)
    assert LogitComparison(reference_logits(logits[0]), **settings)(logits[0]).jensen_shannon.max() < 1e-12
    apart = torch.zeros(2, 3_001)
    apart[0, 3], apart[1, 9] = 1e4, 1e4
    settings["targets"] = settings["targets"][:1]
    far = LogitComparison(reference_logits(apart[:1]), **settings)(apart[1:]).jensen_shannon
    torch.testing.assert_close(far, torch.tensor([math.log(2)]))


def test_a_sweep_is_used_again_and_leaves_the_logits_alone(logits):
    mine, theirs = logits
    before = mine.clone()
    sweep = LogitComparison(reference_logits(theirs), k=3, targets=torch.full((len(mine),), -1), tracked=NONE)
    first, _, again = sweep(mine), sweep(theirs), sweep(mine)
    assert torch.equal(mine, before)
    assert torch.equal(first.kl, again.kl)
    assert torch.equal(first.top, again.top)
    assert again.jensen_shannon.isnan().all()
