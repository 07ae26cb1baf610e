"""Jumps: a set of fitted maps, each an ordinary torch module, with their scores and provenance.

jumps = Jumps.from_pretrained("jumps/smollm2", model=model)
predicted = jumps[12, 30](states)     # states at level 12 → states at level 30
jumps.info[12, 30].r2                 # R² on text that nothing was fitted or chosen on
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from layerjump import __version__
from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadJumps, NoSuchJump
from layerjump.jumps.maps import FEATURES, Affine, FeatureKind, Unchanged, to_affine, to_module
from layerjump.models.fingerprint import ModelIdentity, identify_model
from layerjump.models.model import Model
from layerjump.models.structure import FINAL, Pair, Site, parse_pair

Lands = Literal["level", "final", "site"]
_MAX_LISTED = 8


@dataclass(frozen=True)
class JumpInfo:
    """Description of one jump; scores are of the test split, (uniform, variance-weighted)."""

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
        """The kind of target: a `level` still needs norm and unembedding for a prediction, `final` the latter."""
        if self.target == FINAL:
            return "final"
        return "level" if self.target.part == "level" else "site"


@dataclass(frozen=True, kw_only=True)
class RunInfo(ModelIdentity):
    """The model, text and positions that moments or jumps come from."""

    text: str
    text_sha256: str
    tokens: int
    """Number of tokens that were run through the model."""
    positions: str
    skip_first: int
    special: bool
    """Whether special tokens were among the positions."""
    split: str
    seed: int

    @classmethod
    def of(cls, model: Model, corpus: Corpus, positions: Positions, *, tokens: int, split: str, seed: int) -> RunInfo:
        """Describe a run of a model over `tokens` tokens of a text."""
        return cls(
            **vars(identify_model(model)),
            text=corpus.name,
            text_sha256=corpus.sha256,
            tokens=tokens,
            positions=str(positions),
            skip_first=positions.skip_first,
            special=positions.special,
            split=split,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class Provenance(RunInfo):
    """Where a set of jumps comes from. It has no date: the same run gives the same bytes on any day."""

    n_fit: int
    """Number of positions in the fit split."""
    n_select: int = 0
    """Number of positions in the validation split."""
    n_test: int = 0
    """Number of positions in the test split."""
    estimator: str
    settings: dict[str, Any]
    layerjump: str = __version__
    """Version of this library."""


class Infos(Mapping[Pair, JumpInfo]):
    """Descriptions of a set of jumps: `infos[3, 6]`, `infos["3.attn.in", "final"]`, in sorted order."""

    def __init__(self, infos: Mapping[Pair, JumpInfo]) -> None:
        self._infos = {pair: infos[pair] for pair in sorted(infos)}

    def __getitem__(self, pair: Any) -> JumpInfo:
        source, target = parse_pair(pair)
        info = self._infos.get((source, target))
        if info is None:
            names = [f"{source} → {target}" for source, target in self._infos]
            more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
            raise NoSuchJump(
                f"there is no jump {source} → {target} in this set, only {', '.join(names[:_MAX_LISTED])}{more}; use "
                f"one of these, or fit that pair"
            )
        return info

    def __contains__(self, pair: object) -> bool:
        return parse_pair(pair) in self._infos

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


def describe_sites(sites: set[Site]) -> str:
    """Return a short description of a set of sites: `levels 0…29` or `1.attn.in, 2.attn.in and 7 more`."""
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
    """Singular values of a jump's weight W, and what follows from them."""

    singular_values: tuple[float, ...]
    effective_rank: float  # exp of the entropy of the normalised squared singular values
    stable_rank: float  # ‖W‖²_F / ‖W‖²₂
    from_identity: float | None  # ‖W − I‖_F / ‖I‖_F; None where W is not square
    bias_norm: float


