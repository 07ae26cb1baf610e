"""`architecture`: does it matter for linear jumps how a transformer is built?

Protocol: models of the depth and width of the given model, with its tokenizer, are trained from scratch on the same
text, in the same order and for the same number of steps. They differ in the positional encoding, the range of
attention, or the placement of the norms; variants are compared within one such group, because other rows differ in more
than one respect. The authors of "Jump to Conclusions" leave the question open.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import plotly.graph_objects as go

from layerjump.data.corpus import Corpus
from layerjump.errors import argument
from layerjump.models.model import Model
from layerjump.studies.charts import BLUE, Panel, colours, draw_bars, empty_figure
from layerjump.studies.formatting import number, unique
from layerjump.studies.results import Column, Interval, Record, Result, Study
from layerjump.studies.setup import Setup
from layerjump.studies.training_dynamics import ProfileRow
from layerjump.training.build_model import VARIANTS, TrainingArchitecture, build_model
from layerjump.training.linearity_profile import measure_profile
from layerjump.training.packed_rows import pack_rows
from layerjump.training.pretrain import Recipe, train_model, training_arguments

MAX_LENGTH, BATCH_SIZE = 128, 16
LEARNING_RATE = 1e-3


class RunRow(Record):
    """One trained model."""

    varies: str
    variant: str
    run: int
    parameters: int
    profile: Annotated[ProfileRow, Column("{}")]
    gain: float
    """Agreement of the map to the last level with the model, minus that of the identity, mean over levels."""


class VariantRow(Record):
    """Means over the runs of one variant; the intervals are one standard deviation to each side."""

    varies: str
    variant: str
    parameters: int
    perplexity: Annotated[Interval, Column("perplexity{}")]
    r2: Annotated[Interval, Column("r2{}")]
    agreement_map: Annotated[Interval, Column("agreement map{}")]
    agreement_identity: Annotated[Interval, Column("agreement identity{}")]
    gain: Annotated[Interval, Column("gain{}")]
    with_residual_held_out: Annotated[Interval, Column("with residual held out{}")]
    without_residual_held_out: Annotated[Interval, Column("without residual held out{}")]
    jump_strength: Annotated[Interval, Column("jump strength{}")]


class Tables(Record):
    """Rows by run and by variant."""

    runs: list[RunRow]
    variants: list[VariantRow]


class Headline(Record):
    """Means over runs, by variant."""

    gain: Annotated[dict[str, float], Column("gain_{}")]
    without_residual_held_out: Annotated[dict[str, float], Column("without_residual_held_out_{}")]


def cannot_run(setup: Setup) -> str | None:
    """Return why the study cannot run, or None."""
    if setup.model.task != "causal":
        return "it trains causal models with the tokenizer of this model, which is not causal"
    if setup.model.tokenizer is None:
        return "it trains models with the tokenizer of this model, which has none"
    if not setup.settings.training_steps:
        return f"it trains models of the size of this one; pass {argument('training_steps')}, and a small model"
    return None


def run(setup: Setup) -> Result[Tables, Headline]:
    """Train every variant several times, and measure each model on the test documents."""
    settings = setup.settings
    tables = Tables([], [])
    train_text, test_text = (
        Corpus(setup.corpus.name, tuple(setup.corpus.documents[index] for index in setup.documents(part)), part)
        for part in ("fit", "test")
    )
    steps, length = settings.training_steps or 1, min(MAX_LENGTH, setup.model.tokenization.max_length)
    recipe = Recipe(
        layers=setup.model.n_blocks,
        hidden_size=setup.model.d_model,
        heads=int(setup.model.text_config.num_attention_heads),
        max_positions=length,
        length=length,
        steps=steps,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        eval_every=steps,
    )
    for varies, variants in VARIANTS.items():
        for name, architecture in variants.items():
            rows = []
            for index in range(settings.training_runs):
                of_run = replace(recipe, seed=settings.seed + index)
                model = _train(setup.model, architecture, train_text, of_run)
                profile = ProfileRow.of(measure_profile(model, test_text, seed=settings.seed))
                gain = profile.agreement_map - profile.agreement_identity
                size = model.hf.num_parameters()
                rows.append(RunRow(varies, name, index + 1, size, profile, gain))
            tables.runs.extend(rows)
            tables.variants.append(_average(rows))
    facts = {
        "steps": steps,
        "batch": BATCH_SIZE,
        "length": length,
        "learning_rate": LEARNING_RATE,
        "runs": settings.training_runs,
    }
    means = {row.variant.replace(" ", "_"): row for row in tables.variants}
    headline = Headline(
        gain={name: row.gain.mean for name, row in means.items()},
        without_residual_held_out={name: row.without_residual_held_out.mean for name, row in means.items()},
    )
    notes = [
        "Gain is how often the map to the last level predicts the model's own token, minus how often the identity "
        "does, mean over levels; whiskers are one standard deviation over seeds. Compare variants within one group: "
        "other rows differ in more respects. All variants share one learning rate, and none is trained to convergence."
    ]
    return Result("architecture", tables, headline, notes, facts)


def _train(like: Model, architecture: TrainingArchitecture, text: Corpus, recipe: Recipe) -> Model:
    tokenizer = like.tokenization.tokenizer
    rows = pack_rows(text.documents, like.tokenization, recipe.length)
    hf = build_model(architecture, recipe, tokenizer, seed=recipe.seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = training_arguments(recipe, Path(folder), device=like.device.type)
        settings.save_strategy = "no"
        train_model(hf, tokenizer, rows, recipe, settings)
    return Model.wrap(hf, tokenizer, name=architecture.family)


def _average(rows: Sequence[RunRow]) -> VariantRow:
    def interval(score: Callable[[RunRow], float]) -> Interval:
        values = [score(row) for row in rows]
        spread = stdev(values) if len(values) > 1 else 0.0
        return Interval(mean(values), mean(values) - spread, mean(values) + spread)

    return VariantRow(
        rows[0].varies,
        rows[0].variant,
        rows[0].parameters,
        perplexity=interval(lambda row: row.profile.perplexity),
        r2=interval(lambda row: row.profile.r2),
        agreement_map=interval(lambda row: row.profile.agreement_map),
        agreement_identity=interval(lambda row: row.profile.agreement_identity),
        gain=interval(lambda row: row.gain),
        with_residual_held_out=interval(lambda r: r.profile.linearity.with_residual_held_out),
        without_residual_held_out=interval(lambda r: r.profile.linearity.without_residual_held_out),
        jump_strength=interval(lambda row: row.profile.jump_strength),
    )


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return one bar a variant; the whiskers are one standard deviation over seeds."""
    rows = result.tables.variants
    groups = unique(row.varies for row in rows)
    paint = colours(groups) if len(groups) > 1 else dict.fromkeys(groups, BLUE)

    def chart(title: str, score: Callable[[VariantRow], Interval]) -> go.Figure:
        figure = empty_figure(title, height=360)
        for name in groups:
            group = [row for row in rows if row.varies == name]
            labels = [f"{row.varies}: {row.variant}" for row in group]
            draw_bars(figure, labels, list(map(score, group)), name=name, colour=paint[name])
        return figure.update_yaxes(autorange="reversed")

    charts = [
        chart("gain of the map over the identity in agreement", lambda row: row.gain),
        chart("linearity without residual, held out", lambda row: row.without_residual_held_out),
        chart("R² of the map to the last level", lambda row: row.r2),
        chart("held-out perplexity", lambda row: row.perplexity),
    ]
    most, least = (end(rows, key=lambda row: row.gain.mean) for end in (max, min))
    reading = (
        f"A map to the last level gains most over the identity with {most.varies} {most.variant} "
        f"({number(most.gain.mean)}) and least with {least.varies} {least.variant} ({number(least.gain.mean)}); only "
        "variants of one group differ in one respect alone."
    )
    return [Panel("Architectures", reading, ("variants", "runs"), charts)]


STUDY = Study(
    "architecture", "does it matter for linear jumps how a transformer is built?", run, figures, cannot_run=cannot_run
)
