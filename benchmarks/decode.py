"""Speed of early exit: tokens per second, relative to `model.generate` and to other methods, in one run.

    python benchmarks/decode.py [--model smollm2 --model stories15m] [--quick]

Prompts are the first words of documents of Wikipedia, news and TinyStories (all in `../shared/text`); jumps are fitted
on other documents of the same texts, and rules are calibrated on the model's continuations of the first tokens of yet
others. All methods continue every prompt in turn, in alternating order, so that other load on the machine affects all
of them equally; ratios are medians over prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import layerjump as lj
from layerjump.generation.calibration.serialization import Calibration
from layerjump.generation.generate import Generated
from layerjump.metrics.timing import describe_machine
from layerjump.studies import early_exit
from layerjump.studies.setup import Setup, make_settings

SHARED = Path(__file__).parents[2] / "shared"
TEXTS = {
    "wikipedia": "leipzig/eng_wikipedia_2016_10K-sentences.txt",
    "news": "leipzig/eng_news_2020_10K-sentences.txt",
    "stories": "tinystories/tinystories_valid_sample.txt",
}
FOLDERS = {"stories15m": "models/stories15M"}
ALWAYS, EVERY = ("hf", "never", "p95", "lossless"), 6
"""Methods that continue every prompt; the others continue every sixth."""
JUMPS = "calibrated"
"""The estimator of the jumps for early exit."""
SPLIT = "30/10/60"
"""Most documents are left for calibration: a threshold uses one position of each."""
WORDS, MAX_WORDS = 10, 60
"""Words of a prompt, and the largest number of words of a document, about as many as are generated."""


@dataclass
class Rival:
    """One way to generate, with its times and outputs."""

    run: Callable[[dict[str, torch.Tensor]], Any]
    seconds: dict[int, float] = field(default_factory=dict)
    """Turn → seconds."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Turn → generated tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=["smollm2", "stories15m"])
    parser.add_argument("--text", type=Path, default=SHARED / "text")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each text")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--fit", type=int, default=80_000, help="tokens to fit jumps on")
    parser.add_argument("--documents", type=int, default=3_500, help="documents to calibrate on")
    parser.add_argument("--quick", action="store_true", help="small numbers, to test that the script runs")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.fit, options.documents = 1, 12, 6_000, 500
    figures = {}
    for name in options.model or ["stories15m", "smollm2"]:
        figures[name] = measure(name, options)
    print(json.dumps(figures))


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure one model: print its tables, return its figures."""
    model = lj.load(SHARED / FOLDERS[name] if name in FOLDERS else name)
    print(f"\n{describe_machine()}\n{model}, {options.tokens} new tokens, seed 0")
    text, prompts = texts(options)
    jumps, figures = replay_exits(model, text, options)
    calibration = lj.calibrate(
        model,
        jumps,
        text,
        target=0.95,
        documents=options.documents,
        self_generated_tokens=options.tokens,
        log=lambda line: print(line, flush=True),
    )
    print(calibration)
    print("cost on validation documents relative to the full model:", calibration.report.selection_cost)
    print_lower_bound(model, calibration)
    assistants = draft_models(model, text, options)
    for size in (1, 8):
        figures |= race(model, jumps, calibration, assistants, prompts, size, options.tokens)
    return figures


def texts(options: argparse.Namespace) -> tuple[lj.Corpus, list[str]]:
    """Return one corpus of all three texts for fitting and calibration, and prompts from other documents."""
    documents, prompts = [], []
    for path in TEXTS.values():
        documents_read = [d for d in lj.load_text(options.text / path).documents if len(d.split()) > WORDS]
        prompts += [" ".join(d.split()[:WORDS]) for d in documents_read[: options.prompts]]
        documents.append([" ".join(d.split()[:MAX_WORDS]) for d in documents_read[options.prompts :]])
    # One document of each in turn, so that every prefix of the corpus contains all three texts.
    mixed = [d for row in zip(*documents, strict=False) for d in row]
    return lj.Corpus("mixed", tuple(mixed), "one document of each text in turn"), prompts


def replay_exits(model: lj.Model, text: lj.Corpus, options: argparse.Namespace) -> tuple[lj.Jumps, dict[str, float]]:
    """Return jumps, and the blocks that the paper's rule saves with them at 95 %, as the study `exits` replays it."""
    settings = make_settings(
        "ours",
        tokens=options.fit,
        split=SPLIT,
        test_positions=120 if options.quick else 1_000,
        estimators=("mat", JUMPS),
    )
    setup = Setup(model, text, settings)
    headline = early_exit.run(setup).headline.blocks_saved
    saved = {name: headline[f"dynamic_{name}_at_0.95"] / model.n_blocks for name in ("identity", "mat", JUMPS)}
    print("share of blocks saved at 95 % in the replay, all levels checked:", saved)
    figures = {"layers_saved_p95_map": saved[JUMPS], "layers_saved_p95_identity": saved["identity"]}
    return setup.jumps(JUMPS), figures


