"""What tests of fits compare: states, files, predictions."""

from __future__ import annotations

from pathlib import Path

import torch

import layerjump as lj


def kept(model, text, sites, documents, positions):
    """All states of some documents, as float64 arrays."""
    batches = lj.make_batches(text, model.tokenization, positions, documents=documents)
    found = list(lj.capture_states(model, batches, sites))
    return {site: torch.cat([states[site] for states in found]).double().numpy() for site in sites}


def same_bytes(*folders: Path) -> bool:
    return len({(folder / "jumps.safetensors").read_bytes() for folder in folders}) == 1


def assert_same_predictions(ours, theirs, model, text) -> None:
    """Maps may differ where no state goes; what they make of real states may not."""
    assert set(ours) == set(theirs)
    sites = sorted({site for pair in ours for site in pair})
    states = kept(model, text, sites, range(50), lj.Positions("all"))
    for pair in ours:
        x = torch.from_numpy(states[pair[0]]).float()
        a, b = ours[pair](x), theirs[pair](x)
        assert (a - b).abs().max() < 1e-4 * b.std()
