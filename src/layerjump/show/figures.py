"""Which figures each study is shown with. They are made from the tables of `results.json` and nothing else."""

from __future__ import annotations

from layerjump.show import (
    alternation,
    architecture,
    examples,
    exits,
    finetune,
    levels,
    linearity,
    pruning,
    training,
)
from layerjump.show.fallback import fallback
from layerjump.show.panel import Maker, Panel, Study

MAKERS: dict[str, list[Maker]] = {
    "r2": [levels.r2_pairs, levels.r2_composed],
    "predictions": [levels.predictions],
    "exits": [exits.curves, exits.savings],
    "linearity": [linearity.scores, linearity.steps, linearity.angles, linearity.shape],
    "examples": [examples.examples],
    "alternation": [alternation.schedules],
    "pruning": [pruning.pruned, pruning.tasks],
    "dynamics": [training.over_steps, training.by_block],
    "finetune": [finetune.blocks],
    "architecture": [architecture.variants],
}
"""To show a study in its own way, add a row; what no maker draws is drawn by `fallback`."""


def panels(name: str, study: Study) -> list[Panel]:
    """Every panel of a study: those of its makers, then one for each table that none of them used."""
    found = [panel for maker in MAKERS.get(name, []) for panel in maker(study)]
    used = {table for panel in found for table in panel.tables}
    rest = {table: rows for table, rows in study["tables"].items() if table not in used and rows}
    return found + [fallback(table, rows) for table, rows in rest.items()]
