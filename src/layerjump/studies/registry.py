"""The registry of studies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from layerjump.errors import BadStudy
from layerjump.studies import (
    architecture,
    attention_heads,
    data_efficiency,
    early_exit,
    examples,
    failures,
    finetuning,
    human_evaluation,
    layer_skipping,
    linearity,
    map_cost,
    predictions,
    probes,
    pruning,
    r2,
    submodules,
    training_dynamics,
    transfer,
)
from layerjump.studies.results import Result
from layerjump.studies.setup import Setup


def no_predictions(setup: Setup) -> str | None:
    """Why a model cannot be asked for tokens, if it cannot."""
    return setup.model.no_predictions


def anything(setup: Setup) -> str | None:
    """A study that any model can do."""
    return None


@dataclass(frozen=True)
class Study:
    """One named experiment."""

    name: str
    run: Callable[[Setup], Result]
    asks: str
    """The question it answers, in a few words."""
    unable: Callable[[Setup], str | None] = no_predictions
    """Why a run cannot do it; None where it can."""
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
    Study("exits", early_exit.run, "how many blocks does stopping early save?"),
    Study(
        "gates",
        probes.run,
        "how many more does it save to ask a probe of the state?",
        probes.unable,
    ),
    Study("linearity", linearity.run, "how linear is each block, and why?", anything),
    Study("submodules", submodules.run, "which sub-modules can be matrices, where, and why?"),
    Study(
        "heads",
        attention_heads.run,
        "which attention heads can be matrices?",
        attention_heads.unable,
    ),
    Study("alternation", layer_skipping.run, "which blocks to run, and which to jump over?"),
    Study("pruning", pruning.run, "what is lost when blocks are dropped?", pruning.unable),
    Study("examples", examples.run, "what do the levels say, in words?"),
    Study(
        "transfer", transfer.run, "does a map fitted on one text serve another?", transfer.unable
    ),
    Study("data", data_efficiency.run, "how much text does a map need, and of what kind?"),
    Study(
        "dynamics",
        training_dynamics.run,
        "how does linearity change from checkpoint to checkpoint?",
        training_dynamics.unable,
    ),
    Study(
        "finetune", finetuning.run, "does fine-tuning make blocks more linear?", finetuning.unable
    ),
    Study(
        "architecture",
        architecture.run,
        "does it matter how a transformer is built?",
        architecture.unable,
    ),
    Study("size", map_cost.run, "what do maps and shortcuts cost, and give?"),
    Study("failures", failures.run, "where are the maps wrong?"),
    Study(
        "plausibility",
        human_evaluation.run,
        "a blinded sheet: are the readings plausible to a human?",
    ),
)
STUDIES: dict[str, Study] = {row.name: row for row in _ROWS}
MAIN = ("r2", "predictions", "exits", "linearity", "examples")
"""What a run does unless told."""


def select_studies(names: str | None) -> list[Study]:
    """The studies of a list such as `r2,exits`, in the table's order; `all` is every one."""
    if names is None:
        return [STUDIES[name] for name in MAIN]
    asked = list(STUDIES) if names == "all" else [name.strip() for name in names.split(",")]
    for name in asked:
        if name not in STUDIES:
            raise BadStudy(f"there is no study {name!r}; known are {', '.join(STUDIES)}, or all")
    return [study for name, study in STUDIES.items() if name in asked]
