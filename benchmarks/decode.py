"""Speed of early exit and of verified drafts: tokens per second, relative to `model.generate`, in one run.

    python benchmarks/decode.py [--model smollm2 --model stories15m] [--quick]
    python benchmarks/decode.py --folder prepared --part prepare     # fit and calibrate; later runs read the folder
    python benchmarks/decode.py --folder prepared --part race        # … and add their figures to it

Prompts are the first words of documents of Wikipedia, news and TinyStories (all in `../shared/text`); jumps are fitted
on other documents of the same texts, and rules and drafters are calibrated on the model's continuations of the first
tokens of yet others. Two further sets of prompts are texts to rewrite, summarise, edit or continue as a list, which
repeat themselves, and random tokens. All methods continue every prompt in turn, in alternating order, so that other
load on the machine affects all of them equally; ratios are medians over prompts. Every method runs on the number of
threads that is best for it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import layerjump as lj
from layerjump.data.chat import render_chat
from layerjump.generation.calibration.calibration_file import load_calibration, save_calibration
from layerjump.generation.calibration.result import Calibration
from layerjump.generation.combine_drafters import DraftConfig, DrafterName
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
PARAGRAPHS = "wikitext-2/wiki.valid.raw"
FOLDERS = {"stories15m": "models/stories15M"}
PARTS = ("prepare", "race", "repeating", "random", "batch", "drafters", "rivals")
LENSES = ("mat", "calibrated", "calibrated+final@-1")
"""Lenses of the replay; the last has memory, and its jumps are those of early exit."""
SPLIT = "30/10/60"
"""Most documents are left for calibration: a threshold uses one position of each."""
WORDS, MAX_WORDS = 10, 60
"""Words of a prompt, and the largest number of words of a document, about as many as are generated."""
CODE = (textwrap.dedent, textwrap.indent, textwrap.shorten, textwrap.fill, textwrap.wrap)


@dataclass
class Rival:
    """One way to generate, with its times and outputs."""

    run: Callable[[dict[str, torch.Tensor]], Any]
    every: int = 1
    """It continues the first prompt of every group of this size."""
    threads: int = 0
    """Threads that are best for it; 0: not measured yet."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Turn → seconds."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """Turn → generated tokens."""

    def time(self, inputs: dict[str, torch.Tensor]) -> tuple[float, Any]:
        torch.set_num_threads(self.threads or torch.get_num_threads())
        start = time.perf_counter()
        output = self.run(inputs)
        return time.perf_counter() - start, output


