"""Second moments of hidden states: sums that grow batch by batch, merge exactly, and yield centred moments.

Closed-form estimators need nothing else. States are shifted by a fixed vector per site (the first batch's typical
state), so that a large mean does not drown small differences. Sums are float64. Their products are float64 too: on a
CPU that costs less than twice as much as float32, and jumps then equal a float64 solution to ten digits. Accelerators
that are slow in float64 form products in float32 (`products`), as does `calibrated` for its many products; rows of
outlying norm (attention sinks) still go through a float64 product.

Sums live on the device of their source's states. Where a model is spread over several devices, the rows of targets
travel, which are small next to the sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from layerjump.errors import BadMoments
from layerjump.jumps.maps import FeatureKind, compute_features
from layerjump.jumps.reservoir import Reservoir
from layerjump.metrics.logits import upcast
from layerjump.models.sites import Pair, Site, sites_of

OUTLYING = 8.0
"""Rows whose shifted norm is this many times the batch's median are multiplied in float64."""
GRAM_BLOCKS = 6
"""Blocks a side of a symmetric product: six save five twelfths of its arithmetic."""
ROWS_AT_ONCE = 1024
"""Rows in one float32 product: rounding grows with their number, the cost of adding to float64 falls."""
# A standard deviation below this share of the mean counts as none. Float32 states cannot vary by
# less; and rounding of float64 ones, squared next to such a deviation, stays under every cut-off.
CONSTANT = 1e-8


@dataclass(frozen=True, eq=False)
class Source:
    """Centred moments of one source site, whose states are x; all tensors are float64."""

    n: int
    mean: Tensor  # (dx,)
    scatter: Tensor  # (dx, dx), Σ (x − x̄)(x − x̄)ᵀ

    def to(self, device: torch.device) -> Source:
        """Return the same moments on another device."""
        return Source(self.n, self.mean.to(device), self.scatter.to(device))


