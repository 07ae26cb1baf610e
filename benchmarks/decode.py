"""What early exit gains on the clock: tokens a second beside `model.generate` and its own rivals, in one run.

    python benchmarks/decode.py [--model smollm2 --model stories15m] [--quick]

Prompts are the first words of documents of Wikipedia, news and TinyStories (all in `../shared/text`); jumps are fitted
on other documents of the same texts, and rules calibrated on what the model writes behind the openings of yet others.
Every prompt is gone on with by all rivals in turn, forwards then backwards, so that whatever else the machine does
meets all of them alike; ratios are medians over prompts.
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
ALWAYS, NOW_AND_THEN = ("hf", "never", "p95", "lossless"), 6
"""Rivals that go on with every prompt; the others do with every sixth."""
JUMPS = "calibrated"
"""The estimator that tokens leave through."""
SPLIT = "30/10/60"
"""Most documents are left for calibration: a threshold takes one position of each."""
WORDS, MOST_WORDS = 10, 60
"""Words of a prompt, and of a document at most: what is generated is no longer than that either."""


@dataclass
class Rival:
    """One way to generate, and what it has done so far."""

    run: Callable[[dict[str, torch.Tensor]], Any]
    seconds: dict[int, float] = field(default_factory=dict)
    """Turn → seconds; and what was made in it."""
    made: dict[int, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=["smollm2", "stories15m"])
    parser.add_argument("--text", type=Path, default=SHARED / "text")
    parser.add_argument("--prompts", type=int, default=40, help="of each text")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--fit", type=int, default=80_000, help="tokens to fit jumps on")
    parser.add_argument("--documents", type=int, default=3_500, help="whose openings to calibrate on")
    parser.add_argument("--quick", action="store_true", help="few of everything: to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.fit, options.documents = 1, 12, 6_000, 500
    figures = {}
    for name in options.model or ["stories15m", "smollm2"]:
        figures[name] = measure(name, options)
    print(json.dumps(figures))


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Everything about one model; prints its tables, returns its figures."""
    model = lj.load(SHARED / FOLDERS[name] if name in FOLDERS else name)
    print(f"\n{describe_machine()}\n{model}, {options.tokens} new tokens, seed 0")
    text, prompts = texts(options)
    jumps, figures = replayed(model, text, options)
    found = lj.calibrate(
        model,
        jumps,
        text,
        target=0.95,
        documents=options.documents,
        self_generated_tokens=options.tokens,
        log=lambda line: print(line, flush=True),
    )
    print(found)
    print("cost on select documents over the full model's:", found.report.selection_cost)
    bound(model, found)
    assistants = shorter(model, text, options)
    for size in (1, 8):
        figures |= race(model, jumps, found, assistants, prompts, size, options.tokens)
    return figures


def texts(options: argparse.Namespace) -> tuple[lj.Corpus, list[str]]:
    """One text of all three for fitting and calibrating, and prompts from what is left."""
    documents, prompts = [], []
    for path in TEXTS.values():
        read = [d for d in lj.load_text(options.text / path).documents if len(d.split()) > WORDS]
        prompts += [" ".join(d.split()[:WORDS]) for d in read[: options.prompts]]
        documents.append([" ".join(d.split()[:MOST_WORDS]) for d in read[options.prompts :]])
    # One of each in turn, so that any first so many hold all three.
    mixed = [d for row in zip(*documents, strict=False) for d in row]
    return lj.Corpus("mixed", tuple(mixed), "one document of each text in turn"), prompts


def replayed(model: lj.Model, text: lj.Corpus, options: argparse.Namespace) -> tuple[lj.Jumps, dict[str, float]]:
    """Jumps, and blocks saved at 95 % by the paper's rule with them, as the `exits` study replays it."""
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


def bound(model: lj.Model, found: Calibration) -> None:
    """The least time of a token: its weights are read once."""
    weights = sum(p.nbytes for p in model.structure.blocks[0].parameters()) * model.n_blocks
    head = model.structure.unembedding.get_parameter("weight").nbytes
    start = time.perf_counter()
    for _ in range(5):
        model.structure.unembedding.get_parameter("weight").sum()
    rate = 5 * head / (time.perf_counter() - start)
    print(
        f"a token reads {(weights + head) / 1e6:.0f} MB of weights; summing the vocabulary matrix goes at "
        f"{rate / 1e9:.1f} GB/s, so at that rate {1e3 * (weights + head) / rate:.1f} ms a token; measured parts: "
        f"{found.report.costs}"
    )


