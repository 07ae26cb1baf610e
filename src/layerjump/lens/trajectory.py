"""Trajectory: what a lens predicts at every level and position of one text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerjump.errors import BadText
from layerjump.io import write_text
from layerjump.lens.prepare_prompt import Prompt
from layerjump.lens.readout import LensQuery, PromptStates, Readout, compute_stats, settled_index
from layerjump.metrics.logits import LogitStats, upcast
from layerjump.models.model import Model
from layerjump.models.sites import Site

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go
    from rich.console import Console, ConsoleOptions, RenderResult

    from layerjump.lens.attribution import Attribution
    from layerjump.lens.concepts import ConceptRace, ConceptTrack
    from layerjump.lens.findings import LensFinding

_NUMBERS = ("probability", "entropy", "kl", "confidence", "cross_entropy")  # the order of `Trajectory.to_dict`


@dataclass(frozen=True)
class TokenTrack:
    """One token at every level and position; both tensors are (levels, positions)."""

    id: int
    text: str
    probability: Tensor
    rank: Tensor
    """Number of more probable tokens: 0 for the most probable."""


@dataclass(frozen=True, eq=False)
class Trajectory:
    """What a lens predicts at every level and position of a text.

    Tensors are (levels, positions); `top` and `probability` have a third dimension of size k. Logits are not stored,
    but the hidden states are: `track`, `jensen_shannon` and `distribution` decode them again when needed.
    """

    model: Model
    name: str
    """The name of the lens."""
    first_fitted_position: int
    """The first position that the jumps were fitted on; predictions at earlier positions are unreliable."""
    readouts: tuple[Readout, ...]
    """How each site is decoded."""
    prompt: Prompt
    states: PromptStates
    query: LensQuery
    model_top: Tensor
    """(positions,) the id of the model's own most probable token."""
    stats: LogitStats
    top: Tensor = field(init=False)
    """(levels, positions, k) ids of the most probable tokens, in descending order of probability."""
    probability: Tensor = field(init=False)
    """(levels, positions, k) probabilities of the tokens in `top`."""
    confidence: Tensor = field(init=False)
    """The highest probability minus the second highest."""
    entropy: Tensor = field(init=False)
    """The entropy of the lens' distribution in nats."""
    kl: Tensor = field(init=False)
    """KL(model ‖ lens) in nats; zero at level L."""
    cross_entropy: Tensor = field(init=False)
    """−ln p of the next token in the text; NaN where there is none: at the last position and in masked models."""

    def __post_init__(self) -> None:
        for name in ("top", *_NUMBERS):
            object.__setattr__(self, name, getattr(self.stats, name))

    @property
    def levels(self) -> tuple[str, ...]:
        """The names of the sites."""
        return tuple(str(site) for site in self.states.sites)

    @property
    def tokens(self) -> list[str]:
        """The texts of all input tokens, with special tokens; their ids if the model has no tokenizer."""
        return self.model.token_texts(self.prompt.ids)

    @property
    def positions(self) -> tuple[int, ...]:
        """The positions of the input tokens that were read."""
        return self.prompt.positions

    @property
    def image_positions(self) -> tuple[int, ...]:
        """The positions of the placeholders of images, such as `<image>`; none in a text alone."""
        return self.prompt.image_positions

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each token of a chat, or `template` for what the chat template added; empty for a plain text.

        Tokens that the model added for `new_tokens` are `generated`, those of a plain text before them `prompt`.
        """
        return self.prompt.roles

    @property
    def settled_level(self) -> Tensor:
        """(positions,) the index of the first level from which on the top token is the model's, at all later levels.

        −1 where the last level read has another top token; level L never has.
        """
        return settled_index(self.top[:, :, 0], self.model_top)

    @property
    def tracked(self) -> tuple[TokenTrack, ...]:
        """The tokens of the `tokens` argument."""
        texts = self.decode(self.query.tracked)
        probability, rank = self.stats.tracked.unbind(-1), self.stats.rank.unbind(-1)
        return tuple(map(TokenTrack, self.query.tracked, texts, probability, rank))

    def track(self, token: str | int) -> TokenTrack:
        """Probability and rank of any token at every level and position."""
        token = self.model.prediction_id(token)
        tracks = {track.id: track for track in self.tracked}
        return tracks.get(token) or self._recompute(LensQuery(1, (token,))).tracked[0]

    def concept(self, words: Sequence[str]) -> ConceptTrack:
        """Probability of a set of words, in all their spellings that are one token, at every level and position."""
        from layerjump.lens.concepts import ConceptTrack, concept_ids

        ids = concept_ids(self.model, words)
        is_read = set(ids) <= set(self.query.tracked)
        tracks = [
            track for track in (self if is_read else self._recompute(LensQuery(1, ids))).tracked if track.id in ids
        ]
        return ConceptTrack(tuple(words), ids, torch.stack([track.probability for track in tracks]).sum(0))

    def race(self, concepts: Mapping[str, Sequence[str]], position: int = -1) -> ConceptRace:
        """The probabilities of several concepts, by name, level by level at one position."""
        from layerjump.lens.concepts import race

        return race(self, concepts, position)

    def findings(self) -> tuple[LensFinding, ...]:
        """The most striking findings as sentences: where the answer is decided, tokens that lead and are dropped …"""
        from layerjump.lens.findings import find_striking

        return find_striking(self)

    def jensen_shannon(self) -> Tensor:
        """The Jensen–Shannon divergence between lens and model in nats: 0 to ln 2."""
        if self.query.jensen_shannon:
            return self.stats.jensen_shannon
        return self._recompute(LensQuery(1, jensen_shannon=True)).stats.jensen_shannon

    @torch.no_grad()
    def distribution(self, level: Site | str | int, position: int = -1) -> Tensor:
        """(vocab_size,) probabilities at one level and position; negative positions count from the end of the text."""
        index, row = self._cell(level, position)
        readout = self.readouts[index]
        logits = readout.logits(self.states.read_by(readout, index)[row : row + 1])
        return upcast(logits)[0].softmax(-1).cpu()

    def state(self, level: Site | str | int, position: int = -1) -> Tensor:
        """(d,) the hidden state at one level and position; negative positions count from the end of the text."""
        index, row = self._cell(level, position)
        return self.states.states[index][row]

    def attribution(
        self, position: int, level: Site | str | int, token: str | int | None = None, against: str | int | None = None
    ) -> Attribution:
        """The token's logit at one level and position as a sum over embedding, attention, feed-forward and heads.

        Without a `token`, that of the top token there. With `against`, its difference from the logit of another token.
        Negative positions count from the end.
        """
        from layerjump.lens.attribution import attribute

        index, row = self._cell(level, position)
        token = int(self.top[index, row, 0]) if token is None else token
        return attribute(
            self.model, self.readouts[index], self.prompt, self.positions[row], token, against=against, lens=self.name
        )

    def _cell(self, level: Site | str | int, position: int) -> tuple[int, int]:
        """The indices of a level and of a position that were read."""
        site = Site.parse(level)
        if site not in self.states.sites:
            raise BadText(f"level {level} was not read; expected one of {', '.join(self.levels)}")
        return self.states.sites.index(site), self.row_of(position)

    def row_of(self, position: int) -> int:
        """The index of a position that was read; negative positions count from the end of the text."""
        absolute = position + len(self.prompt.ids) if position < 0 else position
        if absolute not in self.positions:
            raise BadText(f"position {position} was not read; expected one of {', '.join(map(str, self.positions))}")
        return self.positions.index(absolute)

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each predicted token, or the name of each label."""
        return self.model.prediction_texts(ids)

    def with_tracked(self, tokens: Sequence[str | int]) -> Trajectory:
        """The same trajectory, with these tokens tracked instead."""
        tracked = tuple(dict.fromkeys(self.model.prediction_id(token) for token in tokens))
        return self._recompute(replace(self.query, tracked=tracked))

    def _recompute(self, query: LensQuery) -> Trajectory:
        readouts = {self.name: self.readouts}
        _, stats = compute_stats(self.model, readouts, self.states, query)
        return replace(self, query=query, stats=stats[self.name])

    def to_dict(self) -> dict[str, Any]:
        """The trajectory as JSON values: lists by level, then position, then k; five digits, null for NaN."""
        top = self.top.tolist()
        ids = sorted({token for level in top for row in level for token in row} | {*self.query.tracked})
        return {
            "model": self.model.name,
            "lens": self.name,
            "task": self.model.task,
            "levels": list(self.levels),
            "n_blocks": self.model.n_blocks,
            "tokens": [{"id": token, "text": text} for token, text in zip(self.prompt.ids, self.tokens, strict=True)],
            **({"roles": list(self.roles)} if self.roles else {}),
            "positions": list(self.positions),
            "fitted_from": self.first_fitted_position,
            "k": self.query.k,
            "words": {str(token): text for token, text in zip(ids, self.decode(ids), strict=True)},
            "top": top,
            **{name: _rounded(getattr(self, name)) for name in _NUMBERS},
            "js": _rounded(self.stats.jensen_shannon) if self.query.jensen_shannon else None,
            "decided_at": [None if level < 0 else level for level in self.settled_level.tolist()],
            "followed": [
                {
                    "id": track.id,
                    "text": track.text,
                    "probability": _rounded(track.probability),
                    "rank": track.rank.tolist(),
                }
                for track in self.tracked
            ],
        }

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with one row for each level and position; a tracked token adds two columns."""
        import pandas

        n_levels, k = len(self.levels), self.query.k
        n_rows = n_levels * len(self.positions)
        tokens, settled = self.tokens, self.settled_level.tolist()
        top = self.decode(self.top.flatten().tolist())
        numbers = {"probability": self.probability[:, :, 0], "confidence": self.confidence}
        numbers |= {"entropy": self.entropy, "kl": self.kl, "cross_entropy": self.cross_entropy}
        if self.query.jensen_shannon:
            numbers["jensen_shannon"] = self.stats.jensen_shannon
        for track in self.tracked:
            numbers[f"p({track.text!r})"] = track.probability
            numbers[f"rank({track.text!r})"] = track.rank
        columns: dict[str, Any] = {
            "level": [level for level in self.levels for _ in self.positions],
            "position": [*self.positions] * n_levels,
            "token": [tokens[position] for position in self.positions] * n_levels,
            **({"role": [self.roles[position] for position in self.positions] * n_levels} if self.roles else {}),
            "fitted": [position >= self.first_fitted_position for position in self.positions] * n_levels,
            "top": top[::k],
            "settled": [0 <= first <= level for level in range(n_levels) for first in settled],
            "best": [top[k * row : k * (row + 1)] for row in range(n_rows)],
            "probabilities": self.probability.reshape(n_rows, k).tolist(),
        }
        return pandas.DataFrame(columns | {name: values.flatten().numpy() for name, values in numbers.items()})

    def plot(self, value: str = "probability") -> go.Figure:
        """A heat map of levels and positions; its colour is the top token's probability, or `entropy`, `kl` …"""
        from layerjump.lens.render.html import plot

        return plot(self, value)

    def to_html(self, path: str | Path | None = None) -> str:
        """The heat map as one HTML page that needs no network; written to `path` if there is one."""
        page: str = self.plot().to_html(include_plotlyjs=True, full_html=True)
        if path is not None:
            write_text(Path(path).expanduser(), page)
        return page

    def widget(self) -> Any:
        """The page's interactive grid as a notebook widget (needs anywidget: `pip install "layerjump[notebook]"`)."""
        from layerjump.lens.render.widget import make_widget

        return make_widget(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """The widget, and the table where widgets do not run: on GitHub, in a saved notebook, without anywidget."""
        from layerjump.lens.render.widget import has_widgets

        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self._repr_html_()}
        if has_widgets():
            view = self.widget()._repr_mimebundle_()
            # anywidget returns the bundle alone, or with its metadata.
            bundle = (view[0] if isinstance(view, tuple) else view) | bundle
        return bundle

    def _repr_html_(self) -> str:
        from layerjump.lens.render.html import to_table

        return to_table(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from layerjump.lens.render.terminal import render

        yield render(self, options.max_width)

    def __repr__(self) -> str:
        return (
            f"Trajectory({self.model.name} through {self.name}: {len(self.levels)} levels, "
            f"{len(self.positions)} of {len(self.prompt.ids)} positions)"
        )


def _rounded(values: Any) -> Any:
    """Nested lists of numbers with five significant digits; None for NaN and infinity."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.5g}") if math.isfinite(values) else None
