"""Second-moment sums of hidden states: add, merge, centre.

Rows of states before they are added: wide enough, finite, and what is typical of them.

Products of states that are added to sums, without temporaries and without doing anything twice.

What closed-form fitting reads: centred sums of one site, and of one site paired with another.

All tensors are float64. Centred sums keep the small differences that uncentred ones lose beside a
large mean.

A seeded sample of raw states that does not depend on order, batches or processes.

Every picked position has a key, a hash of seed, document, sequence and position; the reservoir keeps the rows with the
smallest keys. So reservoirs of parts merge to the reservoir of the whole.

Sums over states that add, merge, save and resume: all that closed-form fitting ever needs.

States are shifted by a fixed vector per site (the first batch's typical state, kept with the sums), so that a large
mean does not drown small differences. Sums and products are float64: on a CPU that is less than twice the cost of
float32, and jumps then equal a float64 solution to ten digits. Accelerators that are slow in float64 may form products
in float32 (`products`), as those of both features are for `calibrated`; there rows of outlying norm (attention sinks)
still go through a float64 product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.errors import BadMoments
from layerjump.jumps.maps import FeatureKind, compute_features
from layerjump.jumps.pairs import Pair, sites_of
from layerjump.metrics.logits import upcast
from layerjump.models.structure import FINAL, Site

OUTLYING = 8.0
"""Rows whose shifted norm is this many times the batch's median are multiplied in float64."""


def require_finite(states: Mapping[Site, Tensor]) -> None:
    """Before anything is added: a NaN or infinity makes the sum of its rows one."""
    for site, state in states.items():
        if not torch.isfinite(state.sum(dtype=torch.float64)):
            raise BadMoments(f"the states at site {site} hold NaN or infinite values")


def typical(states: Tensor) -> Tensor:
    """The mean of the rows that are not outlying: a few attention sinks would drag it far from all others.

    It is rounded to float32, so that taking it from float32 states is as exact as they are.
    """
    norm = torch.linalg.vector_norm(states, dim=-1)
    return states[norm <= OUTLYING * norm.median()].double().mean(0).float().double()


SQUARE_BLOCKS = 6
"""Blocks a side of a symmetric product: six save five twelfths of its arithmetic."""


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add xᵀy to a sum."""
    if x.dtype == total.dtype:
        total.addmm_(x.mT, y)  # without a temporary as large as the sum
    else:
        total += x.mT @ y


def add_square(total: Tensor, x: Tensor) -> None:
    """xᵀx is symmetric: what is below the diagonal is not added; `mirrored` gives it."""
    for start, end in _square_blocks(x.shape[1]):
        add_product(total[start:end, start:], x[:, start:end], x[:, start:])


def mirrored(total: Tensor) -> Tensor:
    """The whole of a sum of which what is on and above the diagonal was added."""
    return total.triu() + total.triu(1).mT


def _square_blocks(width: int) -> list[tuple[int, int]]:
    step = -(-width // SQUARE_BLOCKS)
    return [(start, min(start + step, width)) for start in range(0, width, step)]


# A standard deviation below this share of the mean counts as none. Float32 states cannot vary by
# less; and rounding of float64 ones, squared beside such a deviation, stays under every cut-off.
CONSTANT = 1e-8


@dataclass(frozen=True, eq=False)
class Source:
    """One site's side: count, mean and scatter of its states x."""

    n: int
    mean: Tensor  # (dx,)
    scatter: Tensor  # (dx, dx), Σ (x − x̄)(x − x̄)ᵀ


@dataclass(frozen=True, eq=False)
class Target:
    """What pairs a source with one target site, whose states are y."""

    mean: Tensor  # (dy,)
    cross: Tensor  # (dx, dy), Σ (x − x̄)(y − ȳ)ᵀ
    spread: Tensor  # (dy,), Σ (y − ȳ)², the diagonal only
    scatter: Tensor | None = None  # (dy, dy), where a study keeps it


def constant(n: int, mean: Tensor, spread: Tensor) -> Tensor:
    """Say which coordinates do not vary: standard deviation at most 1e-8 of the mean."""
    return spread <= n * (CONSTANT * mean).square()


def pool(pairs: Sequence[tuple[Source, Target]]) -> tuple[Source, Target]:
    """Combine the sums of several groups of rows into those of all rows together, exactly.

    Each group's scatter is about its own mean; moving it to the common mean adds n δδᵀ.
    """
    if not pairs:
        raise BadMoments("there is nothing to pool: give at least one pair of sums.")
    for source, target in pairs:
        check(source, [target])
    n = sum(source.n for source, _ in pairs)
    mean_x = _total([source.mean * (source.n / n) for source, _ in pairs])
    mean_y = _total([target.mean * (source.n / n) for source, target in pairs])
    moved = [recentre(source, target, mean_x, mean_y) for source, target in pairs]
    kept = [target.scatter for _, target in moved if target.scatter is not None]
    return Source(n, mean_x, _total([source.scatter for source, _ in moved])), Target(
        mean=mean_y,
        cross=_total([target.cross for _, target in moved]),
        spread=_total([target.spread for _, target in moved]),
        scatter=_total(kept) if len(kept) == len(pairs) else None,
    )


