"""The page that shows one pretraining run."""

from __future__ import annotations

from typing import Any

from layerjump.report.page import Drawer, Section, page
from layerjump.studies.charts import number, safe
from layerjump.studies.training_dynamics import by_block, over_steps


def training_page(record: dict[str, Any], command: str) -> str:
    """One file that shows a pretraining run, from its record alone."""
    drawer, told = Drawer(), record["settings"]
    name = f"{told['arch']}, {told['shape_layers']} blocks, width {told['shape_hidden']}"
    penalty = (
        told["penalty"]
        if told["penalty"] == "none"
        else f"{told['penalty']} × {told['strength']:g}"
    )
    about = (
        f"{number(record['parameters'])} parameters; {number(told['steps'])} steps of {told['batch']} × "
        f"{told['length']} tokens of {record['text']['name']}; penalty: {penalty}; seed {told['seed']}"
    )
    html = "".join(
        drawer.panel(panel, record, files="training", command=command)
        for maker in (over_steps, by_block)
        for panel in maker(record)
    )
    return page(name, safe(about), "", [Section("training", "training", html)])
