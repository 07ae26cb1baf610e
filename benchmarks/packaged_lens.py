"""Fit, score and write the lens that the package brings for the bundled model.

    python benchmarks/packaged_lens.py --text eng_wikipedia_2016_10K-sentences.txt [-o FOLDER] [--quick]

One pass over the text gives affine maps from every fourth level to `final`, the input of the unembedding. All have full
rank: where a low rank for early levels met a full one for late levels, predictions seemed to form at that border.
Everything is stored in 8 bits, in less than 3 MB, and scored as it is stored, on documents that were not fitted on.
`--quick` fits few tokens of tests/fixtures/tiny-gpt2.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import layerjump as lj
from layerjump.io import write_text
from layerjump.jumps.default_jumps import PACKAGED
from layerjump.jumps.model_card import HeldOutScores, model_card
from layerjump.lens.score_jumps import with_held_out_scores
from layerjump.metrics.timing import describe_machine

MODEL, TOKENS, LEVEL_STEP = "smollm2", 16_000, 4
TINY = Path(__file__).parents[1] / "tests/fixtures/tiny-gpt2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="pydoc")
    parser.add_argument("-o", "--output", type=Path, default=PACKAGED / MODEL)
    parser.add_argument("--quick", action="store_true", help="a small model, few tokens, a temporary folder")
    options = parser.parse_args()
    print(describe_machine())
    source, tokens = (str(TINY), 2_000) if options.quick else (MODEL, TOKENS)
    model, text = lj.load(source), lj.load_text(options.text)
    pairs = ",".join(f"{level}:final" for level in range(0, model.n_blocks, LEVEL_STEP))
    jumps = lj.fit(model, text, estimator="affine", pairs=pairs, features="rms", tokens=tokens, use_validation=False)
    with tempfile.TemporaryDirectory() as folder:
        jumps.save_pretrained(folder, storage="int8")
        jumps = with_held_out_scores(model, lj.Jumps.from_pretrained(folder), text)
        output = Path(folder) if options.quick else options.output
        jumps.save_pretrained(output, storage="int8")
        command = f"python benchmarks/packaged_lens.py --text {options.text}"
        write_text(output / "README.md", model_card(jumps, f"layerjump/{MODEL}", command=command))
        size = sum(file.stat().st_size for file in output.iterdir())
    scores = HeldOutScores.of(jumps)
    assert scores is not None
    print("level, KL, KL of the logit lens, same top token, the same of the logit lens")
    for row in zip(
        scores.level, scores.kl, scores.kl_identity, scores.agreement, scores.agreement_identity, strict=True
    ):
        print(*row)
    print(json.dumps({"bytes": size, **asdict(scores)}))


if __name__ == "__main__":
    main()
