"""Estimate the memory, disk and arithmetic of a run before it starts, and choose how it fits in memory.

A run has two phases, and its memory is that of the larger one. In the pass over the text it holds sums or states, and
one batch; in the solution it holds the same, the temporaries of one pair's solution, and the jumps.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import psutil
import torch

from layerjump.data.batches import Batches
from layerjump.errors import LayerjumpError, TooLarge, UnsupportedModel, argument
from layerjump.jumps.estimators.calibrated import MAX_LOGITS, MAX_ROWS
from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.moments import GRAM_BLOCKS, Moments
from layerjump.jumps.moments_of_splits import SPLITS
from layerjump.models.joint_sources import plain_sites
from layerjump.models.model import Model
from layerjump.models.sites import FINAL, JointSource, Pair, Site

Storage = Literal["sums", "held-out states", "spill"]
"""What a run holds: all sums; sums of the fit split and states of the others; or states on disk."""


@dataclass(frozen=True)
class SolveCost:
    """What an estimator takes to solve one source and its pairs, for a source of width w."""

    matrices: float
    """Float64 matrices of w² that it holds at once, temporaries and the scores on the test split included."""
    per_source: float
    """Operations of a source, in w³."""
    per_pair: float
    """Operations of a pair, in w³."""


SOLVE_COSTS = {
    "ridge": SolveCost(14, 26, 4),
    "orthogonal": SolveCost(14, 0, 32),
    "low-rank": SolveCost(12, 1, 17),
    "n-njtc": SolveCost(12, 1, 17),
    "ojfa": SolveCost(14, 1, 4),
    "calibrated": SolveCost(8, 0, 5),
}
"""Matrices as `benchmarks/scale.py --only solutions` measures them; operations as times of one core imply them."""
OTHER_SOLVE_COST = SolveCost(10, 0.5, 4)
TOKENS_AT_ONCE = 1024
LOGITS_AT_ONCE = 6
"""Logits of the held-out states that choosing a temperature holds at once: the model's, the map's, temporaries."""
GRAM_SHARE = (GRAM_BLOCKS + 1) / (2 * GRAM_BLOCKS)
"""Share of the arithmetic of a Gram matrix that is done: the blocks on and above the diagonal."""


class SplitSize(Protocol):
    """The sizes of a split that the cost of a run depends on; `Batches` have them."""

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_picks(self) -> int: ...

    @property
    def n_source_tokens(self) -> int: ...

    @property
    def max_picks(self) -> int: ...


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that the cost of a run depends on."""

    width: Callable[[Site], int]
    """The width of the states at a site."""
    d_model: int
    weights: float
    """Weights that a token passes from level 0 to level L."""
    widest_layer: int
    itemsize: int
    """Bytes of one number of a state."""
    vocab_size: int = 0
    encoder_weights: float = 0
    """Weights that a token of an encoder–decoder's source passes."""

    @classmethod
    def of(cls, model: Model) -> ModelSize:
        """Read the sizes of a model."""
        parameters = list(model.structure.blocks[0].parameters())
        first = parameters[0]
        encoder_weights = 0
        if model.task == "seq2seq":
            with suppress(UnsupportedModel):  # an encoder that reads no tokens (Whisper)
                encoder_weights = _weights(model.encoder_side())
        return cls(
            width=model.structure.width,
            d_model=model.d_model,
            weights=_weights(model),
            widest_layer=max(weight.shape[0] for weight in parameters),
            itemsize=first.itemsize if first.is_floating_point() else 2,
            vocab_size=0 if model.no_predictions else model.structure.vocab_size,
            encoder_weights=encoder_weights,
        )


@dataclass(frozen=True)
class Speed:
    """Floating-point operations a second of large matrix products."""

    model: float
    """In the model's precision."""
    products: float
    """In the precision of the sums' products."""
    solve: float
    """In float64."""


