"""Measure loss, linearity and lens predictions of a model on held-out text, once or during training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, StrictFloat, StrictInt, ValidationError, field_validator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from layerjump.data.batches import make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import BadArtifact, TextTooShort
from layerjump.io import read_json, write_json
from layerjump.jumps.collect_moments import RunPlan, plan_run
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.score_from_moments import block_map, block_pair, block_scores
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.metrics.geometry import jump_strength
from layerjump.metrics.token_loss import token_losses
from layerjump.models.model import Model

PROFILE_SPLIT = "75/0/25"
"""Split of the held-out documents: maps are fitted on three quarters and tested on one."""
MAX_FIT_POSITIONS_PER_DIM = 60
"""Limit of positions to fit on, for every dimension: pure noise then has a linearity of 1/60."""
MAX_LOSS_TOKENS = 30_000
MAX_LENS_POSITIONS = 600
MEASUREMENTS_FILE = "track.json"

Result = TypeVar("Result")
Row = dict[str, Any]
"""One row of a table: column name → number, or None for a number that is not finite."""


@dataclass(frozen=True)
class BlockProfile:
    """Linearity of one block (arXiv 2405.12250) in sample and held out, and the angle between its two levels."""

    block: int
    with_residual: float
    without_residual: float
    with_residual_held_out: float
    without_residual_held_out: float
    identity: float
    """Linearity of the identity map."""
    chance_floor: float
    """Linearity of pure noise, in sample."""
    angle: float


@dataclass(frozen=True)
class LevelProfile:
    """R² of the map from one level to the last, and how often map and identity predict the model's own token."""

    level: int
    r2: float
    agreement_map: float
    agreement_identity: float


@dataclass(frozen=True)
class Profile:
    """Measurements of one model on held-out text."""

    loss: float
    """Mean loss in nats per token."""
    perplexity: float
    jump_strength: float
    blocks: list[BlockProfile]
    levels: list[LevelProfile]

    def mean(self, column: str) -> float:
        """Return the mean of a column, such as "with residual", over blocks or over the levels below the last."""
        name = column.replace(" ", "_")
        rows = self.blocks if name in vars(self.blocks[0]) else self.levels[:-1]
        return sum(getattr(row, name) for row in rows) / len(rows)

    def summary_row(self) -> dict[str, float]:
        """Return loss, jump strength and the means over blocks and levels."""
        streams = ("with residual", "without residual", "with residual held out", "without residual held out")
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            **{name: self.mean(name) for name in (*streams, "identity", "chance floor")},
            "jump strength": self.jump_strength,
            **{name: self.mean(name) for name in ("agreement map", "agreement identity", "r2")},
        }

    def tables(self, **labels: int | str) -> dict[str, list[Row]]:
        """Return the rows of the tables `steps`, `blocks` and `levels`; the labels become their first columns."""

        def row(values: dict[str, float]) -> Row:
            columns = {name.replace("_", " "): value for name, value in values.items()}
            return labels | {name: value if math.isfinite(value) else None for name, value in columns.items()}

        blocks, levels = ([row(vars(profile)) for profile in rows] for rows in (self.blocks, self.levels))
        return {"steps": [row(self.summary_row())], "blocks": blocks, "levels": levels}


