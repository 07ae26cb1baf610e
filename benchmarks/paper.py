"""The papers' experiments on available models, by the code of `layerjump study`, with its reports.

    python benchmarks/paper.py [--only smollm2-wikipedia,transfer …] [-o reports] [--quick]

With the authors' protocol (9,000 sentences to fit on, 1,000 to test, one random position each, no bias, no
regularisation, position 0 allowed): SmolLM2 on Leipzig's English Wikipedia and news, transfer between the two, rxn-bert
(masked) on reactions, and `calibrated` maps next to the paper's (500 of the sentences select their features). Then
`linearity` as in "Your Transformer is Secretly Linear" on SmolLM2, stories15M and rxn-bert, and `finetuning` as in its
Table 1. Models, and all texts except the news, differ from the papers'. `architecture` is our own study: nine kinds of
transformer of the size of tests/fixtures/tiny-gpt2, trained three times each.
`demo` is what `make demo` runs, for the README.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import layerjump as lj
from layerjump.metrics.timing import describe_machine
from layerjump.report.write_report import write_report
from layerjump.studies.results import Result, to_json
from layerjump.studies.runner import MAIN, run_studies, select_studies
from layerjump.studies.setup import Setup, make_settings

SHARED = Path(__file__).parents[2] / "shared"
MODELS, TEXTS = SHARED / "models", SHARED / "text"
WIKIPEDIA = TEXTS / "leipzig/eng_wikipedia_2016_10K-sentences.txt"
NEWS = TEXTS / "leipzig/eng_news_2020_10K-sentences.txt"
STORIES = TEXTS / "tinystories/tinystories_valid_sample.txt"
REACTIONS = TEXTS / "reactions.txt"
TASKS = TEXTS / "eval"
TINY = Path(__file__).parents[1] / "tests/fixtures/tiny-gpt2"

PAPER = "r2,predictions,early_exit"
RUNS: dict[str, tuple[str, list[Path | str], str, dict[str, Any]]] = {
    "demo": ("smollm2", ["pydoc"], ",".join(MAIN), {"protocol": "ours", "tokens": 16_000}),
    "smollm2-wikipedia": ("smollm2", [WIKIPEDIA], PAPER, {"protocol": "paper"}),
    "smollm2-submodules": ("smollm2", [WIKIPEDIA], "submodules", {"protocol": "paper", "rerun_tokens": 4_000}),
    "smollm2-news": ("smollm2", [NEWS], "predictions,early_exit", {"protocol": "paper"}),
    "transfer": ("smollm2", [WIKIPEDIA, NEWS], "text_transfer", {"protocol": "paper"}),
    "rxn-bert": (str(MODELS / "rxn-bert"), [REACTIONS], PAPER, {"protocol": "paper"}),
    "rxn-bert-submodules": (
        str(MODELS / "rxn-bert"),
        [REACTIONS],
        "submodules",
        {"protocol": "paper", "rerun_tokens": 20_000},
    ),
    "calibrated-smollm2": (
        "smollm2",
        [WIKIPEDIA],
        "predictions,early_exit,exit_probes",
        {"protocol": "paper", "estimators": ("mat", "calibrated"), "split": "8500/500/1000"},
    ),
    "calibrated-rxn-bert": (
        str(MODELS / "rxn-bert"),
        [REACTIONS],
        "predictions,early_exit,exit_probes",
        {"protocol": "paper", "estimators": ("mat", "calibrated"), "split": "8500/500/1000"},
    ),
    "alternation": (str(MODELS / "stories15M"), [STORIES], "layer_skipping", {"protocol": "ours"}),
    "linearity-smollm2": ("smollm2", [WIKIPEDIA], "linearity", {"protocol": "ours", "tokens": 60_000}),
    "linearity-stories15M": (str(MODELS / "stories15M"), [STORIES], "linearity", {"protocol": "ours"}),
    "linearity-rxn-bert": (str(MODELS / "rxn-bert"), [REACTIONS], "linearity", {"protocol": "ours"}),
    "finetune-stories15M": (
        str(MODELS / "stories15M"),
        [STORIES],
        "finetuning",
        {"protocol": "ours", "finetune_data": str(TASKS / "boolq.jsonl"), "training_runs": 3},
    ),
    "finetune-smollm2": (
        "smollm2",
        [WIKIPEDIA],
        "finetuning",
        {"protocol": "ours", "finetune_data": str(TASKS / "copa.jsonl"), "training_runs": 3},
    ),
    "architecture": (
        str(TINY),
        [STORIES],
        "architecture",
        {"protocol": "ours", "training_steps": 300, "training_runs": 3, "split": "70/10/20"},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"some of {', '.join(RUNS)}")
    parser.add_argument("-o", "--output", type=Path, default=Path("reports"))
    parser.add_argument("--quick", action="store_true", help="few sentences: within two minutes")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(RUNS)
    if options.quick and not options.only:
        names = ["linearity-stories15M"]
    print(describe_machine())
    figures = {name: one_run(name, options.output / name, options.quick) for name in names}
    print(json.dumps(figures))


def one_run(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Run one row of the table, write its report, print its headlines and return them."""
    source, texts, studies, keywords = RUNS[name]
    if quick:
        keywords = keywords | {"split": "600/60/60", "rerun_tokens": 300}
    settings = make_settings(**keywords)
    first, *others = [lj.load_text(text) for text in texts]
    setup = Setup(lj.load(source), first, settings, others)
    results = run_studies(setup, select_studies(studies), folder, command=f"benchmarks/paper.py --only {name}")
    print(f"\n## {name}: {setup.model}, {', '.join(map(str, texts))}, seed 0")
    print(write_report(results, folder)[-1].read_text(encoding="utf-8"))
    return {study: to_json(result.headline) for study, result in results.studies.items() if isinstance(result, Result)}


if __name__ == "__main__":
    main()