def measure_speed(model: Model, products: torch.dtype) -> Speed:
    """Time short matrix products on the model's device: a tenth of a second."""

    def measured(dtype: torch.dtype) -> float:
        rows = torch.ones(TOKENS_AT_ONCE, min(model.d_model, 2048), dtype=dtype, device=model.device)
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            float((rows.mT @ rows)[0, 0])  # waits for the device
            best = min(best, time.perf_counter() - start)
        return 2.0 * rows.numel() * rows.shape[1] / best

    speeds = {dtype: measured(dtype) for dtype in {model.dtype, products, torch.float64}}
    return Speed(speeds[model.dtype], speeds[products], speeds[torch.float64])


@dataclass(frozen=True)
class CostEstimate:
    """Bytes held at once, and floating-point operations of the second moments and of the model's blocks."""

    sums_bytes: int
    batch_bytes: int
    """Temporaries of the pass over the text: one batch's states, their copies, and activations of the model."""
    sums_flops: float
    model_flops: float
    tokens: int
    positions: int
    states_bytes: int = 0
    """Hidden states that are held in memory."""
    solve_bytes: int = 0
    """Temporaries of the solution."""
    jumps_bytes: int = 0
    """Solved maps that are held in memory."""
    disk_bytes: int = 0
    """Hidden states and solved maps on disk."""
    solve_flops: float = 0
    speed: Speed | None = None

    @property
    def bytes(self) -> int:
        """Bytes held at once."""
        return self.sums_bytes + self.states_bytes + max(self.batch_bytes, self.solve_bytes + self.jumps_bytes)

    @property
    def seconds(self) -> float | None:
        """About how long the run takes, at a measured speed of matrix products."""
        if (speed := self.speed) is None:
            return None
        return self.model_flops / speed.model + self.sums_flops / speed.products + self.solve_flops / speed.solve

    def host_bytes(self, processes: int) -> int:
        """Bytes that several processes on one host hold: the sums once, and at the end twice, in the first process."""
        others = processes - 1
        return self.bytes + others * self.batch_bytes + self.sums_bytes * others // processes

    def __str__(self) -> str:
        share = self.sums_flops / max(self.model_flops, 1)
        disk = f", disk {format_size(self.disk_bytes)}" if self.disk_bytes else ""
        duration = "" if self.seconds is None else f"; about {format_duration(self.seconds)}"
        processes = local_processes()
        together = f", {format_size(self.host_bytes(processes))} in {processes} processes" if processes > 1 else ""
        return (
            f"{self.tokens:,} tokens, {self.positions:,} positions; memory {format_size(self.bytes)} (sums "
            f"{format_size(self.sums_bytes + self.states_bytes)}, jumps {format_size(self.jumps_bytes)}{together})"
            f"{disk}; {self.sums_flops / 1e9:,.0f} GFLOP of sums, {share:.0%} of the model's own "
            f"{self.model_flops / 1e9:,.0f}{duration}"
        )

    def require_memory(self, device: torch.device | None = None) -> None:
        """Raise `TooLarge` for a run that does not fit in the memory that is free now."""
        on_host = device is None or device.type == "cpu"
        needed = self.host_bytes(local_processes()) if on_host else self.bytes
        require_memory(needed, f"{format_size(self.sums_bytes)} of it for sums", device)


def require_memory(needed: int, parts: str, device: torch.device | None = None, *, advice: str | None = None) -> None:
    """Raise `TooLarge` for a run that needs more than the memory that is free now, with its largest parts."""
    free = free_memory(device)
    if needed > free:
        advice = advice or (
            f"use fewer pairs ({argument('pairs', 'to-last')}, or a list), or {argument('spill')} to keep states on "
            f"disk"
        )
        raise TooLarge(
            f"this run needs {format_size(needed)} ({parts}), but only {format_size(free)} are free; {advice}"
        )


