"""Models that are hard on numbers: massive activations, and heads with more rows than there are tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.story_text import stories

import layerjump as lj
from layerjump.jumps.collect_moments import plan_run
from layerjump.models.sites import Site

MASSIVE = 1e4
"""How much larger than its others one coordinate is made; in real models it is some thousand."""


@pytest.fixture(scope="module")
def text():
    return stories(200)


@pytest.fixture
def fresh(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


def test_a_massive_coordinate_leaves_the_maps_exact(fresh, text):
    """The stream of one coordinate is blown up; norms take most of it away, and the model goes on predicting."""
    with torch.no_grad():
        fresh.hf.transformer.wpe.weight[:, 3] += MASSIVE
    chosen = plan_run(fresh, text, pairs="0:4,2:4", tokens=4_000, use_validation=False, split="90/0/10")
    rows = [(each[Site(2)], each[Site(4)]) for each in lj.capture_states(fresh, chosen.batches["fit"], [2, 4])]
    x, y = (torch.cat([pair[side] for pair in rows]).double().numpy() for side in (0, 1))
    assert np.abs(x).max() > MASSIVE / 2
    jumps = lj.fit(fresh, text, pairs="0:4,2:4", tokens=4_000, use_validation=False, split="90/0/10")
    wanted = x @ np.linalg.lstsq(x, y, rcond=None)[0]
    found = jumps[2, 4](torch.from_numpy(x).float()).detach().double().numpy()
    small = [column for column in range(y.shape[1]) if column != 3]
    error = np.abs(found - wanted)[:, small].max(0) / y[:, small].std(0)
    assert error.max() < 1e-3  # sums in float32 would be wrong by 1e-2
    read = lj.Lens(fresh, jumps)("Once upon a time", levels=[0, 2, 4])
    assert torch.isfinite(torch.as_tensor(read.kl)).all()


def test_rows_of_a_head_that_are_no_tokens(fresh, text, data_folder):
    """As of models whose vocabulary was filled up to a round number: readable, scored, never given a made-up name."""
    tokens = len(fresh.tokenization.tokenizer)
    fresh.hf.resize_token_embeddings(tokens + 37, mean_resizing=False)
    with torch.no_grad():
        fresh.hf.lm_head.weight[tokens:] = 0  # the logit 0 may well be the largest
    padded = lj.Model.wrap(fresh.hf, fresh.tokenization.tokenizer, name="padded")
    jumps = lj.fit(padded, text, tokens=4_000)
    plain = lj.load(data_folder / "tiny-gpt2")
    same = lj.fit(plain, text, tokens=4_000)
    assert all(torch.equal(jumps[pair].weight, same[pair].weight) for pair in jumps)
    found = lj.Lens(padded, jumps)("Once upon a time, there was", k=tokens + 37)
    assert found.top.shape[-1] == tokens + 37
    assert torch.isfinite(torch.as_tensor(found.kl)).all()
    names = found.decode(list(range(tokens, tokens + 37)))
    assert names == [f"<row {row}>" for row in range(tokens, tokens + 37)]
    best = lj.refine(padded, jumps, text, steps=3)
    assert all(map(np.isfinite, best.provenance.settings["refine"]["kl_after"]))
