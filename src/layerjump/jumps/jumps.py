"""Jumps: a set of fitted maps, each an ordinary torch module, with their scores and provenance.

jumps = Jumps.from_pretrained("jumps/smollm2", model=model)
predicted = jumps[12, 30](states)     # states at level 12 → states at level 30
jumps.info[12, 30].r2                 # R² on text that nothing was fitted or chosen on
jumps["final@-1+12", "final"](both)   # of a joint source: (…, 2 d), `final` one position earlier, then level 12
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from layerjump import __version__
from layerjump.data.corpus import Corpus
from layerjump.data.positions import Positions
from layerjump.errors import BadJumps, NoSuchJump, WrongModel
from layerjump.jumps.maps import FEATURES, Affine, FeatureKind, Unchanged, to_affine, to_module
from layerjump.models.fingerprint import ModelIdentity, identify_model
from layerjump.models.model import Model
from layerjump.models.sites import EMBEDDING, FINAL, JointSource, Pair, Site, SourceName, parse_pair
from layerjump.notebook_tables import rows_table

Lands = Literal["level", "final", "site"]
JumpDtype = Literal["float32", "bfloat16", "float16"]
_MAX_LISTED = 8
_MAX_ROWS = 64
"""Jumps in a notebook's table."""
_BY_LEVEL = "temperature"
"""The setting of `calibrated` that a run records for each level."""
_MAY_DIFFER = ("model", "revision", "tokenizer", "layerjump")
"""Fields of the provenance in which sets of one fit may differ."""


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
                f"this set has no jump {source} → {target}, only {', '.join(names[:_MAX_LISTED])}{more}; use "
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

    Iterating gives the (source, target) pairs, sorted. Parameters are float32 without gradients, unless another dtype
    was asked for.
    """

    def __init__(
        self,
        maps: Mapping[Pair, nn.Module],
        infos: Mapping[Pair, JumpInfo],
        provenance: Provenance,
        *,
        read_map: Callable[[Pair], nn.Module] | None = None,
    ) -> None:
        """`read_map` reads the maps that are not among `maps` when they are first used."""
        super().__init__()
        self.info = Infos(infos)
        self.provenance = provenance
        self.used_on: str | None = None
        """Name of the model they are used on, where its weights are not those they were fitted on."""
        self.folder: Path | None = None
        """Folder they were loaded from, in which a calibrated exit rule may be found too."""
        self.maps = nn.ModuleDict({_module_name(pair): maps[pair] for pair in self.info if pair in maps})
        self._read_map = read_map
        self._placement: torch.Tensor
        # Follows `to`, `half` and the like, for maps that are read later.
        self.register_buffer("_placement", torch.empty(0), persistent=False)

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

    @classmethod
    def join(cls, parts: Sequence[Jumps]) -> Jumps:
        """Put several sets of one model, text and estimator into one: the levels of a fit, split over several runs.

        Raises `WrongModel` for different weights, and `BadJumps` for a pair in two sets and for other differences.
        """
        if not parts:
            raise BadJumps("expected at least one set of jumps to join, got none")
        provenance, maps, infos = parts[0].provenance, {}, {}
        temperatures: dict[str, float] = {}
        for part in parts:
            _check_joinable(provenance, part.provenance)
            for pair, info in part.info.items():
                if pair in infos:
                    raise BadJumps(f"the jump {pair[0]} → {pair[1]} is in more than one of these sets; leave one out")
                maps[pair], infos[pair] = part[pair], info
            temperatures |= part.provenance.settings.get(_BY_LEVEL, {})
        settings = provenance.settings | ({_BY_LEVEL: temperatures} if temperatures else {})
        return cls(maps, infos, replace(provenance, settings=settings))

    def __getitem__(self, pair: Any) -> nn.Module:
        source, target = parse_pair(pair)
        if source == target:
            _check_site(source, self.provenance.n_blocks)
            return Unchanged(self.provenance.width)
        info = self.info[source, target]
        name = _module_name((info.source, info.target))
        if name not in self.maps:
            assert self._read_map is not None
            self.maps[name] = self._read_map((info.source, info.target)).to(self._placement)
        return self.maps[name]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.info)

    def __len__(self) -> int:
        return len(self.info)

    def __contains__(self, pair: object) -> bool:
        return pair in self.info

    @property
    def n_parameters(self) -> int:
        """The number of values that all maps in memory store together."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def n_bytes(self) -> int:
        """The memory that these values take."""
        return sum(parameter.nbytes for parameter in self.parameters())

    def spectrum(self, source: SourceName, target: int | str | Site) -> JumpSpectrum:
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

    def _repr_html_(self) -> str:
        from layerjump.jumps.model_card import HeldOutScores

        held_out = HeldOutScores.of(self)
        if held_out is not None:
            head = ["level", "KL", "KL, logit lens", "same top token", "same top token, logit lens"]
            columns = held_out.kl, held_out.kl_identity, held_out.agreement, held_out.agreement_identity
            return rows_table(repr(self), head, list(zip(held_out.level, *columns, strict=True)))
        rows = [
            [f"{source} → {target}", *(score[0] if score else "–" for score in (info.r2, info.r2_identity))]
            for (source, target), info in list(self.info.items())[:_MAX_ROWS]
        ]
        more = f"; the first {_MAX_ROWS} of {len(self)}" if len(self) > _MAX_ROWS else ""
        return rows_table(repr(self) + more, ["jump", "R², held out", "R² of the identity"], rows)

    # The three methods below take huggingface_hub's names and arguments. Its `ModelHubMixin` itself is
    # not used: it looks for a config.json that we do not have, and lets its own errors through.

    def save_pretrained(self, save_directory: str | Path, *, storage: Literal["float32", "int8"] = "float32") -> None:
        """Write jumps.safetensors and jumps.json into a folder.

        `storage="int8"` takes a quarter of the bytes: codes of 8 bits, and a factor for each row of a matrix.
        """
        from layerjump.jumps import serialization

        serialization.save(self, save_directory, storage=storage)

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
        lazy: bool = False,
        dtype: JumpDtype = "float32",
    ) -> Jumps:
        """Load a folder or a hub repository; with a model, check that the jumps were fitted on it.

        With `lazy`, a jump is read when it is first used, to the device that the set was moved to. That takes neither
        time nor memory for the other jumps, but the checksum of the whole file is not verified. `dtype` is that of the
        maps in memory: bfloat16 and float16 take half of float32.
        """
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
        return serialization.load(folder, model=model, allow_other_weights=allow_other_weights, lazy=lazy, dtype=dtype)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Push jumps using layerjump.",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
        storage: Literal["float32", "int8"] = "float32",
    ) -> str:
        """Upload to a hub repository, which is created if needed, with a model card; return the commit's address.

        `lj.load_jumps(model)` looks for the jumps of a model under `layerjump/<model>`.
        """
        from huggingface_hub import HfApi

        from layerjump.jumps import serialization
        from layerjump.jumps.model_card import model_card

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, storage=storage)
            (Path(folder) / "README.md").write_text(model_card(self, repo_id), encoding="utf-8")
            with serialization.hub_errors(f"the jumps cannot be uploaded to {repo_id}"):
                api = HfApi(token=token)
                return api.upload_folder(
                    repo_id=api.create_repo(repo_id, private=private, exist_ok=True).repo_id,
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=branch,
                    create_pr=create_pr,
                )


