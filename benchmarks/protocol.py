"""The paper's protocol on any model: 9,000 sentences to fit, 1,000 to test, one random position each, `mat`.

    python benchmarks/protocol.py [--model smollm2] [--quick]

Prints the held-out R² of every level → last, beside the identity's, as a Markdown table. Position 0 and special tokens
may be drawn, as the authors' code does. What differs from the paper: the model, and the text (Leipzig's English
Wikipedia sentences, which the authors did not use for these figures).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import layerjump as lj
from layerjump.inputs.positions import PAPER
from layerjump.measure.timing import machine

TEXT = Path(__file__).parents[2] / "shared/text/leipzig/eng_wikipedia_2016_10K-sentences.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sentences")
    options = parser.parse_args()
    sizes = "900/0/100" if options.quick else "9000/0/1000"
    model = lj.load(options.model)
    jumps = lj.fit(model, lj.read(options.text), positions=PAPER, sizes=sizes)
    print(f"{machine()}\n{jumps}, seed 0\n")
    print(
        "| level | R² mat | R² identity | weighted R² mat | weighted R² identity |\n|---|---|---|---|---|"
    )
    above = 0
    for (source, _), info in jumps.info.items():
        ours, theirs = info.r2 or (0, 0), info.r2_identity or (0, 0)
        above += ours[0] > theirs[0]
        print(f"| {source} | {ours[0]:.3f} | {theirs[0]:.3f} | {ours[1]:.3f} | {theirs[1]:.3f} |")
    figures = {
        "levels": len(jumps),
        "levels_mat_above_identity": above,
        "n_fit": jumps.provenance.n_fit,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