def recentre(
    source: Source, target: Target, mean_x: Tensor, mean_y: Tensor
) -> tuple[Source, Target]:
    """Take the same sums about other centres than the rows' own means."""
    dx, dy = source.mean - mean_x, target.mean - mean_y
    scatter = None if target.scatter is None else target.scatter + source.n * torch.outer(dy, dy)
    return Source(source.n, mean_x, source.scatter + source.n * torch.outer(dx, dx)), Target(
        mean=mean_y,
        cross=target.cross + source.n * torch.outer(dx, dy),
        spread=target.spread + source.n * dy.square(),
        scatter=scatter,
    )


def _total(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def check(source: Source, targets: Sequence[Target]) -> None:
    """Refuse sums that would give NaN or nonsense, and say which and why."""
    if source.n < 1:
        raise BadMoments(
            f"these sums hold {source.n} rows, and at least one is needed. "
            "Collect them over some text first."
        )
    dx = source.mean.numel()
    _check_tensor("the source's mean", source.mean, (dx,))
    _check_tensor("the source's scatter", source.scatter, (dx, dx))
    for i, target in enumerate(targets):
        _check_target(f"target {i}'s", target, dx)


def _check_target(whose: str, target: Target, dx: int) -> None:
    dy = target.mean.numel()
    _check_tensor(f"{whose} mean", target.mean, (dy,))
    _check_tensor(f"{whose} cross", target.cross, (dx, dy))
    _check_tensor(f"{whose} spread", target.spread, (dy,))
    if target.scatter is not None:
        _check_tensor(f"{whose} scatter", target.scatter, (dy, dy))


def _check_tensor(what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise BadMoments(
            f"{what} has shape {tuple(tensor.shape)}, but {shape} was wanted. "
            "Pair sums of the same source and target sites."
        )
    if tensor.dtype != torch.float64:
        raise BadMoments(f"{what} is {tensor.dtype}, but float64 was wanted. Convert the sums.")
    if not torch.isfinite(tensor).all():
        raise BadMoments(
            f"{what} holds NaN or infinite values. Some states were not finite when the sums were "
            "collected: load the model in float32 or bfloat16, and collect again."
        )


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


ROWS_AT_ONCE = 1024
"""Rows in one float32 product: rounding grows with their number, the cost of adding to float64 falls."""


class Moments:
    """Running sums of states at the sites of some pairs."""

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
        """What maps will read of a source's states; its sums are of that."""
        self.pairs = list(pairs)
        self.sites = sites_of(self.pairs)
        self.sources = list(dict.fromkeys(source for source, _ in self.pairs))
        self._targets = {a: [b for source, b in self.pairs if source == a] for a in self.sources}
        self._met = list(dict.fromkeys(target for _, target in self.pairs))
        self._rooms: dict[object, Tensor] = {}
        if features != "raw" and not set(self._met).isdisjoint(self.sources):
            raise BadMoments(
                f"sums of {features} features were asked for, but {describe(self.pairs)} lead to sites that others "
                f"start from; give pairs that all lead to final, or raw features"
            )
        self.full_targets = full_targets
        # Σ x xᵀ is kept for sources; for mere targets its diagonal will do, unless a study needs more.
        self.squared = list(self.sites) if full_targets else self.sources
        self.n = 0
        self.sums: dict[str, Tensor] = {}
        self.shift: dict[Site, Tensor] = {}
        kept = [site for site in self.sites if site.part == "level" or site == FINAL]
        self.reservoir = Reservoir(kept, reservoir)

    # -- growing

    @torch.no_grad()
    def add(self, states: Mapping[Site, Tensor], *, keys: Tensor | None = None) -> None:
        """Fold a batch in: one row of every site's tensor for each picked position.

        `keys` orders the rows for the reservoir (see there); without them the reservoir is not fed.
        """
        widened = {site: upcast(states[site]) for site in self.sites}
        rows = {len(state) for state in widened.values()}
        if len(rows) != 1:
            raise BadMoments(
                f"the sites' states have {sorted(rows)} rows; the same rows were wanted at all"
            )
        if not self.sums:
            self.set_shift(self.shift_for(widened))
        self._check_widths({site: self._seen(site, state[:1]) for site, state in widened.items()})
        self._add_products(widened)
        self._add_angles(widened)
        self.n += rows.pop()
        if keys is not None:
            self.reservoir.add(widened, keys)

    def merge(self, other: Moments) -> None:
        """Fold another run's sums in; they may have been taken about another shift."""
        mine, theirs = ((m.pairs, m.squared, m.features) for m in (self, other))
        if mine != theirs:
            raise BadMoments(
                f"sums over {describe(other.pairs)}, {other.features} features, cannot be merged into sums over "
                f"{describe(self.pairs)}, {self.features} features; collect both with the same pairs and features"
            )
        if other.n == 0:
            return
        if self.n == 0:
            self.shift, self.sums = dict(other.shift), {k: v.clone() for k, v in other.sums.items()}
        else:
            self._check_widths(other.shift)
            moved = other._about(self.shift)
            for name, total in self.sums.items():
                total += moved[name]
        self.n += other.n
        self.reservoir.merge(other.reservoir)

    def shift_for(self, states: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
        """A shift that suits these states: a typical one of each site."""
        return {site: typical(self._seen(site, states[site])) for site in self.sites}

    def set_shift(self, shift: Mapping[Site, Tensor]) -> None:
        """Start from zero about a given shift (processes that will add their sums must share it)."""
        self.shift = {site: shift[site].double() for site in self.sites}
        device = next(iter(self.shift.values())).device
        self.sums = {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in self.shapes(self.shift).items()
        }

    def shapes(self, shift: Mapping[Site, Tensor]) -> dict[str, tuple[int, ...]]:
        """The shape of every sum about such a shift."""
        width = {site: len(shift[site]) for site in self.sites}
        few, many = (len(self.pairs),), (len(self.sites),)
        shapes: dict[str, tuple[int, ...]] = {"norm": many, "cosine": few, "angle": few}
        shapes |= {f"sum/{site}": (width[site],) for site in self.sites}
        shapes |= {f"square/{site}": (width[site], width[site]) for site in self.squared}
        shapes |= {f"diagonal/{s}": (width[s],) for s in self.sites if s not in self.squared}
        return shapes | {f"cross/{a}>{b}": (width[a], width[b]) for a, b in self.pairs}

    # -- reading

    def source(self, site: Site) -> Source:
        """The centred sums of a source site."""
        total, n = self.sums[f"sum/{site}"], max(self.n, 1)
        scatter = mirrored(self.sums[f"square/{site}"]) - torch.outer(total, total) / n
        return Source(self.n, self.mean(site), scatter)

    def target(self, source: Site, target: Site) -> Target:
        """The centred sums that pair a source with a target."""
        n, x, y = max(self.n, 1), self.sums[f"sum/{source}"], self.sums[f"sum/{target}"]
        square = self.sums.get(f"square/{target}")
        diagonal = self.sums[f"diagonal/{target}"] if square is None else square.diagonal()
        return Target(
            self.mean(target),
            self.sums[f"cross/{source}>{target}"] - torch.outer(x, y) / n,
            # Rounding may leave a constant coordinate a hair below zero.
            (diagonal - y.square() / n).clamp(min=0),
            None if square is None else mirrored(square) - torch.outer(y, y) / n,
        )

    def mean(self, site: Site) -> Tensor:
        """The mean state at a site."""
        return self.shift[site] + self.sums[f"sum/{site}"] / max(self.n, 1)

    def mean_cosine(self, pair: Pair) -> float:
        """Mean cosine of the angle between the states at the two sites (NaN where widths differ)."""
        return self.sums["cosine"][self.pairs.index(pair)].item() / max(self.n, 1)

    def mean_angle(self, pair: Pair) -> float:
        """Mean angular distance arccos(cos)/π between the states at the two sites."""
        return self.sums["angle"][self.pairs.index(pair)].item() / max(self.n, 1)

    def mean_norm(self, site: Site) -> float:
        """Mean length of the states at a site."""
        return self.sums["norm"][self.sites.index(site)].item() / max(self.n, 1)

    # -- the sums themselves

    def _add_angles(self, states: Mapping[Site, Tensor]) -> None:
        norms = {site: torch.linalg.vector_norm(states[site], dim=-1) for site in self.sites}
        self.sums["norm"] += torch.stack([norms[site].double().sum() for site in self.sites])
        cosines, angles = [], []
        for a, b in self.pairs:
            if states[a].shape != states[b].shape:
                cosines.append(self.sums["cosine"].new_full((), torch.nan))
                angles.append(cosines[-1])
                continue
            length = (norms[a] * norms[b]).clamp(min=torch.finfo(norms[a].dtype).tiny)
            cosine = (torch.linalg.vecdot(states[a], states[b]) / length).double().clamp(-1, 1)
            cosines.append(cosine.sum())
            angles.append(cosine.arccos().sum() / torch.pi)
        self.sums["cosine"] += torch.stack(cosines)
        self.sums["angle"] += torch.stack(angles)

    def _add_products(self, states: Mapping[Site, Tensor]) -> None:
        require_finite(states)
        if self.products == torch.float64:
            self._multiply(lambda site: self._shifted(site, states[site]))
        else:
            self._add_float32_products(states)

    def _seen(self, site: Site, states: Tensor) -> Tensor:
        return compute_features(states, self.features) if site in self._targets else states

    def _shifted(self, site: Site, states: Tensor) -> Tensor:
        """In float64, in memory kept from batch to batch: taken anew each time, it frays the heap of a long run.

        Targets are needed together; mere sources take turns in one place.
        """
        states = self._seen(site, states)
        place = site if site in self._met else (states.shape[-1], states.device)
        room = self._rooms.get(place)
        if room is None or len(room) < len(states):
            room = self._rooms[place] = torch.empty_like(states, dtype=torch.float64)
        return torch.sub(states, self.shift[site], out=room[: len(states)])

    def _add_float32_products(self, states: Mapping[Site, Tensor]) -> None:
        """In float32, except for rows so long that their rounding would cover the others."""
        seen = {site: self._seen(site, states[site]) for site in self.sites}
        shifted = {site: seen[site] - self.shift[site].to(seen[site]) for site in self.sites}
        outlying = self._outlying(shifted)
        self._multiply(lambda site: seen[site][outlying].double() - self.shift[site])
        for state in shifted.values():
            state[outlying] = 0
        for start in range(0, len(outlying), ROWS_AT_ONCE):
            part = {site: state[start : start + ROWS_AT_ONCE] for site, state in shifted.items()}
            self._multiply(part.__getitem__)

    def _multiply(self, shifted: Callable[[Site], Tensor]) -> None:
        """Targets' rows are held for all their sources; a mere source's rows are made, used and let go."""
        held = {site: shifted(site) for site in self._met}
        for site in self.sites:
            rows = held[site] if site in held else shifted(site)
            self.sums[f"sum/{site}"] += rows.sum(0, dtype=torch.float64)
            if site in self.squared:
                add_square(self.sums[f"square/{site}"], rows)
            else:
                self.sums[f"diagonal/{site}"] += rows.square().sum(0, dtype=torch.float64)
            for target in self._targets.get(site, ()):
                add_product(self.sums[f"cross/{site}>{target}"], rows, held[target])

    def _outlying(self, shifted: Mapping[Site, Tensor]) -> Tensor:
        """Rows of outlying norm at any site."""
        outlying = torch.zeros(len(next(iter(shifted.values()))), dtype=torch.bool)
        for state in shifted.values():
            norm = torch.linalg.vector_norm(state, dim=-1)
            outlying |= (norm > OUTLYING * norm.median()).to(outlying.device)
        return outlying

    def _about(self, shift: Mapping[Site, Tensor]) -> dict[str, Tensor]:
        """The same sums about another shift: (x − t) = (x − s) + δ, multiplied out."""
        moved = {
            "norm": self.sums["norm"],
            "cosine": self.sums["cosine"],
            "angle": self.sums["angle"],
        }
        delta = {site: self.shift[site] - shift[site] for site in self.sites}
        for name, value in self.sums.items():
            kind, _, place = name.partition("/")
            if kind in ("square", "cross"):
                a, b = (place.split(">") * 2)[:2] if kind == "square" else place.split(">")
                x, y = self.sums[f"sum/{a}"], self.sums[f"sum/{b}"]
                dx, dy = delta[Site.parse(a)], delta[Site.parse(b)]
                moved[name] = value + torch.outer(dx, y) + torch.outer(x + self.n * dx, dy)
            elif kind == "diagonal":
                d, x = delta[Site.parse(place)], self.sums[f"sum/{place}"]
                moved[name] = value + d * (2 * x + self.n * d)
            elif kind == "sum":
                moved[name] = value + self.n * delta[Site.parse(place)]
        return moved

    def _check_widths(self, given: Mapping[Site, Tensor]) -> None:
        for site in self.sites:
            wanted, found = self.shift[site].shape[-1], given[site].shape[-1]
            if wanted != found:
                raise BadMoments(
                    f"the sums hold states of width {wanted} at site {site}, but {found} was given; they belong "
                    f"to different models"
                )


def describe(pairs: Iterable[Pair]) -> str:
    """A short name for a list of pairs."""
    listed = list(pairs)
    ends = f"{listed[0][0]}:{listed[0][1]} … {listed[-1][0]}:{listed[-1][1]}" if listed else "none"
    return f"{len(listed)} pairs ({ends})"
