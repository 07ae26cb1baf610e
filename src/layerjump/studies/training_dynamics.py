"""`training_dynamics`: how does linearity change from checkpoint to checkpoint of a training run?

Protocol: every checkpoint (a folder, or a hub revision of the model) is measured on the same text: loss, linearity of
every block with and without the residual stream, in sample and held out, jump strength, and how often a map to the last
level and the identity predict the model's own token. "Your Transformer is Secretly Linear" finds that main-stream
linearity falls during pretraining (the legend of its figure says "without residuals", its text the opposite), so both
are given. The figures also show the record of a training run of `layerjump pretrain`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from layerjump.errors import BadStudy, argument
from layerjump.models.loading import load
from layerjump.models.model import Model
from layerjump.studies.charts import Panel, colours, draw_heat_map, line_chart
from layerjump.studies.formatting import number, unique
from layerjump.studies.linearity import Scores
from layerjump.studies.results import Column, Record, Result, Study, from_json
from layerjump.studies.setup import Setup
from layerjump.training.linearity_profile import PROFILE_SPLIT, Profile, measure_profile


class ProfileRow(Record):
    """Loss, jump strength, and means over blocks (linearity) and over levels below the last (predictions)."""

    loss: float
    perplexity: float
    linearity: Annotated[Scores, Column("{}")]
    jump_strength: Annotated[float, Column("jump strength")]
    agreement_map: Annotated[float, Column("agreement map")]
    agreement_identity: Annotated[float, Column("agreement identity")]
    r2: float

    @classmethod
    def of(cls, profile: Profile) -> ProfileRow:
        return from_json(cls, profile.tables()["steps"][0])


class StepRow(Record):
    """The model at one step."""

    step: int
    checkpoint: Annotated[str | None, Column(optional=True)] = field(default=None, kw_only=True)
    profile: Annotated[ProfileRow, Column("{}")]


class BlockRow(Record):
    """Linearity of one block at one step."""

    step: int
    checkpoint: Annotated[str | None, Column(optional=True)] = field(default=None, kw_only=True)
    block: int
    linearity: Annotated[Scores, Column("{}")]
    angle: float


class LevelRow(Record):
    """Predictions of one level at one step."""

    step: int
    checkpoint: Annotated[str | None, Column(optional=True)] = field(default=None, kw_only=True)
    level: int
    r2: float
    agreement_map: Annotated[float, Column("agreement map")]
    agreement_identity: Annotated[float, Column("agreement identity")]


class Tables(Record):
    """Measurements by step, by step and block, and by step and level."""

    steps: list[StepRow] = field(default_factory=list)
    blocks: list[BlockRow] = field(default_factory=list)
    levels: list[LevelRow] = field(default_factory=list)


class StepSummary(Record):
    """The main numbers at one step."""

    step: int
    with_residual: float
    without_residual: float
    with_residual_held_out: float
    without_residual_held_out: float
    jump_strength: float
    perplexity: float

    @classmethod
    def of(cls, row: StepRow) -> StepSummary:
        scores = row.profile.linearity
        in_sample = scores.with_residual, scores.without_residual
        held_out = scores.with_residual_held_out, scores.without_residual_held_out
        return cls(row.step, *in_sample, *held_out, row.profile.jump_strength, row.profile.perplexity)


class Headline(Record):
    """The first and the last step."""

    first: Annotated[StepSummary, Column("first_{}")]
    last: Annotated[StepSummary, Column("last_{}")]


def cannot_run(setup: Setup) -> str | None:
    """Return why training cannot be followed, or None."""
    if setup.model.task == "seq2seq":
        return "it measures single stacks of blocks, and this model is an encoder–decoder"
    if setup.model.no_predictions:
        return setup.model.no_predictions
    if not setup.settings.checkpoints:
        return f"it needs a series of checkpoints; pass {argument('checkpoints')} (folders or revisions)"
    return None


def run(setup: Setup) -> Result[Tables, Headline]:
    """Measure every checkpoint on the same text."""
    measured: dict[str, list[dict[str, Any]]] = {"steps": [], "blocks": [], "levels": []}
    for index, (name, model) in enumerate(_load_checkpoints(setup), start=1):
        profile = measure_profile(model, setup.corpus, seed=setup.settings.seed)
        for table, rows in profile.tables(step=step_of(name, index), checkpoint=name).items():
            measured[table] += rows
    by_step = {table: sorted(rows, key=lambda row: row["step"]) for table, rows in measured.items()}
    tables = from_json(Tables, by_step)
    headline = Headline(StepSummary.of(tables.steps[0]), StepSummary.of(tables.steps[-1]))
    notes = [
        "Position 0 is left out; maps are fitted on three quarters of the documents and tested on one. Jump strength "
        "(the mean angle of the last block over the mean of the others) is our definition."
    ]
    facts = {"checkpoints": len(tables.steps), "split": PROFILE_SPLIT}
    return Result("training_dynamics", tables, headline, notes, facts)


def _load_checkpoints(setup: Setup) -> Iterator[tuple[str, Model]]:
    device, dtype = str(setup.model.device), str(setup.model.dtype).split(".")[-1]
    for checkpoint in setup.settings.checkpoints:
        folder = Path(checkpoint).expanduser()
        if not folder.is_dir():
            # A branch, tag or commit of the model.
            revision = load(setup.model.name, revision=checkpoint, device=device, dtype=dtype)
            yield checkpoint, revision
            continue
        inside = sorted(folder.glob("checkpoint-*"), key=lambda path: step_of(path.name, 0))
        folders = [folder] if (folder / "config.json").is_file() else inside
        if not folders:
            raise BadStudy(
                f"expected a checkpoint or a folder of checkpoint-*, got {checkpoint}; pass such folders or hub "
                f"revisions in {argument('checkpoints')}"
            )
        for path in folders:
            yield path.name, load(path, device=device, dtype=dtype)


def step_of(name: str, default: int) -> int:
    """Return the step in the name of a checkpoint (`checkpoint-500`, `step1000`), or the default."""
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else default


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return what changes from step to step, and in which blocks and levels."""
    return draw_tables(result.tables)


