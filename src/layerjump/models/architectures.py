"""Degrees of support of all text architectures of transformers: the table in the package, and how a row is made.

read_table()                                  # rows as they were recorded by benchmarks/architectures.py
examine(Architecture("causal", "llama", …))   # build a small model, discover its structure, prove it
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from layerjump.errors import LayerjumpError, UnsupportedModel, one_line
from layerjump.models.discovery import ExtraInputs, discover
from layerjump.models.model import Model
from layerjump.models.self_check import self_check
from layerjump.models.small_config import NOT_RUNNABLE, Architecture, build, small_config, text_inputs

TABLE = "architectures.json"
_TOKEN_ARGUMENTS = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")


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


def render_table(rows: list[Support], transformers_version: str) -> str:
    """The table as it is kept in the package."""
    table = {"transformers": transformers_version, "rows": [asdict(row) for row in rows]}
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def examine(architecture: Architecture) -> Support:
    """Build a small model of an architecture, discover its structure and prove it."""
    if reason := NOT_RUNNABLE.get(architecture.model_type):
        return Support(architecture.task, architecture.model_type, "refused", "", reason)
    try:
        model = small_model(architecture)
        failed = [check for check in self_check(model) if not check.passed]
    except UnsupportedModel as error:
        return Support(architecture.task, architecture.model_type, "refused", "", one_line(error, 160))
    except LayerjumpError as error:
        return Support(architecture.task, architecture.model_type, "refused", "", one_line(error, 160))
    if failed:
        facts = "; ".join(f"not proven: {check.fact} ({check.difference:.2g})" for check in failed)
        return Support(architecture.task, architecture.model_type, "refused", "", facts)
    anatomy = model.structure.anatomy
    kinds = Counter(" ".join(_label(write) for write in block.writes) for block in anatomy.blocks if block.writes)
    problems = sorted({block.problem for block in anatomy.blocks if block.problem})
    both_ways = ["reads both ways"] if model.task == "causal" and not model.causal else []
    notes = [*problems, *anatomy.notes, *both_ways, *([anatomy.no_logits] if anatomy.no_logits else [])]
    return Support(
        architecture.task, architecture.model_type, model.structure.degree, ", ".join(kinds), "; ".join(notes)
    )


def _label(write: Any) -> str:
    return f"{write.name} (experts)" if write.is_routed else str(write.name)


def small_model(architecture: Architecture, **sizes: Any) -> Model:
    """A small model of an architecture with random weights, its structure discovered and not yet proven."""
    hf = build(architecture, small_config(architecture.model_type, **sizes))
    extra_inputs = _extra_inputs(hf, architecture)
    structure = discover(hf, extra_inputs=extra_inputs)
    return Model(hf, structure, str(architecture), extra_inputs=extra_inputs)


def _extra_inputs(hf: PreTrainedModel, architecture: Architecture) -> ExtraInputs | None:
    def extra_inputs(ids: Tensor) -> Mapping[str, Any]:
        inputs = text_inputs(hf, architecture.task, ids, torch.ones_like(ids))
        return {name: value for name, value in inputs.items() if name not in _TOKEN_ARGUMENTS}

    return extra_inputs if extra_inputs(torch.ones(2, 9, dtype=torch.long)) else None
