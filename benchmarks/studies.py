"""Cost of the study `predictions`, relative to its lower bound: one body pass and one unembedding a reading.

    python benchmarks/studies.py [--model smollm2] [--quick]

Every level of every scored position is read through two lenses (identity and `mat`), so the lower bound is one body
pass and 2 (L + 1) unembeddings a position. Two texts: sentences with one position each, where the body dominates, and
documents with every position, where the unembedding dominates. The two alternate in one run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import layerjump as lj
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.lens.lens import Lens
from layerjump.metrics.logits import chunk_rows
from layerjump.metrics.timing import describe_machine, ratio, time_alternately

TEXTS = Path(__file__).parents[2] / "shared/text"
CASES = {
    "sentences": ("leipzig/eng_wikipedia_2016_10K-sentences.txt", "one", 4_000),
    "documents": ("domains/biomedical.txt", "all", 500),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer tokens: within two minutes")
    options = parser.parse_args()
    model = lj.load(options.model)
    jumps = lj.fit(model, "pydoc", tokens=2_000)
    lenses = {"identity": Lens(model), "mat": Lens(model, jumps)}
    print(f"{describe_machine()}\n{model}, {', '.join(lenses)} at every level, seed 0\n")
    print(f"{'text':10} {'tokens':>7} {'scored':>7} {'study s':>8} {'bound s':>8} {'ratio':>6}")
    figures: dict[str, float] = {}
    for name, (text, positions, tokens) in CASES.items():
        tokens = tokens // (4 if options.quick else 1)
        picked = lj.Positions.parse(positions)
        batches = lj.make_batches(lj.load_text(TEXTS / text), model.tokenization, picked, tokens=tokens)
        rivals: dict[str, Callable[[], object]] = {
            "study": partial(evaluate_lenses, model, lenses, batches),
            "bound": partial(lower_bound, model, batches, len(lenses)),
        }
        seconds = time_alternately(rivals, repeats=1 if options.quick else options.repeats)
        over = ratio(seconds["study"], seconds["bound"])
        middle = {rival: sorted(times)[len(times) // 2] for rival, times in seconds.items()}
        print(
            f"{name:10} {batches.n_tokens:7} {batches.n_picks:7} {middle['study']:8.1f} "
            f"{middle['bound']:8.1f} {over:6.2f}"
        )
        figures[f"predictions_over_minimum_{name}"] = over
    print(json.dumps({"predictions_over_minimum": max(figures.values()), **figures}))


@torch.no_grad()
def lower_bound(model: lj.Model, batches: lj.Batches, lenses: int) -> None:
    """Run the body once, and one bare unembedding for every reading."""
    final = torch.cat([states["final"] for states in lj.capture_states(model, batches, ["final"])])
    for rows in final.split(chunk_rows(model)):
        for _ in range(lenses * (model.n_blocks + 1)):
            model.structure.decode(rows)


if __name__ == "__main__":
    main()