@dataclass(frozen=True)
class Prepared:
    """A model with its jumps and its calibration."""

    model: lj.Model
    text: lj.Corpus
    jumps: lj.Jumps
    calibration: Calibration
    n_threads: int
    minutes: float
    """Of each part at most: what is not continued by then is left out, and the table says how many prompts were."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=["smollm2", "stories15m"])
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all; `prepare` runs where needed")
    parser.add_argument("--folder", type=Path, help="keep jumps, calibrations and figures here, for runs by parts")
    parser.add_argument("--text", type=Path, default=SHARED / "text")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each text, and repeating prompts")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--fit", type=int, default=40_000, help="tokens to fit jumps on")
    parser.add_argument("--documents", type=int, default=1_200, help="documents to calibrate on")
    parser.add_argument("--positions", type=int, default=1_000, help="test positions of the replay")
    parser.add_argument("--draft-documents", type=int, default=400, help="documents to fit drafters on")
    parser.add_argument("--every", type=int, default=4, help="slow rivals continue one prompt in N")
    parser.add_argument("--minutes", type=float, default=60, help="of each part at most; the table counts the prompts")
    parser.add_argument("--quick", action="store_true", help="small numbers, to test that the script runs")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.fit, options.every = 1, 12, 6_000, 1
        options.documents, options.draft_documents, options.positions = 500, 24, 120
    parts = options.part or PARTS
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        for name in options.model or ["stories15m", "smollm2"]:
            measure(name, parts, folder / name, options)
        print(json.dumps({path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/figures.json")}))


def measure(name: str, parts: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
    """Measure parts for one model: print their tables, and add their figures to the folder."""
    n_threads = torch.get_num_threads()
    model = lj.load(SHARED / FOLDERS[name] if name in FOLDERS else name)
    print(f"\n{describe_machine()}\n{model}, {options.tokens} new tokens, seed 0")
    text, prompts = texts(options)
    if not (folder / "figures.json").is_file():
        prepare(model, text, folder, options)
    jumps = lj.Jumps.from_pretrained(folder, model=model)
    calibration = load_calibration(folder, model=model)
    prepared = Prepared(model, text, jumps, calibration, n_threads, options.minutes)
    print(calibration, flush=True)
    sets = {
        "race": lambda: race(prepared, prompts, options),
        "repeating": lambda: compare_drafts(prepared, "repeating", repeating_prompts(model, options), options),
        "random": lambda: compare_drafts(prepared, "random", random_prompts(model, options), options),
        "batch": lambda: compare_batches(prepared, prompts, options),
        "drafters": lambda: compare_drafters(prepared, prompts, options),
        "rivals": lambda: compare_rivals(prepared, prompts, options),
    }
    for part, run in sets.items():
        if part in parts:
            figures = json.loads((folder / "figures.json").read_text()) | run()
            (folder / "figures.json").write_text(json.dumps(figures))


def texts(options: argparse.Namespace) -> tuple[lj.Corpus, list[str]]:
    """Return one corpus of all three texts for fitting and calibration, and prompts from other documents."""
    documents, prompts = [], []
    for path in TEXTS.values():
        documents_read = [d for d in lj.load_text(options.text / path).documents if len(d.split()) > WORDS]
        prompts.append([" ".join(d.split()[:WORDS]) for d in documents_read[: options.prompts]])
        documents.append([" ".join(d.split()[:MAX_WORDS]) for d in documents_read[options.prompts :]])
    # One document of each in turn, so that every prefix of the corpus contains all three texts.
    mixed = [d for row in zip(*documents, strict=False) for d in row]
    in_turn = [prompt for row in zip(*prompts, strict=True) for prompt in row]
    return lj.Corpus("mixed", tuple(mixed), "one document of each text in turn"), in_turn


def repeating_prompts(model: lj.Model, options: argparse.Namespace) -> list[str]:
    """Return texts to rewrite, to summarise, to edit and to continue as a list, as many of each."""
    lines = (options.text / PARAGRAPHS).read_text().splitlines()
    paragraphs = [line.strip() for line in lines if 60 < len(line.split()) < 110]
    sentences = lj.load_text(options.text / TEXTS["news"]).documents[-200:]
    prompts: list[str] = []
    for index in range(-(-options.prompts // 4)):
        code = inspect.getsource(CODE[index % len(CODE)]).strip()[:600]
        instructions = [
            f"Rewrite this paragraph. Change as little as possible.\n\n{paragraphs[2 * index]}",
            f"Summarise this paragraph in its own words.\n\n{paragraphs[2 * index + 1]}",
            f"Rename the argument `text` to `string` in this function, and print the whole function.\n\n{code}",
        ]
        if model.tokenization.tokenizer.chat_template:
            chats = [[{"role": "user", "content": text}] for text in instructions]
            instructions = [render_chat(model.name, model.tokenization.tokenizer, chat).text for chat in chats]
        rows = [
            f"{n}. {sentence.split()[0]}: {' '.join(sentence.split()[1:5])} (source: news, language: English, page {n})"
            for n, sentence in enumerate(sentences[5 * index : 5 * index + 5], start=1)
        ]
        prompts += [*instructions, "\n".join([*rows, "6."])]
    return prompts[: options.prompts]


def random_prompts(model: lj.Model, options: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Return prompts of sixteen random tokens."""
    generator = torch.Generator().manual_seed(0)
    special = {*model.tokenization.tokenizer.all_special_ids}
    allowed = torch.tensor([token for token in range(model.structure.vocab_size) if token not in special])
    drawn = torch.randint(len(allowed), (max(1, options.prompts // 2), 16), generator=generator)
    return [{"input_ids": allowed[row][None], "attention_mask": torch.ones(1, 16).long()} for row in drawn]


def prepare(model: lj.Model, text: lj.Corpus, folder: Path, options: argparse.Namespace) -> None:
    """Fit jumps, replay the paper's rule with them as in the study `early_exit`, and calibrate rule and drafters."""
    settings = make_settings(
        "ours", tokens=options.fit, split=SPLIT, n_test_positions=options.positions, estimators=LENSES
    )
    setup = Setup(model, text, settings)
    headline = early_exit.run(setup).headline.blocks_saved
    saved = {name: headline[f"dynamic_{name}_at_0.95"] / model.n_blocks for name in ("identity", *LENSES)}
    print("share of blocks saved at 95 % in the replay, all levels checked:", saved, flush=True)
    jumps = setup.jumps(LENSES[-1])
    jumps.save_pretrained(folder)
    calibration = lj.calibrate(
        model,
        jumps,
        text,
        target=0.95,
        documents=options.documents,
        self_generated_tokens=options.tokens,
        draft_documents=options.draft_documents,
        log=lambda line: print(line, flush=True),
    )
    save_calibration(calibration, folder)
    report = calibration.report
    print("cost on validation documents relative to the full model:", report.selection_cost)
    print(f"costs in milliseconds: {report.costs}")
    if report.drafts is not None:
        print("a verification step in milliseconds, by columns:", [(n, 1e3 * s) for n, s in report.drafts.step_seconds])
    figures = {
        "replay_saved_at_95": saved[LENSES[-1]],
        "replay_saved_at_95_without_memory": saved["calibrated"],
        "replay_saved_at_95_identity": saved["identity"],
    }
    (folder / "figures.json").write_text(json.dumps(figures))


def generation_settings(model: lj.Model, tokens: int) -> dict[str, Any]:
    return {
        "do_sample": False,
        "max_new_tokens": tokens,
        "min_new_tokens": tokens,
        "pad_token_id": model.tokenization.pad,
    }


def our_rival(prepared: Prepared, tokens: int, *, every: int = 1, **keywords: Any) -> Rival:
    settings = generation_settings(prepared.model, tokens)
    return Rival(lambda inputs: lj.generate(prepared.model, prepared.jumps, inputs, **keywords, **settings), every)


def their_rival(prepared: Prepared, tokens: int, *, every: int = 1, **keywords: Any) -> Rival:
    hf: Any = prepared.model.hf
    settings = generation_settings(prepared.model, tokens)
    return Rival(lambda inputs: hf.generate(**inputs, **settings, **keywords), every)


def never_and_lossless(prepared: Prepared, tokens: int) -> dict[str, Rival]:
    return {
        "never": our_rival(prepared, tokens, exit="never"),
        "lossless": our_rival(prepared, tokens, exit=prepared.calibration.verified_exit, verify=True),
    }


def run_all(rivals: dict[str, Rival], batches: list[dict[str, torch.Tensor]], prepared: Prepared) -> None:
    """Let all rivals continue all prompts in turn, each with the number of threads that was best on the first."""
    for rival in rivals.values():
        if not rival.threads:
            by_threads = {}
            for threads in sorted({1, prepared.n_threads}, reverse=True):
                rival.threads = threads
                rival.time(batches[0])  # warm-up
                by_threads[threads] = rival.time(batches[0])[0]
            rival.threads = min(by_threads, key=lambda threads: by_threads[threads])
    end = time.perf_counter() + 60 * prepared.minutes
    for turn, inputs in enumerate(batches):
        if turn and time.perf_counter() > end:
            break
        for rival in list(rivals.values())[:: 1 if turn % 2 == 0 else -1]:
            if turn % rival.every == 0:
                rival.seconds[turn], rival.outputs[turn] = rival.time(inputs)
    torch.set_num_threads(prepared.n_threads)


def encode(model: lj.Model, prompts: list[Any], size: int = 1) -> list[dict[str, torch.Tensor]]:
    if not isinstance(prompts[0], str):
        return prompts
    return [model.tokenization.generation_inputs(prompts[i : i + size]) for i in range(0, len(prompts), size)]


def print_table(title: str, rivals: dict[str, Rival], size: int, tokens: int, *bases: str) -> None:
    columns = " ".join(f"{'/ ' + base:>10}" for base in bases)
    print(f"\n{title}\n{'method':26} {'threads':>7} {'prompts':>7} {'tokens/s':>9} {columns}")
    for name, rival in rivals.items():
        rate = size * tokens / statistics.median(rival.seconds.values())
        ratios = " ".join(f"{over(rivals, name, base):10.3f}" for base in bases)
        print(
            f"{name:26} {rival.threads:7} {len(rival.seconds):7} {rate:9.1f} {ratios}  {describe_run(rival)}",
            flush=True,
        )


def over(rivals: dict[str, Rival], name: str, other: str) -> float:
    """Return how many times as fast one method is as another: the median over the prompts of both."""
    theirs, ours = rivals[other].seconds, rivals[name].seconds
    return statistics.median(theirs[turn] / ours[turn] for turn in ours if turn in theirs)


def describe_run(rival: Rival) -> str:
    """Return the counters of our own methods; nothing for Hugging Face's."""
    results = list(rival.outputs.values())
    if not isinstance(results[0], Generated):
        return ""
    spent = {part: sum(r.counts.seconds[part] for r in results) for part in results[0].counts.seconds}
    shares = ", ".join(f"{part} {seconds / sum(spent.values()):.0%}" for part, seconds in spent.items() if seconds)
    saved = statistics.mean(r.blocks_saved for r in results)
    steps = sum(r.counts.steps for r in results)
    if not steps:
        return f"blocks saved {saved:.1%}; {shares}"
    per_step = sum(max(map(len, r.ids)) for r in results) / steps
    return f"{per_step:.2f} tokens a step, {describe_drafts(results)}; {shares}"


def describe_drafts(results: list[Generated]) -> str:
    """Return, for every drafter, its drafts per step and the share of them accepted at each depth."""
    drafters = sorted({name for r in results for name in r.counts.drafters})
    steps, parts = sum(r.counts.steps for r in results), []
    for name in drafters:
        counts = [r.counts.drafters[name] for r in results if name in r.counts.drafters]
        depths = range(max(len(c.drafted) for c in counts))
        drafted = [sum(c.drafted[d] for c in counts if d < len(c.drafted)) for d in depths]
        accepted = [sum(c.accepted[d] for c in counts if d < len(c.accepted)) for d in depths]
        shares = " ".join(f"{a / n:.2f}" if n else "–" for a, n in zip(accepted, drafted, strict=True))
        parts.append(f"{name} {sum(drafted) / steps:.2f} a step, right {shares}")
    return "; ".join(parts) or "no drafts"


def race(prepared: Prepared, prompts: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Compare `model.generate`, our loop without exits, early exit and lossless generation; check every token."""
    model, tokens = prepared.model, options.tokens
    rivals = {
        "hf": their_rival(prepared, tokens, every=options.every),
        **never_and_lossless(prepared, tokens),
        "p95": our_rival(prepared, tokens, every=options.every, exit=prepared.calibration.exit),
    }
    batches = encode(model, prompts)
    run_all(rivals, batches, prepared)
    print_table(f"batch 1, {len(prompts)} prompts", rivals, 1, tokens, "hf", "never")
    near_ties = sum(r.counts.near_ties for r in rivals["lossless"].outputs.values())
    same = [r.ids == rivals["never"].outputs[turn].ids for turn, r in rivals["lossless"].outputs.items()]
    with_hf = [
        rivals["lossless"].outputs[turn].ids[0] == output[0, batches[turn]["input_ids"].shape[1] :].tolist()
        for turn, output in rivals["hf"].outputs.items()
    ]
    print(
        f"lossless: all tokens of {sum(same)} of {len(same)} prompts equal our loop's, of {sum(with_hf)} of "
        f"{len(with_hf)} model.generate's; {near_ties} near ties"
    )
    return {
        "lossless_over_never": over(rivals, "lossless", "never"),
        "lossless_over_hf": over(rivals, "lossless", "hf"),
        "p95_over_never": over(rivals, "p95", "never"),
        "p95_over_hf": over(rivals, "p95", "hf"),
        "same_text_as_never": statistics.mean(same),
        "same_text_as_hf": statistics.mean(with_hf),
        "agreement_p95": agreement(model, rivals["p95"], batches),
    }


def compare_drafts(prepared: Prepared, name: str, prompts: list[Any], options: argparse.Namespace) -> dict[str, float]:
    """Compare lossless generation with our loop on another set of prompts."""
    rivals = never_and_lossless(prepared, options.tokens)
    run_all(rivals, encode(prepared.model, prompts), prepared)
    print_table(f"{name}, {len(prompts)} prompts", rivals, 1, options.tokens, "never")
    return {f"{name}_over_never": over(rivals, "lossless", "never")}


def compare_batches(prepared: Prepared, prompts: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Compare lossless generation with our loop, eight prompts at a time."""
    rivals = never_and_lossless(prepared, options.tokens) | {"hf": their_rival(prepared, options.tokens, every=3)}
    run_all(rivals, encode(prepared.model, prompts, 8), prepared)
    print_table(f"batch 8, {len(prompts)} prompts", rivals, 8, options.tokens, "hf", "never")
    return {"batch8_over_never": over(rivals, "lossless", "never"), "batch8_over_hf": over(rivals, "lossless", "hf")}


def compare_drafters(prepared: Prepared, prompts: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Compare the drafters alone with their combination."""
    calibrated = prepared.calibration.verified_exit.drafts
    if calibrated is None:
        print("no drafters pay on this machine")
        return {}
    rivals = never_and_lossless(prepared, options.tokens)
    names: tuple[DrafterName, ...] = ("lookup", "recycled", "head") if calibrated.head else ("lookup", "recycled")
    for name in names:
        config = replace(calibrated, drafters=(name,))
        rivals[name] = our_rival(prepared, options.tokens, verify=True, drafts=config)
    rivals["lookup, uncalibrated"] = our_rival(prepared, options.tokens, verify=True, drafts="lookup")
    splice = fit_splice(prepared, options)
    rivals["splice"] = Rival(
        lambda inputs: lj.generate(
            prepared.model,
            splice,
            inputs,
            verify=True,
            drafts=DraftConfig(("splice",), costs=calibrated.costs),
            **generation_settings(prepared.model, options.tokens),
        )
    )
    exit = replace(prepared.calibration.exit, drafts=DraftConfig(("exit",), 4, costs=calibrated.costs))
    rivals["exit"] = our_rival(prepared, options.tokens, exit=exit, verify=True)
    run_all(rivals, encode(prepared.model, prompts[:: 3 * options.every]), prepared)
    print_table("drafters", rivals, 1, options.tokens, "never")
    return {f"{name}_alone_over_never": over(rivals, name, "never") for name in (*names, "splice", "exit")}


def fit_splice(prepared: Prepared, options: argparse.Namespace) -> lj.Jumps:
    """Return the jump of a splice that runs the first block and about the last seventh of the blocks."""
    late = prepared.model.n_blocks - max(1, prepared.model.n_blocks // 7)
    return lj.fit(
        prepared.model,
        prepared.text,
        estimator="ridge",
        sources=f"1+{late}@-1",
        target=late,
        tokens=options.fit // 3,
        strength=1e-3,
    )


def compare_rivals(prepared: Prepared, prompts: list[str], options: argparse.Namespace) -> dict[str, float]:
    """Compare with Hugging Face's prompt lookup, early exit and assisted generation, each with its best setting."""
    model, tokens, n_blocks = prepared.model, options.tokens, prepared.model.n_blocks
    batches = encode(model, prompts[:: 5 * options.every])
    assistants = {
        f"{level} blocks": lj.make_draft_model(model, prepared.text, level, tokens=options.fit // 4).model.hf
        for level in (n_blocks // 3, 2 * n_blocks // 3)
    }
    levels = sorted({max(1, n_blocks * k // 6) for k in (1, 3, 5)})
    rivals = {
        "hf": their_rival(prepared, tokens),
        **never_and_lossless(prepared, tokens),
        "hf prompt lookup": their_rival(prepared, tokens, prompt_lookup_num_tokens=3),
        "hf early exit": fastest(
            {f"level {level}": their_rival(prepared, tokens, assistant_early_exit=level) for level in levels},
            batches[0],
        ),
        "hf assisted": fastest(
            {name: their_rival(prepared, tokens, assistant_model=hf) for name, hf in assistants.items()}, batches[0]
        ),
    }
    run_all(rivals, batches, prepared)
    print_table("Hugging Face's own methods", rivals, 1, tokens, "hf", "never")
    return {}


def fastest(candidates: dict[str, Rival], inputs: dict[str, torch.Tensor]) -> Rival:
    """Return the candidate with the shortest run on one prompt."""
    seconds = {name: rival.time(inputs)[0] for name, rival in candidates.items()}
    best = min(seconds, key=lambda name: seconds[name])
    print(f"fastest of {', '.join(candidates)}: {best}")
    return candidates[best]


@torch.no_grad()
def agreement(model: lj.Model, rival: Rival, batches: list[dict[str, torch.Tensor]]) -> float:
    """Return how often a generated token is the full model's, given the same prefix."""
    hits = []
    for turn, result in rival.outputs.items():
        prompt = batches[turn]["input_ids"]
        ids = torch.cat([prompt, torch.tensor(result.ids)], 1)
        logits = model.hf(input_ids=ids[:, :-1]).logits[:, prompt.shape[1] - 1 :]
        if (end := model.hf.generation_config.eos_token_id) is not None:
            logits[..., end] = -torch.inf  # no method may generate the end of text
        best = logits.argmax(-1)
        hits += (best == ids[:, prompt.shape[1] :]).reshape(-1).tolist()
    return statistics.mean(hits)


if __name__ == "__main__":
    main()
