"""`dynamics`: how linear a model is at every checkpoint of its training.

"Your Transformer is Secretly Linear" finds that main-stream linearity falls during pretraining (its figure's legend
says "without residuals", its text the opposite): here both are given, in sample and held out, with the loss, the
angles' jump strength, and what the levels predict. Checkpoints are folders, or hub revisions of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerjump.errors import BadStudy
from layerjump.inputs.loading import load
from layerjump.inputs.models import Model
from layerjump.studies.result import Result, Row
from layerjump.studies.setup import Setup
from layerjump.train.profile import SIZES, profile
from layerjump.train.track import Tables, add

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
        else "it follows a series of checkpoints, and none was given; give --checkpoint (folders or hub revisions)"
    )


def run(setup: Setup) -> Result:
    """Measure every checkpoint on the same text."""
    tables: Tables = {"steps": [], "blocks": [], "levels": []}
    for place, (name, model) in enumerate(_series(setup), start=1):
        found = profile(model, setup.corpus, seed=setup.settings.seed)
        add(tables, found, step=step_of(name, place), checkpoint=name)
    for name in tables:
        tables[name].sort(key=lambda row: int(row["step"]))
    result = Result("dynamics", tables)
    result.settings = {"checkpoints": len(tables["steps"]), "split": SIZES}
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
