"""Jumps: a set of fitted maps with their scores and provenance.

What is known about a jump, and about the run that fitted it.

Jumps: a set of fitted maps, each an ordinary torch module, with all that is known about them.

jumps = Jumps.from_pretrained("jumps/smollm2", model=model)
predicted = jumps[12, 30](states)     # states at level 12 → states at level 30
jumps.info[12, 30].r2                 # how well, on text that nothing was fitted or chosen on
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from layerjump.errors import BadJumps, NoSuchJump
from layerjump.jumps.maps import FEATURES, Affine, FeatureKind, Unchanged, to_affine, to_module
from layerjump.models.structure import FINAL, Site

if TYPE_CHECKING:
    from layerjump.models.model import Model

Pair = tuple[Site, Site]
Lands = Literal["level", "final", "site"]
_SHOWN = 8


@dataclass(frozen=True)
class JumpInfo:
    """What is known about one jump; scores are of the test split, (uniform, variance-weighted)."""

    source: Site
    target: Site
    estimator: str
    features: FeatureKind = "raw"
    rank: int | None = None
    strength: float | None = None
    r2: tuple[float, float] | None = None
    r2_identity: tuple[float, float] | None = None
    n_test: int = 0

    @property
    def lands(self) -> Lands:
        """What is left to do for a prediction: norm and head from a level, the head alone from final."""
        if self.target == FINAL:
            return "final"
        return "level" if self.target.part == "level" else "site"


@dataclass(frozen=True)
class Provenance:
    """Where a set of jumps comes from. No date: the same run gives the same bytes on any day."""

    model: str
    revision: str | None
    fingerprint: str
    tokenizer: str | None
    family: str
    n_blocks: int
    width: int
    text: str
    text_sha256: str
    tokens: int  # run through the model
    positions: str
    skip_first: int
    special: bool
    split: str
    n_fit: int  # positions picked, likewise below
    n_select: int
    n_test: int
    seed: int
    estimator: str
    settings: dict[str, Any]
    layerjump: str  # version


class Infos(Mapping[Pair, JumpInfo]):
    """What is known about each jump: `infos[3, 6]`, `infos["3.attn.in", "final"]`, in sorted order."""

    def __init__(self, infos: Mapping[Pair, JumpInfo]) -> None:
        self._infos = {pair: infos[pair] for pair in sorted(infos)}

    def __getitem__(self, pair: Any) -> JumpInfo:
        found = self._infos.get(parse_pair(pair))
        if found is None:
            source, target = parse_pair(pair)
            raise NoSuchJump(
                f"there is no jump {source} → {target} here, only {self._listed()}; "
                "ask for one of these or fit that one too"
            )
        return found

    def __contains__(self, pair: object) -> bool:
        return parse_pair(pair) in self._infos

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def _listed(self) -> str:
        names = [f"{source} → {target}" for source, target in self._infos]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more


def parse_pair(pair: Any) -> Pair:
    """Read a source and a target, each a level's number, a site's name or a `Site`."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise NoSuchJump(
            f"{pair!r} was given, but a jump has a source and a target: jumps[3, 6], for example"
        )
    return Site.parse(pair[0]), Site.parse(pair[1])


def sites_said(sites: set[Site]) -> str:
    """A set of sites in a few words, such as `levels 0…29` or `1.attn.in, 2.attn.in and 7 more`."""
    ordered = sorted(sites, key=lambda site: (site == FINAL, site))
    indices = [site.index for site in ordered]
    levels = all(site.part == "level" for site in ordered)
    if levels and len(ordered) > 2 and indices == list(range(indices[0], indices[-1] + 1)):
        return f"levels {indices[0]}…{indices[-1]}"
    more = f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    kind = "" if len(ordered) == 1 or not levels else "levels "
    return kind + ", ".join(str(site) for site in ordered[:3]) + more


@dataclass(frozen=True)
class JumpSpectrum:
    """What a jump's weight W looks like."""

    singular_values: tuple[float, ...]
    effective_rank: float  # exp of the entropy of the normalised squared singular values
    stable_rank: float  # ‖W‖²_F / ‖W‖²₂
    from_identity: float | None  # ‖W − I‖_F / ‖I‖_F; None where W is not square
    bias_norm: float