class Jumps(nn.Module):
    """A set of jumps: `jumps[3, 6]` is the module that maps states at level 3 to level 6.

    Iterating gives the (source, target) pairs, sorted. Parameters are float32 without gradients.
    """

    def __init__(self, maps: Mapping[Pair, nn.Module], infos: Mapping[Pair, JumpInfo], provenance: Provenance) -> None:
        super().__init__()
        self.info = Infos(infos)
        self.provenance = provenance
        self.used_on: str | None = None
        """Name of the model they are used on, where its weights are not those they were fitted on."""
        self.folder: Path | None = None
        """Folder they were loaded from, in which a calibrated exit rule may be found too."""
        self.maps = nn.ModuleDict({_module_name(pair): maps[pair] for pair in self.info})

    @classmethod
    def from_maps(cls, maps: Mapping[Pair, Affine], infos: Mapping[Pair, JumpInfo], provenance: Provenance) -> Jumps:
        """Make a set of fitted maps and their descriptions; an error where the two disagree."""
        if not maps:
            raise BadJumps("expected at least one jump, got none")
        if maps.keys() != infos.keys():
            source, target = sorted(maps.keys() ^ infos.keys())[0]
            raise BadJumps(f"the jump {source} → {target} has a map or an info but not both; pass both for each jump")
        for pair, affine in maps.items():
            _check(pair, affine, infos[pair], provenance)
        modules = {pair: to_module(maps[pair], infos[pair].features) for pair in maps}
        return cls(modules, infos, provenance)

    def __getitem__(self, pair: Any) -> nn.Module:
        source, target = parse_pair(pair)
        if source == target:
            _check_site(source, self.provenance.n_blocks)
            return Unchanged(self.provenance.width)
        info = self.info[source, target]
        return self.maps[_module_name((info.source, info.target))]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def __contains__(self, pair: object) -> bool:
        return pair in self.info

    @property
    def n_parameters(self) -> int:
        """The number of values that all maps store together."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def n_bytes(self) -> int:
        """The memory that these values take."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def spectrum(self, source: int | str | Site, target: int | str | Site) -> JumpSpectrum:
        """Return singular values, ranks and distance from the identity of one jump's weight."""
        affine = to_affine(self[source, target])
        dy, dx = affine.shape
        eye = torch.eye(dx, dtype=torch.float64)
        factors = tuple(factor.cpu().double() for factor in affine.factors)
        weight = Affine(affine.shape, factors).linear(eye)
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

    def __repr__(self) -> str:
        provenance = self.provenance
        sources, targets = {source for source, _ in self}, {target for _, target in self}
        count = f"{len(self)} jump{'' if len(self) == 1 else 's'}"
        other = f", used on {self.used_on} (other weights)" if self.used_on else ""
        # Lenses of other tools do not record how many positions they were fitted on.
        positions = f"{provenance.n_fit:,} positions of {provenance.text}" if provenance.n_fit else "unknown text"
        return (
            f"Jumps({provenance.estimator}, {count}: {describe_sites(sources)} → {describe_sites(targets)}, "
            f"d {provenance.width}, fitted on {provenance.model} with {positions}{other})"
        )

    # The three methods below take huggingface_hub's names and arguments. Its `ModelHubMixin` itself is
    # not used: it looks for a config.json that we do not have, and lets its own errors through.

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
        """Load a folder or a hub repository; with a model, check that the jumps were fitted on it."""
        from layerjump.jumps import serialization

        name = str(pretrained_model_name_or_path)
        folder = Path(name).expanduser()
        looks_local = folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
        if not folder.exists() and not looks_local:
            from huggingface_hub import snapshot_download

            with serialization.hub_errors(f"{name} is neither a local folder nor available on the hub"):
                downloaded = snapshot_download(
                    name,
                    revision=revision,
                    token=token,
                    cache_dir=cache_dir,
                    local_files_only=local_files_only,
                    allow_patterns=list(serialization.FILES),
                )
            folder = Path(downloaded)
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
        """Upload to a hub repository, which is created if needed; return the commit's address."""
        from huggingface_hub import HfApi

        from layerjump.jumps import serialization

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            with serialization.hub_errors(f"the jumps cannot be uploaded to {repo_id}"):
                api = HfApi(token=token)
                return api.upload_folder(
                    repo_id=api.create_repo(repo_id, private=private, exist_ok=True).repo_id,
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=branch,
                    create_pr=create_pr,
                )


def _module_name(pair: Pair) -> str:
    # The name of a submodule may not contain a dot.
    return "{}>{}".format(*pair).replace(".", ":")


def _check_site(site: Site, n_blocks: int) -> None:
    first = 0 if site.part == "level" else 1
    if site.part != "final" and not first <= site.index <= n_blocks:
        raise NoSuchJump(f"the model has {n_blocks} blocks, so it has no site {site}")


def _check(pair: Pair, affine: Affine, info: JumpInfo, provenance: Provenance) -> None:
    """Raise `BadJumps` where a jump's sites, map and info do not fit together."""
    source, target = pair
    if (info.source, info.target) != pair:
        raise BadJumps(
            f"the jump {source} → {target} has the info of {info.source} → {info.target}; pass the info of each "
            f"jump under its own pair"
        )
    if source == target:
        raise BadJumps(f"a jump {source} → {source} is the identity by definition; leave it out")
    for site in pair:
        _check_site(site, provenance.n_blocks)
    name = f"the map {source} → {target}"
    if info.features not in FEATURES:
        raise BadJumps(f"{name} reads {info.features!r}; features are {', '.join(FEATURES)}")
    (dy, dx), width = affine.shape, provenance.width
    expected = width * (2 if info.features == "both" else 1)
    if source.part == "level" and dx != expected:
        raise BadJumps(f"{name} reads {dx} features, expected {expected} for d {width}")
    if target.part == "level" and dy != width:
        raise BadJumps(f"{name} has {dy} outputs, expected {width} for d {width}")
    # The factors' shapes must chain from the map's output to its input.
    sizes = [dy, *(size for factor in affine.factors for size in factor.shape), dx]
    is_chain = len(sizes) in (2, 4, 6) and all(factor.dim() == 2 for factor in affine.factors)
    if not is_chain or sizes[::2] != sizes[1::2] or (affine.bias is not None and tuple(affine.bias.shape) != (dy,)):
        raise BadJumps(f"{name} has factors or a bias whose shapes do not give a map {dx} → {dy}")
    if len(affine.factors) == 2 and info.rank not in (None, len(affine.factors[1])):
        raise BadJumps(f"{name} has rank {len(affine.factors[1])}, but its info says {info.rank}")
