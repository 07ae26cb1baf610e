"""Fit a Jacobian lens with TransformerLens 4.3.0; runs in its environment.

    python jacobian.py JOB OUT [--tokens 2000] [--skip-first 16] [--dim-batch 8]

The lens is fitted on the job's sequences in their order, without those that are too short, up to the number of tokens.
Each takes one forward pass and d_model / dim-batch backward passes; nothing is random. TransformerLens tokenizes texts
itself; here it gets the job's tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from job import Clock, Job, report
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import JacobianLens

MAX_LENGTH = 128  # the package's default


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--skip-first", type=int, default=16, help="positions to skip at the start of a sequence")
    parser.add_argument("--dim-batch", type=int, default=8)
    options = parser.parse_args()
    job = Job.read(options.job)
    model = TransformerBridge.boot_transformers(job.model, device="cpu", dtype=torch.float32)
    model.eval()
    job.require_same(model)
    sequences = long_enough(job.fit, options.tokens, options.skip_first + 2)
    model.to_tokens = lambda ids: torch.tensor([ids])
    clock = Clock()
    with clock:
        lens = JacobianLens.fit(
            model,
            sequences,
            corpus="the job's sequences",
            skip_first_positions=options.skip_first,
            dim_batch=options.dim_batch,
            max_seq_len=MAX_LENGTH,
            show_progress=False,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    lens.save(str(options.out / "lens.pt"), dtype=torch.float32)
    cost = {
        "cpu_seconds": clock.cpu,
        "wall_seconds": clock.wall,
        "tokens": sum(map(len, sequences)),
        "sequences": lens.n_prompts,
        "backward_passes": lens.n_prompts * -(-lens.d_model // options.dim_batch),
        "skip_first": options.skip_first,
    }
    report(options.out / "cost.json", cost)


def long_enough(sequences: list[list[int]], tokens: int, least: int) -> list[list[int]]:
    """Return sequences of at least `least` tokens, cut to the package's maximum, with about `tokens` in all."""
    selected: list[list[int]] = []
    for ids in sequences:
        if len(ids) >= least:
            selected.append(ids[:MAX_LENGTH])
        if sum(map(len, selected)) >= tokens:
            return selected
    if not selected:
        raise SystemExit(
            f"expected sequences of at least {least} tokens, {least - 2} of them skipped, got none; lower --skip-first"
        )
    return selected


if __name__ == "__main__":
    main()
