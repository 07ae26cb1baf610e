"""What fits of large models take, computed from the package's own estimate: memory, disk and time.

    python benchmarks/cost_table.py

Nothing is run and no weights are needed. Sizes are those of the published configurations. The text has 44 d positions
in its fit split, and an eighth of that in each of the others. Times assume the speeds in `ACCELERATOR` and `SERVER`.
Prints the table of docs/scale.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import torch

from layerjump.jumps.cost_estimate import CostEstimate, ModelSize, Speed, Storage, estimate_cost, format_duration
from layerjump.jumps.maps import FeatureKind
from layerjump.jumps.moments import Moments
from layerjump.models.sites import FINAL, Pair, Site

ACCELERATOR = Speed(model=400e12, products=40e12, solve=30e12)
"""About what an H100 reaches in bfloat16, float32 and float64: 40 to 60 % of its data sheet."""
SERVER = Speed(model=2e12, products=2e12, solve=1e12)
"""About what 64 cores of a server reach in float32 and float64."""
N_DEVICES = 8
GB = 1e9


@dataclass(frozen=True)
class Architecture:
    """A published configuration of a decoder."""

    name: str
    n_blocks: int
    d_model: int
    active_weights: float
    """Weights of all blocks that a token passes."""
    total_weights: float
    widest_layer: int
    vocab_size: int


ARCHITECTURES = (
    Architecture("8B (Llama 3.1)", 32, 4096, 6.98e9, 8.03e9, 14336, 128256),
    Architecture("32B (Qwen3)", 64, 5120, 31.2e9, 32.8e9, 25600, 151936),
    Architecture("70B (Llama 3.1)", 80, 8192, 68.4e9, 70.6e9, 28672, 128256),
    Architecture("400B MoE (Llama 4 Maverick)", 48, 5120, 15.1e9, 400.7e9, 16384, 202048),
)


@dataclass(frozen=True)
class Split:
    """The sizes of a split, in batches of 1,024 tokens."""

    n_tokens: int
    n_source_tokens: int = 0
    max_picks: int = 1024

    @property
    def n_picks(self) -> int:
        return self.n_tokens


def pairs_of(name: str, n_blocks: int) -> list[Pair]:
    """The pairs of levels of a fit by name."""
    levels = [Site(level) for level in range(n_blocks + 1)]
    if name == "all":
        return [(a, b) for a in levels for b in levels if a < b]
    if name == "to-final":
        return [(level, FINAL) for level in levels]
    return [(level, levels[-1]) for level in levels[:-1]]


def cost(architecture: Architecture, estimator: str, pairs: str, storage: Storage, speed: Speed) -> CostEstimate:
    """The package's estimate for a model in bfloat16 whose products are formed in float32."""
    d = architecture.d_model
    size = ModelSize(
        width=lambda site: d,
        d_model=d,
        weights=architecture.active_weights,
        widest_layer=architecture.widest_layer,
        itemsize=2,
        vocab_size=architecture.vocab_size,
    )
    is_calibrated = estimator == "calibrated"
    features: FeatureKind = "both" if is_calibrated else "raw"
    moments = Moments(pairs_of(pairs, architecture.n_blocks), products=torch.float32, features=features)
    splits = {"fit": Split(44 * d), "test": Split(44 * d // 8)}
    if is_calibrated:
        splits["validation"] = Split(44 * d // 8)
    return estimate_cost(size, moments, splits, estimator, storage=storage, speed=speed)


def rows() -> list[dict[str, str | float]]:
    """One row for each model and fit."""
    table: list[dict[str, str | float]] = []
    for architecture in ARCHITECTURES:
        weights = 2 * architecture.total_weights
        for estimator, pairs in (("mat", "to-last"), ("calibrated", "to-final"), ("mat", "all")):
            whole = cost(architecture, estimator, pairs, "sums", ACCELERATOR)
            held = cost(architecture, estimator, pairs, "held-out states", ACCELERATOR)
            spilled = cost(architecture, estimator, pairs, "spill", ACCELERATOR)
            on_server = cost(architecture, estimator, pairs, "spill", SERVER)
            assert spilled.seconds is not None
            assert on_server.seconds is not None
            # Weights and sums are shared out; temporaries are not.
            shared = (weights + whole.sums_bytes) / N_DEVICES + whole.bytes - whole.sums_bytes
            table.append(
                {
                    "model": architecture.name,
                    "fit": f"{estimator}, {pairs}",
                    "weights": weights / GB,
                    "tokens": whole.tokens,
                    "all sums": whole.bytes / GB,
                    "held-out states": held.bytes / GB,
                    "spill": spilled.bytes / GB,
                    "disk": spilled.disk_bytes / GB,
                    f"each of {N_DEVICES} devices": shared / GB,
                    "accelerator": format_duration(spilled.seconds),
                    "server": format_duration(on_server.seconds),
                }
            )
    return table


def markdown() -> str:
    """The table of docs/scale.md."""
    table = rows()
    lines = [" | ".join(table[0]), " | ".join("---" for _ in table[0])]
    for row in table:
        cells = [value if isinstance(value, str) else f"{value:,.0f}" for value in row.values()]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    print(markdown())
    print(json.dumps({"rows": rows()}))