class Jumps(nn.Module):
    """A set of jumps: `jumps[3, 6]` is the module that maps states at level 3 to level 6.

    Iterating gives the (source, target) pairs, sorted. Parameters are float32 without gradients.
    """

    def __init__(
        self, maps: Mapping[Pair, nn.Module], infos: Mapping[Pair, JumpInfo], provenance: Provenance
    ) -> None:
        super().__init__()
        self.info = Infos(infos)
        self.provenance = provenance
        self.used_on: str | None = None
        """The model they are used on, where that has other weights than they were fitted on."""
        self.folder: Path | None = None
        """Where they were read from: an exit rule may lie beside them."""
        self.maps = nn.ModuleDict({_key(pair): maps[pair] for pair in self.info})

    @classmethod
    def of(
        cls,
        maps: Mapping[Pair, Affine],
        infos: Mapping[Pair, JumpInfo],
        provenance: Provenance,
    ) -> Jumps:
        """Make a set of fitted maps and what is known about each; an error where the two disagree."""
        _check(maps, infos, provenance)
        modules = {pair: to_module(maps[pair], infos[pair].features) for pair in maps}
        return cls(modules, infos, provenance)

    def __getitem__(self, pair: Any) -> nn.Module:
        source, target = parse_pair(pair)
        if source == target:
            _check_site(source, self.provenance.n_blocks)
            return Unchanged(self.provenance.width)
        info = self.info[source, target]
        return self.maps[_key((info.source, info.target))]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def __contains__(self, pair: object) -> bool:
        return pair in self.info

    @property
    def n_parameters(self) -> int:
        """How many numbers all maps store together."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def n_bytes(self) -> int:
        """The memory these numbers take."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def spectrum(self, source: int | str | Site, target: int | str | Site) -> JumpSpectrum:
        """Singular values, ranks and distance from the identity of one jump's weight."""
        return _spectrum(to_affine(self[source, target]))

    def __repr__(self) -> str:
        known = self.provenance
        where = f"{sites_said({s for s, _ in self})} → {sites_said({t for _, t in self})}"
        count = f"{len(self)} jump{'' if len(self) == 1 else 's'}"
        other = f", used on {self.used_on} (other weights)" if self.used_on else ""
        # Lenses of other tools do not say how many positions they were fitted on.
        positions = f"{known.n_fit:,} positions of {known.text}" if known.n_fit else "unknown text"
        return (
            f"Jumps({known.estimator}, {count}: {where}, d {known.width}, fitted on {known.model} "
            f"with {positions}{other})"
        )

    # The three below take huggingface_hub's names and arguments. Its `ModelHubMixin` itself is not
    # used: it looks for a config.json that we do not have, and lets its own errors through.

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write jumps.safetensors and jumps.json into a folder."""
        from layerjump.jumps import serialization

        serialization.save(self, save_directory)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        model: Model | None = None,
        allow_other_weights: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Jumps:
        """Read a folder or a repository of the hub; with a model, check that it is the one fitted on."""
        from layerjump.jumps import hub, serialization

        folder = hub.fetch(
            pretrained_model_name_or_path,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        return serialization.load(folder, model=model, allow_other_weights=allow_other_weights)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Push jumps using layerjump.",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
    ) -> str:
        """Upload to a repository of the hub, made if need be; returns the commit's address."""
        from layerjump.jumps import hub

        return hub.push(
            self,
            repo_id,
            commit_message=commit_message,
            private=private,
            token=token,
            branch=branch,
            create_pr=create_pr,
        )


def _key(pair: Pair) -> str:
    # A module's name may not contain a dot.
    return "{}>{}".format(*pair).replace(".", ":")


def _spectrum(affine: Affine) -> JumpSpectrum:
    dy, dx = affine.shape
    eye = torch.eye(dx, dtype=torch.float64)
    weight = Affine(affine.shape, tuple(factor.cpu().double() for factor in affine.factors)).linear(
        eye
    )
    values = torch.linalg.svdvals(weight)
    squares = values.square()
    total = float(squares.sum())
    shares = squares / total if total else squares
    return JumpSpectrum(
        singular_values=tuple(values.tolist()),
        effective_rank=float(torch.special.entr(shares).sum().exp()) if total else 0.0,
        stable_rank=total / float(squares[0]) if total else 0.0,
        from_identity=float((weight - eye).norm()) / math.sqrt(dx) if dx == dy else None,
        bias_norm=0.0 if affine.bias is None else float(affine.bias.double().norm()),
    )


def _check(
    maps: Mapping[Pair, Affine], infos: Mapping[Pair, JumpInfo], provenance: Provenance
) -> None:
    if not maps:
        raise BadJumps("there is no jump in this set; give at least one")
    if maps.keys() != infos.keys():
        source, target = sorted(maps.keys() ^ infos.keys())[0]
        raise BadJumps(
            f"the jump {source} → {target} has a map or an info but not both; give both of each jump"
        )
    for pair, affine in maps.items():
        _check_pair(pair, infos[pair], provenance.n_blocks)
        _check_shape(affine, infos[pair], provenance.width)


def _check_pair(pair: Pair, info: JumpInfo, n_blocks: int) -> None:
    source, target = pair
    if (info.source, info.target) != pair:
        raise BadJumps(
            f"the jump {source} → {target} has the info of {info.source} → {info.target}; "
            "give each jump its own"
        )
    if source == target:
        raise BadJumps(f"a jump {source} → {source} is the identity by definition; leave it out")
    for site in pair:
        _check_site(site, n_blocks)


def _check_site(site: Site, n_blocks: int) -> None:
    first = 0 if site.part == "level" else 1
    if site.part != "final" and not first <= site.index <= n_blocks:
        raise NoSuchJump(f"the model has {n_blocks} blocks, so it has no site {site}")


def _check_shape(affine: Affine, info: JumpInfo, width: int) -> None:
    name = f"the map {info.source} → {info.target}"
    if info.features not in FEATURES:
        raise BadJumps(f"{name} reads {info.features!r}; features are {', '.join(FEATURES)}")
    dy, dx = affine.shape
    wanted_in = width * (2 if info.features == "both" else 1)
    if info.source.part == "level" and dx != wanted_in:
        raise BadJumps(f"{name} reads {dx} features, but {wanted_in} were wanted for d {width}")
    if info.target.part == "level" and dy != width:
        raise BadJumps(f"{name} gives {dy} coordinates, but {width} were wanted for d {width}")
    if not _holds_together(affine):
        raise BadJumps(f"{name} is made of tensors that do not multiply to {dx} → {dy} coordinates")
    if len(affine.factors) == 2 and info.rank not in (None, len(affine.factors[1])):
        raise BadJumps(f"{name} has rank {len(affine.factors[1])}, but its info says {info.rank}")


def _holds_together(affine: Affine) -> bool:
    """Whether the factors' shapes chain from the map's input to its output, and the bias fits."""
    if any(factor.dim() != 2 for factor in affine.factors) or len(affine.factors) > 2:
        return False
    ends = [affine.shape[0], *(size for factor in affine.factors for size in factor.shape)]
    ends.append(affine.shape[1])
    bias = affine.bias is None or tuple(affine.bias.shape) == (affine.shape[0],)
    return bias and ends[::2] == ends[1::2]
