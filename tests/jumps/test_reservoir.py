"""The sample of raw states is one of all positions, also where a document is many sequences long."""

import torch

from layerjump.jumps.statistics import Moments, Reservoir, sampling_keys
from layerjump.models.structure import Site

A, B = Site(0), Site(1)


def test_positions_of_a_long_documents_sequences_have_keys_of_their_own():
    sequence, position = torch.arange(300).repeat_interleave(64), torch.arange(64).repeat(300)
    keys = sampling_keys(torch.zeros(300 * 64), position, sequence, seed=0)
    assert len(keys.unique()) == 300 * 64
    first = sequence == 0
    assert torch.equal(keys[first], sampling_keys(torch.zeros(64), torch.arange(64), seed=0))


def test_the_sample_of_one_long_document_is_spread_over_its_positions():
    sequence, position = torch.arange(300).repeat_interleave(64), torch.arange(64).repeat(300)
    kept = Reservoir([A], 2_000)
    kept.add(
        {A: position[:, None].double()}, sampling_keys(0 * position, position, sequence, seed=0)
    )
    counts = torch.bincount(kept.states[A][:, 0].long(), minlength=64)
    assert counts.min() > 10  # 31 of each on average
    assert counts.max() < 60


def test_a_long_documents_sample_does_not_depend_on_the_order_of_its_sequences():
    sequence, position = torch.arange(40).repeat_interleave(16), torch.arange(16).repeat(40)
    states = {site: torch.randn(640, 3, dtype=torch.float64) for site in (A, B)}
    keys = sampling_keys(0 * position, position, sequence, seed=1)
    found = []
    for order in (torch.arange(640), torch.arange(640).flip(0)):
        sums = Moments([(A, B)], reservoir=50)
        for rows in order.split(37):
            sums.add({site: state[rows] for site, state in states.items()}, keys=keys[rows])
        found.append(sums.reservoir.states[A])
    assert torch.equal(*found)
