"""Measured cost of blocks, unembeddings and probes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from layerjump.generation.block_runner import BlockRunner, prompt_positions
from layerjump.generation.packed_llama import choose_blocks, pack_unembedding
from layerjump.generation.probes import Probe
from layerjump.generation.rules import LevelReading, Shortlist
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.models.model import Model

_CONTEXT = 64  # tokens in the KV cache before those that are timed, if the model has that many positions
_REPEATS = 15
_JOINT_TOKENS = 4  # tokens that run through the blocks together to measure what a queued token adds


class FileRecord(BaseModel):
    """A part of the calibration file."""

    model_config = ConfigDict(frozen=True, strict=True, populate_by_name=True)


def in_file(key: str, **settings: Any) -> Any:
    """A field that has another key in the file."""
    return Field(validation_alias=key, serialization_alias=key, **settings)


class Costs(FileRecord):
    """Milliseconds at batch size 1."""

    block: float
    """One block, one token."""
    queued_token: float = in_file("waiting")
    """What a queued token adds when it runs through a block together with another."""
    unembedding: float = in_file("head")
    """One reading of a level: jump, final norm, unembedding, softmax."""
    probe: float = in_file("gate")
    shortlist_unembedding: float | None = in_file("short", default=None)
    """One reading of a level with a shortlist; None: there is no shortlist."""

    @property
    def early_unembedding(self) -> float:
        """One reading of a level before the last."""
        return self.unembedding if self.shortlist_unembedding is None else self.shortlist_unembedding

    def full_model(self, n_blocks: int) -> float:
        """One token for which the full model runs."""
        return n_blocks * self.block + self.unembedding

    def __str__(self) -> str:
        costs = self.model_dump(exclude_none=True)
        return ", ".join(f"{name.replace('_', ' ')} {cost:.3g}" for name, cost in costs.items())


@torch.no_grad()
def measure_costs(model: Model, jumps: Jumps | None, shortlist: Shortlist | None = None) -> Costs:
    """Time the parts of a decode step in turns; the medians."""
    context = max(1, min(_CONTEXT, model.max_positions - _JOINT_TOKENS))
    ids = torch.full((1, context + _JOINT_TOKENS), 1, device=model.device)
    positions = prompt_positions(model, ids[:, :context], None)
    runner = BlockRunner(model, choose_blocks(model), None, positions)
    _run_all_blocks(runner, ids[:, :context])
    lens = Lens(pack_unembedding(model), jumps)
    level = min(lens.levels, key=lambda level: abs(level - model.n_blocks // 2))
    state = torch.randn(1, model.d_model, device=model.device, dtype=model.dtype)
    position = torch.tensor([context], device=model.device)
    probe = Probe(torch.randn(1, model.d_model + 3), (level,), 0.5)

    parts: dict[str, Callable[[], object]] = {
        "one token": lambda: _run_all_blocks(runner, ids[:, : context + 1]),
        "joint tokens": lambda: _run_all_blocks(runner, ids),
        "unembedding": lambda: LevelReading(level, state, position, lens.logits).gap,
        "probe": lambda: probe.should_exit(LevelReading(level, state, position, lens.logits)),
    }
    if shortlist is not None:
        short_lens = Lens(shortlist.restrict(model), jumps)
        parts["shortlist"] = lambda: LevelReading(level, state, position, short_lens.logits).gap
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(_REPEATS):
        for name, run in parts.items():
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
            runner.rollback(context)
    median = {name: sorted(values)[_REPEATS // 2] for name, values in times.items()}
    added = max(0.0, median["joint tokens"] - median["one token"]) / (_JOINT_TOKENS - 1)
    return Costs(
        block=median["one token"] / model.n_blocks,
        queued_token=added / model.n_blocks,
        unembedding=median["unembedding"],
        probe=median["probe"],
        shortlist_unembedding=median.get("shortlist"),
    )


def _run_all_blocks(runner: BlockRunner, ids: Tensor) -> None:
    runner.extend(ids)
    for block in range(1, runner.n_blocks + 1):
        runner.run(block)
