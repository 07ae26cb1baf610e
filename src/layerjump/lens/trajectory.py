"""Trajectory: what a lens predicts at every level and position of one text.

`tokenize_prompts` turns texts into ids, and `compute_stats` decodes the hidden states of all levels through several
lenses within a memory budget. `read_trajectories` in lens.py runs the model in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerjump.errors import BadModel, BadText
from layerjump.io import write_text
from layerjump.jumps.maps import apply_map
from layerjump.metrics.logits import (
    LOGITS_MEMORY,
    LogitComparison,
    LogitStats,
    chunk_rows,
    chunks,
    reference_logits,
    upcast,
)
from layerjump.models.model import Model
from layerjump.models.structure import Site, Structure

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects as go
    from rich.console import Console, ConsoleOptions, RenderResult

BATCH_TOKENS = 4096
"""Tokens of a batch, padding included; a longer text is a batch of its own."""
_CHUNK_POSITIONS = 64  # positions decoded at once, at all levels
_EXCERPT = 20  # characters of a text in an error message
_NUMBERS = ("probability", "entropy", "kl", "confidence", "cross_entropy")  # the order of `Trajectory.to_dict`


@dataclass(frozen=True)
class Readout:
    """How a lens decodes one site: linear maps, then the final norm unless the maps land after it."""

    structure: Structure
    site: Site
    maps: tuple[nn.Module, ...] = ()
    needs_final_norm: bool = True

    def to_final(self, states: Tensor) -> Tensor:
        """The input of the unembedding, for hidden states at the site."""
        for jump in self.maps:
            states = apply_map(jump, states)
        if not self.needs_final_norm:
            return states
        if states.shape[-1] != self.structure.d_model:
            raise BadModel(
                f"{self.site} has width {states.shape[-1]}, but the final norm and the unembedding expect d_model "
                f"{self.structure.d_model}; read a site of the residual stream, such as {self.site.index}.mid"
            )
        return self.structure.to_final(states)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of hidden states at the site."""
        return self.structure.decode(self.to_final(states))


@dataclass(frozen=True)
class LensQuery:
    """Which statistics to compute at every level and position."""

    k: int
    """Number of most probable tokens to keep."""
    tracked: tuple[int, ...] = ()
    """Ids of tokens whose probability and rank to record."""
    jensen_shannon: bool = False


@dataclass(frozen=True)
class Prompt:
    """One tokenized text with its special tokens, and the positions to read."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    image_positions: tuple[int, ...] = ()
    """The positions at which the states of images stand in place of tokens."""
    inputs: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)
    """The other arguments of the model's `forward`, such as pixels; None for a text alone."""


