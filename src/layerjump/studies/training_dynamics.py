"""`dynamics`: how linear a model is at every checkpoint of its training.

"Your Transformer is Secretly Linear" finds that main-stream linearity falls during pretraining (its figure's legend
says "without residuals", its text the opposite): here both are given, in sample and held out, with the loss, the
angles' jump strength, and what the levels predict. Checkpoints are folders, or hub revisions of the model.

Figures of a model in training, or of a series of checkpoints: tables `steps`, `blocks` and `levels`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from layerjump.errors import BadStudy, argument
from layerjump.models.loading import load
from layerjump.models.model import Model
from layerjump.studies._untyped import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    Panel,
    Result,
    Row,
    Study,
    add_line,
    empty_figure,
    heat_map,
    number,
)
from layerjump.studies.setup import Setup
from layerjump.training.monitor import PROFILE_SPLIT, measure_profile

_NAMES = ("with residual", "without residual")


def unable(setup: Setup) -> str | None:
    """Why training cannot be followed, if it cannot."""
    if setup.model.task == "seq2seq":
        return "it measures single stacks of blocks, and this is an encoder–decoder"
    if setup.model.no_predictions:
        return setup.model.no_predictions
    return (
        None
        if setup.settings.checkpoints
        else f"it needs a series of checkpoints, and got none; give {argument('checkpoints')} (folders or revisions)"
    )


def run(setup: Setup) -> Result:
    """Measure every checkpoint on the same text."""
    tables: dict[str, list[Row]] = {"steps": [], "blocks": [], "levels": []}
    for place, (name, model) in enumerate(_series(setup), start=1):
        found = measure_profile(model, setup.corpus, seed=setup.settings.seed)
        for table, rows in found.tables(step=step_of(name, place), checkpoint=name).items():
            tables[table] += rows
    for name in tables:
        tables[name].sort(key=lambda row: int(row["step"]))
    result = Result("dynamics", tables)
    result.settings = {"checkpoints": len(tables["steps"]), "split": PROFILE_SPLIT}
    result.headline = _headline(tables["steps"])
    result.notes.append(
        "Positions other than 0; maps are fitted on three quarters of the documents and tested on one. Jump strength "
        "(the last block's mean angle over the mean of the others') is our definition."
    )
    return result


def _series(setup: Setup) -> Iterator[tuple[str, Model]]:
    like: dict[str, Any] = {
        "device": str(setup.model.device),
        "dtype": str(setup.model.hf.dtype).split(".")[-1],
    }
    for given in setup.settings.checkpoints:
        folder = Path(given).expanduser()
        if not folder.is_dir():
            # No folder: a branch, tag or commit of the model.
            yield given, load(setup.model.name, revision=given, **like)
            continue
        inside = sorted(folder.glob("checkpoint-*"), key=lambda path: step_of(path.name, 0))
        places = [folder] if (folder / "config.json").is_file() else inside
        if not places:
            raise BadStudy(
                f"{given} is no checkpoint, and holds none (checkpoint-*); give folders that do, or hub revisions"
            )
        for path in places:
            yield path.name, load(path, **like)


def step_of(name: str, otherwise: int) -> int:
    """The step in a checkpoint's name (`checkpoint-500`, `step1000`), or its place in the series."""
    found = re.findall(r"\d+", name)
    return int(found[-1]) if found else otherwise


def _headline(rows: list[Row]) -> Row:
    first, last = rows[0], rows[-1]
    found: Row = {"first_step": first["step"], "last_step": last["step"]}
    for name in (*_NAMES, *(f"{name} held out" for name in _NAMES), "jump strength", "perplexity"):
        key = name.replace(" ", "_")
        found |= {f"first_{key}": first[name], f"last_{key}": last[name]}
    return found


_LINES = (
    ("perplexity", (("perplexity", "perplexity", BLUE, "solid"),)),
    (
        "linearity, mean over blocks",
        (
            ("with residual held out", "with residual", BLUE, "solid"),
            ("without residual held out", "without residual", GREEN, "solid"),
            ("identity", "identity", ORANGE, "dash"),
            ("chance floor", "noise would score (in sample)", GREY, "dot"),
        ),
    ),
    (
        "own token given by a lens, mean over levels",
        (
            ("agreement map", "map", AMBER, "solid"),
            ("agreement identity", "identity", ORANGE, "dash"),
        ),
    ),
    ("jump strength", (("jump strength", "jump strength", PURPLE, "solid"),)),
)


def over_steps(study: Study) -> list[Panel]:
    """What changes from step to step."""
    rows = study["tables"].get("steps")
    if not rows:
        return []
    figures = [_lines(rows, title, lines) for title, lines in _LINES]
    figures[0].update_yaxes(type="log", dtick="D2")
    first, last = rows[0], rows[-1]
    reading = (
        f"From step {number(first['step'])} to {number(last['step'])} held-out perplexity goes from "
        f"{number(first['perplexity'])} to {number(last['perplexity'])}; of what a block adds, a linear map explains "
        f"{number(first['without residual held out'])} on unseen text at first and "
        f"{number(last['without residual held out'])} at last; jump strength goes from "
        f"{number(first['jump strength'])} to {number(last['jump strength'])}."
    )
    return [Panel("From step to step", reading, ("steps",), figures)]


def _lines(
    rows: Sequence[Row], title: str, lines: Sequence[tuple[str, str, str, str]]
) -> go.Figure:
    figure = empty_figure(title, x="step")
    for column, name, colour, dash in lines:
        add_line(figure, rows, "step", column, name=name, colour=colour, dash=dash)
    return figure.update_traces(showlegend=len(lines) > 1)


def by_block(study: Study) -> list[Panel]:
    """Where in the model it changes: blocks and levels up, steps across."""
    blocks, levels = (study["tables"].get(name) for name in ("blocks", "levels"))
    if not blocks or not levels:
        return []
    column = "without residual held out"
    figures = [
        _over(blocks, "block", column, "linearity without residual, held out"),
        _over(levels, "level", "agreement map", "own token given by the map"),
    ]
    last = [row for row in blocks if row["step"] == blocks[-1]["step"]]
    least = min(last, key=lambda row: row[column])
    most = max(last, key=lambda row: row[column])
    reading = (
        f"At the end block {least['block']} is the least linear ({number(least[column])} without the residual stream) "
        f"and block {most['block']} the most ({number(most[column])})."
    )
    return [Panel("Block by block", reading, ("blocks", "levels"), figures)]


def _over(rows: Sequence[Row], up: str, column: str, title: str) -> go.Figure:
    named = [row | {"step": str(row["step"])} for row in rows]
    figure = heat_map(named, "step", up, column, title=title, x_title="step", y_title=up)
    # Steps are names here: as numbers they would be spaced, and cells squared, by their size.
    return figure.update_xaxes(type="category").update_yaxes(autorange=True, dtick=1)
