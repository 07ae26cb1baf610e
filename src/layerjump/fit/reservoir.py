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
    """The rows with the `size` smallest keys, at some sites.

    Its memory is taken once, for a quarter more: offered rows gather behind the kept ones until there is no room, and
    only then are all sorted.
    """

    def __init__(self, sites: Sequence[Site], size: int) -> None:
        self.sites, self.size = list(sites), size
        self.room = size + -(-size // 4)
        self._keys = torch.empty(0, dtype=torch.int64)
        self._rows: dict[Site, Tensor] = {}
        self._filled = 0
        self._limit: int | None = None  # the largest key that was kept, once as many as fit were

    @property
    def keys(self) -> Tensor:
        self._settle()
        return self._keys[: self._filled]

    @property
    def states(self) -> dict[Site, Tensor]:
        """The kept rows, those with the smallest keys first."""
        self._settle()
        return {site: rows[: self._filled] for site, rows in self._rows.items()}

    def add(self, states: Mapping[Site, Tensor], keys: Tensor) -> None:
        """Offer rows; those with small enough keys stay."""
        if not self.sites or not self.size:
            return
        keys = keys.cpu()
        if self._limit is not None:  # once full, few rows get in: only those are copied
            chosen = (keys < self._limit).nonzero()[:, 0]
            states = {site: states[site][chosen.to(states[site].device)] for site in self.sites}
            keys = keys[chosen]
        step = max(1, self.room - self.size)
        for start in range(0, len(keys), step):
            part = slice(start, start + step)
            self._gather(keys[part], {site: states[site][part] for site in self.sites})

    def merge(self, other: Reservoir) -> None:
        """Offer another reservoir's rows."""
        if len(other.keys):
            self.add(other.states, other.keys)

    def _gather(self, keys: Tensor, states: Mapping[Site, Tensor]) -> None:
        """Take in as many rows as there is room for beside the kept ones, or fewer."""
        if not self._rows:
            self._keys = torch.empty(self.room, dtype=torch.int64)
            self._rows = {s: torch.empty(self.room, states[s].shape[-1]) for s in self.sites}
        if self._filled + len(keys) > self.room:
            self._settle()
        place = slice(self._filled, self._filled + len(keys))
        self._keys[place] = keys
        for site in self.sites:
            self._rows[site][place] = states[site]
        self._filled += len(keys)

    def _settle(self) -> None:
        """Sort, and let go of what has no room."""
        order = torch.argsort(self._keys[: self._filled], stable=True)[: self.size]
        self._filled = len(order)
        self._keys[: self._filled] = self._keys[order]
        for rows in self._rows.values():
            rows[: self._filled] = rows[order]
        if self._filled == self.size:
            self._limit = int(self._keys[self.size - 1])


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
