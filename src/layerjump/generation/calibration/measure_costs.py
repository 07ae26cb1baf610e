"""Measure what blocks, unembeddings and probes cost on this machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from layerjump.generation.block_runner import BlockRunner, prompt_positions
from layerjump.generation.calibration.result import Costs
from layerjump.generation.exit_rules import LevelReading, Shortlist
from layerjump.generation.packed_llama import choose_blocks, pack_unembedding
from layerjump.generation.probes import Probe
from layerjump.jumps.jumps import Jumps
from layerjump.lens.lens import Lens
from layerjump.metrics.timing import read_clock
from layerjump.models.model import Model

_CONTEXT = 64  # tokens in the KV cache before those that are timed, if the model has that many positions
_REPEATS = 15
_JOINT_TOKENS = 4  # tokens that run through the blocks together to measure what a queued token adds


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
    n_terms = len(lens.readout(level).site.terms)
    position = torch.tensor([context], device=model.device)
    probe = Probe(torch.randn(1, model.d_model + 3), (level,), 0.5)

    def read(lens: Lens) -> LevelReading:
        return LevelReading(level, state, position, lambda at, states: lens.logits(at, states.repeat(1, n_terms)))

    parts: dict[str, Callable[[], object]] = {
        "one token": lambda: _run_all_blocks(runner, ids[:, : context + 1]),
        "joint tokens": lambda: _run_all_blocks(runner, ids),
        "unembedding": lambda: read(lens).gap,
        "probe": lambda: probe.should_exit(read(lens)),
    }
    if shortlist is not None:
        short_lens = Lens(shortlist.restrict(model), jumps)
        parts["shortlist"] = lambda: read(short_lens).gap
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(_REPEATS):
        for name, run in parts.items():
            start = read_clock()
            run()
            times[name].append(1e3 * (read_clock() - start))
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
