"""Cost of fitting, relative to the bare forward pass and to scikit-learn on stored states.

    python benchmarks/fit.py [--models smollm2,stories15m] [--quick]

One run; the rivals alternate:
  forward      `model(**batch)` over the tokens of the fit and test splits
  to-last      plan, pass, `mat` for every level → last, test scores; all positions; on half of the tokens
  all pairs    the same for all pairs, on a sample of positions (15 %, never fewer than 44 d)
  scikit-learn LinearRegression(fit_intercept=False) once a pair on 9,000 stored float32 states: a few pairs are
               timed and scaled to all; compared with our moments and solutions of all pairs from the same states.
Memory: peak of a whole process at 20,000 and at 200,000 tokens (`--quick`: 5,000 and 20,000).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.linear_model import LinearRegression

import layerjump as lj
from layerjump.jumps.collect_moments import plan_run
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.moments import Moments
from layerjump.metrics.timing import describe_machine, ratio, time_alternately
from layerjump.models.sites import Pair, parse_pairs

SHARED = Path(__file__).parents[2] / "shared"
MODELS = {
    "smollm2": ("smollm2", SHARED / "text/wikitext-2/wikitext2_train_first1MB.txt", 96_000, 1),
    "stories15m": (
        str(SHARED / "models/stories15M"),
        SHARED / "text/tinystories/tinystories_train_sample.txt",
        100_000,
        3,
    ),
}
LONG = {"smollm2": SHARED / "text/leipzig/eng_wikipedia_2016_10K-sentences.txt", "stories15m": MODELS["stories15m"][1]}
"""Texts of more than 200,000 tokens, for memory."""
STORED = 9_000
PARTS = ("to-last", "all-pairs", "sampling", "memory")
REPEATS, FEWER = 2, 2  # levels → last: two repetitions, on half of the tokens
SETTINGS: dict[str, Any] = {"use_validation": False, "split": "90/0/10"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2,stories15m")
    parser.add_argument("--only", choices=PARTS, help="one part of the benchmark")
    parser.add_argument("--tokens", type=int, help="tokens of the passes, in place of each model's own number")
    parser.add_argument("--quick", action="store_true", help="fewer tokens: within two minutes")
    parser.add_argument("--peak", nargs=3, metavar=("MODEL", "TEXT", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        print(peak_of_one_run(options.peak[0], options.peak[1], int(options.peak[2])))
        return
    print(describe_machine())
    print(
        f"products of 4,096 rows by 576: {gflops(torch.float64):.0f} GFLOP/s in float64, "
        f"{gflops(torch.float32):.0f} in float32"
    )
    figures: dict[str, dict[str, float]] = {}
    for name in options.models.split(","):
        source, text, tokens, repeats = MODELS[name]
        tokens = options.tokens or tokens // (48 if options.quick else 1)
        figures[name] = {}
        if options.only in (None, "to-last"):
            figures[name] |= to_last(source, text, tokens // FEWER)
        if options.only in (None, "all-pairs"):
            figures[name] |= all_pairs(source, text, tokens, repeats)
        if options.only in (None, "sampling"):
            figures[name] |= sampling(source, text, tokens)
        if options.only not in (None, "memory"):
            continue
        lengths = (5_000, 20_000) if options.quick else (20_000, 200_000)
        if options.quick and name == "smollm2":
            lengths = (1_000, 2_000)
        few, many = (peak(source, LONG[name], size) for size in lengths)
        print(f"  peak memory at {lengths[0]:,} tokens {few:,.0f} MB, at {lengths[1]:,} {many:,.0f} MB")
        figures[name]["rss_growth"] = many / few - 1
    print(json.dumps(figures))


def gflops(dtype: torch.dtype) -> float:
    """Speed of one matrix product here: a lower bound for any method that forms one product a pair."""
    rows = torch.randn(4_096, 576, dtype=dtype)
    seconds = time_alternately({"product": lambda: [rows.T @ rows for _ in range(20)]})["product"]
    return 20 * 2 * rows.numel() * 576 / min(seconds) / 1e9


def to_last(source: str, text: Path, tokens: int) -> dict[str, float]:
    """Every level → last, all positions, alternating with the bare forward pass."""
    model, corpus = lj.load(source), lj.load_text(text)
    batches = run_batches(model, corpus, tokens, REPEATS)
    seconds = time_alternately(
        {"forward": lambda: forward(model, batches), "to-last": lambda: fit(model, corpus, tokens, "to-last")},
        repeats=REPEATS,
        warm_up=False,
    )
    print_times(seconds)
    return {"to_last_over_forward": ratio(seconds["to-last"], seconds["forward"])}


def all_pairs(source: str, text: Path, tokens: int, repeats: int) -> dict[str, float]:
    """All pairs on their sample of positions, alternating with the bare forward pass."""
    model, corpus = lj.load(source), lj.load_text(text)
    batches = run_batches(model, corpus, tokens, repeats)
    seconds = time_alternately(
        {"forward": lambda: forward(model, batches), "all pairs": lambda: fit(model, corpus, tokens, "all")},
        repeats=repeats,
        warm_up=False,
    )
    print_times(seconds)
    return {"all_pairs_over_forward": ratio(seconds["all pairs"], seconds["forward"])}


def sampling(source: str, text: Path, tokens: int) -> dict[str, float]:
    """All pairs against scikit-learn, and the R² that the sample of positions costs."""
    model, corpus = lj.load(source), lj.load_text(text)
    return {
        "solve_speedup_over_sklearn": against_sklearn(model, corpus),
        "all_pairs_r2_lost_by_sampling": lost_by_sampling(model, corpus, tokens, fit(model, corpus, tokens, "all")),
    }


def run_batches(model: lj.Model, corpus: lj.Corpus, tokens: int, repeats: int) -> list[lj.Batch]:
    """Print and return the batches of fit and test documents that a fit runs."""
    plan = plan_run(model, corpus, tokens=tokens, **SETTINGS)
    batches = [batch for part in plan.batches.values() for batch in part]
    total = sum(batch.n_tokens for batch in batches)
    print(f"\n{model}, {corpus.name}, {total:,} tokens, seed 0, {repeats} repetitions")
    return batches


def print_times(seconds: dict[str, list[float]]) -> None:
    for rival, times in seconds.items():
        middle, over = sorted(times)[len(times) // 2], ratio(times, seconds["forward"])
        print(f"  {rival:12} {middle:8.1f} s  {over:6.2f} × forward")


def fit(model: lj.Model, corpus: lj.Corpus, tokens: int, pairs: str, **more: Any) -> lj.Jumps:
    """Run a complete fit: plan, pass, solutions, test scores."""
    return solve_jumps(plan_run(model, corpus, pairs=pairs, tokens=tokens, **SETTINGS, **more).run(), "mat")


def lost_by_sampling(model: lj.Model, corpus: lj.Corpus, tokens: int, sampled: lj.Jumps) -> float:
    """Mean test R² lost by the sample of positions, over every fifth pair (every pair of a small model)."""
    pairs = list(sampled)[:: 5 if len(sampled) > 100 else 1]
    named = ",".join(f"{source}:{target}" for source, target in pairs)
    every = fit(model, corpus, tokens, named, positions=lj.Positions("all"))
    ours, theirs = (mean_r2(jumps, pairs) for jumps in (sampled, every))
    print(f"  all pairs: {sampled}")
    print(f"  mean test R² of {len(pairs)} pairs: sampled {ours:.4f}, all positions {theirs:.4f}")
    return theirs - ours


@torch.no_grad()
def forward(model: lj.Model, batches: list[lj.Batch]) -> None:
    for batch in batches:
        model.hf(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)


def mean_r2(jumps: lj.Jumps, pairs: list[Pair]) -> float:
    scores = [score[0] for pair in pairs if (score := jumps.info[pair].r2)]
    return sum(scores) / len(scores)


def against_sklearn(model: lj.Model, corpus: lj.Corpus) -> float:
    """Speed-up of solving all pairs from moments over one scikit-learn fit a pair, from the same stored states."""
    pairs = parse_pairs("all", model.structure)
    stored = stored_states(model, corpus, Moments(pairs).sites)
    n = len(next(iter(stored.values())))
    timed = [pairs[0], pairs[len(pairs) // 2], pairs[-1]]
    start = time.perf_counter()
    for a, b in timed:
        LinearRegression(fit_intercept=False).fit(stored[a].numpy(), stored[b].numpy())
    theirs = (time.perf_counter() - start) / len(timed) * len(pairs)
    start = time.perf_counter()
    moments = Moments(pairs, reservoir=0)
    moments.add(stored)
    for site in moments.sources:
        solve("mat", moments.source(site), [moments.target(a, b) for a, b in pairs if a == site])
    ours = time.perf_counter() - start
    print(
        f"  {len(pairs)} pairs from {n:,} stored states: ours {ours:.1f} s, scikit-learn {theirs:.1f} s "
        f"(scaled from {len(timed)} pairs): {theirs / ours:.1f} ×"
    )
    return theirs / ours


def stored_states(model: lj.Model, corpus: lj.Corpus, sites: list[lj.Site]) -> dict[lj.Site, torch.Tensor]:
    share = lj.Positions("share", 0.5)
    batches = lj.make_batches(corpus, model.tokenization, share, tokens=int(2.1 * STORED))
    batches_of_states = list(lj.capture_states(model, batches, sites))
    return {site: torch.cat([states[site] for states in batches_of_states])[:STORED] for site in sites}


def peak(source: str, text: Path, tokens: int) -> float:
    command = [sys.executable, __file__, "--peak", source, str(text), str(tokens)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def peak_of_one_run(source: str, text: str, tokens: int) -> float:
    """Peak memory in MB of a process that fits every level → last once.

    From Linux's own high-water mark: `getrusage` would include the peak of the parent process.
    """
    lj.fit(lj.load(source), text, tokens=tokens)
    (line,) = [s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s]
    return float(line.split()[1]) / 1000


if __name__ == "__main__":
    main()