def shorter(model: lj.Model, text: lj.Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Checkpoints of the first third and two thirds of the blocks, with a map to the vocabulary: assistants."""
    levels = (model.n_blocks // 3, 2 * model.n_blocks // 3)
    return {
        f"{level} blocks": lj.make_draft_model(model, text, level, tokens=options.fit // 4).model.hf for level in levels
    }


def race(
    model: lj.Model,
    jumps: lj.Jumps,
    found: Calibration,
    assistants: dict[str, Any],
    prompts: list[str],
    size: int,
    tokens: int,
) -> dict[str, float]:
    """All rivals on all prompts, so many at a time."""
    settings = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
    settings["pad_token_id"] = model.tokenization.pad
    batches = [
        model.tokenization.generation_inputs(prompts[start : start + size]) for start in range(0, len(prompts), size)
    ]
    rivals = field_of(model, jumps, found, assistants, settings, size, batches[0])
    for rival in rivals.values():
        rival.run(batches[0])  # warm
    for turn, inputs in enumerate(batches):
        for name, rival in list(rivals.items())[:: 1 if turn % 2 == 0 else -1]:
            if name not in ALWAYS and turn % NOW_AND_THEN:
                continue
            start = time.perf_counter()
            rival.made[turn] = rival.run(inputs)
            rival.seconds[turn] = time.perf_counter() - start
    full = [rivals["hf"].made[turn][:, inputs["input_ids"].shape[1] :] for turn, inputs in enumerate(batches)]
    print(f"\nbatch {size}, {len(prompts)} prompts\n{'rival':12} {'tokens/s':>9} {'over hf':>8} {'over never':>10}")
    for name, rival in rivals.items():
        rate = size * tokens / statistics.median(rival.seconds.values())
        ratios = f"{over(rivals, name, 'hf'):8.3f} {over(rivals, name, 'never'):10.3f}"
        print(f"{name:12} {rate:9.1f} {ratios}  {said(rival, full)}")
    if size > 1:
        return {}
    return {
        "lossless_over_hf": over(rivals, "lossless", "hf"),
        "p95_over_hf": over(rivals, "p95", "hf"),
        "lossless_over_never": over(rivals, "lossless", "never"),
        "p95_over_never": over(rivals, "p95", "never"),
        "agreement_p95": agreement(model, list(rivals["p95"].made.values()), batches),
    }


def field_of(
    model: lj.Model,
    jumps: lj.Jumps,
    found: Calibration,
    assistants: dict[str, Any],
    settings: dict[str, Any],
    size: int,
    first: dict[str, torch.Tensor],
) -> dict[str, Rival]:
    """The rivals; Hugging Face's own early exit at whichever level is fastest on the first prompt."""

    def ours(**how: Any) -> Rival:
        return Rival(lambda inputs: lj.generate(model, jumps, inputs, **how, **settings))

    hf: Any = model.hf

    def theirs(**how: Any) -> Rival:
        return Rival(lambda inputs: hf.generate(**inputs, **settings, **how))

    rivals = {
        "hf": theirs(),
        "never": ours(exit="never"),
        "p95": ours(exit=found.exit),
        "p95 copy": ours(exit=found.exit, cache="copy"),
        "lossless": ours(exit=found.verified_exit, verify=True, max_draft_tokens=found.max_draft_tokens),
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


def fastest(tries: dict[str, Rival], inputs: dict[str, torch.Tensor]) -> Rival:
    """Whichever takes least time for one prompt, the second time."""
    seconds = {}
    for name, rival in tries.items():
        for _ in range(2):
            start = time.perf_counter()
            rival.run(inputs)
            seconds[name] = time.perf_counter() - start
    best = min(seconds, key=lambda name: seconds[name])
    print(f"fastest of {', '.join(tries)}: {best}")
    return tries[best]


def over(rivals: dict[str, Rival], name: str, other: str) -> float:
    """How many times as fast: the median over prompts."""
    theirs, ours = rivals[other].seconds, rivals[name].seconds
    return statistics.median(theirs[turn] / ours[turn] for turn in ours)


def said(rival: Rival, full: list[torch.Tensor]) -> str:
    """What our own loops have to say about themselves."""
    if not isinstance(rival.made[0], Generated):
        return ""
    results: list[Generated] = list(rival.made.values())
    spent = {part: sum(r.counts.seconds[part] for r in results) for part in results[0].counts.seconds}
    shares = ", ".join(f"{part} {seconds / sum(spent.values()):.0%}" for part, seconds in spent.items())
    saved = statistics.mean(r.blocks_saved for r in results)
    same = [
        a == b
        for turn, r in rival.made.items()
        for ours, theirs in zip(r.ids, full[turn].tolist(), strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    tokens = sum(r.n_tokens for r in results)
    heads = sum(r.counts.unembeddings for r in results) / tokens
    short = sum(r.counts.shortlist_unembeddings for r in results) / tokens
    return (
        f"blocks not waited for {saved:.1%}, same token as hf {statistics.mean(same):.1%}, "
        f"products a token {heads:.2f} whole and {short:.2f} short; {shares}"
    )


@torch.no_grad()
def agreement(model: lj.Model, made: list[Generated], batches: list[dict[str, torch.Tensor]]) -> float:
    """How often an emitted token is the full model's, given the same prefix."""
    hits = []
    for result, inputs in zip(made, batches, strict=True):
        prompt = inputs["input_ids"]
        ids = torch.cat([prompt, torch.tensor(result.ids)], 1)
        logits = model.hf(input_ids=ids[:, :-1]).logits[:, prompt.shape[1] - 1 :]
        if (end := model.hf.generation_config.eos_token_id) is not None:
            logits[..., end] = -torch.inf  # no rival was allowed to end
        best = logits.argmax(-1)
        hits += (best == ids[:, prompt.shape[1] :]).reshape(-1).tolist()
    return statistics.mean(hits)


if __name__ == "__main__":
    main()
