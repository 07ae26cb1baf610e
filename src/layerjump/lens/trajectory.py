"""Trajectory: what a lens predicts at every level and position of one text.

A text as a lens reads it: its ids, the positions that are read, and batches of several.

What lenses read in every cell (a level at a position) of one text, in one sweep and within a memory budget.

A trajectory: what a lens reads at every level of every position of one text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.data.tokenization import token_texts
from layerjump.errors import BadModel, BadText
from layerjump.lens.lens import Reader, Route, SiteName
from layerjump.metrics.logits import (
    LOGITS_MEMORY,
    LogitStats,
    LogitSweep,
    chunk_rows,
    reference_logits,
    upcast,
)
from layerjump.models.activations import capture_states
from layerjump.models.model import Model
from layerjump.models.structure import Site

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go
    from rich.console import RenderableType

CELLS = 4096
"""Cells of a batch, padding included, unless one text alone has more."""
_SHOWN = 20


@dataclass(frozen=True)
class Prompt:
    """One text, special tokens and all, and where it is read."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    targets: Tensor
    """(positions,) the token that really comes next; −1 where none does."""


def prompts(model: Model, texts: Sequence[str], last: int | None = None) -> list[Prompt]:
    """Tokenize texts. A causal model is read everywhere, a masked one at its masks, or everywhere if there is none.

    `last` asks for no more than so many positions, the last ones; the model sees the whole text all the same.
    """
    if model.task not in ("causal", "masked"):
        raise BadModel(
            f"{model.name} is an encoder–decoder, and one text does not say what each of the two reads; read its "
            f"levels with `lens.evaluate.evaluate_lenses` and batches that hold both"
        )
    tokens = model.tokenization
    rows = [tuple(tokens.wrap(ids)) for ids in tokens.encode(list(texts))]
    for text, ids in zip(texts, rows, strict=True):
        _check(text, len(ids), tokens.max_length)
    mask = tokens.mask if model.masked else None
    return [_prompt(ids, mask, model.causal, last) for ids in rows]


def _prompt(ids: tuple[int, ...], mask: int | None, causal: bool, last: int | None) -> Prompt:
    masked = tuple(place for place, token in enumerate(ids) if token == mask)
    following = [*ids[1:], -1] if causal else [-1] * len(ids)
    positions = masked or tuple(range(len(ids)))
    positions = positions if last is None else positions[-last:]
    return Prompt(ids, positions, torch.tensor(following)[list(positions)])


def _check(text: str, length: int, longest: int) -> None:
    said = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
    if length > longest:
        raise BadText(
            f"the text {said} has {length:,} tokens, but the model reads at most {longest:,}; shorten it"
        )
    if length == 0:
        raise BadText(f"the text {said} has no tokens; give at least one word")


def grouped(
    found: Sequence[Prompt], padding: int, cells: int = CELLS
) -> Iterator[tuple[list[int], Batch]]:
    """Batches of prompts of like length, each with the prompts' indices; picks are the positions read."""
    order = sorted(range(len(found)), key=lambda index: len(found[index].ids))
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * len(found[index].ids) > cells:
            yield group, _batch([found[each] for each in group], padding)
            group = []
        group.append(index)
    if group:
        yield group, _batch([found[each] for each in group], padding)


def _batch(found: Sequence[Prompt], padding: int) -> Batch:
    longest = max(len(prompt.ids) for prompt in found)
    ids = torch.full((len(found), longest), padding)
    attention = torch.zeros_like(ids)
    for place, prompt in enumerate(found):
        ids[place, : len(prompt.ids)] = torch.tensor(prompt.ids)
        attention[place, : len(prompt.ids)] = 1
    position = torch.tensor([place for prompt in found for place in prompt.positions])
    counts = torch.tensor([len(prompt.positions) for prompt in found])
    row = torch.arange(len(found)).repeat_interleave(counts)
    return Batch(ids, attention, row, position, row, ids[row, position])


POSITIONS = 64
"""Positions whose truth is held at once; products are of all levels' states there, stacked."""


@dataclass(frozen=True)
class TextStates:
    """One text's states: what all lenses share."""

    sites: tuple[Site, ...]
    states: tuple[Tensor, ...]
    """(positions, d) at each site."""
    last: Tensor
    """(positions, d) at level L: what the model itself says."""
    targets: Tensor
    """(positions,) the token that really comes next; −1 where none does."""

    @property
    def n_positions(self) -> int:
        return len(self.last)


