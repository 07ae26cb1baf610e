"""Cost of pruning: our replacements, removal and ReplaceMe's least squares with the same spans, text and budget.

    python benchmarks/prune.py [--models smollm2,stories15m] [--drops 6] [--quick] [--minutes 5]

All methods share the calibration documents: for smollm2 WikiText-2 train and TinyStories train in equal parts, for
stories15M TinyStories alone (its perplexity on WikiText is 7,000). The result is the perplexity on WikiText-2 test,
TinyStories valid and two texts that nothing is calibrated on (biomedical abstracts, court opinions), relative to the
original model on the same tokens, paired over documents.
  same span       every method on one span, the one with the lowest validation loss with a full map in place
  best selection  every method with its own selection: remove_bi by Block Influence (ShortGPT, as published: no block
                  protected), deepest, replaceme the span of least angle, sleb by loss without the blocks, linearpatch
                  on sleb's blocks, prune_comp by its own iteration, ours by loss (greedy, or the span above)
  refit against   ratio of the perplexity of `refit` to that of each other method on the same tokens, with its interval
  answers         accuracy in arithmetic, bracket matching, copying and retrieval (`generative_probe.py`), and in
                  lm-eval's tasks (not with --quick)
  distil          `fold` and `refit` with their best selection, all weights trained for the given minutes
  cost            seconds of refitting relative to one forward pass over the calibration text, peak memory (timed: run
                  it alone)
  speed           tokens per second of the exported checkpoint and the original, alternating; their logits are compared
Last line: JSON, model → dropped blocks → text → method → perplexity ratio, for each method with its own selection, and
as "METHOD_same_cut" on the common span; "refit_against" has the paired ratios with intervals, "probe" and
"tasks" the answers.
`fold` here is the method `rotation`, the best of one pass.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from generative_probe import questions, score
from mixture import mixture
from prune_rivals import compensated_selection, sleb_selection, with_compensation, with_linear_patch
from transformers import AutoModelForCausalLM

import layerjump as lj
from layerjump.data.batches import Batches, make_batches
from layerjump.data.positions import ALL_POSITIONS
from layerjump.evaluation.tasks import evaluate
from layerjump.metrics.timing import describe_machine, ratio, time_alternately
from layerjump.metrics.token_loss import TokenLosses, token_losses
from layerjump.models.model import Model
from layerjump.pruning.distill import distill
from layerjump.pruning.prune import CalibrationData, Pruned, drop_and_replace, lowest_loss, prepare_calibration
from layerjump.pruning.select import BlockSelector, Span, contiguous_spans, required_blocks

SHARED = Path(__file__).parents[2] / "shared"
WIKI, STORIES = SHARED / "text/wikitext-2", SHARED / "text/tinystories"
TRAIN = {"wikitext2": WIKI / "wikitext2_train_first1MB.txt", "tinystories": STORIES / "tinystories_train_sample.txt"}
CALIBRATION_TEXTS = {"smollm2": ("wikitext2", "tinystories"), "stories15m": ("tinystories",)}
"""Model → its calibration texts."""
TESTS = {
    "wikitext2": WIKI / "wiki.test.raw",
    "tinystories": STORIES / "tinystories_valid_sample.txt",
    "biomedical": SHARED / "text/domains/biomedical.txt",
    "legal": SHARED / "text/domains/legal.txt",
}
SOURCES = {"smollm2": "smollm2", "stories15m": str(SHARED / "models/stories15M")}
DROPS = {"smollm2": (3, 6, 8, 10), "stories15m": (1, 2)}
CALIBRATION, TEST = 20_000, 5_000
SPLIT = "85/10/5"
SAME_SPAN = {"remove": "remove", "replaceme": "replaceme", "rotation": "fold", "linear": "linear", "refit": "refit"}
"""Method → its name in the JSON."""
OURS = ("linear", "fold")
TASKS = "copa,piqa,arc_easy"
"""lm-eval tasks, of each the first 100 items; a model of children's stories answers none of them."""