@dataclass(frozen=True, eq=False)
class Target:
    """Centred moments that pair a source with one target site, whose states are y."""

    mean: Tensor  # (dy,)
    cross: Tensor  # (dx, dy), Σ (x − x̄)(y − ȳ)ᵀ
    sum_squares: Tensor  # (dy,), Σ (y − ȳ)²

    def to(self, device: torch.device) -> Target:
        """Return the same moments on another device."""
        return Target(self.mean.to(device), self.cross.to(device), self.sum_squares.to(device))


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

    def filled(self, named: Mapping[str, Tensor]) -> Sums:
        """Return sums of the same sites and pairs that hold the tensors of a file."""
        return Sums(
            sum={site: named[f"sum/{site}"] for site in self.sum},
            gram={site: named[f"square/{site}"] for site in self.gram},
            diagonal={site: named[f"diagonal/{site}"] for site in self.diagonal},
            cross={(a, b): named[f"cross/{a}>{b}"] for a, b in self.cross},
            norm=named["norm"],
            cosine=named["cosine"],
            angle=named["angle"],
        )


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
        sampled = [site for site in self.sites if site.between_blocks]
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
    def add(self, states: Mapping[Site, Tensor], *, keys: Tensor | None = None, outlying: Tensor | None = None) -> None:
        """Add a batch: one row of every site's tensor for each picked position.

        `keys` decide which rows the reservoir samples (see `sampling_keys`); without them it samples none. `outlying`
        marks the rows that are multiplied in float64 among float32 products; without it, `outlying_rows` does.
        """
        widened, n_rows = check_states(states, self.sites)
        home = widened[self.sites[0]].device
        if self.sums is None:
            self.set_shift(self.shift_for(widened))
        self._move_to({site: rows.device for site, rows in widened.items()})
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
            self._add_float32_products(widened, self.outlying_rows(widened) if outlying is None else outlying)
        sums = self._require_sums()
        norms = {site: torch.linalg.vector_norm(widened[site], dim=-1) for site in self.sites}
        sums.norm += torch.stack([norms[site].double().sum().to(home) for site in self.sites])
        cosines, angles = [], []
        states_on, norms_on = _Copies(widened), _Copies(norms)
        for a, b in self.pairs:
            if widened[a].shape != widened[b].shape:
                cosines.append(sums.cosine.new_full((), torch.nan))
                angles.append(cosines[-1])
                continue
            device = widened[a].device
            length = (norms[a] * norms_on(b, device)).clamp(min=torch.finfo(norms[a].dtype).tiny)
            cosine = (torch.linalg.vecdot(widened[a], states_on(b, device)) / length).double().clamp(-1, 1)
            cosines.append(cosine.sum().to(home))
            angles.append((cosine.arccos().sum() / torch.pi).to(home))
        sums.cosine += torch.stack(cosines)
        sums.angle += torch.stack(angles)
        self.n += n_rows
        if keys is not None:
            self.reservoir.add(widened, keys)

    def release_buffers(self) -> None:
        """Release the copies of states that are reused from batch to batch, when no batch follows."""
        self._buffers.clear()

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
                total += moved[name].to(total.device)
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
        """Start from zero about a given shift."""
        self.shift = {site: shift[site].double() for site in self.sites}
        self.sums = self.zeros()

    def zeros(self, device: torch.device | str | None = None) -> Sums:
        """Return sums of zero in the shapes that the shift's widths imply, each on the device of its source's shift."""

        def zero(site: Site, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device or self.shift[site].device)

        width = {site: len(self.shift[site]) for site in self.sites}
        first = self.sites[0]
        return Sums(
            sum={site: zero(site, width[site]) for site in self.sites},
            gram={site: zero(site, width[site], width[site]) for site in self.gram_sites},
            diagonal={s: zero(s, width[s]) for s in self.sites if s not in self.gram_sites},
            cross={(a, b): zero(a, width[a], width[b]) for a, b in self.pairs},
            norm=zero(first, len(self.sites)),
            cosine=zero(first, len(self.pairs)),
            angle=zero(first, len(self.pairs)),
        )

    def _move_to(self, devices: Mapping[Site, torch.device]) -> None:
        """Move sums to their states' devices: sums from a file or from another process are on the CPU."""
        if all(self.shift[site].device == device for site, device in devices.items()):
            return
        sums, home = self._require_sums(), devices[self.sites[0]]
        self.shift = {site: shift.to(devices[site]) for site, shift in self.shift.items()}
        self.sums = Sums(
            sum={site: total.to(devices[site]) for site, total in sums.sum.items()},
            gram={site: gram.to(devices[site]) for site, gram in sums.gram.items()},
            diagonal={site: diagonal.to(devices[site]) for site, diagonal in sums.diagonal.items()},
            cross={(a, b): cross.to(devices[a]) for (a, b), cross in sums.cross.items()},
            norm=sums.norm.to(home),
            cosine=sums.cosine.to(home),
            angle=sums.angle.to(home),
        )

    # -- centred moments

    def source(self, site: Site) -> Source:
        """Return the centred moments of a source site."""
        sums = self._require_sums()
        scatter = _mirror(sums.gram[site])
        scatter -= _outer_mean(sums.sum[site], sums.sum[site], self.n)
        return Source(self.n, self.mean(site), scatter)

    def target(self, source: Site, target: Site) -> Target:
        """Return the centred moments that pair a source with a target, on the source's device."""
        sums, n = self._require_sums(), max(self.n, 1)
        x, gram = sums.sum[source], sums.gram.get(target)
        y = sums.sum[target].to(x.device)
        diagonal = (sums.diagonal[target] if gram is None else gram.diagonal()).to(x.device)
        cross = _outer_mean(x, y, n)
        torch.sub(sums.cross[source, target], cross, out=cross)
        # Rounding may leave a constant coordinate a hair below zero.
        return Target(self.mean(target).to(x.device), cross, (diagonal - y.square() / n).clamp(min=0))

    def targets(self, source: Site, sites: Sequence[Site]) -> Targets:
        """Return the centred moments that pair a source with each of some targets, formed when they are read."""
        return Targets(self, source, sites)

    def select_features(self, source: Source, target: Target, features: FeatureKind) -> tuple[Source, Target]:
        """Return both sides of a pair for one kind of features: sums of both features hold each alone as well."""
        if features == self.features:
            return source, target
        width = len(source.mean) // 2
        part = slice(0, width) if features == "raw" else slice(width, None)
        return (
            Source(source.n, source.mean[part], source.scatter[part, part]),
            Target(target.mean, target.cross[part], target.sum_squares),
        )

    def pair_moments(self, pair: Pair, features: FeatureKind) -> tuple[Source, Target]:
        """Return both sides of a pair for one kind of features."""
        return self.select_features(self.source(pair[0]), self.target(*pair), features)

    def subset(self, pairs: Sequence[Pair], *, sample: bool = False) -> Moments:
        """Return the moments of some of the pairs; they share these sums. `sample`: with the sampled states."""
        part = Moments(
            pairs,
            reservoir=self.reservoir.size if sample else 0,
            full_targets=self.full_targets,
            products=self.products,
            features=self.features,
        )
        part.join([self])
        return part

    def join(self, parts: Sequence[Moments]) -> None:
        """Take over the sums of these pairs from moments of the same rows, each of which has some of the pairs."""
        filled = [(part, part.sums) for part in parts if part.sums is not None]
        if not filled:
            return
        self.n = filled[0][0].n
        shift = {site: shift for part, _ in filled for site, shift in part.shift.items()}
        self.shift = {site: shift[site] for site in self.sites}
        self.sums = _select_sums(filled, self)
        self.reservoir.join([part.reservoir for part in parts])

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
        held_on = _Copies(held)
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
                _add_product(sums.cross[site, target], rows, held_on(target, rows.device))

    def outlying_rows(self, states: Mapping[Site, Tensor]) -> Tensor:
        """Return which rows have such a norm at some site that their rounding in float32 would cover the others."""
        first = states[self.sites[0]]
        is_outlying = torch.zeros(len(first), dtype=torch.bool, device=first.device)
        for site in self.sites:
            rows = self._features(site, states[site])
            norm = torch.linalg.vector_norm(rows - self.shift[site].to(rows), dim=-1)
            is_outlying |= (norm > OUTLYING * norm.median()).to(first.device)
        return is_outlying

    def _add_float32_products(self, states: Mapping[Site, Tensor], is_outlying: Tensor) -> None:
        """Multiply in float32, except outlying rows."""
        features = {site: self._features(site, states[site]) for site in self.sites}
        shifted = {site: rows - self.shift[site].to(rows) for site, rows in features.items()}
        # The host reads their number once; a Boolean mask would be read again for every site.
        outlying = is_outlying.nonzero()[:, 0]
        if len(outlying):
            index = {rows.device: outlying.to(rows.device) for rows in shifted.values()}
            self._add_products(lambda site: features[site][index[features[site].device]].double() - self.shift[site])
            for rows in shifted.values():
                rows[index[rows.device]] = 0
        for start in range(0, len(is_outlying), ROWS_AT_ONCE):
            part = {site: rows[start : start + ROWS_AT_ONCE] for site, rows in shifted.items()}
            self._add_products(part.__getitem__)

    def _sums_about(self, shift: Mapping[Site, Tensor]) -> Sums:
        """Return a copy of the sums about another shift: (x − t) = (x − s) + δ, multiplied out."""
        sums, n = self._require_sums(), self.n
        delta = {site: ours - shift[site].to(ours.device) for site, ours in self.shift.items()}

        def moved(product: Tensor, a: Site, b: Site) -> Tensor:
            x, dx = sums.sum[a], delta[a]
            y, dy = sums.sum[b].to(x.device), delta[b].to(x.device)
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


