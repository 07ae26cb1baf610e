"""Second moments of hidden states: sums that grow batch by batch, merge exactly, and yield centred moments; their file.

Closed-form estimators need nothing else. States are shifted by a fixed vector per site (the first batch's typical
state), so that a large mean does not drown small differences. Sums are float64. Their products are float64 too: on a
CPU that costs less than twice as much as float32, and jumps then equal a float64 solution to ten digits. Accelerators
that are slow in float64 form products in float32 (`products`), as does `calibrated` for its many products; rows of
outlying norm (attention sinks) still go through a float64 product.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from layerjump.errors import BadArtifact, BadMoments, NewerFormat, WrongModel, argument, one_line
from layerjump.io import parse_json, read_tensors, write_tensors
from layerjump.jumps.jumps import RunInfo
from layerjump.jumps.maps import FeatureKind, compute_features
from layerjump.jumps.serialization import Pairing, Record, RunInfoRecord, read_record
from layerjump.metrics.logits import upcast
from layerjump.models.structure import FINAL, Pair, Site, sites_of

OUTLYING = 8.0
"""Rows whose shifted norm is this many times the batch's median are multiplied in float64."""
GRAM_BLOCKS = 6
"""Blocks a side of a symmetric product: six save five twelfths of its arithmetic."""
ROWS_AT_ONCE = 1024
"""Rows in one float32 product: rounding grows with their number, the cost of adding to float64 falls."""
# A standard deviation below this share of the mean counts as none. Float32 states cannot vary by
# less; and rounding of float64 ones, squared next to such a deviation, stays under every cut-off.
CONSTANT = 1e-8
SPLITS = ("fit", "validation", "test")
MAX_LENGTH = 512
"""Longest sequence, unless a run is planned with another; longer documents are cut."""
FORMAT = 1
KIND = "layerjump moments"
MAX_SAMPLED = 100_000
"""Raw states that a file may claim to hold: memory for all of them is allocated at once."""


@dataclass(frozen=True, eq=False)
class Source:
    """Centred moments of one source site, whose states are x; all tensors are float64."""

    n: int
    mean: Tensor  # (dx,)
    scatter: Tensor  # (dx, dx), Σ (x − x̄)(x − x̄)ᵀ


@dataclass(frozen=True, eq=False)
class Target:
    """Centred moments that pair a source with one target site, whose states are y."""

    mean: Tensor  # (dy,)
    cross: Tensor  # (dx, dy), Σ (x − x̄)(y − ȳ)ᵀ
    sum_squares: Tensor  # (dy,), Σ (y − ȳ)², the diagonal only
    scatter: Tensor | None = None  # (dy, dy), where a study collects it


@dataclass(eq=False)
class Sums:
    """Uncentred sums of shifted states x − s, in float64."""

    sum: dict[Site, Tensor]  # Σ (x − s)
    gram: dict[Site, Tensor]  # Σ (x − s)(x − s)ᵀ, on and above the diagonal
    diagonal: dict[Site, Tensor]  # the diagonal alone, for sites that are only targets
    cross: dict[Pair, Tensor]  # Σ (x − s)(y − t)ᵀ
    norm: Tensor  # Σ ‖x‖ of every site
    cosine: Tensor  # Σ cos(x, y) of every pair
    angle: Tensor  # Σ arccos(cos(x, y)) / π of every pair

    def named(self) -> dict[str, Tensor]:
        """All tensors by their name in a file, in an order that depends on the pairs alone."""
        tensors = {"norm": self.norm, "cosine": self.cosine, "angle": self.angle}
        tensors |= {f"sum/{site}": tensor for site, tensor in self.sum.items()}
        tensors |= {f"square/{site}": tensor for site, tensor in self.gram.items()}
        tensors |= {f"diagonal/{site}": tensor for site, tensor in self.diagonal.items()}
        return tensors | {f"cross/{a}>{b}": tensor for (a, b), tensor in self.cross.items()}


