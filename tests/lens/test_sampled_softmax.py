"""The few tokens that a step of tuner looks at stand for all."""

import numpy as np
import pytest
import torch
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump.lens.tuning import SampledTarget


@pytest.fixture(scope="module")
def structure():
    return lj.Model.wrap(tiny_model("llama", vocab_size=3000, dtype=torch.float32)).structure


@pytest.fixture(scope="module")
def states(structure):
    draw = torch.Generator().manual_seed(0)
    width = structure.unembedding.get_parameter("weight").shape[1]
    final, other = 2 * torch.randn(2, 8, width, generator=draw)
    return final, 0.8 * final + 0.2 * other  # what a map that is not bad lands on


def gradient(seen, landed):
    """Of KL with respect to where a map lands."""
    landed = landed.clone().requires_grad_(True)
    logits = seen.logits(landed, needs_final_norm=False)
    kl, slope = seen.kl(logits.detach())
    logits.backward(slope)
    return kl, landed.grad


def test_kl_and_its_gradient_are_torchs(structure, states):
    final, landed = states
    kl, found = gradient(SampledTarget.full(structure, final), landed)
    landed = landed.clone().requires_grad_(True)
    own = structure.decode(final).log_softmax(-1).detach()
    guess = structure.decode(landed).log_softmax(-1)
    wanted = torch.nn.functional.kl_div(guess, own, reduction="sum", log_target=True)
    wanted.backward()
    assert kl == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert torch.allclose(found, landed.grad, atol=1e-5)


def test_few_tokens_show_on_average_what_all_show(structure, states):
    final, landed = states
    whole, wanted = gradient(SampledTarget.full(structure, final), landed)
    draws = [
        gradient(
            SampledTarget.full(structure, final).sample(np.random.default_rng(seed), 300, 300),
            landed,
        )
        for seed in range(200)
    ]
    mean = torch.stack([slope for _, slope in draws]).mean(0)
    one = draws[0][1]
    assert float((one - wanted).norm() / wanted.norm()) > 0.1  # a single one is off
    assert float((mean - wanted).norm() / wanted.norm()) < 0.04
    assert np.mean([kl for kl, _ in draws]) == pytest.approx(whole, rel=0.02)
    # Taken for the whole vocabulary, the same tokens would lead astray.
    few = SampledTarget.full(structure, final).sample(np.random.default_rng(0), 300, 300)
    unweighted = SampledTarget(
        few.structure, few.probabilities / few.probabilities.sum(-1, keepdim=True)
    )
    assert float((gradient(unweighted, landed)[1] - wanted).norm() / wanted.norm()) > 0.08


def test_a_small_vocabulary_is_seen_whole(structure, states):
    seen = SampledTarget.full(structure, states[0])
    assert seen.sample(np.random.default_rng(0)) is seen
