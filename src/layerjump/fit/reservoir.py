"""A seeded sample of raw states that does not depend on order, batches or processes.

Every picked position has a key, a hash of seed, document, sequence and position; the reservoir keeps the rows with the
smallest keys. So reservoirs of parts merge to the reservoir of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerjump.inputs.sites import Site


class Reservoir:
    """The rows with the `size` smallest keys, at some sites.

    Its memory is taken once: a row that comes in takes the place of one that goes out. Reading puts them in order.
    """

    def __init__(self, sites: Sequence[Site], size: int) -> None:
        self.sites, self.size = list(sites), size
        self._keys = torch.empty(0, dtype=torch.int64)
        self._rows: dict[Site, Tensor] = {}
        self._filled = 0

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
        everyone = torch.cat([self._keys[: self._filled], keys])
        staying = torch.argsort(everyone, stable=True)[: self.size]
        comers = staying[staying >= self._filled] - self._filled
        if len(comers):
            self._put(keys[comers], states, comers, staying)

    def merge(self, other: Reservoir) -> None:
        """Offer another reservoir's rows."""
        if len(other.keys):
            self.add(other.states, other.keys)

    def _put(
        self, keys: Tensor, states: Mapping[Site, Tensor], rows: Tensor, staying: Tensor
    ) -> None:
        """Rows of states go to free places, then to those of kept rows that do not stay."""
        if not self._rows:
            self._keys = torch.empty(self.size, dtype=torch.int64)
            self._rows = {s: torch.empty(self.size, states[s].shape[-1]) for s in self.sites}
        going = torch.ones(self._filled, dtype=torch.bool)
        going[staying[staying < self._filled]] = False
        free = torch.arange(self._filled, self.size)
        places = torch.cat([free, going.nonzero()[:, 0]])[: len(keys)]
        self._keys[places] = keys
        for site, kept in self._rows.items():
            kept[places] = states[site][rows.to(states[site].device)].to(kept)
        self._filled = min(self.size, self._filled + len(keys))

    def _settle(self) -> None:
        """Put the kept rows in order."""
        if bool((self._keys[: self._filled].diff() >= 0).all()):
            return  # they are, since somebody read them
        order = torch.argsort(self._keys[: self._filled], stable=True)
        self._keys[: self._filled] = self._keys[order]
        for rows in self._rows.values():
            rows[: self._filled] = rows[order]


def keys_of(
    document: Tensor, position: Tensor, sequence: Tensor | None = None, *, seed: int
) -> Tensor:
    """A 63-bit hash of (seed, document, sequence, position): two rounds of SplitMix64's mixing."""
    key = _mix(document.long() * 0x1F123BB5 + seed)
    place = position.long() if sequence is None else position.long() + (sequence.long() << 32)
    return _mix(key ^ place * 0x5851F42D) & (2**63 - 1)


def _mix(x: Tensor) -> Tensor:
    x = x + (0x9E3779B97F4A7C15 - 2**64)
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - 2**64)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Right shift of the bits as unsigned (torch's own keeps the sign)."""
    return (x >> bits) & (2 ** (64 - bits) - 1)
