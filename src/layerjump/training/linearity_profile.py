"""Measure loss, linearity and lens predictions of a model on held-out text, once or during training."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, StrictFloat, StrictInt, ValidationError, field_validator
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import BadArtifact, TextTooShort
from layerjump.io import read_json, write_json
from layerjump.jumps.collect_moments import RunPlan, plan_run
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.scoring import block_map, block_pair, block_scores
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
        rows = self.block_rows()
        rows = rows if column in rows[0] else self.level_rows()[:-1]
        return sum(row[column] for row in rows) / len(rows)

    def block_rows(self) -> list[Row]:
        """Return one row a block, with column names as in files and reports ("with residual held out")."""
        return [_as_row(block) for block in self.blocks]

    def level_rows(self) -> list[Row]:
        """Return one row a level, with column names as in files and reports ("agreement map")."""
        return [_as_row(level) for level in self.levels]

    def summary_row(self) -> dict[str, float]:
        """Return loss, jump strength and the means over blocks and levels."""
        streams = ("with residual", "without residual")
        held_out = ("with residual held out", "without residual held out")
        block_means = {name: self.mean(name) for name in (*streams, *held_out, "identity")}
        block_means["chance floor"] = self.mean("chance floor")
        level_names = ("agreement map", "agreement identity", "r2")
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            **block_means,
            "jump strength": self.jump_strength,
            **{name: self.mean(name) for name in level_names},
        }

    def tables(self, **labels: int | str) -> dict[str, list[Row]]:
        """Return the rows of the tables `steps`, `blocks` and `levels`; the labels become their first columns."""
        rows = {"steps": [self.summary_row()], "blocks": self.block_rows(), "levels": self.level_rows()}
        return {name: [labels | _finite(row) for row in table] for name, table in rows.items()}


def _as_row(profile: BlockProfile | LevelProfile) -> Row:
    return {name.replace("_", " "): value for name, value in asdict(profile).items()}


def _finite(row: Row) -> Row:
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def measure_profile(model: Model, text: Corpus, *, seed: int = 0) -> Profile:
    """Measure a model on a text; the same seed selects the same documents and positions."""
    adjacent = _plan(model, text, "adjacent", Positions("all", special=True), seed).run()
    to_last = _plan(model, text, "to-last", _predicting_positions(model), seed)
    jumps = solve_jumps(to_last.run(), "affine")
    losses = token_losses(model, _loss_batches(model, text, seed))
    lenses = {"map": Lens(model, jumps), "identity": Lens(model)}
    scores = evaluate_lenses(model, lenses, _lens_batches(model, text, to_last, seed))
    agreement = scores.hits(1).double().mean(-1)
    blocks = []
    for level in range(model.n_blocks):
        fitted = block_map(adjacent.fit, level)
        linearity = block_scores(fitted, adjacent.fit, adjacent.test, level)
        blocks.append(
            BlockProfile(
                block=level + 1,
                angle=adjacent.test.mean_angle(block_pair(level)),
                **{name.replace(" ", "_"): value for name, value in linearity.items()},
            )
        )
    r2 = {info.source.index: info.r2[0] for info in jumps.info.values() if info.r2}
    levels = [
        LevelProfile(level, r2.get(level, 1.0), float(agreement[0, level]), float(agreement[1, level]))
        for level in range(model.n_blocks + 1)
    ]
    strength = jump_strength([block.angle for block in blocks])
    return Profile(losses.mean, losses.perplexity, strength, blocks, levels)


def _predicting_positions(model: Model) -> Positions:
    """Positions at which the model predicts a token: the masks of a masked model."""
    return Positions.parse(MASKED_SHARE if model.masked else "all")


def _plan(model: Model, text: Corpus, pairs: str, positions: Positions, seed: int) -> RunPlan:
    def plan(tokens: int | None) -> RunPlan:
        return plan_run(
            model,
            text,
            pairs=pairs,
            positions=positions,
            tokens=tokens,
            split=PROFILE_SPLIT,
            seed=seed,
            use_validation=False,
        )

    try:
        share = positions.amount or 1
        return plan(int(MAX_FIT_POSITIONS_PER_DIM * model.d_model / share / 0.75))
    except TextTooShort:
        return plan(None)


def _loss_batches(model: Model, text: Corpus, seed: int) -> Batches:
    positions = _predicting_positions(model)
    try:
        return make_batches(
            text, model.tokenization, positions, seed=seed, tokens=MAX_LOSS_TOKENS, max_batch_tokens=4096
        )
    except TextTooShort:
        return make_batches(text, model.tokenization, positions, seed=seed, max_batch_tokens=4096)


def _lens_batches(model: Model, text: Corpus, plan: RunPlan, seed: int) -> Batches:
    """About `MAX_LENS_POSITIONS` positions of the test documents; a masked model keeps the plan's masks."""
    test = plan.batches["test"]
    if test.n_picks <= MAX_LENS_POSITIONS or model.masked:
        return test
    share = Positions("share", MAX_LENS_POSITIONS / test.n_picks)
    documents = [*dict.fromkeys(test.sequences.document)]
    return make_batches(text, model.tokenization, share, documents=documents, seed=seed)


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

    def add(self, profile: Profile, step: int) -> None:
        """Append the rows of a profile."""
        for name, rows in profile.tables(step=step).items():
            getattr(self, name).extend(rows)

    def until(self, step: int) -> Measurements:
        """Return the rows up to a step."""
        return Measurements(
            **{name: [row for row in rows if row["step"] <= step] for name, rows in self.model_dump().items()}
        )


def load_measurements(path: Path, step: int) -> Measurements:
    """Load the measurements of an earlier part of a run, up to a step."""
    try:
        return Measurements.model_validate(read_json(path)).until(step)
    except ValidationError as error:
        raise BadArtifact(
            f"{path} does not hold the measurements of a training; remove {path.parent} to start that training again"
        ) from error


class TrainingMonitor(TrainerCallback):
    """Measures the model before the first step, every `eval_every` steps and after the last, in the first process."""

    def __init__(
        self, hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Corpus, *, eval_every: int, folder: Path
    ) -> None:
        self.measurements = Measurements(steps=[], blocks=[], levels=[])
        self._model = Model.wrap(hf, tokenizer, name="model")
        self._text, self._eval_every, self._path = text, eval_every, folder / MEASUREMENTS_FILE

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
        self.measurements.add(measure_profile(self._model, self._text), step)
        hf.train()
        write_json(self._path, self.measurements.model_dump())
