"""Monitor loss, linearity and predictions of a model in training.

What is measured of a model in training, on other text: loss, linearity, angles, what its levels predict.

How a model changes while it is trained: its profile every so many steps, kept in a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import BadArtifact, TextTooShort
from layerjump.io import read_json, write_json
from layerjump.jumps.block_linearity import block_map, block_pair, block_scores
from layerjump.jumps.collect import RunPlan, plan_run
from layerjump.jumps.fit import solve_jumps
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.metrics.linearity import jump_strength
from layerjump.metrics.token_loss import token_losses
from layerjump.models.model import Model

PROFILE_SPLIT = "75/0/25"
"""Of the held-out documents: maps are fitted on three quarters and tested on one."""
PER_WIDTH = 60
"""Positions to fit on, at most, for every coordinate: noise would then score a sixtieth."""
PREDICTED = 30_000
"""Tokens whose loss is taken, at most."""
READ = 600
"""Positions read through the vocabulary at every level."""


@dataclass(frozen=True)
class Profile:
    """One model's numbers at one moment."""

    loss: float
    """Nats a held-out token."""
    perplexity: float
    jump_strength: float
    blocks: list[dict[str, Any]]
    """By block: linearity with and without the residual stream, in sample and held out; the turn of its stream."""
    levels: list[dict[str, Any]]
    """By level: R² of the map to the last one, and how often map and identity give the model's own token."""

    def mean(self, column: str) -> float:
        """The mean over blocks, or over the levels below the last."""
        rows = self.blocks if column in self.blocks[0] else self.levels[:-1]
        return sum(row[column] for row in rows) / len(rows)

    def row(self) -> dict[str, float]:
        """All in a few numbers."""
        names = ("with residual", "without residual")
        found = {"loss": self.loss, "perplexity": self.perplexity}
        for name in (*names, *(f"{name} held out" for name in names), "identity", "chance floor"):
            found[name] = self.mean(name)
        found["jump strength"] = self.jump_strength
        for name in ("agreement map", "agreement identity", "r2"):
            found[name] = self.mean(name)
        return found


def measure_profile(model: Model, text: Corpus, *, seed: int = 0) -> Profile:
    """Measure a model on a text; the same seed takes the same documents and positions."""
    everywhere = Positions("all", special=True)
    adjacent = _plan(model, text, "adjacent", everywhere, seed).run()
    to_last = _plan(model, text, "to-last", _predicting(model), seed)
    collected = to_last.run()
    found = token_losses(model, _predicted(model, text, seed))
    jumps = solve_jumps(collected, "affine")
    lenses = {"map": Lens(model, jumps), "identity": Lens(model)}
    hits = (
        evaluate_lenses(model, lenses, _few(model, text, to_last, seed)).hits(1).double().mean(-1)
    )
    blocks = []
    for level in range(model.n_blocks):
        fitted = block_map(adjacent.fit, level)
        scores = block_scores(fitted, adjacent.fit, adjacent.test, level)
        angle = adjacent.test.mean_angle(block_pair(level))
        blocks.append({"block": level + 1, **scores, "angle": angle})
    scores_of = {info.source.index: info.r2 for info in jumps.info.values() if info.r2}
    levels = [
        {
            "level": level,
            "r2": scores_of[level][0] if level in scores_of else 1.0,
            "agreement map": float(hits[0, level]),
            "agreement identity": float(hits[1, level]),
        }
        for level in range(model.n_blocks + 1)
    ]
    turns = [row["angle"] for row in blocks]
    return Profile(found.mean, found.perplexity, jump_strength(turns), blocks, levels)


def _predicting(model: Model) -> Positions:
    """Where tokens are predicted: at the masks of a masked model."""
    return Positions.parse(MASKED_SHARE if model.masked else "all")


def _plan(model: Model, text: Corpus, pairs: str, positions: Positions, seed: int) -> RunPlan:
    share = positions.amount or 1
    wanted = int(PER_WIDTH * model.d_model / share / 0.75)

    def planned(tokens: int | None) -> RunPlan:
        return plan_run(
            model,
            text,
            pairs=pairs,
            positions=positions,
            tokens=tokens,
            split=PROFILE_SPLIT,
            seed=seed,
            select=False,
        )

    try:
        return planned(wanted)
    except TextTooShort:
        return planned(None)


def _predicted(model: Model, text: Corpus, seed: int) -> Batches:
    try:
        return make_batches(
            text,
            model.tokenization,
            _predicting(model),
            seed=seed,
            tokens_wanted=PREDICTED,
            budget=4096,
        )
    except TextTooShort:
        return make_batches(text, model.tokenization, _predicting(model), seed=seed, budget=4096)


def _few(model: Model, text: Corpus, whole: RunPlan, seed: int) -> Batches:
    """About `READ` positions of the test documents; a masked model must see the same masks."""
    found = whole.batches["test"]
    if found.n_picks <= READ or model.masked:
        return found
    share = Positions("share", READ / found.n_picks)
    documents = [*dict.fromkeys(found.sequences.document)]
    return make_batches(text, model.tokenization, share, documents=documents, seed=seed)


Tables = dict[str, list[dict[str, Any]]]
"""`steps` (a row for each measurement), `blocks` and `levels` (one for each of those, too)."""
NAMES = ("steps", "blocks", "levels")
FILE = "track.json"


class TrainingMonitor(TrainerCallback):
    """Measures the model before the first step, every so many, and after the last; the first process alone does."""

    def __init__(
        self,
        hf: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        text: Corpus,
        *,
        eval_every: int,
        folder: Path,
    ) -> None:
        self._model = Model.wrap(hf, tokenizer, name="model")
        self._text, self._every, self._path = text, eval_every, folder / FILE
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
            self.tables |= load_measurements(self._path, state.global_step)

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
        append_profile(self.tables, measure_profile(self._model, self._text), step=step)
        hf.train()
        write_json(self._path, dict(self.tables))


def load_measurements(path: Path, step: int) -> Tables:
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


def append_profile(tables: Tables, found: Profile, **where: Any) -> None:
    """Put a profile's rows into the tables, behind what says where they belong."""
    tables["steps"].append(where | _finite(found.row()))
    tables["blocks"] += [where | _finite(row) for row in found.blocks]
    tables["levels"] += [where | _finite(row) for row in found.levels]


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no other numbers."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}
