"""Lens: hidden states at a site to logits, through a jump and the model's own unembedding.

lens = Lens(model, jumps)             # without jumps: the logit lens
trajectory = lens("The capital of")   # every position at every level
lens.at(5, 20)("The capital of")      # level 5 read as if it were level 20
lens.direction(" Paris", 20)          # what the lens looks for at level 20
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, overload

from torch import Tensor

from layerjump.errors import BadJumps, BadModel, argument
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.models.model import Model, require_model
from layerjump.models.structure import FINAL, Site

if TYPE_CHECKING:
    from layerjump.lens.token_direction import DirectionAblation
    from layerjump.lens.trajectory import Trajectory

SiteName = Site | str | int
Route = Callable[[Tensor], Tensor]
"""From states at a site to the states just before the vocabulary product."""


class Reader(Protocol):
    """What a trajectory is read through."""

    @property
    def model(self) -> Model: ...

    @property
    def fitted_from(self) -> int:
        """The first position that its maps were fitted on."""
        ...

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that it can read."""
        ...

    def route(self, site: SiteName) -> Route:
        """How a site is read; an error if it cannot be."""
        ...


@dataclass(frozen=True)
class Lens:
    """Reads any level of a model. Without jumps it is the logit lens: norm and head of the state as it is."""

    model: Model
    jumps: Jumps | None = None

    def __post_init__(self) -> None:
        require_model(self.model)
        self.model.require_predictions()
        if self.jumps is None:
            return
        known = self.jumps.provenance
        if (known.n_blocks, known.width) != (self.model.n_blocks, self.model.d_model):
            raise BadJumps(
                f"{self.jumps} are of a model with {known.n_blocks} blocks, but {self.model} was given; fit jumps on "
                f"it, or give the model they were fitted on"
            )

    @overload
    def __call__(
        self,
        text: str,
        k: int = 10,
        levels: Sequence[SiteName] | None = None,
        tokens: Sequence[str | int] = (),
        jensen_shannon: bool = False,
    ) -> Trajectory: ...

    @overload
    def __call__(
        self,
        text: list[str] | tuple[str, ...],
        k: int = 10,
        levels: Sequence[SiteName] | None = None,
        tokens: Sequence[str | int] = (),
        jensen_shannon: bool = False,
    ) -> list[Trajectory]: ...

    def __call__(
        self,
        text: str | list[str] | tuple[str, ...],
        k: int = 10,
        levels: Sequence[SiteName] | None = None,
        tokens: Sequence[str | int] = (),
        jensen_shannon: bool = False,
    ) -> Trajectory | list[Trajectory]:
        """Read a text, or each of several: the k best tokens and more at every position and level.

        `levels` are levels or other sites (all levels that it reads unless told), `tokens` are followed through them,
        `jensen_shannon` asks for the Jensen–Shannon divergence too.
        """
        from layerjump.lens.trajectory import read_trajectories

        texts = [text] if isinstance(text, str) else text
        found = read_trajectories(
            self.model,
            {self.name: self},
            texts,
            k=k,
            levels=levels,
            tokens=tokens,
            jensen_shannon=jensen_shannon,
        )
        trajectories = [each[self.name] for each in found]
        return trajectories[0] if isinstance(text, str) else trajectories

    @property
    def name(self) -> str:
        """The estimator of its jumps, or `identity`."""
        return "identity" if self.jumps is None else self.jumps.provenance.estimator

    @property
    def fitted_from(self) -> int:
        """The first position that its jumps were fitted on; 0 where nothing was fitted."""
        return 0 if self.jumps is None else self.jumps.provenance.skip_first

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels that it can read: other tools' lenses, and jumps of chosen pairs, need not lead from every one."""
        last, jumps = self.model.n_blocks, self.jumps
        if jumps is None:
            return tuple(range(last + 1))
        ends = (Site(last), FINAL)
        found = [level for level in range(last) if any((Site(level), end) in jumps for end in ends)]
        if not found:
            raise BadJumps(
                f"{jumps} has no jump from a level to the last one or to `final`, so no level can be read; fit with "
                f"{argument('pairs', 'to-last')}"
            )
        return (*found, last)

    def logits(self, site: SiteName, states: Tensor) -> Tensor:
        """Logits of states at a level or another site; at level L they are the model's own."""
        return self.model.structure.decode(self.route(site)(states))

    def route(self, site: SiteName) -> Route:
        """How states at a site come before the vocabulary product: by a jump to level L or to `final`, or as they are.

        Level L and `final` need no jump. Without jumps, any site as wide as the model is taken for a level L.
        """
        site, last = Site.parse(site), Site(self.model.n_blocks)
        structure = self.model.structure
        structure.tap(site)  # an error where the model has no such site
        if site == FINAL:
            return lambda states: states
        if site == last or self.jumps is None:
            return lambda states: structure.to_final(self._as_wide(site, states))
        if (site, last) in self.jumps:
            to_last = self.jumps[site, last]
            return lambda states: structure.to_final(apply_map(to_last, states))
        if (site, FINAL) in self.jumps:
            to_final = self.jumps[site, FINAL]
            return lambda states: apply_map(to_final, states)
        where, pairs = f"{site}", f"{site}:{last}"
        if site.part == "level":
            where, pairs = f"level {site}", "to-last"
        raise BadJumps(
            f"{self.jumps} has no jump from {where} to the last level or to `final`, so nothing can be read there; "
            f"fit with {argument('pairs', pairs)}"
        )

    def at(self, source: SiteName, target: SiteName) -> CrossLevelLens:
        """A reader of one site as another: jump from the source to the target, then this lens as it reads the target.

        Read so, level i shows what it has of level j. For the last level it is the lens itself.
        """
        return CrossLevelLens(self, Site.parse(source), Site.parse(target))

    def direction(self, token: str | int, site: SiteName) -> Tensor:
        """The direction at a site, of unit length, along which the lens reads more of a token."""
        from layerjump.lens.token_direction import direction

        return direction(self, token, site)

    def ablate_direction(
        self, tokens: str | int | Sequence[str | int], level: int, texts: str | Sequence[str]
    ) -> DirectionAblation:
        """Take tokens' directions out of a level and run on: does the model change as the lens says?"""
        from layerjump.lens.token_direction import remove

        tokens = [tokens] if isinstance(tokens, str | int) else tokens
        return remove(self, tokens, level, [texts] if isinstance(texts, str) else texts)

    def _as_wide(self, site: Site, states: Tensor) -> Tensor:
        if states.shape[-1] != self.model.d_model:
            raise BadModel(
                f"{site} is {states.shape[-1]} wide and the model {self.model.d_model}, so its norm and head cannot "
                f"read it; give a site of the stream, such as {site.index}.mid"
            )
        return states


