"""A trajectory: what a lens reads at every level of every position of one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerjump.errors import BadText
from layerjump.inputs.models import Model
from layerjump.inputs.sites import Site
from layerjump.inputs.states import states
from layerjump.inputs.tokens import token_texts
from layerjump.lens.cells import Asked, TextStates, read_cells
from layerjump.lens.lens import Reader, SiteName, wide
from layerjump.lens.prompt import Prompt, grouped, prompts
from layerjump.measure.sweep import Said

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go
    from rich.console import RenderableType


def read(
    model: Model,
    lenses: Mapping[str, Reader],
    text: str,
    *,
    k: int = 10,
    levels: Sequence[SiteName] | None = None,
    tokens: Sequence[str | int] = (),
    js: bool = False,
    last: int | None = None,
) -> dict[str, Trajectory]:
    """Read one text through several lenses, with one forward pass; `last` positions of it, or all."""
    return read_all(model, lenses, [text], k=k, levels=levels, tokens=tokens, js=js, last=last)[0]


@torch.no_grad()
def read_all(
    model: Model,
    lenses: Mapping[str, Reader],
    texts: Sequence[str],
    *,
    k: int = 10,
    levels: Sequence[SiteName] | None = None,
    tokens: Sequence[str | int] = (),
    js: bool = False,
    last: int | None = None,
) -> list[dict[str, Trajectory]]:
    """Read each of several texts through several lenses; texts of like length share a forward pass."""
    if k < 1:
        raise BadText(f"the number of best tokens given is {k}; give 1 or more")
    chosen = _read_by_all(lenses.values()) if levels is None else levels
    sites = tuple(dict.fromkeys(Site.parse(site) for site in chosen))
    if not sites:
        raise BadText("no level was given to read; give at least one")
    # Before the model runs: what cannot be read is an error at once.
    routes = {name: [lens.route(site) for site in sites] for name, lens in lenses.items()}
    follow = tuple(dict.fromkeys(token_id(model, token) for token in tokens))
    asked = Asked(min(k, model.anatomy.vocabulary), follow, js)
    found = prompts(model, texts, last)
    level_l = Site(model.n_blocks)
    made: list[dict[str, Trajectory]] = [{} for _ in texts]
    for indices, batch in grouped(found, model.tokens.pad):
        (at,) = states(model, [batch], [*sites, level_l])
        counts = [len(found[index].positions) for index in indices]
        split = {site: at[site].split(counts) for site in (*sites, level_l)}
        for place, index in enumerate(indices):
            mine = tuple(split[site][place] for site in sites)
            text = TextStates(sites, mine, split[level_l][place], found[index].targets)
            best, cells = read_cells(model, routes, text, asked)
            made[index] = {
                name: Trajectory(lens, name, found[index], text, asked, best, cells[name])
                for name, lens in lenses.items()
            }
    return made


def _read_by_all(lenses: Iterable[Reader]) -> list[int]:
    """Trajectories that are held against each other have the same levels."""
    return sorted(set.intersection(*(set(lens.levels) for lens in lenses)))


def token_id(model: Model, token: str | int) -> int:
    """A token by its text, which must be one token, or by its id."""
    if isinstance(token, str):
        return model.tokens.one(token)
    if not 0 <= token < model.anatomy.vocabulary:
        raise BadText(
            f"the token {token} was given, but the vocabulary has {model.anatomy.vocabulary:,}, counted from 0"
        )
    return token


@dataclass(frozen=True)
class Followed:
    """One token through all cells; both tensors are (levels, positions)."""

    id: int
    text: str
    probability: Tensor
    rank: Tensor
    """How many tokens are better: 0 is the best."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What a lens reads in every cell of a text. Tensors are (levels, positions), `top` and `probability` with k more.

    Logits are not kept, but the states are: whatever else is asked of a cell is read from them again.
    """

    lens: Reader
    name: str
    """The lens'."""
    prompt: Prompt
    states: TextStates
    asked: Asked
    best: Tensor
    """(positions,) the model's own answer."""
    cells: Said

    @property
    def model(self) -> Model:
        return self.lens.model

    @property
    def levels(self) -> tuple[str, ...]:
        """The names of the sites read."""
        return tuple(str(site) for site in self.states.sites)

    @property
    def tokens(self) -> list[str]:
        """The texts of all input tokens, special ones included."""
        return self.words(self.prompt.ids)

    @property
    def positions(self) -> tuple[int, ...]:
        """Which of the tokens were read."""
        return self.prompt.positions

    @property
    def fitted_from(self) -> int:
        """Cells at positions below this one were not fitted, so what they say is worth little."""
        return self.lens.fitted_from

    @property
    def top(self) -> Tensor:
        """The k best tokens, the best first."""
        return self.cells.top

    @property
    def probability(self) -> Tensor:
        """Theirs."""
        return self.cells.probability

    @property
    def confidence(self) -> Tensor:
        """The best probability minus the second best."""
        return self.cells.confidence

    @property
    def entropy(self) -> Tensor:
        """In nats, as all that follow."""
        return self.cells.entropy

    @property
    def kl(self) -> Tensor:
        """KL(model ‖ lens): zero at level L."""
        return self.cells.kl

    @property
    def cross_entropy(self) -> Tensor:
        """To the token that really comes next; NaN where none does: at the last position, and in masked models."""
        return self.cells.cross_entropy

    @property
    def decided_at(self) -> Tensor:
        """(positions,) the index of the first level from which on the best token is the model's own, and stays so.

        −1 where even the last level read says something else; level L never does.
        """
        return decided_at(self.top[:, :, 0], self.best)

    @property
    def followed(self) -> tuple[Followed, ...]:
        """The tokens that were asked for."""
        texts = self.words(self.asked.follow)
        probability, rank = self.cells.followed.unbind(-1), self.cells.rank.unbind(-1)
        return tuple(map(Followed, self.asked.follow, texts, probability, rank))

    def follow(self, token: str | int) -> Followed:
        """Probability and rank of any token in all cells."""
        wanted = token_id(self.model, token)
        known = {each.id: each for each in self.followed}
        return known.get(wanted) or self._again(Asked(1, (wanted,))).followed[0]

    def jensen_shannon(self) -> Tensor:
        """The Jensen–Shannon divergence between lens and model: 0 to ln 2."""
        found = self if self.asked.js else self._again(Asked(1, js=True))
        return found.cells.js

    @torch.no_grad()
    def distribution(self, level: SiteName, position: int = -1) -> Tensor:
        """The probabilities of all tokens in one cell; positions count in the text, from its end if negative."""
        site = Site.parse(level)
        place = position + len(self.prompt.ids) if position < 0 else position
        if site not in self.states.sites or place not in self.positions:
            raise BadText(
                f"level {level} at position {position} was not read; levels are {', '.join(self.levels)}, positions "
                f"{', '.join(map(str, self.positions))}"
            )
        state = self.states.states[self.states.sites.index(site)]
        row = self.positions.index(place)
        logits = self.model.anatomy.decode(self.lens.route(site)(state[row : row + 1]))
        return wide(logits)[0].softmax(-1).cpu()

    def words(self, ids: Sequence[int]) -> list[str]:
        """The texts of tokens."""
        assert self.model.tokenizer is not None  # or there would be no trajectory of a text
        return token_texts(self.model.tokenizer, ids)

    def _again(self, asked: Asked) -> Trajectory:
        routes = {self.name: [self.lens.route(site) for site in self.states.sites]}
        best, cells = read_cells(self.model, routes, self.states, asked)
        return replace(self, asked=asked, best=best, cells=cells[self.name])

    def to_dict(self) -> dict[str, Any]:
        """The trajectory as JSON holds it: numbers with five digits, null where there is none."""
        from layerjump.lens.export import to_dict

        return to_dict(self)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for every cell."""
        from layerjump.lens.export import to_pandas

        return to_pandas(self)

    def plot(self, value: str = "probability") -> go.Figure:
        """A heat map of levels and positions; colour is the best token's probability, or entropy, kl, confidence …"""
        from layerjump.lens.picture import plot

        return plot(self, value)

    def to_html(self, path: str | Path | None = None) -> str:
        """The heat map as one HTML page that needs no network; written to a file if a path is given."""
        from layerjump.lens.picture import to_html

        return to_html(self, path)

    def _repr_html_(self) -> str:
        from layerjump.lens.picture import to_table

        return to_table(self)

    def __rich__(self) -> RenderableType:
        from layerjump.lens.terminal import whole

        return whole(self)

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.model.name} through {self.name}: {len(self.levels)} levels, "
            f"{len(self.positions)} of {len(self.prompt.ids)} positions)"
        )


def decided_at(top: Tensor, best: Tensor) -> Tensor:
    """The first level from which on `top`, (levels, positions), is `best`, (positions,); −1 for none."""
    right = (top == best).flip(0).long()
    staying = right.cumprod(0).sum(0)
    return torch.where(staying > 0, len(top) - staying, -1)
