"""Measured cost of blocks, unembeddings and probes, and the cost of a rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from layerjump.generation.block_runner import BlockRunner
from layerjump.generation.packed_cpu import choose_blocks, pack_unembedding
from layerjump.generation.probes import Probe
from layerjump.generation.rules import LevelReading, Shortlist
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.models.model import Model

CONTEXT = 64
"""Tokens before those that are timed, where the model has so many positions."""
TURNS = 15
TOGETHER = 4
"""Tokens that go through the blocks at once when the cost of waiting ones is measured."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds at batch 1."""

    block: float
    """One block, one token."""
    waiting: float
    """What a waiting token adds when it goes through a block together with another."""
    head: float
    """One look at a level: the jump, norm, vocabulary product, softmax."""
    gate: float
    short: float | None = None
    """A look at the tokens of a shortlist; None: there is none."""

    @property
    def look(self) -> float:
        """A look at a level before the last."""
        return self.head if self.short is None else self.short

    def full(self, n_blocks: int) -> float:
        """A token for which the whole model runs."""
        return n_blocks * self.block + self.head

    def __str__(self) -> str:
        names = {
            "block": "a block",
            "waiting": "a waiting token",
            "head": "a look",
            "gate": "a gate",
        }
        told = [f"{words} {getattr(self, name):.3g}" for name, words in names.items()]
        return ", ".join(
            [*told, *([] if self.short is None else [f"a short look {self.short:.3g}"])]
        )

    def record(self) -> dict[str, float | None]:
        return asdict(self)


@torch.no_grad()
def measure_costs(model: Model, jumps: Jumps | None, shortlist: Shortlist | None = None) -> Costs:
    """Time the parts of a step, in turns, and take medians."""
    context = max(1, min(CONTEXT, model.max_positions - TOGETHER))
    runner = BlockRunner(choose_blocks(model), model.hf.config, None, torch.arange(context)[None])
    ids = torch.full((1, context + TOGETHER), 1, device=model.device)
    _run_all_blocks(runner, ids[:, :context])
    lens = Lens(pack_unembedding(model), jumps)
    level = min(lens.levels, key=lambda each: abs(each - model.n_blocks // 2))
    state = torch.randn(1, model.d_model, device=model.device, dtype=model.hf.dtype)
    position = torch.tensor([context], device=model.device)
    gate = Probe(torch.randn(1, model.d_model + 3), (level,), 0.5)

    def blocks(tokens: int) -> Callable[[], object]:
        return lambda: _run_all_blocks(runner, ids[:, : context + tokens])

    def look(lens: Lens) -> Callable[[], object]:
        return lambda: LevelReading(level, state, position, lens.logits).gap

    def ask() -> object:
        return gate.should_exit(LevelReading(level, state, position, lens.logits))

    parts = {"one": blocks(1), "some": blocks(TOGETHER), "head": look(lens), "gate": ask}
    if shortlist is not None:
        parts["short"] = look(Lens(shortlist.restrict(model), jumps))
    found: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(TURNS):
        for name, part in parts.items():
            start = time.perf_counter()
            part()
            found[name].append(1e3 * (time.perf_counter() - start))
            runner.rollback(context)
    middle = {name: sorted(times)[TURNS // 2] for name, times in found.items()}
    block = middle["one"] / model.n_blocks
    waiting = max(0.0, middle["some"] - middle["one"]) / (TOGETHER - 1) / model.n_blocks
    return Costs(block, waiting, middle["head"], middle["gate"], middle.get("short"))


def _run_all_blocks(runner: BlockRunner, ids: Tensor) -> None:
    runner.extend(ids)
    for block in range(1, runner.n_blocks + 1):
        runner.run(block)


def replay_cost(costs: Costs, n_blocks: int, left: Tensor, heads: Tensor, gates: Tensor) -> Tensor:
    """The cost of examples that left at these levels after so many looks and gates; blocks are made up for later.

    `heads` counts all vocabulary products, the one that gives the token among them.
    """
    waited = (n_blocks - left) * min(costs.waiting, costs.block)
    whole = (left == n_blocks).to(heads)
    looks = whole * costs.head + (heads - whole) * costs.look
    return left * costs.block + waited + looks + gates * costs.gate
