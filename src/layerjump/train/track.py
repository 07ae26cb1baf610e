"""How a model changes while it is trained: its profile every so many steps, kept in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from layerjump.errors import BadArtifact
from layerjump.fit.files import read_json, write_json
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model
from layerjump.train.profile import Profile, profile

Tables = dict[str, list[dict[str, Any]]]
"""`steps` (a row for each measurement), `blocks` and `levels` (one for each of those, too)."""
NAMES = ("steps", "blocks", "levels")
FILE = "track.json"


class Track(TrainerCallback):
    """Measures the model before the first step, every so many, and after the last; the first process alone does."""

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: Corpus,
        *,
        every: int,
        folder: Path,
    ) -> None:
        self._model = Model.wrap(hf, tokenizer, name="model")
        self._text, self._every, self._path = text, every, folder / FILE
        self.tables: Tables = {name: [] for name in NAMES}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """What an earlier part of the run measured up to its checkpoint stays; the rest is measured again."""
        if not state.is_world_process_zero:
            return
        if state.global_step == 0:
            self._measure(0)
        elif self._path.is_file():
            self.tables |= measured_before(self._path, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Measure, where it is time to."""
        due = state.global_step % self._every == 0 or state.global_step == state.max_steps
        if due and state.is_world_process_zero:
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        hf = self._model.hf
        if not all(bool(weight.isfinite().all()) for weight in hf.parameters()):
            return  # the trainer is about to say so
        hf.eval()
        add(self.tables, profile(self._model, self._text), step=step)
        hf.train()
        write_json(self._path, dict(self.tables))


def measured_before(path: Path, step: int) -> Tables:
    """What an earlier part of a run measured, up to a step."""
    kept = read_json(path)
    tables: dict[str, Any] = {name: kept.get(name) for name in NAMES}
    if not all(_is_table(rows) for rows in tables.values()):
        raise BadArtifact(
            f"{path} does not hold what a training measured; remove {path.parent} to begin that training anew"
        )
    return {name: [row for row in rows if row["step"] <= step] for name, rows in tables.items()}


def _is_table(rows: Any) -> bool:
    """Rows of the same columns, with numbers or nothing in them."""
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return False
    alike = all(row.keys() == rows[0].keys() for row in rows)
    numbers = all(
        cell is None or type(cell) in (int, float) for row in rows for cell in row.values()
    )
    return alike and numbers and all(type(row.get("step")) is int for row in rows)


def add(tables: Tables, found: Profile, **where: Any) -> None:
    """Put a profile's rows into the tables, behind what says where they belong."""
    tables["steps"].append(where | _finite(found.row()))
    tables["blocks"] += [where | _finite(row) for row in found.blocks]
    tables["levels"] += [where | _finite(row) for row in found.levels]


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no other numbers."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}
