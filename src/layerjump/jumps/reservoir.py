"""A seeded sample of raw hidden states that does not depend on order, batches or processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from layerjump.models.sites import Site


class Reservoir:
    """A seeded sample of raw states that does not depend on order, batches or processes.

    Every picked position has a key (`sampling_keys`); the reservoir holds the rows with the `size` smallest keys. So
    reservoirs of parts merge to the reservoir of the whole. Memory is allocated once: a new row overwrites one that is
    displaced. Reading sorts the rows.
    """

    def __init__(self, sites: Sequence[Site], size: int) -> None:
        self.sites, self.size = list(sites), size
        self._keys = torch.empty(0, dtype=torch.int64)
        self._rows: dict[Site, Tensor] = {}
        self._filled = 0

    @property
    def keys(self) -> Tensor:
        """The keys of the sampled rows, in ascending order."""
        self._sort()
        return self._keys[: self._filled]

    @property
    def states(self) -> dict[Site, Tensor]:
        """The sampled rows of every site, in ascending order of their keys."""
        self._sort()
        return {site: rows[: self._filled] for site, rows in self._rows.items()}

    def add(self, states: Mapping[Site, Tensor], keys: Tensor) -> None:
        """Offer rows; those with small enough keys are sampled."""
        if not self.sites or not self.size:
            return
        keys = keys.cpu()
        candidates = torch.cat([self._keys[: self._filled], keys])
        smallest = torch.argsort(candidates, stable=True)[: self.size]
        new = smallest[smallest >= self._filled] - self._filled
        if not len(new):
            return
        if not self._rows:
            self._keys = torch.empty(self.size, dtype=torch.int64)
            self._rows = {s: torch.empty(self.size, states[s].shape[-1]) for s in self.sites}
        # New rows go to unused slots first, then to those of rows that are displaced.
        displaced = torch.ones(self._filled, dtype=torch.bool)
        displaced[smallest[smallest < self._filled]] = False
        unused = torch.arange(self._filled, self.size)
        slots = torch.cat([unused, displaced.nonzero()[:, 0]])[: len(new)]
        self._keys[slots] = keys[new]
        for site, rows in _gather(states, self.sites, new).items():
            self._rows[site][slots] = rows
        self._filled = min(self.size, self._filled + len(new))

    def merge(self, other: Reservoir) -> None:
        """Offer another reservoir's rows."""
        if len(other.keys):
            self.add(other.states, other.keys)

    def join(self, parts: Sequence[Reservoir]) -> None:
        """Take over samples of the same positions, of which each part holds some of the sites."""
        filled = [part for part in parts if len(part.keys)]
        if filled and self.sites:
            states = {site: rows for part in filled for site, rows in part.states.items()}
            self.add(states, filled[0].keys)

    def _sort(self) -> None:
        if bool((self._keys[: self._filled].diff() >= 0).all()):
            return
        order = torch.argsort(self._keys[: self._filled], stable=True)
        self._keys[: self._filled] = self._keys[order]
        for rows in self._rows.values():
            rows[: self._filled] = rows[order]


def _gather(states: Mapping[Site, Tensor], sites: Sequence[Site], index: Tensor) -> dict[Site, Tensor]:
    """Rows of every site, on the CPU. The host waits once for all sites of one accelerator and width."""
    groups: dict[tuple[torch.device, int], list[Site]] = {}
    for site in sites:
        groups.setdefault((states[site].device, states[site].shape[-1]), []).append(site)
    rows: dict[Site, Tensor] = {}
    for (device, _), members in groups.items():
        selected = index.to(device)
        of_group = [states[site][selected].float() for site in members]
        rows |= zip(members, of_group if device.type == "cpu" else torch.stack(of_group).cpu(), strict=True)
    return rows


def sampling_keys(document: Tensor, position: Tensor, sequence: Tensor | None = None, *, seed: int) -> Tensor:
    """Return a 63-bit hash of (seed, document, sequence, position): two rounds of SplitMix64's mixing."""

    def shift_right(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & (2 ** (64 - bits) - 1)  # of the bits as unsigned: torch's own keeps the sign

    def mix(x: Tensor) -> Tensor:
        x = x + (0x9E3779B97F4A7C15 - 2**64)
        x = (x ^ shift_right(x, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
        x = (x ^ shift_right(x, 27)) * (0x94D049BB133111EB - 2**64)
        return x ^ shift_right(x, 31)

    key = mix(document.long() * 0x1F123BB5 + seed)
    index = position.long() if sequence is None else position.long() + (sequence.long() << 32)
    return mix(key ^ index * 0x5851F42D) & (2**63 - 1)
