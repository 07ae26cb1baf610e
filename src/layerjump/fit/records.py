"""What is known about a jump, and about the run that fitted it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from layerjump.errors import NoSuchJump
from layerjump.fit.modules import FeatureKind
from layerjump.inputs.sites import FINAL, Site

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
