"""`architecture`: does it matter for linear jumps how a transformer is built?

Models as deep and wide as the one given, with its tokenizer, are trained from scratch on the same text, in the same
order, for as many steps; they differ in where positions come from, how far attention reaches, or where the norms stand.
What varies is compared within rows that share all else. The authors of "Jump to Conclusions" leave the question open.

Figures of `architecture`: variants beside each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import plotly.graph_objects as go

from layerjump.data.corpus import Corpus
from layerjump.errors import argument
from layerjump.models.model import Model
from layerjump.studies._untyped import (
    BLUE,
    Panel,
    Result,
    Row,
    Study,
    bars,
    colours,
    empty_figure,
    number,
    unique,
)
from layerjump.studies.setup import Setup
from layerjump.training.data import pack_rows
from layerjump.training.model import VARIANTS, Architecture, ModelShape, build_model
from layerjump.training.monitor import measure_profile
from layerjump.training.pretrain import Recipe, train_model, training_arguments

LENGTH, BATCH = 128, 16
LEARNING_RATE = 1e-3
SHOWN = (
    "perplexity",
    "r2",
    "agreement map",
    "agreement identity",
    "gain",
    "with residual held out",
    "without residual held out",
    "jump strength",
)


def unable(setup: Setup) -> str | None:
    """Why it cannot be studied here, if it cannot."""
    if setup.model.task != "causal":
        return "it trains causal models with this one's tokenizer, and this one is not causal"
    if setup.model.tokenizer is None:
        return "it trains models with this one's tokenizer, and it has none"
    return (
        None
        if setup.settings.train_steps
        else f"it trains models as large as this one; give {argument('train_steps')}, and a small model"
    )


def run(setup: Setup) -> Result:
    """Train every variant `runs` times, and measure each on the test documents."""
    settings = setup.settings
    result = Result("architecture", {"runs": [], "variants": []})
    every = [(what, name) for what, variants in VARIANTS.items() for name in variants]
    text, held_out = (_documents(setup, part) for part in ("fit", "test"))
    for what, name in every:
        rows = []
        for turn in range(settings.finetune_runs):
            recipe = _recipe(setup, seed=settings.seed + turn)
            model = _trained(setup.model, VARIANTS[what][name], text, recipe)
            found = measure_profile(model, held_out, seed=settings.seed).summary_row()
            found["gain"] = found["agreement map"] - found["agreement identity"]
            about: Row = {"varies": what, "variant": name, "run": turn + 1}
            rows.append(about | {"parameters": model.hf.num_parameters()} | found)
        result.tables["runs"] += rows
        result.tables["variants"].append(_summed(rows))
    recipe = _recipe(setup, seed=settings.seed)
    result.settings = {"steps": recipe.steps, "batch": BATCH, "length": recipe.length}
    result.settings |= {"learning_rate": LEARNING_RATE, "runs": settings.finetune_runs}
    result.headline = _headline(result.tables["variants"])
    result.notes.append(
        "Gain is how often the map to the last level gives the model's own token, less how often the identity does, "
        "mean over levels; ± is the standard deviation over seeds. Compare within what varies: other rows differ "
        "in more than that. One learning rate serves all, and none of them is trained to the end."
    )
    return result


def _documents(setup: Setup, part: str) -> Corpus:
    documents = setup.documents(part)
    chosen = tuple(setup.corpus.documents[i] for i in documents)
    return Corpus(setup.corpus.name, chosen, part)


def _recipe(setup: Setup, *, seed: int) -> Recipe:
    model, steps = setup.model, setup.settings.train_steps or 1
    length = min(LENGTH, model.tokenization.max_length)
    heads = int(model.hf.config.num_attention_heads)
    return Recipe(
        shape=ModelShape(model.n_blocks, model.d_model, heads, length),
        length=length,
        steps=steps,
        batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        seed=seed,
        eval_every=steps,
    )


def _trained(like: Model, kind: Architecture, text: Corpus, recipe: Recipe) -> Model:
    tokenizer = like.tokenization.tokenizer
    rows = pack_rows(text.documents, like.tokenization, recipe.length)
    hf = build_model(kind, recipe.shape, tokenizer, seed=recipe.seed)
    with tempfile.TemporaryDirectory() as folder:
        settings = training_arguments(recipe, Path(folder), device=like.device.type)
        settings.save_strategy = "no"
        train_model(hf, tokenizer, rows, recipe, settings)
    return Model.wrap(hf, tokenizer, name=kind.family)


def _summed(rows: list[Row]) -> Row:
    """Means over seeds, with their standard deviations as bounds."""
    found: Row = {name: rows[0][name] for name in ("varies", "variant", "parameters")}
    for name in SHOWN:
        values = [row[name] for row in rows]
        spread = stdev(values) if len(values) > 1 else 0.0
        found |= {name: mean(values), f"{name} low": mean(values) - spread}
        found[f"{name} high"] = mean(values) + spread
    return found


def _headline(rows: list[Row]) -> Row:
    return {
        f"{name}_{row['variant']}".replace(" ", "_"): row[name]
        for row in rows
        for name in ("gain", "without residual held out")
    }


_SHOWN = (
    ("gain", "gain of the map over the identity in own tokens"),
    ("without residual held out", "linearity without residual, held out"),
    ("r2", "R² of the map to the last level"),
    ("perplexity", "held-out perplexity"),
)


def variants(study: Study) -> list[Panel]:
    """One bar a variant; the whiskers are a standard deviation over seeds."""
    rows = study["tables"].get("variants")
    if not rows:
        return []
    named = [row | {"name": f"{row['varies']}: {row['variant']}"} for row in rows]
    figures = [_bars(named, column, title) for column, title in _SHOWN]
    most, least = (end(rows, key=lambda row: row["gain"]) for end in (max, min))
    reading = (
        f"A map to the last level gains most over the identity with {most['varies']} {most['variant']} "
        f"({number(most['gain'])}), least with {least['varies']} {least['variant']} ({number(least['gain'])}); only "
        "variants of one kind differ in that alone."
    )
    return [Panel("Architectures", reading, ("variants", "runs"), figures)]


def _bars(rows: Sequence[Row], column: str, title: str) -> go.Figure:
    figure = empty_figure(title, height=360)
    kinds = unique(row["varies"] for row in rows)
    paint = colours(kinds) if len(kinds) > 1 else dict.fromkeys(kinds, BLUE)
    for kind in kinds:
        mine = [row for row in rows if row["varies"] == kind]
        bars(
            mine,
            "name",
            column,
            name=kind,
            colour=paint[kind],
            figure=figure,
            low=f"{column} low",
            high=f"{column} high",
        )
    return figure.update_yaxes(autorange="reversed")
