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
        self._keys = torch.empty(0, dtype=torch.int64)
        self._states: dict[Site, Tensor] = {}
        # Offered rows wait until as many have come as the reservoir holds: sorting them in moves every kept row.
        self._waiting: list[tuple[Tensor, dict[Site, Tensor]]] = []

    @property
    def keys(self) -> Tensor:
        self._settle()
        return self._keys

    @property
    def states(self) -> dict[Site, Tensor]:
        """The kept rows, those with the smallest keys first."""
        self._settle()
        return self._states

    def load(self, keys: Tensor, states: Mapping[Site, Tensor]) -> None:
        """Start from rows that were kept before."""
        self._keys, self._states, self._waiting = keys, dict(states), []

    def add(self, states: Mapping[Site, Tensor], keys: Tensor) -> None:
        """Offer rows; those with small enough keys stay."""
        if not self.sites or not self.size:
            return
        keys = keys.cpu()
        chosen = torch.ones(len(keys), dtype=torch.bool)
        if len(self._keys) == self.size:
            chosen = keys < self._keys[-1]  # once full, few rows get in: only those are copied
        if chosen.any():
            rows = {site: states[site][chosen].float().cpu() for site in self.sites}
            self._waiting.append((keys[chosen], rows))
        if sum(len(waiting) for waiting, _ in self._waiting) >= self.size:
            self._settle()

    def merge(self, other: Reservoir) -> None:
        """Offer another reservoir's rows."""
        if len(other.keys) and self.sites:
            self._waiting.append((other.keys, other.states))

    def _settle(self) -> None:
        if not self._waiting:
            return
        offered = [(self._keys, self._states), *self._waiting] if self._states else self._waiting
        self._waiting = []
        together = torch.cat([keys for keys, _ in offered])
        order = torch.argsort(together, stable=True)[: self.size]
        self._keys = together[order]
        self._states = {
            site: torch.cat([states[site] for _, states in offered])[order] for site in self.sites
        }


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