class _Copies:
    """Tensors of sites on the devices that ask for them: each travels at most once to each device."""

    def __init__(self, tensors: Mapping[Site, Tensor]) -> None:
        self._tensors = tensors
        self._copies: dict[tuple[Site, torch.device], Tensor] = {}

    def __call__(self, site: Site, device: torch.device) -> Tensor:
        tensor = self._tensors[site]
        if tensor.device == device:
            return tensor
        if (site, device) not in self._copies:
            self._copies[site, device] = tensor.to(device)
        return self._copies[site, device]


def _select_sums(parts: Sequence[tuple[Moments, Sums]], whole: Moments) -> Sums:
    """The sums of the pairs of `whole`, each taken from a part that has it."""
    norm = {site: sums.norm[i] for part, sums in parts for i, site in enumerate(part.sites)}
    cosine = {pair: sums.cosine[i] for part, sums in parts for i, pair in enumerate(part.pairs)}
    angle = {pair: sums.angle[i] for part, sums in parts for i, pair in enumerate(part.pairs)}
    # A site that is a source in `parts` may be only a target in `whole`.
    diagonal = {site: gram.diagonal() for _, sums in parts for site, gram in sums.gram.items()}
    for _, sums in parts:
        diagonal |= sums.diagonal
    return Sums(
        sum={site: next(sums.sum[site] for _, sums in parts if site in sums.sum) for site in whole.sites},
        gram={site: next(sums.gram[site] for _, sums in parts if site in sums.gram) for site in whole.gram_sites},
        diagonal={site: diagonal[site] for site in whole.sites if site not in whole.gram_sites},
        cross={pair: next(sums.cross[pair] for _, sums in parts if pair in sums.cross) for pair in whole.pairs},
        norm=torch.stack([norm[site] for site in whole.sites]),
        cosine=torch.stack([cosine[pair] for pair in whole.pairs]),
        angle=torch.stack([angle[pair] for pair in whole.pairs]),
    )


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add xᵀy to a sum."""
    if x.dtype == total.dtype:
        total.addmm_(x.mT, y)  # without a temporary as large as the sum
    else:
        total += x.mT @ y


def _mirror(total: Tensor) -> Tensor:
    """The full symmetric matrix of which one half was added up."""
    full = total.triu()
    full += total.triu(1).mT
    return full


def _outer_mean(x: Tensor, y: Tensor, n: int) -> Tensor:
    """The product of two sums over n rows, divided by n."""
    product = torch.outer(x, y)
    product /= max(n, 1)
    return product


class Targets(Sequence[Target]):
    """Moments that pair one source with several targets. Each is formed when it is read: together they are large."""

    def __init__(self, moments: Moments, source: Site, sites: Sequence[Site]) -> None:
        self._moments, self._source, self._sites = moments, source, sites

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Targets(self._moments, self._source, self._sites[index])
        return self._moments.target(self._source, self._sites[index])


def check_states(states: Mapping[Site, Tensor], sites: Sequence[Site]) -> tuple[dict[Site, Tensor], int]:
    """Return the states of some sites in float32 or wider, and the number of rows; raise for what cannot be added."""
    widened = {site: upcast(states[site]) for site in sites}
    n_rows = {len(rows) for rows in widened.values()}
    if len(n_rows) != 1:
        raise BadMoments(f"expected the same number of rows at every site, got {sorted(n_rows)}")
    # One NaN or infinite value makes the sum non-finite.
    home = widened[sites[0]].device
    totals = torch.stack([rows.sum(dtype=torch.float64).to(home) for rows in widened.values()])
    if not bool(totals.isfinite().all()):
        site = sites[totals.isfinite().tolist().index(False)]
        raise BadMoments(f"the states at site {site} hold NaN or infinite values")
    return widened, n_rows.pop()


def is_constant(n: int, mean: Tensor, sum_squares: Tensor) -> Tensor:
    """Return which coordinates do not vary: standard deviation at most 1e-8 of the mean."""
    return sum_squares <= n * (CONSTANT * mean).square()


def pool(pairs: Sequence[tuple[Source, Target]]) -> tuple[Source, Target]:
    """Combine the moments of several groups of rows into those of all rows together, exactly."""
    if not pairs:
        raise BadMoments("expected at least one pair of moments to pool, got none")
    for source, target in pairs:
        check_moments(source, [target])
    device = pairs[0][0].mean.device
    pairs = [(source.to(device), target.to(device)) for source, target in pairs]
    n = sum(source.n for source, _ in pairs)
    mean_x = reduce(torch.add, (source.mean * (source.n / n) for source, _ in pairs))
    mean_y = reduce(torch.add, (target.mean * (source.n / n) for source, target in pairs))
    # About other centres than the rows' own means, sums of products gain n δδᵀ.
    moved = [(x, y, x.mean - mean_x, y.mean - mean_y) for x, y in pairs]
    return Source(
        n, mean_x, reduce(torch.add, (x.scatter + x.n * torch.outer(dx, dx) for x, _, dx, _ in moved))
    ), Target(
        mean=mean_y,
        cross=reduce(torch.add, (y.cross + x.n * torch.outer(dx, dy) for x, y, dx, dy in moved)),
        sum_squares=reduce(torch.add, (y.sum_squares + x.n * dy.square() for x, y, _, dy in moved)),
    )


def check_moments(source: Source, targets: Sequence[Target]) -> None:
    """Raise `BadMoments` for moments of no rows, of shapes that do not match, or with non-finite values."""
    if source.n < 1:
        raise BadMoments(
            f"these moments hold {source.n} rows, at least one is needed; collect them over some text first"
        )
    for name, tensor, shape in _expected_shapes(source, targets):
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


def _expected_shapes(source: Source, targets: Sequence[Target]) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    dx = source.mean.numel()
    yield "the source's mean", source.mean, (dx,)
    yield "the source's scatter", source.scatter, (dx, dx)
    for i, target in enumerate(targets):
        dy = target.mean.numel()
        yield f"target {i}'s mean", target.mean, (dy,)
        yield f"target {i}'s cross", target.cross, (dx, dy)
        yield f"target {i}'s sum_squares", target.sum_squares, (dy,)


def describe_pairs(pairs: Iterable[Pair]) -> str:
    """Return a short description of a list of pairs."""
    listed = list(pairs)
    ends = f"{listed[0][0]}:{listed[0][1]} … {listed[-1][0]}:{listed[-1][1]}" if listed else "none"
    return f"{len(listed)} pairs ({ends})"
