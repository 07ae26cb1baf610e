"""Degrees of support of all text architectures of transformers, as benchmarks/architectures.py recorded them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerjump.models.model import Model

TABLE = "support_table.json"


@dataclass(frozen=True)
class Support:
    """How far one architecture is supported."""

    task: str
    model_type: str
    degree: str
    """`full`: levels, parts and predictions are proven; `levels`: no parts; `states`: no predictions; `refused`."""
    parts: str
    """The parts of its blocks, such as `attn ffn`; blocks of another kind follow after a comma."""
    note: str
    """Why the degree is not full, and what else a user should know."""


def read_table() -> list[Support]:
    """The rows of all architectures, as recorded with the transformers version that the table names."""
    table = json.loads(files("layerjump.models").joinpath(TABLE).read_text(encoding="utf-8"))
    return [Support(**row) for row in table["rows"]]


def describe(model: Model) -> Support:
    """How far one model is supported: the row that the table would have for it."""
    anatomy = model.structure.anatomy
    kinds = dict.fromkeys(
        " ".join(f"{write.name} (experts)" if write.is_routed else write.name for write in block.writes)
        for block in anatomy.blocks
        if block.writes
    )
    problems = sorted({block.problem for block in anatomy.blocks if block.problem})
    both_ways = ["reads both ways"] if model.task == "causal" and not model.causal else []
    notes = [*problems, *anatomy.notes, *both_ways, *([anatomy.no_logits] if anatomy.no_logits else [])]
    return Support(model.task, model.model_type, model.structure.degree, ", ".join(kinds), "; ".join(notes))


def render_table(rows: Sequence[Support], transformers_version: str) -> str:
    """The table as it is kept in the package."""
    table = {"transformers": transformers_version, "rows": [asdict(row) for row in rows]}
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"
