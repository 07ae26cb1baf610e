"""Fits whose sums do not fit in memory: states are stored, and sums are formed from them for one source at a time.

The states of the picked positions are stored in the model's own dtype, which loses nothing: on disk (`spill`), or in
memory where a split has few rows. Then each source's sums are added up batch by batch, in the order and with the
arithmetic of a run that holds all sums, so the jumps have the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerjump.io import only_writer, writing
from layerjump.jumps.jumps import RunInfo
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments import Moments, check_states
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.models.sites import Pair, Site

log = logging.getLogger("layerjump")

SUFFIX = ".states"
"""Ending of the files in a spill folder."""


class StateStore:
    """Hidden states of one split, row after row, in a file or (without a path) in memory."""

    def __init__(self, sites: Sequence[Site], n_rows: int, path: Path | None = None) -> None:
        self.sites, self.path = list(sites), path
        self.n = 0
        self._n_rows = n_rows
        self._rows: dict[Site, Tensor] = {}
        """The rows in memory; of a file, an empty tensor with the width, dtype and device of each site."""
        self._start: dict[Site, int] = {}
        """The byte at which the rows of each site start in the file."""
        if path is not None:
            with writing(path):
                self._file = path.open("w+b")

    def append(self, states: Mapping[Site, Tensor]) -> None:
        """Store one batch's rows of every site."""
        if not self._rows:
            self._allocate(states)
        for site in self.sites:
            rows = states[site]
            if self.path is None:
                self._rows[site][self.n : self.n + len(rows)] = rows
                continue
            with writing(self.path):
                self._file.seek(self._start[site] + self.n * _row_bytes(rows))
                self._file.write(_bytes_of(rows.detach().cpu().contiguous()))
        self.n += len(states[self.sites[0]])

    def read(self, site: Site, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of a site, on the device that they came from."""
        layout = self._rows[site]
        if self.path is None:
            return layout[start:stop]
        rows = torch.empty(stop - start, layout.shape[1], dtype=layout.dtype)
        with writing(self.path):  # what the buffer still holds is written first
            self._file.seek(self._start[site] + start * _row_bytes(rows))
            self._file.readinto(_bytes_of(rows))
        return rows.to(layout.device)

    def close(self) -> None:
        """Release the rows."""
        self._rows.clear()
        if self.path is not None:
            with contextlib.suppress(OSError):  # a full disk was reported when it was written
                self._file.close()
            self.path.unlink(missing_ok=True)

    def _allocate(self, states: Mapping[Site, Tensor]) -> None:
        in_memory = self.path is None
        start = 0
        for site in self.sites:
            rows = states[site]
            self._rows[site] = rows.new_empty(self._n_rows if in_memory else 0, rows.shape[1])
            self._start[site] = start
            start += self._n_rows * _row_bytes(rows)


class StoredMoments:
    """The states of one split, of which the second moments of any of its pairs are formed."""

    def __init__(self, moments: Moments, n_rows: int, path: Path | None = None) -> None:
        """`moments`, without sums, says which pairs and products there are."""
        self._moments = moments
        self._store = StateStore(moments.sites, n_rows, path)
        self._batches: list[tuple[int, int, Tensor, Tensor | None]] = []
        """First and last row, keys and outlying rows of every batch."""
        self._diagonals: dict[Site, Tensor] = {}
        """Diagonals of Gram matrices formed so far: a run that holds all sums takes a target's from there too."""

    @property
    def sites(self) -> list[Site]:
        """The sites whose states are stored."""
        return self._moments.sites

    @property
    def n(self) -> int:
        """The number of rows."""
        return self._store.n

    @torch.no_grad()
    def add(self, states: Mapping[Site, Tensor], *, keys: Tensor) -> None:
        """Store a batch, as `Moments.add` adds it."""
        widened, n_rows = check_states(states, self.sites)
        outlying = None
        if self._moments.products != torch.float64:
            # Which rows are outlying depends on all sites, of which one source's sums see a few.
            if not self._moments.shift:
                self._moments.shift = self._moments.shift_for(widened)
            outlying = self._moments.outlying_rows(widened)
        self._batches.append((self.n, self.n + n_rows, keys, outlying))
        self._store.append(states)

    def form(self, pairs: Sequence[Pair], *, sample: bool) -> Moments:
        """Return the second moments of some of the pairs; `sample`: with a reservoir of states."""
        whole = self._moments
        moments = Moments(
            pairs,
            reservoir=whole.reservoir.size if sample else 0,
            full_targets=whole.full_targets,
            products=whole.products,
            features=whole.features,
        )
        for start, stop, keys, outlying in self._batches:
            rows = {site: self._store.read(site, start, stop) for site in moments.sites}
            moments.add(rows, keys=keys, outlying=outlying)
        moments.release_buffers()
        if moments.sums is not None:
            for site in moments.sums.diagonal.keys() & self._diagonals.keys():
                moments.sums.diagonal[site] = self._diagonals[site]
            self._diagonals |= {site: gram.diagonal().clone() for site, gram in moments.sums.gram.items()}
        return moments

    def close(self) -> None:
        """Release the states."""
        self._store.close()


@dataclass(frozen=True)
class StagedMoments:
    """The splits of one run, some as sums and some as stored states: the sums of one source are formed at a time."""

    splits: Mapping[str, Moments | StoredMoments]
    pairs: Sequence[Pair]
    info: RunInfo
    max_length: int
    targets_at_once: int | None = None
    """The number of a source's targets that are formed together; None: all."""
    spill: Path | None = None
    """The folder of stored states, where solved maps are stored too."""

    def parts(self, *, whole: bool, sample: bool) -> Iterator[SplitMoments]:
        """Yield the moments of one source after another, or (`whole`) of all together.

        `sample`: the validation split gets a reservoir of states.
        """
        groups = [list(self.pairs)] if whole else list(self._groups())
        for pairs in groups:
            formed = {}
            for name, split in self.splits.items():
                if isinstance(split, StoredMoments):
                    formed[name] = split.form(pairs, sample=sample and name == "validation")
                else:
                    formed[name] = split.subset(pairs)
            yield SplitMoments(**formed, info=self.info, max_length=self.max_length, texts=())
            formed.clear()

    def _groups(self) -> Iterator[list[Pair]]:
        by_source: dict[Site, list[Pair]] = {}
        for pair in self.pairs:
            by_source.setdefault(pair[0], []).append(pair)
        # The last source first: its Gram matrix has the diagonal of a target of the others.
        for source in sorted(by_source, reverse=True):
            pairs = by_source[source]
            step = self.targets_at_once or len(pairs)
            for start in range(0, len(pairs), step):
                yield pairs[start : start + step]

    def store_map(self, jump: Affine) -> Affine:
        """Return the same map; if states are on disk, its tensors are mapped from a file that has no name any more.

        The system can then write them out of memory, and removes the file with the last use.
        """
        if self.spill is None:
            return jump
        path = self.spill / f"map{SUFFIX}"

        def mapped(tensor: Tensor) -> Tensor:
            tensor = tensor.cpu().contiguous()
            with writing(path):
                path.write_bytes(_bytes_of(tensor))
                view = torch.from_file(str(path), shared=False, size=tensor.numel(), dtype=tensor.dtype)
                path.unlink()
            return view.view(tensor.shape)

        return Affine(jump.shape, tuple(map(mapped, jump.factors)), jump.bias, jump.strength)

    def close(self) -> None:
        """Release stored states."""
        for split in self.splits.values():
            if isinstance(split, StoredMoments):
                split.close()


@contextlib.contextmanager
def spill_folder(folder: Path) -> Iterator[Path]:
    """Lock a folder for the states of one run; those that a killed run left are removed, and ours at the end."""
    folder = folder.expanduser()
    with only_writer(folder):
        leftovers = list(folder.glob(f"*{SUFFIX}"))
        if leftovers:
            log.info("removed the states of an unfinished run in %s: this run starts over", folder)
        try:
            _remove(leftovers)
            yield folder
        finally:
            _remove(folder.glob(f"*{SUFFIX}"))


_MMAP_THRESHOLD = -3
"""The parameter of glibc's `mallopt` for the size from which memory is mapped on its own."""


@contextlib.contextmanager
def returned_memory() -> Iterator[None]:
    """Let the memory of freed tensors go back to the system at once.

    glibc raises the size up to which it holds freed memory for reuse; sums of one source after another, of ever other
    sizes, would then take twice what they need. Other allocators are left as they are.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError, TypeError):
        yield
        return
    malloc_trim(0)  # what was freed before
    mallopt(_MMAP_THRESHOLD, 2**20)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, 2**25)  # the most that glibc itself would raise it to


def _remove(paths: Iterator[Path] | Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.itemsize


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, which can be written to."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
