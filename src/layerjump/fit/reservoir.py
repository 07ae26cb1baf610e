"""A seeded sample of raw states that does not depend on order, batches or processes.

Every picked position has a key, a hash of seed, document and position; the reservoir keeps the rows with the smallest
keys. So reservoirs of parts merge to the reservoir of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerjump.inputs.sites import Site


class Reservoir:
    """The rows with the `size` smallest keys, at some sites."""

    def __init__(self, sites: Sequence[Site], size: int) -> None:
        self.sites, self.size = list(sites), size
        self.keys = torch.empty(0, dtype=torch.int64)
        self.states: dict[Site, Tensor] = {}

    def add(self, states: Mapping[Site, Tensor], keys: Tensor) -> None:
        """Offer rows; those with small enough keys stay."""
        if not self.sites or not self.size:
            return
        keys = keys.cpu()
        # Once full, few rows get in: only those are copied.
        chosen = (
            keys < self.keys.max()
            if len(self.keys) == self.size
            else torch.ones(len(keys), dtype=torch.bool)
        )
        if chosen.any():
            self._keep(
                keys[chosen], {site: states[site][chosen].float().cpu() for site in self.sites}
            )

    def merge(self, other: Reservoir) -> None:
        """Offer another reservoir's rows."""
        if len(other.keys) and self.sites:
            self._keep(other.keys, other.states)

    def _keep(self, keys: Tensor, states: Mapping[Site, Tensor]) -> None:
        together = torch.cat([self.keys, keys])
        order = torch.argsort(together, stable=True)[: self.size]
        self.keys = together[order]
        for site in self.sites:
            rows = (
                torch.cat([self.states[site], states[site]])
                if site in self.states
                else states[site]
            )
            self.states[site] = rows[order]


def keys_of(document: Tensor, position: Tensor, *, seed: int) -> Tensor:
    """A 63-bit hash of (seed, document, position): two rounds of SplitMix64's mixing."""
    key = _mix(document.long() * 0x1F123BB5 + seed)
    return _mix(key ^ position.long() * 0x5851F42D) & (2**63 - 1)


def _mix(x: Tensor) -> Tensor:
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift of the bits as unsigned (torch's own keeps the sign)."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
