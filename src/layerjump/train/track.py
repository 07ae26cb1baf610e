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

from layerjump.fit.files import read_json, write_json
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model
from layerjump.train.profile import Profile, profile

Tables = dict[str, list[dict[str, Any]]]
"""`steps` (a row for each measurement), `blocks` and `levels` (one for each of those, too)."""
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
        self.tables: Tables = {"steps": [], "blocks": [], "levels": []}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """What an earlier part of the run measured up to its checkpoint stays; the rest is measured again."""
        if not state.is_world_process_zero:
            return
        if state.global_step == 0:
            self._measure(0)
        elif self._path.is_file():
            kept = read_json(self._path)
            for name in self.tables:
                self.tables[name] = [row for row in kept[name] if row["step"] <= state.global_step]

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


def add(tables: Tables, found: Profile, **where: Any) -> None:
    """Put a profile's rows into the tables, behind what says where they belong."""
    tables["steps"].append(where | _finite(found.row()))
    tables["blocks"] += [where | _finite(row) for row in found.blocks]
    tables["levels"] += [where | _finite(row) for row in found.levels]


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no other numbers."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}