@dataclass(frozen=True)
class PromptStates:
    """Hidden states of one text, which all lenses share."""

    sites: tuple[Site, ...]
    states: tuple[Tensor, ...]
    """(positions, d) at each site."""
    last_level: Tensor
    """(positions, d_model) at level L, from which the model itself predicts."""
    targets: Tensor
    """(positions,) the id of the next token in the text; −1 where there is none."""


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
    def settled_level(self) -> Tensor:
        """(positions,) the index of the first level from which on the top token is the model's, at all later levels.

        −1 where the last level read has another top token; level L never has.
        """
        agrees = (self.top[:, :, 0] == self.model_top).flip(0).long()
        n_agreeing = agrees.cumprod(0).sum(0)
        return torch.where(n_agreeing > 0, len(agrees) - n_agreeing, -1)

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

    def jensen_shannon(self) -> Tensor:
        """The Jensen–Shannon divergence between lens and model in nats: 0 to ln 2."""
        if self.query.jensen_shannon:
            return self.stats.jensen_shannon
        return self._recompute(LensQuery(1, jensen_shannon=True)).stats.jensen_shannon

    @torch.no_grad()
    def distribution(self, level: Site | str | int, position: int = -1) -> Tensor:
        """(vocab_size,) probabilities at one level and position; negative positions count from the end of the text."""
        site = Site.parse(level)
        absolute = position + len(self.prompt.ids) if position < 0 else position
        if site not in self.states.sites or absolute not in self.positions:
            raise BadText(
                f"level {level} at position {position} was not read; expected a level of {', '.join(self.levels)} and "
                f"a position of {', '.join(map(str, self.positions))}"
            )
        index, row = self.states.sites.index(site), self.positions.index(absolute)
        logits = self.readouts[index].logits(self.states.states[index][row : row + 1])
        return upcast(logits)[0].softmax(-1).cpu()

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each predicted token, or the name of each label."""
        return self.model.prediction_texts(ids)

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


def tokenize_prompts(model: Model, texts: Sequence[str], last: int | None = None) -> list[Prompt]:
    """Tokenize texts and select the positions to read.

    They are all positions of a causal model, the masked positions of a masked model, or all if none is masked, and the
    one position that a classification head reads. With `last`, only this many of them, the last ones.
    """
    if model.task not in ("causal", "masked", "classification"):
        raise BadModel(
            f"expected a causal or masked model, got the encoder–decoder {model.name}: one text does not say what "
            f"each side reads; pass `inputs` with both, or use `lens.evaluate.evaluate_lenses` with batches"
        )
    tokenization = model.tokenization
    mask = tokenization.mask if model.masked else None
    prompts = []
    for text, bare_ids in zip(texts, tokenization.encode(list(texts)), strict=True):
        ids = tuple(tokenization.wrap_prompt(bare_ids))
        excerpt = repr(text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…")
        if len(ids) > tokenization.max_length:
            raise BadText(
                f"the text {excerpt} has {len(ids):,} tokens, but the model reads at most "
                f"{tokenization.max_length:,}; shorten it"
            )
        if not ids:
            raise BadText(f"the text {excerpt} has no tokens; pass at least one word")
        masked = tuple(position for position, token in enumerate(ids) if token == mask)
        positions = masked or tuple(range(len(ids)))
        if model.pooled is not None:
            positions = positions[:1] if model.pooled == "first" else positions[-1:]
        prompts.append(Prompt(ids, positions if last is None else positions[-last:]))
    return prompts


@torch.no_grad()
def compute_stats(
    model: Model,
    readouts: Mapping[str, Sequence[Readout]],
    states: PromptStates,
    query: LensQuery,
    *,
    memory: int = LOGITS_MEMORY,
) -> tuple[Tensor, dict[str, LogitStats]]:
    """The model's own top token at each position, and each lens' statistics; tensors are (levels, positions, …).

    `readouts` has one readout for each site by lens. At level L every lens is the model.
    """
    n_rows, last, indices = chunk_rows(model, memory), Site(model.n_blocks), range(len(states.sites))
    model_top: list[Tensor] = []
    parts: dict[str, list[LogitStats]] = {name: [] for name in readouts}
    for chunk in chunks(len(states.last_level), min(n_rows, _CHUNK_POSITIONS)):
        reference = reference_logits(upcast(model.logits(states.last_level[chunk])))
        n_positions, device = len(reference.logits), reference.logits.device
        compare = LogitComparison(
            reference,
            k=query.k,
            targets=states.targets[chunk].to(device),
            tracked=torch.tensor(query.tracked, dtype=torch.long, device=device),
            entropy=True,
            jensen_shannon=query.jensen_shannon,
        )
        model_stats = compare(reference.logits)
        model_top.append(model_stats.top[:, 0])
        cells = {(name, index): model_stats for name in readouts for index in indices}
        pending = [(name, index) for name, index in cells if states.sites[index] != last]
        # One product with the unembedding for many rows costs far less than many products for few.
        for batch in chunks(len(pending), max(1, n_rows // n_positions)):
            group = pending[batch]
            final = torch.cat([readouts[name][index].to_final(states.states[index][chunk]) for name, index in group])
            logits = upcast(model.structure.decode(final)).split(n_positions)
            cells |= {cell: compare(cell_logits) for cell, cell_logits in zip(group, logits, strict=True)}
        for name, part in parts.items():
            part.append(LogitStats(*map(torch.stack, zip(*(cells[name, index] for index in indices), strict=True))))
    return torch.cat(model_top).cpu(), {
        name: LogitStats(*(torch.cat(column, 1).cpu() for column in zip(*part, strict=True)))
        for name, part in parts.items()
    }


def _rounded(values: Any) -> Any:
    """Nested lists of numbers with five significant digits; None for NaN and infinity."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return float(f"{values:.5g}") if math.isfinite(values) else None