Ratios = dict[str, dict[str, Any]]
"""Text → method → perplexity ratio."""
Losses = dict[str, TokenLosses]
"""Text → losses of one model."""
RatioIntervals = dict[str, tuple[float, float, float]]
"""Text → perplexity relative to the original model, with its interval."""


class Bench:
    """A model with its calibration text and its two test texts."""

    def __init__(self, name: str, *, most: int, quick: bool, minutes: float) -> None:
        self.model = lj.load(SOURCES[name])
        self.most, self.minutes = most, minutes
        self.questions = questions(10 if quick else 50)
        self.n_items = 0 if quick or name == "stories15m" else 100
        divisor = 4 if quick else 1
        mixed = mixture({text: lj.load_text(TRAIN[text]) for text in CALIBRATION_TEXTS[name]})
        self.calibration = prepare_calibration(
            self.model, mixed.corpus, tokens=CALIBRATION // divisor, split=SPLIT, seed=0
        )
        self.tests = {text: self._test(path, TEST // divisor) for text, path in TESTS.items()}
        self.original = {text: token_losses(self.model, test) for text, test in self.tests.items()}
        required = required_blocks(self.model, self.calibration.fit)
        print(f"{self.model}: {self.calibration.info.tokens:,} tokens; protected {required}")
        for text, losses in self.original.items():
            print(f"  {text}: perplexity {losses.perplexity:.2f} on {len(losses.losses):,} tokens")
        self.ours = BlockSelector(self.model, self.calibration.fit, self.calibration.validation, required)
        self.published = replace(self.ours, protected=())
        self.keep_ends = replace(self.ours, protected=(1, self.model.n_blocks))

    @cached_property
    def by_loss(self) -> list[int]:
        """Blocks in greedy order: the first n are the selection of n blocks."""
        return self.ours.order_by_loss(self.most)

    def _test(self, path: Path, tokens: int) -> Batches:
        return make_batches(lj.load_text(path), self.model.tokenization, ALL_POSITIONS, tokens=tokens)

    def losses(self, model: Model) -> Losses:
        return {text: token_losses(model, test) for text, test in self.tests.items()}

    def ratios(self, losses: Losses) -> RatioIntervals:
        return {text: each.over(self.original[text]) for text, each in losses.items()}

    def prune(self, spans: list[Span], method: str) -> Pruned:
        return drop_and_replace(self.model, spans, method, self.calibration)

    def prune_timed(self, spans: list[Span], method: str) -> Pruned:
        """Prune, and print the time relative to a forward pass over the calibration text."""
        start = time.perf_counter()
        token_losses(self.model, self.calibration.fit)
        middle = time.perf_counter()
        pruned = self.prune(spans, method)
        passes = (time.perf_counter() - middle) / (middle - start)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        changed = sum(step.strength is not None for step in pruned.refitted)
        print(
            f"  {method}: {changed} of {len(pruned.refitted)} projections changed; as long as {passes:.1f} forward "
            f"passes over the calibration text; peak memory of the process {peak:,.0f} MB"
        )
        return pruned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2,stories15m")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, fewer drops")
    parser.add_argument("--minutes", type=float, default=5.0, help="minutes of distillation; 0: none")
    parser.add_argument("--drops", help="numbers of blocks, such as 3,6 (default: those of the table)")
    options = parser.parse_args()
    print(describe_machine())
    figures: dict[str, dict[str, Ratios]] = {}
    for name in options.models.split(","):
        minutes = min(options.minutes, 0.5) if options.quick else options.minutes
        drops = DROPS[name][:1] if options.quick else DROPS[name]
        if options.drops:
            drops = tuple(map(int, options.drops.split(",")))
        bench = Bench(name, most=max(drops), quick=options.quick, minutes=minutes)
        figures[name] = {str(count): compare_methods(bench, count) for count in drops}
    print(json.dumps(figures))


def compare_methods(bench: Bench, count: int) -> Ratios:
    """Compare all methods with one number of dropped blocks; measure distillation and speed."""
    ratios: Ratios = {text: {} for text in TESTS}

    def measure(name: str, label: str, model: Model) -> Losses:
        losses = bench.losses(model)
        intervals = bench.ratios(losses)
        print_ratios(label, intervals)
        for text, (value, _, _) in intervals.items():
            ratios[text][name] = round(value, 4)
        return losses

    def compare_refit(losses: dict[str, Losses], suffix: str = "") -> None:
        """Store the perplexity of refit relative to the others'."""
        print(f"  refit against the others{' on this span' if suffix else ''}:")
        for other in losses:
            if other != "refit":
                pairs = {text: losses["refit"][text].over(losses[other][text]) for text in TESTS}
                print_ratios(f"  refit / {other}", pairs)
                for text, pair in pairs.items():
                    ratios[text].setdefault(f"refit_against{suffix}", {})[other] = [round(value, 4) for value in pair]

    span = best_span(bench, count)
    fit = bench.calibration.fit
    print(f"{count} blocks dropped, same span: blocks {span[0] + 1} to {span[1]}")
    same_span, losses = {}, {}
    for method, name in SAME_SPAN.items():
        same_span[name] = bench.prune_timed([span], method) if name == "refit" else bench.prune([span], method)
        losses[name] = measure(f"{name}_same_cut", name, same_span[name].model)
    for name, attach in (("linearpatch", with_linear_patch), ("prune_comp", with_compensation)):
        losses[name] = measure(f"{name}_same_cut", name, attach(bench.model, [span], fit))
    compare_refit(losses, "_same_cut")
    print(f"{count} blocks dropped, each method with its own selection")
    losses = {}
    selections = best_selections(bench, count)
    for name, (spans, method) in selections.items():
        pruned = bench.prune(spans, method)
        if name in OURS:  # the same competition as in `lj.prune`
            pruned = lowest_loss([pruned, same_span[name]], bench.calibration)
        losses[name] = measure(name, f"{name} {format_spans(pruned.spans)}", pruned.model)
        if name == "fold":
            measure_speed(pruned)
            fold = pruned
    for name, attach, spans in (
        ("linearpatch", with_linear_patch, selections["sleb"][0]),
        ("prune_comp", with_compensation, compensated_selection(bench.model, bench.calibration, count)),
    ):
        losses[name] = measure(name, f"{name} {format_spans(spans)}", attach(bench.model, spans, fit))
    # As in `lj.prune`, the selection is that of the replacement that refitting starts from.
    is_same = list(fold.spans) == [span]
    refitted = same_span["refit"] if is_same else bench.prune_timed(list(fold.spans), "refit")
    losses["refit"] = measure("refit", f"refit {format_spans(refitted.spans)}", refitted.model)
    compare_refit(losses)
    compare_answers(bench, {"original": bench.model, "fold": fold.model, "refit": refitted.model}, ratios)
    for name, pruned in (("distil", fold), ("refit_distilled", refitted)) if bench.minutes else ():
        measure(name, f"{name}, {bench.minutes:g} minutes", distill_within_budget(bench, pruned).model)
    return ratios


def compare_answers(bench: Bench, models: dict[str, Model], ratios: Ratios) -> None:
    """Print and store what models answer to the questions of the generative probe."""
    for name, model in models.items():
        scores = score(model, bench.questions)
        parts = [f"{kind} {each.accuracy:.2f} ({each.loss:.2f} nats)" for kind, each in scores.items()]
        print(f"  answers, {name:<19} {'; '.join(parts)}", flush=True)
        ratios.setdefault("probe", {})[name] = {
            kind: {"accuracy": round(each.accuracy, 4), "loss": round(each.loss, 4)} for kind, each in scores.items()
        }
        if bench.n_items:
            results = evaluate(model, TASKS, SHARED / "text/eval", limit=bench.n_items).scores
            parts = [
                f"{each.task} {each.metric} {each.value:.3f} ({each.low:.3f} to {each.high:.3f})" for each in results
            ]
            print(f"  tasks, {name:<21} {'; '.join(parts)}", flush=True)
            ratios.setdefault("tasks", {})[name] = {
                f"{each.task} {each.metric}": round(each.value, 4) for each in results
            }


def distill_within_budget(bench: Bench, pruned: Pruned) -> Pruned:
    steps = steps_within_budget(bench, pruned, bench.calibration)
    with tempfile.TemporaryDirectory() as folder:
        return distill(pruned, bench.calibration, folder, steps=steps, kl_weight=1.0, train_all_weights=True)


def best_span(bench: Bench, count: int) -> Span:
    """Return the span with the lowest validation loss with a full map in place."""
    selector = bench.ours if bench.ours.spans(count) else bench.keep_ends
    return contiguous_spans(replace(selector, contiguous=True).select("loss", count))[0]


def best_selections(bench: Bench, count: int) -> dict[str, tuple[list[Span], str]]:
    """Return, for each method, the spans that it selects and their replacement."""
    published = {
        "remove_bi": (bench.published, "influence", "remove"),
        "deepest": (bench.keep_ends, "deepest", "remove"),
        "replaceme": (bench.keep_ends, "angle", "replaceme"),
    }
    selections = {
        name: (contiguous_spans(selector.select(criterion, count)), method)
        for name, (selector, criterion, method) in published.items()
    }
    ours = contiguous_spans(bench.by_loss[:count])
    selections["sleb"] = (sleb_selection(bench.published, count), "remove")
    return selections | {"linear": (ours, "linear"), "fold": (ours, "rotation")}


def steps_within_budget(bench: Bench, pruned: Pruned, calibration: CalibrationData) -> int:
    """Return the number of training steps in the budget: a step costs about three forward passes of both models."""
    batch = calibration.fit[0]
    start = time.perf_counter()
    token_losses(bench.model, [batch])
    token_losses(pruned.model, [batch])
    return max(4, int(60 * bench.minutes / (2 * (time.perf_counter() - start))))


@torch.no_grad()
def measure_speed(pruned: Pruned) -> None:
    """Print tokens per second of the exported checkpoint and the original, and the largest difference of logits."""
    original: Any = pruned.original.hf
    prompt = torch.tensor([pruned.original.tokenization.encode(["Once upon a time there was a"])[0]])
    settings = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    with tempfile.TemporaryDirectory() as folder:
        pruned.save(Path(folder) / "model", force=True)
        short = AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
    in_memory, exported = (model(prompt).logits for model in (pruned.model.hf, short))
    difference = float((in_memory - exported).abs().max())
    seconds = time_alternately(
        {
            "original": lambda: original.generate(prompt, **settings),
            "exported": lambda: short.generate(prompt, **settings),
        },
        repeats=3,
    )
    tokens_per_second = {name: 32 / min(times) for name, times in seconds.items()}
    gain = ratio(seconds["original"], seconds["exported"])
    print(
        f"  exported {tokens_per_second['exported']:.1f} tokens/s, original "
        f"{tokens_per_second['original']:.1f}: {gain:.2f}×; its logits differ by {difference:.1e} from those in memory"
    )


def print_ratios(name: str, ratios: RatioIntervals) -> None:
    parts = [f"{text} {v:.3f} ({low:.3f} to {high:.3f})" for text, (v, low, high) in ratios.items()]
    print(f"  {name:<28} {'; '.join(parts)}", flush=True)


def format_spans(spans: Sequence[Span]) -> str:
    return ",".join(f"{i + 1}-{j}" if j > i + 1 else str(j) for i, j in spans)


if __name__ == "__main__":
    main()