def _check_joinable(first: Provenance, other: Provenance) -> None:
    """Raise an error unless two sets come from one fit, but for its pairs."""
    if first.fingerprint != other.fingerprint:
        raise WrongModel(
            f"these jumps were fitted on different weights: {first.model} ({first.fingerprint[:8]}) and {other.model} "
            f"({other.fingerprint[:8]}); join jumps of one model only"
        )
    if "refine" in first.settings or "refine" in other.settings:
        raise BadJumps("these jumps were refined, which records one result for all levels; join them, then refine")
    # Names of one model may differ, and an older version fits the same jumps.
    ours, theirs = ({k: v for k, v in vars(p).items() if k not in _MAY_DIFFER} for p in (first, other))
    for fields in (ours, theirs):
        fields["settings"] = {k: v for k, v in fields["settings"].items() if k != _BY_LEVEL}
    for name, value in ours.items():
        if theirs[name] != value:
            raise BadJumps(
                f"these jumps come from different runs: {name} is {value!r} and {theirs[name]!r}; fit them with the "
                f"same text and settings, but for the pairs"
            )


def _module_name(pair: Pair) -> str:
    # The name of a submodule may not contain a dot.
    return "{}>{}".format(*pair).replace(".", ":")


def _check_site(site: Site, n_blocks: int) -> None:
    for term in site.terms:
        first = 0 if term.site.part == "level" else 1
        if term.site not in (FINAL, EMBEDDING) and not first <= term.site.index <= n_blocks:
            raise NoSuchJump(f"the model has {n_blocks} blocks, so it has no site {term.site}")


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
    if isinstance(target, JointSource):
        raise BadJumps(f"a jump leads to one site at one position, not to {target}; pass a site as its target")
    for site in pair:
        _check_site(site, provenance.n_blocks)
    name = f"the map {source} → {target}"
    if info.features not in FEATURES:
        raise BadJumps(f"{name} reads {info.features!r}; features are {', '.join(FEATURES)}")
    (dy, dx), width = affine.shape, provenance.width
    expected = width * len(source.terms) * (2 if info.features == "both" else 1)
    if all(term.site.part == "level" for term in source.terms) and dx != expected:
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