class Moments:
    """Running second moments of states at the sites of some pairs."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        reservoir: int = 2000,
        full_targets: bool = False,
        products: torch.dtype = torch.float64,
        features: FeatureKind = "raw",
    ) -> None:
        self.products = products
        self.features = features
        """Features of a source's states of which sums are collected."""
        self.pairs = list(pairs)
        self.sites = sites_of(self.pairs)
        self.sources = list(dict.fromkeys(source for source, _ in self.pairs))
        self.full_targets = full_targets
        # The Gram matrix is needed for sources; for other targets its diagonal is, unless a study needs more.
        self.gram_sites = list(self.sites) if full_targets else self.sources
        self.n = 0
        self.shift: dict[Site, Tensor] = {}
        self.sums: Sums | None = None
        sampled = [site for site in self.sites if site.part == "level" or site == FINAL]
        self.reservoir = Reservoir(sampled, reservoir)
        self._targets_of = {a: [b for source, b in self.pairs if source == a] for a in self.sources}
        self._targets = list(dict.fromkeys(target for _, target in self.pairs))
        self._buffers: dict[object, Tensor] = {}
        if features != "raw" and not set(self._targets).isdisjoint(self.sources):
            raise BadMoments(
                f"expected raw features for {describe_pairs(self.pairs)}, which lead to sites that others start from, "
                f"got {features}; use raw features, or pairs that all lead to final"
            )

    @torch.no_grad()
    def add(self, states: Mapping[Site, Tensor], *, keys: Tensor | None = None) -> None:
        """Add a batch: one row of every site's tensor for each picked position.

        `keys` decide which rows the reservoir samples (see `sampling_keys`); without them it samples none.
        """
        widened = {site: upcast(states[site]) for site in self.sites}
        n_rows = {len(rows) for rows in widened.values()}
        if len(n_rows) != 1:
            raise BadMoments(f"expected the same number of rows at every site, got {sorted(n_rows)}")
        for site, rows in widened.items():
            # Checked before anything is added: one NaN or infinite value makes the column sum non-finite.
            if not torch.isfinite(rows.sum(dtype=torch.float64)):
                raise BadMoments(f"the states at site {site} hold NaN or infinite values")
        if self.sums is None:
            self.set_shift(self.shift_for(widened))
        self._check_widths({s: self._features(s, rows[:1]).shape[-1] for s, rows in widened.items()})

        def shifted(site: Site) -> Tensor:
            """Shifted states in float64, in a buffer reused from batch to batch: allocation fragments the heap."""
            rows = self._features(site, widened[site])
            # Targets are needed together; sites that are only sources share one buffer.
            key = site if site in self._targets else (rows.shape[-1], rows.device)
            buffer = self._buffers.get(key)
            if buffer is None or len(buffer) < len(rows):
                buffer = self._buffers[key] = torch.empty_like(rows, dtype=torch.float64)
            return torch.sub(rows, self.shift[site], out=buffer[: len(rows)])

        if self.products == torch.float64:
            self._add_products(shifted)
        else:
            self._add_float32_products(widened)
        sums = self._require_sums()
        norms = {site: torch.linalg.vector_norm(widened[site], dim=-1) for site in self.sites}
        sums.norm += torch.stack([norms[site].double().sum() for site in self.sites])
        cosines, angles = [], []
        for a, b in self.pairs:
            if widened[a].shape != widened[b].shape:
                cosines.append(sums.cosine.new_full((), torch.nan))
                angles.append(cosines[-1])
                continue
            length = (norms[a] * norms[b]).clamp(min=torch.finfo(norms[a].dtype).tiny)
            cosine = (torch.linalg.vecdot(widened[a], widened[b]) / length).double().clamp(-1, 1)
            cosines.append(cosine.sum())
            angles.append(cosine.arccos().sum() / torch.pi)
        sums.cosine += torch.stack(cosines)
        sums.angle += torch.stack(angles)
        self.n += n_rows.pop()
        if keys is not None:
            self.reservoir.add(widened, keys)

    def merge(self, other: Moments) -> None:
        """Add another run's sums, which may be about another shift."""
        ours, theirs = ((m.pairs, m.gram_sites, m.features) for m in (self, other))
        if ours != theirs:
            raise BadMoments(
                f"sums over {describe_pairs(other.pairs)}, {other.features} features, cannot be merged into sums over "
                f"{describe_pairs(self.pairs)}, {self.features} features; collect both with the same pairs and features"
            )
        if other.n == 0 or other.sums is None:
            return
        if self.n == 0 or self.sums is None:
            self.shift, self.sums = dict(other.shift), copy.deepcopy(other.sums)
        else:
            self._check_widths({site: len(shift) for site, shift in other.shift.items()})
            moved = other._sums_about(self.shift).named()
            for name, total in self.sums.named().items():
                total += moved[name]
        self.n += other.n
        self.reservoir.merge(other.reservoir)

    def shift_for(self, states: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
        """Return a shift that suits these states: a typical state of each site.

        That is the mean of the rows that are not outlying: a few attention sinks would drag it far from all others. It
        is rounded to float32, so that subtracting it from float32 states is as exact as they are.
        """
        shift = {}
        for site in self.sites:
            rows = self._features(site, states[site])
            norm = torch.linalg.vector_norm(rows, dim=-1)
            typical = rows[norm <= OUTLYING * norm.median()].double().mean(0)
            shift[site] = typical.float().double()
        return shift

    def set_shift(self, shift: Mapping[Site, Tensor]) -> None:
        """Start from zero about a given shift (processes that will add their sums must share it)."""
        self.shift = {site: shift[site].double() for site in self.sites}
        self.sums = self.zeros(next(iter(self.shift.values())).device)

    def zeros(self, device: torch.device | str) -> Sums:
        """Return sums of zero in the shapes that the shift's widths imply."""

        def zero(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        width = {site: len(self.shift[site]) for site in self.sites}
        return Sums(
            sum={site: zero(width[site]) for site in self.sites},
            gram={site: zero(width[site], width[site]) for site in self.gram_sites},
            diagonal={s: zero(width[s]) for s in self.sites if s not in self.gram_sites},
            cross={(a, b): zero(width[a], width[b]) for a, b in self.pairs},
            norm=zero(len(self.sites)),
            cosine=zero(len(self.pairs)),
            angle=zero(len(self.pairs)),
        )

    # -- centred moments

    def source(self, site: Site) -> Source:
        """Return the centred moments of a source site."""
        sums = self._require_sums()
        total, gram = sums.sum[site], sums.gram[site]
        scatter = _mirror(gram) - torch.outer(total, total) / max(self.n, 1)
        return Source(self.n, self.mean(site), scatter)

    def target(self, source: Site, target: Site) -> Target:
        """Return the centred moments that pair a source with a target."""
        sums, n = self._require_sums(), max(self.n, 1)
        x, y, gram = sums.sum[source], sums.sum[target], sums.gram.get(target)
        diagonal = sums.diagonal[target] if gram is None else gram.diagonal()
        return Target(
            self.mean(target),
            sums.cross[source, target] - torch.outer(x, y) / n,
            # Rounding may leave a constant coordinate a hair below zero.
            (diagonal - y.square() / n).clamp(min=0),
            None if gram is None else _mirror(gram) - torch.outer(y, y) / n,
        )

    def pair_moments(self, pair: Pair, features: FeatureKind) -> tuple[Source, Target]:
        """Return both sides of a pair for one kind of features: sums of both features hold each alone as well."""
        source, target = self.source(pair[0]), self.target(*pair)
        if features == self.features:
            return source, target
        width = len(source.mean) // 2
        part = slice(0, width) if features == "raw" else slice(width, None)
        return (
            Source(source.n, source.mean[part], source.scatter[part, part]),
            Target(target.mean, target.cross[part], target.sum_squares, target.scatter),
        )

    def mean(self, site: Site) -> Tensor:
        """Return the mean state at a site."""
        return self.shift[site] + self._require_sums().sum[site] / max(self.n, 1)

    def mean_cosine(self, pair: Pair) -> float:
        """Return the mean cosine of the angle between the states at the two sites (NaN where widths differ)."""
        return self._require_sums().cosine[self.pairs.index(pair)].item() / max(self.n, 1)

    def mean_angle(self, pair: Pair) -> float:
        """Return the mean angular distance arccos(cos)/π between the states at the two sites."""
        return self._require_sums().angle[self.pairs.index(pair)].item() / max(self.n, 1)

    def mean_norm(self, site: Site) -> float:
        """Return the mean norm of the states at a site."""
        return self._require_sums().norm[self.sites.index(site)].item() / max(self.n, 1)

    # -- accumulation

    def _require_sums(self) -> Sums:
        if self.sums is None:
            raise BadMoments("these moments hold no positions; add states first")
        return self.sums

    def _features(self, site: Site, states: Tensor) -> Tensor:
        return compute_features(states, self.features) if site in self._targets_of else states

    def _add_products(self, shifted: Callable[[Site], Tensor]) -> None:
        """Add all products of shifted rows. Rows of targets are held for all their sources, others made one by one."""
        sums = self._require_sums()
        held = {site: shifted(site) for site in self._targets}
        for site in self.sites:
            rows = held[site] if site in held else shifted(site)
            sums.sum[site] += rows.sum(0, dtype=torch.float64)
            if site in self.gram_sites:
                width = rows.shape[1]
                step = -(-width // GRAM_BLOCKS)
                for start in range(0, width, step):  # on and above the diagonal only: it is symmetric
                    block = slice(start, min(start + step, width))
                    _add_product(sums.gram[site][block, start:], rows[:, block], rows[:, start:])
            else:
                sums.diagonal[site] += rows.square().sum(0, dtype=torch.float64)
            for target in self._targets_of.get(site, ()):
                _add_product(sums.cross[site, target], rows, held[target])

    def _add_float32_products(self, states: Mapping[Site, Tensor]) -> None:
        """Multiply in float32, except rows of such norm that their rounding would cover the others."""
        features = {site: self._features(site, states[site]) for site in self.sites}
        shifted = {site: rows - self.shift[site].to(rows) for site, rows in features.items()}
        outlying = torch.zeros(len(next(iter(shifted.values()))), dtype=torch.bool)
        for rows in shifted.values():
            norm = torch.linalg.vector_norm(rows, dim=-1)
            outlying |= (norm > OUTLYING * norm.median()).to(outlying.device)
        self._add_products(lambda site: features[site][outlying].double() - self.shift[site])
        for rows in shifted.values():
            rows[outlying] = 0
        for start in range(0, len(outlying), ROWS_AT_ONCE):
            part = {site: rows[start : start + ROWS_AT_ONCE] for site, rows in shifted.items()}
            self._add_products(part.__getitem__)

    def _sums_about(self, shift: Mapping[Site, Tensor]) -> Sums:
        """Return a copy of the sums about another shift: (x − t) = (x − s) + δ, multiplied out."""
        sums, n = self._require_sums(), self.n
        delta = {site: self.shift[site] - shift[site] for site in self.sites}

        def moved(product: Tensor, a: Site, b: Site) -> Tensor:
            x, y, dx, dy = sums.sum[a], sums.sum[b], delta[a], delta[b]
            return product + torch.outer(dx, y) + torch.outer(x + n * dx, dy)

        return Sums(
            sum={site: total + n * delta[site] for site, total in sums.sum.items()},
            gram={site: moved(gram, site, site) for site, gram in sums.gram.items()},
            diagonal={
                site: diagonal + delta[site] * (2 * sums.sum[site] + n * delta[site])
                for site, diagonal in sums.diagonal.items()
            },
            cross={(a, b): moved(cross, a, b) for (a, b), cross in sums.cross.items()},
            norm=sums.norm.clone(),
            cosine=sums.cosine.clone(),
            angle=sums.angle.clone(),
        )

    def _check_widths(self, widths: Mapping[Site, int]) -> None:
        for site in self.sites:
            expected = len(self.shift[site])
            if widths[site] != expected:
                raise BadMoments(
                    f"expected states of width {expected} at site {site}, got {widths[site]}; they belong to different "
                    f"models"
                )


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
        for site, rows in self._rows.items():
            rows[slots] = states[site][new.to(states[site].device)].to(rows)
        self._filled = min(self.size, self._filled + len(new))

    def merge(self, other: Reservoir) -> None:
        """Offer another reservoir's rows."""
        if len(other.keys):
            self.add(other.states, other.keys)

    def _sort(self) -> None:
        if bool((self._keys[: self._filled].diff() >= 0).all()):
            return
        order = torch.argsort(self._keys[: self._filled], stable=True)
        self._keys[: self._filled] = self._keys[order]
        for rows in self._rows.values():
            rows[: self._filled] = rows[order]


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


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add xᵀy to a sum."""
    if x.dtype == total.dtype:
        total.addmm_(x.mT, y)  # without a temporary as large as the sum
    else:
        total += x.mT @ y


def _mirror(total: Tensor) -> Tensor:
    """The full symmetric matrix of which one half was added up."""
    return total.triu() + total.triu(1).mT


def is_constant(n: int, mean: Tensor, sum_squares: Tensor) -> Tensor:
    """Return which coordinates do not vary: standard deviation at most 1e-8 of the mean."""
    return sum_squares <= n * (CONSTANT * mean).square()


def pool(pairs: Sequence[tuple[Source, Target]]) -> tuple[Source, Target]:
    """Combine the moments of several groups of rows into those of all rows together, exactly."""
    if not pairs:
        raise BadMoments("expected at least one pair of moments to pool, got none")
    for source, target in pairs:
        check_moments(source, [target])
    n = sum(source.n for source, _ in pairs)
    mean_x = reduce(torch.add, (source.mean * (source.n / n) for source, _ in pairs))
    mean_y = reduce(torch.add, (target.mean * (source.n / n) for source, target in pairs))
    # About other centres than the rows' own means, sums of products gain n δδᵀ.
    moved = [(x, y, x.mean - mean_x, y.mean - mean_y) for x, y in pairs]
    scatters = [y.scatter + x.n * torch.outer(dy, dy) for x, y, _, dy in moved if y.scatter is not None]
    return Source(
        n, mean_x, reduce(torch.add, (x.scatter + x.n * torch.outer(dx, dx) for x, _, dx, _ in moved))
    ), Target(
        mean=mean_y,
        cross=reduce(torch.add, (y.cross + x.n * torch.outer(dx, dy) for x, y, dx, dy in moved)),
        sum_squares=reduce(torch.add, (y.sum_squares + x.n * dy.square() for x, y, _, dy in moved)),
        scatter=reduce(torch.add, scatters) if len(scatters) == len(pairs) else None,
    )


def check_moments(source: Source, targets: Sequence[Target]) -> None:
    """Raise `BadMoments` for moments of no rows, of shapes that do not match, or with non-finite values."""
    if source.n < 1:
        raise BadMoments(
            f"these moments hold {source.n} rows, at least one is needed; collect them over some text first"
        )
    dx = source.mean.numel()
    expected = [("the source's mean", source.mean, (dx,)), ("the source's scatter", source.scatter, (dx, dx))]
    for i, target in enumerate(targets):
        dy = target.mean.numel()
        expected += [
            (f"target {i}'s mean", target.mean, (dy,)),
            (f"target {i}'s cross", target.cross, (dx, dy)),
            (f"target {i}'s sum_squares", target.sum_squares, (dy,)),
        ]
        if target.scatter is not None:
            expected.append((f"target {i}'s scatter", target.scatter, (dy, dy)))
    for name, tensor, shape in expected:
        if tuple(tensor.shape) != shape:
            raise BadMoments(
                f"expected {name} of shape {shape}, got {tuple(tensor.shape)}; pair moments of the same source and "
                f"target sites"
            )
        if tensor.dtype != torch.float64:
            raise BadMoments(f"expected {name} in float64, got {tensor.dtype}; convert the moments")
        if not torch.isfinite(tensor).all():
            raise BadMoments(
                f"{name} holds NaN or infinite values: some states were not finite when the moments were collected; "
                f"load the model in float32 or bfloat16, and collect again"
            )


def describe_pairs(pairs: Iterable[Pair]) -> str:
    """Return a short description of a list of pairs."""
    listed = list(pairs)
    ends = f"{listed[0][0]}:{listed[0][1]} … {listed[-1][0]}:{listed[-1][1]}" if listed else "none"
    return f"{len(listed)} pairs ({ends})"


# -- the moments of a run, and their file


@dataclass(frozen=True)
class SplitMoments:
    """Moments of the fit, validation and test documents, and the run they come from."""

    fit: Moments
    validation: Moments
    test: Moments
    info: RunInfo
    max_length: int = MAX_LENGTH

    @property
    def splits(self) -> dict[str, Moments]:
        """The moments by the name of their split."""
        return {"fit": self.fit, "validation": self.validation, "test": self.test}

    def save(self, path: Path, *, progress: Mapping[str, int] | None = None) -> None:
        """Write everything to one file; `progress` (batches done by split) marks an unfinished run."""
        tensors: dict[str, Tensor] = {}
        for split, moments in self.splits.items():
            named = moments.sums.named() if moments.sums else {}
            named |= {f"shift/{site}": shift for site, shift in moments.shift.items()}
            if len(moments.reservoir.keys):
                named["reservoir-keys"] = moments.reservoir.keys
            named |= {f"reservoir/{site}": rows for site, rows in moments.reservoir.states.items()}
            tensors |= {f"{_ON_DISK[split]}|{name}": tensor for name, tensor in named.items()}
        about = asdict(self.info) | {"max_length": self.max_length, "n_pairs": len(self.fit.pairs)}
        header = {
            "format": FORMAT,
            "about": about,
            "pairs": [[str(source), str(target)] for source, target in self.fit.pairs],
            "full_targets": self.fit.full_targets,
            "reads": self.fit.features,
            "reservoir": self.fit.reservoir.size,
            "n": {_ON_DISK[split]: moments.n for split, moments in self.splits.items()},
            "progress": progress and {_ON_DISK[name]: step for name, step in progress.items()},
        }
        write_tensors(path, tensors, {"kind": KIND, "head": json.dumps(header)})

    @classmethod
    def load(cls, path: Path) -> SplitMoments:
        """Read the moments of a finished run."""
        collected, progress = cls.load_unfinished(path)
        if progress is not None:
            raise BadArtifact(
                f"{path} holds the moments of an unfinished run; finish it with {argument('resume', True)}"
            )
        return collected

    @classmethod
    def load_unfinished(cls, path: Path) -> tuple[SplitMoments, dict[str, int] | None]:
        """Read moments, and the batches done by split of an unfinished run (None for a finished one)."""
        tensors, metadata = read_tensors(path)
        if metadata.get("kind") != KIND or "head" not in metadata:
            raise BadArtifact(f"{path} is not a moments file; fit with {argument('save_moments', True)} to write one")
        data = parse_json(metadata["head"], path)
        version = read_record(_Version, data, path).format
        if version > FORMAT:
            raise NewerFormat(
                f"{path} has moments format {str(version)[:50]}, but this layerjump reads up to {FORMAT}; upgrade it"
            )
        header = read_record(MomentsHeader, data, path)
        try:
            splits = {name: _unpack(_ON_DISK[name], header, tensors) for name in SPLITS}
        except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
            raise BadArtifact(
                f"{path} is damaged: {type(error).__name__} {one_line(error)}; collect the moments again"
            ) from error
        about = dict(header.about)
        max_length = about.pop("max_length")
        progress = header.progress
        if progress is not None:
            progress = {name: progress[_ON_DISK[name]] for name in SPLITS if _ON_DISK[name] in progress}
        return cls(**splits, info=RunInfo(**about), max_length=max_length), progress


def merge_moments(runs: Sequence[SplitMoments]) -> SplitMoments:
    """Add the moments of several runs: other text, other machines, other days, but the same model."""
    first, hashes = runs[0], []
    merged = copy.deepcopy(first.splits)
    for run in runs:
        if first.info.fingerprint != run.info.fingerprint:
            raise WrongModel(
                f"these moments come from different weights: {first.info.model} ({first.info.fingerprint[:12]}) and "
                f"{run.info.model} ({run.info.fingerprint[:12]}); merge runs of one model only"
            )
        if run.info.text_sha256 in hashes:
            raise BadMoments(
                f"the text {run.info.text!r} is in more than one of these runs; merging would count it twice"
            )
        hashes.append(run.info.text_sha256)
        for name, moments in run.splits.items() if run is not first else ():
            merged[name].merge(moments)
    info = replace(
        first.info,
        text=" + ".join(run.info.text for run in runs),
        text_sha256="+".join(hashes),
        tokens=sum(run.info.tokens for run in runs),
    )
    return SplitMoments(**merged, info=info, max_length=first.max_length)


class _Version(Record):
    format: int


class _About(RunInfoRecord):
    max_length: int


_Count = Annotated[int, Field(ge=0, lt=2**53)]


class MomentsHeader(Record):
    """The header of a moments file. Files written before there were features lack `reads`."""

    about: _About
    pairs: Annotated[list[Pairing], Field(min_length=1)]
    full_targets: bool
    reads: FeatureKind = "raw"
    reservoir: Annotated[int, Field(ge=0, le=MAX_SAMPLED)]
    n: dict[Literal["fit", "select", "test"], _Count]
    progress: dict[str, _Count] | None


_ON_DISK: dict[str, Literal["fit", "select", "test"]] = {"fit": "fit", "validation": "select", "test": "test"}
"""Name of every split in a moments file."""


def _unpack(split: Literal["fit", "select", "test"], header: MomentsHeader, tensors: Mapping[str, Tensor]) -> Moments:
    moments = Moments(header.pairs, reservoir=header.reservoir, full_targets=header.full_targets, features=header.reads)
    moments.n = header.n[split]
    stored = {
        name.removeprefix(f"{split}|"): tensor for name, tensor in tensors.items() if name.startswith(f"{split}|")
    }
    if not stored and moments.n:
        raise ValueError(f"the {split} split has {moments.n} positions, but no sums")
    if not stored:
        return moments
    sampled = {
        Site.parse(name.removeprefix("reservoir/")): stored.pop(name)
        for name in list(stored)
        if name.startswith("reservoir/")
    }
    if sampled:
        moments.reservoir.add(sampled, stored.pop("reservoir-keys"))
    shift = {site: stored.pop(f"shift/{site}") for site in moments.sites}
    moments.shift = shift
    # Compared before memory is allocated: a shift may claim to be very wide.
    expected = {name: sums.shape for name, sums in moments.zeros("meta").named().items()}
    if expected != {name: tensor.shape for name, tensor in stored.items()}:
        raise ValueError(f"the {split} split's sums are not those of its pairs")
    moments.set_shift(shift)
    assert moments.sums is not None
    # Copied into memory of our own: matrix products round differently on memory aligned as in a file.
    for name, total in moments.sums.named().items():
        total.copy_(stored[name])
    return moments