@dataclass(frozen=True)
class LensQuery:
    """What is wanted of every cell."""

    k: int
    tracked: tuple[int, ...] = ()
    jensen_shannon: bool = False


@torch.no_grad()
def read_cells(
    model: Model,
    routes: Mapping[str, Sequence[Route]],
    text: TextStates,
    query: LensQuery,
    *,
    memory: int = LOGITS_MEMORY,
) -> tuple[Tensor, dict[str, LogitStats]]:
    """The model's own best tokens, and every site of a text read through every lens.

    Tensors of `Said` are (levels, positions, …) here. A lens is given by its route from each site of the text. At
    level L all lenses are the model.
    """
    rows = chunk_rows(model, memory)
    at_once = min(rows, POSITIONS)
    best: list[Tensor] = []
    parts: dict[str, list[LogitStats]] = {name: [] for name in routes}
    for start in range(0, text.n_positions, at_once):
        own, found = _read(model, routes, text, query, slice(start, start + at_once), rows)
        best.append(own.top[:, 0])
        for name, said in found.items():
            parts[name].append(said)
    return torch.cat(best), {name: _joined(found) for name, found in parts.items()}


def _read(
    model: Model,
    routes: Mapping[str, Sequence[Route]],
    text: TextStates,
    query: LensQuery,
    part: slice,
    rows: int,
) -> tuple[LogitStats, dict[str, LogitStats]]:
    """What the model says at some positions, and all lenses at all sites there."""
    true = reference_logits(upcast(model.logits(text.last[part])))
    targets = text.targets[part].to(true.logits.device)
    follow = torch.tensor(query.tracked, dtype=torch.long, device=true.logits.device)

    sweep = LogitSweep(true, k=query.k, targets=targets, follow=follow, js=query.jensen_shannon)

    def said(logits: Tensor) -> LogitStats:
        return LogitStats(*(each.cpu() for each in sweep(logits)))

    own = said(true.logits)
    last = Site(model.n_blocks)
    jobs = [
        (name, place, route)
        for name, mine in routes.items()
        for place, (site, route) in enumerate(zip(text.sites, mine, strict=True))
        if site != last
    ]
    cells = {(name, place): own for name in routes for place in range(len(text.sites))}
    for group in _groups(jobs, max(1, rows // len(true.logits))):
        # One product of many rows costs far less than many of few.
        final = torch.cat([route(text.states[place][part]) for _, place, route in group])
        logits = upcast(model.structure.decode(final)).split(len(true.logits))
        for (name, place, _), mine in zip(group, logits, strict=True):
            cells[name, place] = said(mine)
    places = range(len(text.sites))
    return own, {name: _stacked([cells[name, place] for place in places]) for name in routes}


def _groups(
    jobs: Sequence[tuple[str, int, Route]], size: int
) -> Iterator[Sequence[tuple[str, int, Route]]]:
    return (jobs[start : start + size] for start in range(0, len(jobs), size))


def _stacked(levels: Sequence[LogitStats]) -> LogitStats:
    return LogitStats(*(torch.stack(column) for column in zip(*levels, strict=True)))


def _joined(parts: Sequence[LogitStats]) -> LogitStats:
    """Positions beside each other."""
    return LogitStats(*(torch.cat(column, 1) for column in zip(*parts, strict=True)))


def read_trajectory(
    model: Model,
    lenses: Mapping[str, Reader],
    text: str,
    *,
    k: int = 10,
    levels: Sequence[SiteName] | None = None,
    tokens: Sequence[str | int] = (),
    jensen_shannon: bool = False,
    last: int | None = None,
) -> dict[str, Trajectory]:
    """Read one text through several lenses, with one forward pass; `last` positions of it, or all."""
    return read_trajectories(
        model,
        lenses,
        [text],
        k=k,
        levels=levels,
        tokens=tokens,
        jensen_shannon=jensen_shannon,
        last=last,
    )[0]


@torch.no_grad()
def read_trajectories(
    model: Model,
    lenses: Mapping[str, Reader],
    texts: Sequence[str],
    *,
    k: int = 10,
    levels: Sequence[SiteName] | None = None,
    tokens: Sequence[str | int] = (),
    jensen_shannon: bool = False,
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
    query = LensQuery(min(k, model.structure.vocab_size), follow, jensen_shannon)
    found = prompts(model, texts, last)
    level_l = Site(model.n_blocks)
    made: list[dict[str, Trajectory]] = [{} for _ in texts]
    for indices, batch in grouped(found, model.tokenization.pad):
        (at,) = capture_states(model, [batch], [*sites, level_l])
        counts = [len(found[index].positions) for index in indices]
        split = {site: at[site].split(counts) for site in (*sites, level_l)}
        for place, index in enumerate(indices):
            mine = tuple(split[site][place] for site in sites)
            text = TextStates(sites, mine, split[level_l][place], found[index].targets)
            best, cells = read_cells(model, routes, text, query)
            made[index] = {
                name: Trajectory(lens, name, found[index], text, query, best, cells[name])
                for name, lens in lenses.items()
            }
    return made


def _read_by_all(lenses: Iterable[Reader]) -> list[int]:
    """Trajectories that are held against each other have the same levels."""
    return sorted(set.intersection(*(set(lens.levels) for lens in lenses)))


def token_id(model: Model, token: str | int) -> int:
    """A token by its text, which must be one token, or by its id."""
    if isinstance(token, str):
        return model.tokenization.one(token)
    if not 0 <= token < model.structure.vocab_size:
        raise BadText(
            f"the token {token} was given, but the vocabulary has {model.structure.vocab_size:,}, counted from 0"
        )
    return token


@dataclass(frozen=True)
class TokenTrack:
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
    query: LensQuery
    model_top: Tensor
    """(positions,) the model's own answer."""
    cells: LogitStats

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
        return self.decode(self.prompt.ids)

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
    def settled_level(self) -> Tensor:
        """(positions,) the index of the first level from which on the best token is the model's own, and stays so.

        −1 where even the last level read says something else; level L never does.
        """
        return settled_level(self.top[:, :, 0], self.model_top)

    @property
    def tracked(self) -> tuple[TokenTrack, ...]:
        """The tokens that were asked for."""
        texts = self.decode(self.query.tracked)
        probability, rank = self.cells.followed.unbind(-1), self.cells.rank.unbind(-1)
        return tuple(map(TokenTrack, self.query.tracked, texts, probability, rank))

    def track(self, token: str | int) -> TokenTrack:
        """Probability and rank of any token in all cells."""
        wanted = token_id(self.model, token)
        known = {each.id: each for each in self.tracked}
        return known.get(wanted) or self._again(LensQuery(1, (wanted,))).tracked[0]

    def jensen_shannon(self) -> Tensor:
        """The Jensen–Shannon divergence between lens and model: 0 to ln 2."""
        found = (
            self if self.query.jensen_shannon else self._again(LensQuery(1, jensen_shannon=True))
        )
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
        logits = self.model.structure.decode(self.lens.route(site)(state[row : row + 1]))
        return upcast(logits)[0].softmax(-1).cpu()

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The texts of tokens."""
        assert self.model.tokenizer is not None  # or there would be no trajectory of a text
        return token_texts(self.model.tokenizer, ids)

    def _again(self, query: LensQuery) -> Trajectory:
        routes = {self.name: [self.lens.route(site) for site in self.states.sites]}
        best, cells = read_cells(self.model, routes, self.states, query)
        return replace(self, query=query, model_top=best, cells=cells[self.name])

    def to_dict(self) -> dict[str, Any]:
        """The trajectory as JSON holds it: numbers with five digits, null where there is none."""
        from layerjump.lens.render.tabular import to_dict

        return to_dict(self)

    def to_pandas(self) -> pandas.DataFrame:
        """A row for every cell."""
        from layerjump.lens.render.tabular import to_pandas

        return to_pandas(self)

    def plot(self, value: str = "probability") -> go.Figure:
        """A heat map of levels and positions; colour is the best token's probability, or entropy, kl, confidence …"""
        from layerjump.lens.render.html import plot

        return plot(self, value)

    def to_html(self, path: str | Path | None = None) -> str:
        """The heat map as one HTML page that needs no network; written to a file if a path is given."""
        from layerjump.lens.render.html import to_html

        return to_html(self, path)

    def _repr_html_(self) -> str:
        from layerjump.lens.render.html import to_table

        return to_table(self)

    def __rich__(self) -> RenderableType:
        from layerjump.lens.render.terminal import whole

        return whole(self)

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.model.name} through {self.name}: {len(self.levels)} levels, "
            f"{len(self.positions)} of {len(self.prompt.ids)} positions)"
        )


def settled_level(top: Tensor, best: Tensor) -> Tensor:
    """The first level from which on `top`, (levels, positions), is `best`, (positions,); −1 for none."""
    right = (top == best).flip(0).long()
    staying = right.cumprod(0).sum(0)
    return torch.where(staying > 0, len(top) - staying, -1)