def draw_tables(tables: Tables) -> list[Panel]:
    """Draw the measurements of checkpoints or of a training run."""
    panels, rows = [], tables.steps

    def points(score: Callable[[ProfileRow], float]) -> list[tuple[float, float]]:
        return [(row.step, score(row.profile)) for row in rows]

    if rows:
        linearity = {
            "linearity with residual": points(lambda row: row.linearity.with_residual_held_out),
            "linearity without residual": points(lambda row: row.linearity.without_residual_held_out),
            "identity": points(lambda row: row.linearity.identity),
            "score of noise, in sample": points(lambda row: row.linearity.chance_floor),
        }
        agreement = {
            "map": points(lambda row: row.agreement_map),
            "identity": points(lambda row: row.agreement_identity),
        }
        perplexity = {"perplexity": points(lambda row: row.perplexity)}
        strength = {"jump strength": points(lambda row: row.jump_strength)}
        dashed, paint = ("identity", "score of noise, in sample"), colours(unique([*linearity, *agreement]))
        title = "agreement with the model, mean over levels"
        charts = [
            line_chart("held-out perplexity", perplexity, x="step", scale="log"),
            line_chart("held-out linearity, mean over blocks", linearity, x="step", dashed=dashed, paint=paint),
            line_chart(title, agreement, x="step", scale="unit", dashed=dashed, paint=paint),
            line_chart("jump strength", strength, x="step"),
        ]
        first, last = rows[0], rows[-1]
        reading = (
            f"From step {number(first.step)} to {number(last.step)}, held-out perplexity goes from "
            f"{number(first.profile.perplexity)} to {number(last.profile.perplexity)}. A linear map explains "
            f"{number(first.profile.linearity.without_residual_held_out)} of the residual writes of a block on "
            f"held-out text at first, and {number(last.profile.linearity.without_residual_held_out)} at last. Jump "
            f"strength goes from {number(first.profile.jump_strength)} to {number(last.profile.jump_strength)}."
        )
        panels.append(Panel("From step to step", reading, ("steps",), charts))
    if tables.blocks and tables.levels:
        title = "linearity without residual, held out"
        by_block = {(str(r.step), str(r.block)): r.linearity.without_residual_held_out for r in tables.blocks}
        by_level = {(str(r.step), str(r.level)): r.agreement_map for r in tables.levels}
        charts = [
            draw_heat_map(by_block, title=title, x="step", y="block", upwards=True),
            draw_heat_map(by_level, title="agreement of the map with the model", x="step", y="level", upwards=True),
        ]
        final = [row for row in tables.blocks if row.step == tables.blocks[-1].step]
        most, least = (end(final, key=lambda row: row.linearity.without_residual_held_out) for end in (max, min))
        reading = (
            f"At the last step, block {least.block} is the least linear without the residual stream "
            f"({number(least.linearity.without_residual_held_out)}) and block {most.block} the most "
            f"({number(most.linearity.without_residual_held_out)})."
        )
        panels.append(Panel("Block by block", reading, ("blocks", "levels"), charts))
    return panels


STUDY = Study(
    "training_dynamics", "how does linearity change from checkpoint to checkpoint?", run, figures, cannot_run=cannot_run
)