def print_lower_bound(model: lj.Model, calibration: Calibration) -> None:
    """Print a lower bound of the time per token: every weight is read once."""
    weights = sum(p.nbytes for p in model.structure.blocks[0].parameters()) * model.n_blocks
    head = model.structure.unembedding.get_parameter("weight").nbytes
    start = time.perf_counter()
    for _ in range(5):
        model.structure.unembedding.get_parameter("weight").sum()
    rate = 5 * head / (time.perf_counter() - start)
    print(
        f"a token reads {(weights + head) / 1e6:.0f} MB of weights; the unembedding matrix is summed at "
        f"{rate / 1e9:.1f} GB/s, at that rate {1e3 * (weights + head) / rate:.1f} ms per token; measured costs: "
        f"{calibration.report.costs}"
    )


def draft_models(model: lj.Model, text: lj.Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Return draft models of the first third and of the first two thirds of the blocks."""
    levels = (model.n_blocks // 3, 2 * model.n_blocks // 3)
    return {
        f"{level} blocks": lj.make_draft_model(model, text, level, tokens=options.fit // 4).model.hf for level in levels
    }


def race(
    model: lj.Model,
    jumps: lj.Jumps,
    calibration: Calibration,
    assistants: dict[str, Any],
    prompts: list[str],
    size: int,
    tokens: int,
) -> dict[str, float]:
    """Run all methods on all prompts, in batches of one size; print their speeds."""
    settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    settings["pad_token_id"] = model.tokenization.pad
    batches = [
        model.tokenization.generation_inputs(prompts[start : start + size]) for start in range(0, len(prompts), size)
    ]
    rivals = make_rivals(model, jumps, calibration, assistants, settings, size, batches[0])
    for rival in rivals.values():
        rival.run(batches[0])  # warm-up
    for turn, inputs in enumerate(batches):
        for name, rival in list(rivals.items())[:: 1 if turn % 2 == 0 else -1]:
            if name not in ALWAYS and turn % EVERY:
                continue
            start = time.perf_counter()
            rival.outputs[turn] = rival.run(inputs)
            rival.seconds[turn] = time.perf_counter() - start
    full = [rivals["hf"].outputs[turn][:, inputs["input_ids"].shape[1] :] for turn, inputs in enumerate(batches)]
    print(f"\nbatch {size}, {len(prompts)} prompts\n{'method':12} {'tokens/s':>9} {'/ hf':>8} {'/ never':>10}")
    for name, rival in rivals.items():
        rate = size * tokens / statistics.median(rival.seconds.values())
        ratios = f"{over(rivals, name, 'hf'):8.3f} {over(rivals, name, 'never'):10.3f}"
        print(f"{name:12} {rate:9.1f} {ratios}  {describe_run(rival, full)}")
    if size > 1:
        return {}
    return {
        "lossless_over_hf": over(rivals, "lossless", "hf"),
        "p95_over_hf": over(rivals, "p95", "hf"),
        "lossless_over_never": over(rivals, "lossless", "never"),
        "p95_over_never": over(rivals, "p95", "never"),
        "agreement_p95": agreement(model, list(rivals["p95"].outputs.values()), batches),
    }


def make_rivals(
    model: lj.Model,
    jumps: lj.Jumps,
    calibration: Calibration,
    assistants: dict[str, Any],
    settings: dict[str, Any],
    size: int,
    first: dict[str, torch.Tensor],
) -> dict[str, Rival]:
    """Return all methods; Hugging Face's early exit uses the level that is fastest on the first prompt."""

    def ours(**keywords: Any) -> Rival:
        return Rival(lambda inputs: lj.generate(model, jumps, inputs, **keywords, **settings))

    hf: Any = model.hf

    def theirs(**keywords: Any) -> Rival:
        return Rival(lambda inputs: hf.generate(**inputs, **settings, **keywords))

    rivals = {
        "hf": theirs(),
        "never": ours(exit="never"),
        "p95": ours(exit=calibration.exit),
        "p95 copy": ours(exit=calibration.exit, cache="copy"),
        "lossless": ours(exit=calibration.verified_exit, verify=True, max_draft_tokens=calibration.max_draft_tokens),
    }
    if size > 1:
        return rivals
    rivals["lookup"] = theirs(prompt_lookup_num_tokens=3)
    levels = sorted({max(1, model.n_blocks * k // 6) for k in range(1, 6)})
    rivals["hf exit"] = fastest({f"level {level}": theirs(assistant_early_exit=level) for level in levels}, first)
    rivals["assistant"] = fastest(
        {name: theirs(assistant_model=assistant) for name, assistant in assistants.items()}, first
    )
    return rivals


def fastest(candidates: dict[str, Rival], inputs: dict[str, torch.Tensor]) -> Rival:
    """Return the candidate with the shortest second run on one prompt."""
    seconds = {}
    for name, rival in candidates.items():
        for _ in range(2):
            start = time.perf_counter()
            rival.run(inputs)
            seconds[name] = time.perf_counter() - start
    best = min(seconds, key=lambda name: seconds[name])
    print(f"fastest of {', '.join(candidates)}: {best}")
    return candidates[best]


def over(rivals: dict[str, Rival], name: str, other: str) -> float:
    """Return how many times as fast one method is as another: the median over prompts."""
    theirs, ours = rivals[other].seconds, rivals[name].seconds
    return statistics.median(theirs[turn] / ours[turn] for turn in ours)


def describe_run(rival: Rival, full: list[torch.Tensor]) -> str:
    """Return the counters of our own methods; nothing for Hugging Face's."""
    if not isinstance(rival.outputs[0], Generated):
        return ""
    results: list[Generated] = list(rival.outputs.values())
    spent = {part: sum(r.counts.seconds[part] for r in results) for part in results[0].counts.seconds}
    shares = ", ".join(f"{part} {seconds / sum(spent.values()):.0%}" for part, seconds in spent.items())
    saved = statistics.mean(r.blocks_saved for r in results)
    same = [
        a == b
        for turn, r in rival.outputs.items()
        for ours, theirs in zip(r.ids, full[turn].tolist(), strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    tokens = sum(r.n_tokens for r in results)
    full_unembeddings = sum(r.counts.unembeddings for r in results) / tokens
    short = sum(r.counts.shortlist_unembeddings for r in results) / tokens
    return (
        f"blocks saved {saved:.1%}, same token as hf {statistics.mean(same):.1%}, "
        f"unembeddings per token {full_unembeddings:.2f} full and {short:.2f} shortlist; {shares}"
    )


@torch.no_grad()
def agreement(model: lj.Model, outputs: list[Generated], batches: list[dict[str, torch.Tensor]]) -> float:
    """Return how often a generated token is the full model's, given the same prefix."""
    hits = []
    for result, inputs in zip(outputs, batches, strict=True):
        prompt = inputs["input_ids"]
        ids = torch.cat([prompt, torch.tensor(result.ids)], 1)
        logits = model.hf(input_ids=ids[:, :-1]).logits[:, prompt.shape[1] - 1 :]
        if (end := model.hf.generation_config.eos_token_id) is not None:
            logits[..., end] = -torch.inf  # no method may generate the end of text
        best = logits.argmax(-1)
        hits += (best == ids[:, prompt.shape[1] :]).reshape(-1).tolist()
    return statistics.mean(hits)


if __name__ == "__main__":
    main()
