"""The model variant to evaluate: whole, with teacher-forced early exit, or linearised.

Teacher-forced early exit: each position of a given text is read at the first level where the rule stops.

The text is given, so no token depends on where an earlier one left, and keys and values are the model's own: this is
what `generate` with an exact cache would have read at every position. A rule that looks at a shortlist of tokens
decides by it here too; what is read where it stops is the whole vocabulary, since any token may be asked for.

What of a model is evaluated: all of it, the levels where an exit rule stops, or maps in the place of parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerjump.errors import BadEvaluation
from layerjump.generation.calibration import serialization
from layerjump.generation.rules import (
    ExitConfig,
    Fixed,
    LevelReading,
    Never,
    Rule,
    checked_levels,
    parse_rule,
)
from layerjump.interventions.linearize import linearize
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import chunk_rows
from layerjump.models.model import Model
from layerjump.models.structure import Site


class TeacherForcedExit:
    """Reads states at the levels that a rule checks, and counts where positions left."""

    def __init__(self, model: Model, jumps: Jumps | None, exit: ExitConfig | Rule) -> None:
        exit = ExitConfig.of(exit)
        self.levels = checked_levels(exit.rule, model.n_blocks)
        self.left = [0] * (model.n_blocks + 1)
        """How many positions left at each level."""
        self._lens, self._rule, self._last = Lens(model, jumps), exit.rule, model.n_blocks
        shortlist = exit.shortlist
        self._early = None if shortlist is None else Lens(shortlist.restrict(model), jumps)
        self._rows = chunk_rows(model)
        if jumps is not None:
            jumps.to(model.device)

    @property
    def mean_level(self) -> float | None:
        """The level at which positions left, on average; None before any has."""
        read = sum(self.left)
        return sum(level * n for level, n in enumerate(self.left)) / read if read else None

    @torch.no_grad()
    def read(self, at: Mapping[Site, Tensor], position: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their logits, level by level, from states (rows, d) at each level and 0-based positions.

        Rows that go up to level L come last if its states are given; without them they are left to the caller.
        """
        for part in torch.arange(len(position), device=position.device).split(self._rows):
            yield from self._part(at, position, part)

    def _part(
        self, at: Mapping[Site, Tensor], position: Tensor, rows: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        earlier: tuple[Tensor, ...] = ()
        for level in self.levels:
            state = at[Site(level)][rows]
            seen = self._early or self._lens
            look = LevelReading(level, state, position[rows], seen.logits, earlier)
            stops = self._rule.should_exit(look)
            if bool(stops.any()):
                self.left[level] += int(stops.sum())
                logits = self._lens.logits(level, state) if self._early else look.logits
                yield rows[stops], logits[stops]
            earlier += (look.top_token,) if look.has_logits else ()
            rows, earlier = rows[~stops], tuple(top[~stops] for top in earlier)
            if not len(rows):
                return
        self.left[self._last] += len(rows)
        if (last := Site(self._last)) in at:
            yield rows, self._lens.logits(last, at[last][rows])


@dataclass(frozen=True)
class ModelVariant:
    """Jumps, and what they are for: an exit rule, or parts of blocks. Without either it is the model as it is."""

    jumps: Jumps | None = None
    rule: ExitConfig | Rule = Never()
    parts: str | None = None
    blocks: tuple[int, ...] | None = None

    @contextmanager
    def changed(self, model: Model) -> Iterator[Model]:
        """The model with maps in the place of parts, if that is asked for; whole again afterwards."""
        if self.parts is None or self.jumps is None:
            yield model
            return
        with linearize(model, self.jumps, parts=self.parts, blocks=self.blocks):
            yield model

    def reader(self, model: Model) -> TeacherForcedExit:
        """What reads positions where the rule stops."""
        return TeacherForcedExit(model, None if self.parts else self.jumps, self.rule)


def make_variant(
    model: Model,
    *,
    jumps: str | Path | Jumps | None = None,
    exit: str | ExitConfig | Rule | None = None,
    level: int | None = None,
    parts: str | None = None,
    blocks: str | None = None,
) -> ModelVariant:
    """Settings as they are given on a command line, checked.

    `exit` is a rule such as gap:0.9 and `level` one level for all (L: the whole model); neither, with jumps, is the
    rule that `layerjump calibrate` left in their folder. `parts` (attn, ffn, norms, block) and `blocks` (3-5) put
    maps in.
    """
    require_causal(model)
    folder = None if jumps is None or isinstance(jumps, Jumps) else Path(jumps).expanduser()
    if folder is not None:
        jumps = Jumps.from_pretrained(folder, model=model)
    assert jumps is None or isinstance(jumps, Jumps)
    if sum(given is not None for given in (exit, level, parts)) > 1:
        raise BadEvaluation("give one of an exit rule, a level and parts, not several")
    if blocks is not None and parts is None:
        raise BadEvaluation(f"blocks {blocks} were given, but not which parts of them; give parts")
    if parts is not None:
        if jumps is None:
            raise BadEvaluation(
                f"{parts} cannot be replaced without maps; give jumps fitted for it"
            )
        return ModelVariant(
            jumps, parts=parts, blocks=None if blocks is None else parse_blocks(blocks)
        )
    if exit is None and level is None and jumps is not None:
        exit = _calibrated(folder, model)
    if level is not None:
        return ModelVariant(jumps, Never() if level == model.n_blocks else Fixed(level))
    return ModelVariant(jumps, parse_rule(exit) if isinstance(exit, str) else exit or Never())


def require_causal(model: Model) -> None:
    """Raise `BadEvaluation` for a model that does not predict next tokens."""
    if model.task != "causal":
        raise BadEvaluation(
            f"{model.name} is a {model.task} model, but tasks and perplexity score the next token; give a causal "
            f"language model"
        )
    model.require_predictions()


def parse_blocks(text: str) -> tuple[int, ...]:
    """Blocks such as 3-5 or 1,4,7-9."""
    found: list[int] = []
    try:
        for part in str(text).split(","):
            first, dash, last = part.strip().partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        found = []
    if not found:
        raise BadEvaluation(f"blocks were given as {text!r}; give numbers, such as 3-5 or 1,4")
    return tuple(found)


def _calibrated(folder: Path | None, model: Model) -> ExitConfig:
    if folder is None or not (folder / serialization.FILE_NAME).is_file():
        raise BadEvaluation(
            "jumps were given, but neither an exit rule nor parts to replace, and none was calibrated; give one"
        )
    return serialization.load_calibration(folder, model=model).exit
