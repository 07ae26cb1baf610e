"""Concepts: sets of tokens that stand for one idea, and the race of several concepts over the levels.

A word has several tokens: with and without a leading blank, capitalised and not. A concept adds up the probabilities of
all of them, and of all its words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerjump.errors import BadText
from layerjump.models.model import Model

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, ConsoleOptions, RenderResult

    from layerjump.lens.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class ConceptTrack:
    """The probability of a concept at every level and position."""

    words: tuple[str, ...]
    ids: tuple[int, ...]
    """The tokens of all words and their spellings."""
    probability: Tensor
    """(levels, positions)."""


@dataclass(frozen=True, eq=False)
class ConceptRace:
    """The probabilities of several concepts at one position, level by level."""

    position: int
    levels: tuple[str, ...]
    concepts: tuple[str, ...]
    probability: Tensor
    """(levels, concepts)."""

    @property
    def leaders(self) -> tuple[str, ...]:
        """The most probable concept at each level."""
        return tuple(self.concepts[index] for index in self.probability.argmax(1).tolist())

    @property
    def crossing_level(self) -> str:
        """The first level from which on the concept that leads at the last level leads at all later ones."""
        leaders = self.leaders
        behind = [index for index, leader in enumerate(leaders) if leader != leaders[-1]]
        return self.levels[behind[-1] + 1 if behind else 0]

    def to_pandas(self) -> pandas.DataFrame:
        """A data frame with a row for each level and a column for each concept."""
        import pandas

        return pandas.DataFrame(self.probability.tolist(), index=list(self.levels), columns=list(self.concepts))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from layerjump.lens.render.terminal import render_race

        yield render_race(self)


def concept_ids(model: Model, words: Sequence[str]) -> tuple[int, ...]:
    """The tokens of words in all spellings that are one token: with a leading blank or not, capitalised or not."""
    if isinstance(words, str) or not words:
        raise BadText(f"expected a concept as a list of words, such as ['Paris', 'France'], got {words!r}")
    ids: dict[int, None] = {}
    for word in words:
        bare = word.strip()
        spellings = dict.fromkeys(
            blank + form for form in (word, bare, bare.lower(), bare.capitalize()) for blank in ("", " ") if bare
        )
        encoded = model.tokenization.encode(list(spellings)) if spellings else []
        single = [row[0] for row in encoded if len(row) == 1]
        if not single:
            raise BadText(
                f"expected words that are one token, got {word!r}, which is several in every spelling; use another word"
            )
        ids |= dict.fromkeys(single)
    return tuple(ids)


def race(trajectory: Trajectory, concepts: Mapping[str, Sequence[str]], position: int) -> ConceptRace:
    """The probabilities of concepts by name at one position that the trajectory has read."""
    if not concepts:
        raise BadText("expected concepts by name, such as {'france': ['Paris', 'France']}, got none")
    tracks = [trajectory.concept(words) for words in concepts.values()]
    owners: dict[int, str] = {}
    for name, track in zip(concepts, tracks, strict=True):
        for token in track.ids:
            if owners.setdefault(token, name) != name:
                (text,) = trajectory.decode([token])
                raise BadText(f"expected concepts without a common token, got {text!r} in {owners[token]} and {name}")
    row = trajectory.row_of(position)
    columns = [track.probability[:, row] for track in tracks]
    return ConceptRace(trajectory.positions[row], trajectory.levels, tuple(concepts), torch.stack(columns, 1))