@dataclass(frozen=True)
class CrossLevelLens:
    """Reads one site as another; made by `Lens.at`."""

    lens: Lens
    source: Site
    target: Site

    @property
    def model(self) -> Model:
        return self.lens.model

    @property
    def name(self) -> str:
        return f"{self.lens.name} {self.source}→{self.target}"

    @property
    def fitted_from(self) -> int:
        return self.lens.fitted_from

    @property
    def levels(self) -> tuple[int, ...]:
        return (self.source.index,) if self.source.part == "level" else ()

    def __call__(
        self, text: str, k: int = 10, tokens: Sequence[str | int] = (), jensen_shannon: bool = False
    ) -> Trajectory:
        """Read a text at the source; the trajectory has this one level."""
        from layerjump.lens.trajectory import read_trajectory

        found = read_trajectory(
            self.model,
            {self.name: self},
            text,
            k=k,
            levels=[self.source],
            tokens=tokens,
            jensen_shannon=jensen_shannon,
        )
        return found[self.name]

    def states(self, states: Tensor) -> Tensor:
        """States at the source as states at the target."""
        jumps = self.lens.jumps
        if jumps is None or self.source == self.target:
            return states
        if (self.source, self.target) not in jumps:
            last = Site(self.model.n_blocks)
            pairs = [(self.source, self.target), (self.target, last)]
            fit = ",".join(f"{a}:{b}" for a, b in pairs if a != b)
            raise BadJumps(
                f"{jumps} has no jump {self.source} → {self.target}; fit with {argument('pairs', fit)}"
            )
        return apply_map(jumps[self.source, self.target], states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of states at the source."""
        return self.model.structure.decode(self.route(self.source)(states))

    def route(self, site: SiteName) -> Route:
        """How the source is read; no other site is."""
        if Site.parse(site) != self.source:
            raise BadJumps(f"this lens reads {self.source} alone, but {site} was given")
        if self.target == Site(self.model.n_blocks):
            return self.lens.route(self.source)
        onward = self.lens.route(self.target)
        return lambda states: onward(self.states(states))
