"""The variant of a model to evaluate: the whole model, teacher-forced early exit, or parts replaced by maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from layerjump.errors import BadEvaluation, argument
from layerjump.generation.calibration import calibration_file
from layerjump.generation.exit_rules import ExitConfig, Fixed, LevelReading, Never, Rule, checked_levels
from layerjump.interventions.linearize import linearize
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import chunk_rows
from layerjump.models.model import Model
from layerjump.models.sites import Site


@dataclass(frozen=True)
class WholeModel:
    """The model as it is; base class of the other variants."""

    @property
    def rule(self) -> Rule:
        """Exit rule of all positions."""
        return Never()

    def applied_to(self, model: Model) -> AbstractContextManager[object]:
        """Change the model while the `with` block runs."""
        return nullcontext()

    def make_reader(self, model: Model) -> TeacherForcedExit:
        """Return the reader of the positions to score."""
        return TeacherForcedExit(model, None, self.rule)


@dataclass(frozen=True)
class EarlyExitModel(WholeModel):
    """Every position is read at the first level where an exit rule is satisfied."""

    jumps: Jumps | None
    """Maps to the last level; None for the identity."""
    exit: ExitConfig | Rule | str
    """An exit rule, or its short name such as gap:0.9."""

    @property
    def rule(self) -> Rule:
        return ExitConfig.of(self.exit).rule

    def make_reader(self, model: Model) -> TeacherForcedExit:
        return TeacherForcedExit(model, self.jumps, self.exit)


@dataclass(frozen=True)
class LinearizedModel(WholeModel):
    """Parts of blocks are replaced by maps."""

    jumps: Jumps
    parts: str
    """Kind of part: attn, ffn, norms or block."""
    blocks: tuple[int, ...] | None = None
    """Blocks whose parts are replaced; None for all."""

    def applied_to(self, model: Model) -> AbstractContextManager[object]:
        return linearize(model, self.jumps, parts=self.parts, blocks=self.blocks)


ModelVariant = WholeModel | EarlyExitModel | LinearizedModel


def make_variant(
    model: Model,
    *,
    jumps: str | Path | Jumps | None = None,
    exit: str | ExitConfig | Rule | None = None,
    level: int | None = None,
    parts: str | None = None,
    blocks: str | None = None,
) -> ModelVariant:
    """Return the model variant that command-line settings describe.

    Args:
        model: A causal language model.
        jumps: Jumps, or a folder of them. Without `exit`, `level` and `parts`, the exit rule that calibration saved
            in the folder applies.
        exit: Exit rule, such as gap:0.9.
        level: Exit level of all positions; L for the whole model.
        parts: Parts to replace by maps: attn, ffn, norms or block.
        blocks: Blocks whose parts are replaced, such as 3-5 or 1,4; by default all.
    """
    require_causal(model)
    folder = None if jumps is None or isinstance(jumps, Jumps) else Path(jumps).expanduser()
    if folder is not None:
        jumps = Jumps.from_pretrained(folder, model=model)
    assert jumps is None or isinstance(jumps, Jumps)
    if sum(value is not None for value in (exit, level, parts)) > 1:
        raise BadEvaluation(f"pass only one of {argument('exit')}, {argument('level')} and {argument('parts')}")
    if blocks is not None and parts is None:
        raise BadEvaluation(f"{argument('blocks')} needs {argument('parts')}; pass parts too")
    if parts is not None:
        if jumps is None:
            raise BadEvaluation(f"{parts} cannot be replaced without maps; pass {argument('jumps')} fitted for it")
        return LinearizedModel(jumps, parts, None if blocks is None else parse_blocks(blocks))
    if level is not None:
        return WholeModel() if level == model.n_blocks else EarlyExitModel(jumps, Fixed(level))
    if exit is not None:
        return EarlyExitModel(jumps, ExitConfig.of(exit))
    if jumps is None:
        return WholeModel()
    if folder is None or not (folder / calibration_file.FILE_NAME).is_file():
        raise BadEvaluation(
            f"the jumps have neither an exit rule nor parts to replace, and no calibrated rule; pass "
            f"{argument('exit')} or {argument('parts')}"
        )
    return EarlyExitModel(jumps, calibration_file.load_calibration(folder, model=model).exit)


def require_causal(model: Model) -> None:
    """Raise `BadEvaluation` for a model that does not predict next tokens."""
    if model.task != "causal":
        raise BadEvaluation(
            f"{model.name} is a {model.task} model, but tasks and perplexity score the next token; pass a causal "
            f"language model"
        )
    model.require_predictions()


def parse_blocks(text: str) -> tuple[int, ...]:
    """Parse a list of blocks such as 3-5 or 1,4,7-9."""
    blocks: list[int] = []
    try:
        for part in str(text).split(","):
            first, dash, last = part.strip().partition("-")
            blocks += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        blocks = []
    if not blocks:
        raise BadEvaluation(f"expected {argument('blocks')} to be numbers such as 3-5 or 1,4, got {text!r}")
    return tuple(blocks)


class TeacherForcedExit:
    """Reads each position of a given text at its exit level, and counts the exits at each level.

    The text is given, so no token depends on the exit level of an earlier one, and the KV cache is the full model's:
    the logits are those that `generate` with an exact cache reads at every position. A rule with a shortlist decides by
    it, but the logits are of the full vocabulary, because the task may ask for any token.
    """

    def __init__(self, model: Model, jumps: Jumps | None, exit: ExitConfig | Rule | str) -> None:
        exit = ExitConfig.of(exit)
        self.levels = checked_levels(exit.rule, model.n_blocks)
        """Levels that the rule checks; empty for the whole model."""
        self._n_exits = [0] * (model.n_blocks + 1)
        self._lens, self._rule, self._last = Lens(model, jumps), exit.rule, model.n_blocks
        shortlist = exit.shortlist
        self._rule_lens = self._lens if shortlist is None else Lens(shortlist.restrict(model), jumps)
        self._chunk_rows = chunk_rows(model)
        if jumps is not None:
            jumps.to(model.device)

    @property
    def mean_level(self) -> float | None:
        """Mean exit level of the positions so far; None for the whole model and before any position is read."""
        n_read = sum(self._n_exits)
        if not n_read or not self.levels:
            return None
        return sum(level * n for level, n in enumerate(self._n_exits)) / n_read

    @torch.no_grad()
    def read(self, states: Mapping[Site, Tensor], positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows with their logits, level by level, from states (rows, d) at the levels and positions from 0.

        Rows without early exit come last if `states` has level L; otherwise they are left to the caller.
        """
        last = Site(self._last)
        for rows in torch.arange(len(positions), device=positions.device).split(self._chunk_rows):
            earlier: tuple[Tensor, ...] = ()
            for level in self.levels:
                state = states[Site(level)][rows]
                reading = LevelReading(level, state, positions[rows], self._rule_lens.logits, earlier)
                exits = self._rule.should_exit(reading)
                if bool(exits.any()):
                    self._n_exits[level] += int(exits.sum())
                    is_full = self._rule_lens is self._lens
                    logits = reading.logits if is_full else self._lens.logits(level, state)
                    yield rows[exits], logits[exits]
                earlier += (reading.top_token,) if reading.has_logits else ()
                rows, earlier = rows[~exits], tuple(top[~exits] for top in earlier)
                if not len(rows):
                    break
            self._n_exits[self._last] += len(rows)
            if len(rows) and last in states:
                yield rows, self._lens.logits(last, states[last][rows])