def measure_profile(model: Model, text: Corpus, *, seed: int = 0) -> Profile:
    """Measure a model on a text; the same seed selects the same documents and positions."""

    def plan(pairs: str, positions: Positions) -> RunPlan:
        max_tokens = int(MAX_FIT_POSITIONS_PER_DIM * model.d_model / (positions.amount or 1) / 0.75)
        settings: dict[str, Any] = {"positions": positions, "split": PROFILE_SPLIT, "seed": seed}
        return _with_at_most(max_tokens, partial(plan_run, model, text, pairs=pairs, use_validation=False, **settings))

    adjacent = plan("adjacent", Positions("all", special=True)).run()
    predicting = Positions.parse(MASKED_SHARE if model.masked else "all")
    to_last = plan("to-last", predicting)
    jumps = solve_jumps(to_last.run(), "affine")
    loss_batches = partial(make_batches, text, model.tokenization, predicting, seed=seed, max_batch_tokens=4096)
    losses = token_losses(model, _with_at_most(MAX_LOSS_TOKENS, loss_batches))
    lens_batches = to_last.batches["test"]
    if lens_batches.n_picks > MAX_LENS_POSITIONS and not model.masked:  # a masked model keeps the plan's masks
        share = Positions("share", MAX_LENS_POSITIONS / lens_batches.n_picks)
        documents = [*dict.fromkeys(lens_batches.sequences.document)]
        lens_batches = make_batches(text, model.tokenization, share, documents=documents, seed=seed)
    scores = evaluate_lenses(model, {"map": Lens(model, jumps), "identity": Lens(model)}, lens_batches)
    agreement = scores.hits(1).double().mean(-1)
    blocks = []
    for level in range(model.n_blocks):
        fitted = block_map(adjacent.fit, level)
        linearity = block_scores(fitted, adjacent.fit, adjacent.test, level)
        columns = {name.replace(" ", "_"): value for name, value in linearity.items()}
        blocks.append(BlockProfile(block=level + 1, angle=adjacent.test.mean_angle(block_pair(level)), **columns))
    r2 = {info.source.index: info.r2[0] for info in jumps.info.values() if info.r2}
    levels = [
        LevelProfile(level, r2.get(level, 1.0), float(agreement[0, level]), float(agreement[1, level]))
        for level in range(model.n_blocks + 1)
    ]
    strength = jump_strength([block.angle for block in blocks])
    return Profile(losses.mean, losses.perplexity, strength, blocks, levels)


def _with_at_most(max_tokens: int, make: Callable[..., Result]) -> Result:
    """Call with a limit of tokens, or without one if the text has fewer."""
    try:
        return make(tokens=max_tokens)
    except TextTooShort:
        return make(tokens=None)


class Measurements(BaseModel):
    """Tables of all profiles of a training run: one row a step, a block of a step, and a level of a step."""

    steps: list[dict[str, StrictInt | StrictFloat | None]]
    blocks: list[dict[str, StrictInt | StrictFloat | None]]
    levels: list[dict[str, StrictInt | StrictFloat | None]]

    @field_validator("steps", "blocks", "levels")
    @classmethod
    def _check_rows(cls, rows: list[Row]) -> list[Row]:
        if any(row.keys() != rows[0].keys() for row in rows):
            raise ValueError("rows have different columns")
        if any(type(row.get("step")) is not int for row in rows):
            raise ValueError("a row has no step")
        return rows


def load_measurements(path: Path, step: int) -> Measurements:
    """Load the measurements of an earlier part of a run, up to a step."""
    try:
        measured = Measurements.model_validate(read_json(path))
    except ValidationError as error:
        raise BadArtifact(
            f"{path} does not hold the measurements of a training; remove {path.parent} to start that training again"
        ) from error
    return Measurements(**{name: [row for row in rows if row["step"] <= step] for name, rows in measured})


class TrainingMonitor(TrainerCallback):
    """Measures the model before the first step, every `eval_every` steps and after the last, in the first process."""

    def __init__(self, model: Model, text: Corpus, *, eval_every: int, folder: Path) -> None:
        self.measurements = Measurements(steps=[], blocks=[], levels=[])
        self._model, self._text = model, text
        self._eval_every, self._path = eval_every, folder / MEASUREMENTS_FILE

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure the untrained model, or load what an earlier part of the run measured before its checkpoint."""
        if not state.is_world_process_zero:
            return
        if state.global_step == 0:
            self._measure(0)
        elif self._path.is_file():
            self.measurements = load_measurements(self._path, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Measure if this step is due."""
        is_due = state.global_step % self._eval_every == 0 or state.global_step == state.max_steps
        if is_due and state.is_world_process_zero:
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        hf = self._model.hf
        if not all(bool(weight.isfinite().all()) for weight in hf.parameters()):
            return  # the trainer is about to raise `Diverged`
        hf.eval()
        for name, rows in measure_profile(self._model, self._text).tables(step=step).items():
            getattr(self.measurements, name).extend(rows)
        hf.train()
        write_json(self._path, self.measurements.model_dump())