def local_processes() -> int:
    """The number of processes of this run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@dataclass(frozen=True)
class MemoryPlan:
    """How a run fits in memory."""

    storage: Storage
    cost: CostEstimate
    passes: tuple[tuple[Pair, ...], ...]
    """The pairs of every pass over the text."""
    targets_at_once: int | None = None
    spill: Path | None = None

    def __str__(self) -> str:
        where = {
            "sums": "all sums in memory",
            "held-out states": "sums of the fit split and states of the others in memory",
            "spill": f"states in {self.spill}, sums of one source at a time",
        }[self.storage]
        passes = f", {len(self.passes)} passes over the text" if len(self.passes) > 1 else ""
        return f"{where}{passes}; {self.cost}"


def plan_memory(
    model: Model,
    moments: Moments,
    batches: Mapping[str, Batches],
    estimator: str,
    *,
    memory: int | None = None,
    spill: Path | None = None,
    spill_if_needed: Path | None = None,
) -> MemoryPlan:
    """Choose how a run fits in `memory` bytes (None: what is free now).

    With `spill`, states go to that folder. Without: all sums in memory; or the states of validation and test splits
    instead of their sums; or states in `spill_if_needed`; or several passes, each for the pairs of some sources.
    """
    budget = free_memory(model.device) if memory is None else memory
    size, speed = ModelSize.of(model), measure_speed(model, moments.products)
    whole = (tuple(moments.pairs),)

    def estimate(pairs: Sequence[Pair], storage: Storage, targets: int | None = None) -> CostEstimate:
        return estimate_cost(
            size, moments, batches, estimator, pairs=pairs, storage=storage, targets_at_once=targets, speed=speed
        )

    # One map for all levels is solved from all sums together.
    by_source = find_estimator(estimator).targets != "one"
    if spill is not None or (spill_if_needed is not None and by_source):
        folder = spill or spill_if_needed
        most = max(sum(a == source for a, _ in moments.pairs) for source in moments.sources)
        groups = [None] if find_estimator(estimator).targets == "predictions" else [None, *_halves(most)]
        plans = [MemoryPlan("spill", estimate(whole[0], "spill", n), whole, n, folder) for n in groups]
        spilled = next((plan for plan in plans if plan.cost.bytes <= budget), plans[-1])
        if spill is not None:
            return _with_disk(spilled, budget)
    choices = [MemoryPlan("sums", estimate(whole[0], "sums"), whole)]
    if by_source:
        choices.append(MemoryPlan("held-out states", estimate(whole[0], "held-out states"), whole))
    for plan in choices:
        if plan.cost.bytes <= budget:
            return plan
    if by_source and spill_if_needed is not None:
        return _with_disk(spilled, budget)
    for n_passes in range(2, len(moments.sources) + 1) if by_source else ():
        passes = tuple(_pairs_of(moments, moments.sources[i::n_passes]) for i in range(n_passes))
        costs = [estimate(pairs, "sums") for pairs in passes]
        largest = max(costs, key=lambda cost: cost.bytes)
        if largest.bytes <= budget:
            return MemoryPlan("sums", largest, passes)
    raise _too_large(choices[0], budget)


def _with_disk(plan: MemoryPlan, budget: int) -> MemoryPlan:
    """The plan, if memory and disk suffice for it."""
    if plan.cost.bytes > budget:
        raise _too_large(plan, budget)
    assert plan.spill is not None
    existing = next(folder for folder in (plan.spill.absolute(), *plan.spill.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if plan.cost.disk_bytes > free:
        raise TooLarge(
            f"this run writes {format_size(plan.cost.disk_bytes)} of states to {plan.spill}, where only "
            f"{format_size(free)} are free; choose another folder with {argument('spill')}, or fewer "
            f"{argument('pairs')} or {argument('tokens')}"
        )
    return plan


def _too_large(plan: MemoryPlan, budget: int) -> TooLarge:
    return TooLarge(
        f"this run needs {format_size(plan.cost.bytes)} ({format_size(plan.cost.sums_bytes)} of it for sums), but only "
        f"{format_size(budget)} are free or allowed; use fewer pairs ({argument('pairs', 'to-last')}, or a list), or "
        f"{argument('spill')} to keep states on disk"
    )


def _pairs_of(moments: Moments, sources: Sequence[Site]) -> tuple[Pair, ...]:
    return tuple(pair for pair in moments.pairs if pair[0] in sources)


def _halves(count: int) -> list[int]:
    """Half of a number, a quarter, and so on down to 1."""
    return [count // 2**k for k in range(1, count.bit_length())]


def parse_memory(memory: str | int | None) -> int | None:
    """Read an amount of memory: a number of bytes, or `48GB`, `500MB`, `2TB`."""
    if memory is None or (isinstance(memory, int) and memory > 0):
        return memory
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)i?B?", str(memory).strip(), re.IGNORECASE)
    amount = float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if amount < 1:
        raise LayerjumpError(f"expected {argument('memory')} such as 48GB, got {memory!r}")
    return int(amount)


def free_memory(device: torch.device | None = None) -> int:
    """Return the bytes that are free on a device (default: in host memory)."""
    if device is not None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def estimate_cost(
    model: Model | ModelSize,
    moments: Moments,
    batches: Mapping[str, SplitSize],
    estimator: str = "mat",
    *,
    pairs: Sequence[Pair] | None = None,
    storage: Storage = "sums",
    targets_at_once: int | None = None,
    speed: Speed | None = None,
) -> CostEstimate:
    """Estimate the cost of collecting `moments` (default: all their pairs) over `batches` and solving them."""
    size = model if isinstance(model, ModelSize) else ModelSize.of(model)
    pairs = moments.pairs if pairs is None else pairs
    sources, targets = (dict.fromkeys(pair[end] for pair in pairs) for end in (0, 1))
    sites = dict.fromkeys(site for pair in pairs for site in pair)
    raw = {site: size.width(site) for site in sites}
    # A joint source's states are captured at plain sites before they are put side by side.
    joint = [site for site in sites if isinstance(site, JointSource)]
    captured = sum(size.width(site) for site in plain_sites(joint))
    wider = 2 if moments.features == "both" else 1
    width = {site: raw[site] * (wider if site in sources else 1) for site in raw}
    gram_sites = sites if moments.full_targets else sources
    entries = sum(width[site] ** 2 for site in gram_sites) + sum(width[a] * width[b] for a, b in pairs)
    positions = sum(split.n_picks for split in batches.values())
    tokens = sum(split.n_tokens for split in batches.values())
    # Two operations per weight and token; an encoder–decoder's tokens go through one stack each.
    encoded = sum(split.n_source_tokens for split in batches.values())
    model_flops = 2.0 * (size.weights * (tokens - encoded) + size.encoder_weights * encoded)

    def reservoir(split: SplitSize) -> int:
        rows = min(moments.reservoir.size, split.n_picks)
        return 4 * sum(raw[site] for site in sites if site in moments.reservoir.sites) * rows

    def add_bytes(rows: int, pairs: Sequence[Pair]) -> int:
        """Copies of one batch's states while it is added: shifted targets, and one source at a time."""
        own_targets = {target for _, target in pairs}
        if moments.products == torch.float64:
            others = max((width[source] for source, _ in pairs if source not in own_targets), default=0)
            return rows * (8 * (sum(width[site] for site in own_targets) + others) + 4 * max(raw.values()))
        # Features and shifted copies in float32, and the largest product.
        own_sites = {site for pair in pairs for site in pair}
        largest = max(width[a] * max(width[a] // GRAM_BLOCKS, width[b]) for a, b in pairs)
        return 4 * (2 * rows * sum(width[site] for site in own_sites) + largest)

    row_bytes = size.itemsize * sum(raw.values())
    widest = max((width[source] for source in sources), default=0)
    costs = SOLVE_COSTS.get(estimator, OTHER_SOLVE_COST)
    solve_bytes = int(8 * costs.matrices * widest**2)
    if find_estimator(estimator).needs_model:  # it compares predictions on a few held-out states
        solve_bytes += 4 * LOGITS_AT_ONCE * min(MAX_ROWS * size.vocab_size, MAX_LOGITS)
    solve_flops = costs.per_source * sum(width[source] ** 3 for source in sources)
    solve_flops += costs.per_pair * sum(width[a] ** 2 * width[b] for a, b in pairs)
    jumps_bytes = 4 * sum(width[a] * width[b] for a, b in pairs)
    if find_estimator(estimator).targets == "predictions":  # one map a level
        jumps_bytes = 4 * sum(width[source] for source in sources) * raw[FINAL]
    activations = _activation_bytes(size)
    rows = max((split.max_picks for split in batches.values()), default=0)
    # States as they are captured, and in float32.
    captured_bytes = rows * (
        size.itemsize * captured + row_bytes + (0 if size.itemsize >= 4 else 4 * sum(raw.values()))
    )
    sums_bytes = sum(8 * entries + reservoir(split) for split in batches.values())
    held = {name: split for name, split in batches.items() if name != "fit"}
    states_bytes = disk_bytes = 0
    batch_bytes = captured_bytes + max(activations, add_bytes(rows, pairs))
    if storage != "sums":
        # The sums of one source, which are formed one source at a time.
        by_source = {source: [pair for pair in pairs if pair[0] == source][:targets_at_once] for source in sources}
        formed = {
            source: 8 * (width[source] ** 2 + sum(width[a] * width[b] for a, b in group))
            for source, group in by_source.items()
        }
        one_source = max(formed.values(), default=0)
        most = max(by_source.values(), key=lambda group: sum(width[b] for _, b in group), default=[])
        state_bytes = size.itemsize * sum(raw[site] for site in {site for pair in most for site in pair})
        formed_splits = [batches[name] for name in SPLITS if name in (batches if storage == "spill" else held)]
        forming = [
            number * one_source + split.max_picks * state_bytes + (add_bytes(split.max_picks, most) if most else 0)
            for number, split in enumerate(formed_splits, start=1)
        ]
        solve_bytes = max([*forming, len(formed_splits) * one_source + solve_bytes])
    if storage == "held-out states":
        sums_bytes = 8 * entries + reservoir(batches["fit"])
        states_bytes = row_bytes * sum(split.n_picks for split in held.values())
    elif storage == "spill":
        sums_bytes = 0
        batch_bytes = captured_bytes + activations
        disk_bytes, jumps_bytes = row_bytes * positions + jumps_bytes, 0
    return CostEstimate(
        sums_bytes=sums_bytes,
        batch_bytes=batch_bytes,
        sums_flops=2.0
        * (GRAM_SHARE * sum(width[site] ** 2 for site in gram_sites) + sum(width[a] * width[b] for a, b in pairs))
        * positions,
        model_flops=model_flops,
        tokens=tokens,
        positions=positions,
        states_bytes=states_bytes,
        solve_bytes=solve_bytes,
        jumps_bytes=jumps_bytes,
        disk_bytes=disk_bytes,
        solve_flops=solve_flops,
        speed=speed,
    )


def _activation_bytes(size: ModelSize) -> int:
    """What a batch's forward pass holds at once in one block."""
    return TOKENS_AT_ONCE * size.itemsize * (3 * size.widest_layer + 6 * size.d_model)


def _weights(model: Model) -> int:
    """The number of weights that a token passes from level 0 to level L."""
    blocks = set(model.structure.blocks)
    once = sum(p.numel() for block in blocks for p in block.parameters())
    return once * (model.n_blocks // len(blocks))


def format_duration(seconds: float) -> str:
    """Return a time for people."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_size(count: float) -> str:
    """Return a number of bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
