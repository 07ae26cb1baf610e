"""Effect of the model's precision on jumps, R² and KL: float64, float32, bfloat16 and float16.

    python benchmarks/numerics.py [--model ../shared/models/stories15M] [--text …] [--tokens 20000] [--quick]

Weights and tokens are the same each time and second moments are float64, so only the hidden states differ. `jumps` is
the root mean square difference between the maps' predictions for the same held-out float64 states, divided by the
standard deviation of these predictions. `kl` and `p1` compare the lens with the model of the same precision on held-out
positions, averaged over levels. Then texts with degenerate moments: one token 10,000 times, documents of one token,
fewer positions than d.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import layerjump as lj
from layerjump.errors import LayerjumpError
from layerjump.metrics.timing import describe_machine

SHARED = Path(__file__).parents[2] / "shared"
DTYPES = ("float64", "float32", "bfloat16", "float16")
HELD = 400


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(SHARED / "models/stories15M"))
    parser.add_argument("--text", default=str(SHARED / "text/tinystories/tinystories_valid_sample.txt"))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    options = parser.parse_args()
    tokens = 4_000 if options.quick else options.tokens
    print(describe_machine())
    text = lj.load_text(options.text)
    print(f"{options.model}, {text.name}, {tokens:,} tokens, {HELD} held-out positions, seed 0")
    figures: dict[str, Any] = {}
    first = None
    print(f"{'states':10} {'R²':>8} {'jumps':>10} {'kl':>8} {'p1':>7}")
    for dtype in DTYPES:
        model = lj.load(options.model, dtype=dtype)
        jumps = lj.fit(model, text, tokens=tokens)
        held = capture_held_out(model, text)
        first = first or (jumps, held)
        row = figures[dtype] = compare(model, jumps, held, *first)
        print(f"{dtype:10} {row['r2']:8.4f} {row['jumps']:10.1e} {row['kl']:8.4f} {row['p1']:7.3f}")
    figures["hard texts"] = fit_degenerate(options.model, text)
    print(json.dumps(figures))


def capture_held_out(model: lj.Model, text: lj.Corpus) -> dict[int, torch.Tensor]:
    """Return the states at held-out positions at every level."""
    documents = lj.split_indices(len(text.documents), "80/10/10", seed=0).test
    batches = lj.make_batches(text, model.tokenization, lj.Positions("sample", 16), documents=documents, seed=0)
    levels = range(model.n_blocks + 1)
    parts, count = [], 0
    for states in lj.capture_states(model, batches, levels):
        parts.append({level: states.at[lj.Site(level)].clone() for level in levels})
        count += states.batch.n_picks
        if count >= HELD:
            break
    return {level: torch.cat([part[level] for part in parts])[:HELD] for level in levels}


@torch.no_grad()
def compare(
    model: lj.Model, jumps: lj.Jumps, held: dict[int, torch.Tensor], exact: lj.Jumps, states: dict[int, torch.Tensor]
) -> dict[str, float]:
    """Return R², change of the maps, KL and Precision@1, as means over levels."""
    last, lens = model.n_blocks, lj.Lens(model, jumps)
    own = model.logits(held[last]).double().log_softmax(-1)
    rows = []
    for level in range(last):
        guess = lens.logits(level, held[level]).double().log_softmax(-1)
        truth = exact[level, last](states[level].float()).double()
        difference = jumps[level, last](states[level].float()).double() - truth
        info = jumps.info[level, last].r2
        assert info is not None
        rows.append(
            [
                info[0],
                float(difference.square().mean().sqrt() / truth.std()),
                float((own.exp() * (own - guess)).sum(-1).mean()),
                float((own.argmax(-1) == guess.argmax(-1)).double().mean()),
            ]
        )
    means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    return dict(zip(("r2", "jumps", "kl", "p1"), means, strict=True))


def fit_degenerate(name: str, text: lj.Corpus) -> dict[str, str]:
    """Fit on texts with degenerate second moments; return the outcome: finite maps, or the error."""
    model = lj.load(name)
    words = text.documents[0].split()
    texts = {
        "one word 10,000 times": [" ".join([words[0]] * 500)] * 20,
        "documents of one word": [word for d in text.documents[:200] for word in d.split()[:5]],
        "fewer positions than d": list(text.documents[:6]),
    }
    outcomes = {}
    for kind, documents in texts.items():
        corpus = lj.Corpus(kind, tuple(documents), "degenerate text")
        for estimator in ("mat", "ridge", "calibrated"):
            try:
                jumps = lj.fit(model, corpus, estimator=estimator)
                finite = all(bool(torch.isfinite(p).all()) for p in jumps.parameters())
                outcome = "finite" if finite else "NOT FINITE"
            except LayerjumpError as error:
                outcome = f"{type(error).__name__}: {error}"
            outcomes[f"{kind}, {estimator}"] = outcome
            print(f"{kind}, {estimator}: {outcome}")
    return outcomes


if __name__ == "__main__":
    main()
