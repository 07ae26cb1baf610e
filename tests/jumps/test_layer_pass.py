"""A pass layer by layer gives the states of a plain pass, bit for bit, and reads every block's weights once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers.small_llama import save_small_llama
from helpers.story_text import stories
from helpers.tiny_models import tiny_model, wrapped

import layerjump as lj
from layerjump.data.batches import make_batches
from layerjump.data.positions import Positions
from layerjump.jumps.layer_pass import can_run_by_layer, capture_by_layer
from layerjump.models.model import capture_states
from layerjump.models.self_check import sample
from layerjump.models.sites import FINAL, Site


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "falcon", "bert", "gemma2", "mistral", "opt", "mpt"])
def test_states_at_every_site_are_those_of_a_plain_pass(family):
    model = wrapped(tiny_model(family, dtype=torch.float32))
    assert can_run_by_layer(model)
    sites = model.structure.sites()
    batches = [sample(model), sample(model, rows=3, length=7)]
    plain = list(capture_states(model, batches, sites))
    by_layer = list(capture_by_layer(model, batches, sites))
    assert FINAL in sites
    for ours, theirs in zip(by_layer, plain, strict=True):
        assert all(torch.equal(ours[site], theirs[site]) for site in sites)


@pytest.mark.parametrize("family", ["albert", "t5"])
def test_blocks_that_share_more_than_the_stream_run_as_ever(family):
    assert not can_run_by_layer(wrapped(tiny_model(family, dtype=torch.float32)))


def test_an_offloaded_model_reads_each_block_once(tmp_path, monkeypatch):
    model = lj.load(save_small_llama(tmp_path), device_map="disk")
    batches = make_batches(stories(60), model.tokenization, Positions("all"), tokens=3_000)
    assert len(batches) > 2
    assert can_run_by_layer(model)
    reads: Counter[str] = Counter()
    weights_map = type(model.structure.blocks[0].mlp.up_proj._hf_hook.weights_map)
    read = weights_map.__getitem__

    def counted(self, key):
        reads[f"{self.prefix}{key}"] += 1
        return read(self, key)

    monkeypatch.setattr(weights_map, "__getitem__", counted)
    for _ in capture_by_layer(model, list(batches), [Site(0), Site(4)]):
        pass
    assert {reads[name] for name in reads if ".layers." in name} == {1}
    assert sum(".layers." in name for name in reads) == 4 * 9


def test_fit_of_an_offloaded_model_runs_layer_by_layer(tmp_path, monkeypatch):
    folder = save_small_llama(tmp_path)
    plain, offloaded = lj.load(folder), lj.load(folder, device_map="disk")
    passes = []
    monkeypatch.setattr(
        "layerjump.jumps.collect_moments.capture_by_layer",
        lambda model, batches, sites, folder: passes.append(len(batches)) or capture_by_layer(model, batches, sites),
    )
    settings = {"pairs": "all", "tokens": 3_000}
    ours, theirs = (lj.fit(model, stories(60), **settings) for model in (offloaded, plain))
    assert len(passes) == 2  # test and fit split
    assert ours.info == theirs.info
    for pair in theirs:
        assert all(map(torch.equal, ours[pair].parameters(), theirs[pair].parameters()))
