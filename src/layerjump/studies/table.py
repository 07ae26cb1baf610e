"""The studies, one row each, in the order in which a report shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layerjump.errors import BadStudy
from layerjump.inputs.models import Model
from layerjump.studies import (
    alternation,
    examples,
    exits,
    heads,
    linearity,
    predictions,
    r2,
    submodules,
)
from layerjump.studies.result import Result
from layerjump.studies.setup import Setup


def no_predictions(model: Model) -> str | None:
    """Why a model cannot be asked for tokens, if it cannot."""
    return model.no_predictions


def anything(model: Model) -> str | None:
    """A study that any model can do."""
    return None


@dataclass(frozen=True)
class Study:
    """One named experiment."""

    name: str
    run: Callable[[Setup], Result]
    asks: str
    """The question it answers, in a few words."""
    unable: Callable[[Model], str | None] = no_predictions
    """Why a model cannot do it; None where it can."""
    level_pairs: str = "to-last"
    """The pairs of levels whose jumps it needs."""


_ROWS = (
    Study(
        "r2",
        r2.run,
        "how much of each level does a map from an earlier one explain?",
        anything,
        "all",
    ),
    Study("predictions", predictions.run, "what does each level already predict?"),
    Study("exits", exits.run, "how many blocks does stopping early save?"),
    Study("linearity", linearity.run, "how linear is each block, and why?", anything),
    Study("submodules", submodules.run, "which sub-modules can be matrices, where, and why?"),
    Study("heads", heads.run, "which attention heads can be matrices?", heads.unable),
    Study("alternation", alternation.run, "which blocks to run, and which to jump over?"),
    Study("examples", examples.run, "what do the levels say, in words?"),
)
STUDIES: dict[str, Study] = {row.name: row for row in _ROWS}
MAIN = ("r2", "predictions", "exits", "linearity", "examples")
"""What a run does unless told."""


def chosen(names: str | None) -> list[Study]:
    """The studies of a list such as `r2,exits`, in the table's order; `all` is every one."""
    if names is None:
        return [STUDIES[name] for name in MAIN]
    asked = list(STUDIES) if names == "all" else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in STUDIES:
            raise BadStudy(f"there is no study {name!r}; known are {', '.join(STUDIES)}, or all")
    return [study for name, study in STUDIES.items() if name in asked]
