"""What pruning costs: our stand-ins beside removal and ReplaceMe's least squares, on the same cuts, text and budget.

    python benchmarks/prune.py [--models smollm2,stories15m] [--quick] [--minutes 5]

Calibration, the same documents for every method: for smollm2 WikiText-2 train and TinyStories train in equal parts, for
stories15M TinyStories alone (it cannot read the other: perplexity 7,000). Perplexity on WikiText-2 test and TinyStories
valid, as a ratio to the whole model's on the same tokens, paired over documents.
  same cut      every map on one run of blocks, the one whose loss on select documents is least with a full map in place
  own best cut  each method with the cut it would choose: remove_bi by Block Influence (published: no block protected),
                deepest, replaceme the run of least angle, ours by loss (greedily, or the run above)
  distil        `fold` on its own best cut, all weights trained for so many minutes
  speed         tokens a second of the exported checkpoint beside the original, in turn; its logits are compared, too
Last line: JSON, model → blocks dropped → text → method → perplexity ratio, each method with its own best cut, and with
"_same_cut" behind its name on the common one. `fold` is our best training-free stand-in (`rotation`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from mixture import mixture
from transformers import AutoModelForCausalLM

import layerjump as lj
from layerjump.data.batches import Batches, make_batches
from layerjump.metrics.timing import describe_machine, ratio, time_alternately
from layerjump.metrics.token_loss import TokenLosses, token_losses
from layerjump.models.model import Model
from layerjump.pruning.distill import distill
from layerjump.pruning.prune import (
    ALL_POSITIONS,
    CalibrationData,
    Pruned,
    drop_and_replace,
    lowest_loss,
    prepare_calibration,
)
from layerjump.pruning.select import (
    BlockSelector,
    Span,
    contiguous_spans,
    required_blocks,
)

SHARED = Path(__file__).parents[2] / "shared"
WIKI, STORIES = SHARED / "text/wikitext-2", SHARED / "text/tinystories"
TRAIN = {
    "wikitext2": WIKI / "wikitext2_train_first1MB.txt",
    "tinystories": STORIES / "tinystories_train_sample.txt",
}
READS = {"smollm2": ("wikitext2", "tinystories"), "stories15m": ("tinystories",)}
"""Model → the texts it is calibrated on."""
TESTS = {
    "wikitext2": WIKI / "wiki.test.raw",
    "tinystories": STORIES / "tinystories_valid_sample.txt",
}
SOURCES = {"smollm2": "smollm2", "stories15m": str(SHARED / "models/stories15M")}
DROPS = {"smollm2": (3, 6, 8, 10), "stories15m": (1, 2)}
CALIBRATION, TEST = 20_000, 5_000
SIZES = "85/10/5"
SAME_CUT = {"remove": "remove", "replaceme": "replaceme", "rotation": "fold", "linear": "linear"}
"""Method → its name in the figures."""
OURS = ("linear", "fold")

Ratios = dict[str, dict[str, float]]
"""Text → method → perplexity ratio."""
Found = dict[str, tuple[float, float, float]]
"""Text → perplexity over the whole model's, with its interval."""


class Bench:
    """One model, its calibration text and its two test texts."""

    def __init__(self, name: str, *, most: int, quick: bool, minutes: float) -> None:
        self.model = lj.load(SOURCES[name])
        self.most, self.minutes = most, minutes
        few = 4 if quick else 1
        mixed = mixture({text: lj.load_text(TRAIN[text]) for text in READS[name]})
        self.calibration = prepare_calibration(
            self.model, mixed.corpus, tokens=CALIBRATION // few, split=SIZES, seed=0
        )
        self.tests = {text: self._test(path, TEST // few) for text, path in TESTS.items()}
        self.whole = {text: token_losses(self.model, test) for text, test in self.tests.items()}
        stay = required_blocks(self.model, self.calibration.fit)
        print(f"{self.model}: {self.calibration.about['tokens']:,} tokens; stay {stay}")
        for text, found in self.whole.items():
            print(f"  {text}: perplexity {found.perplexity:.2f} on {len(found.each):,} tokens")
        fit, select = self.calibration.fit, self.calibration.validation
        self.ours = BlockSelector(self.model, fit, select, stay)
        ends = (1, self.model.n_blocks)
        self.published = BlockSelector(self.model, fit, select, ())
        self.ends_stay = BlockSelector(self.model, fit, select, ends)

    @cached_property
    def by_loss(self) -> list[int]:
        """Blocks in the order in which they go, greedily: the first few are the choice of fewer."""
        return self.ours.order_by_loss(self.most)

    def _test(self, path: Path, tokens: int) -> Batches:
        return make_batches(
            lj.load_text(path), self.model.tokenization, ALL_POSITIONS, tokens_wanted=tokens
        )

    def ratios(self, model: Model) -> Found:
        found: dict[str, TokenLosses] = {
            t: token_losses(model, test) for t, test in self.tests.items()
        }
        return {text: found[text].over(self.whole[text]) for text in self.tests}

    def cut(self, cuts: list[Span], method: str) -> Pruned:
        return drop_and_replace(self.model, cuts, method, self.calibration)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="smollm2,stories15m")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, fewer drops")
    parser.add_argument("--minutes", type=float, default=5.0, help="of distillation for each drop")
    options = parser.parse_args()
    print(describe_machine())
    figures: dict[str, dict[str, Ratios]] = {}
    for name in options.models.split(","):
        minutes = min(options.minutes, 0.5) if options.quick else options.minutes
        drops = DROPS[name][:1] if options.quick else DROPS[name]
        bench = Bench(name, most=max(drops), quick=options.quick, minutes=minutes)
        figures[name] = {str(count): one_drop(bench, count) for count in drops}
    print(json.dumps(figures))


def one_drop(bench: Bench, count: int) -> Ratios:
    """Both tables of one number of blocks, distillation and speed."""
    ratios: Ratios = {text: {} for text in TESTS}
    run = one_run(bench, count)
    print(f"{count} blocks out, same cut: blocks {run[0] + 1} to {run[1]}")
    one_cut = {}
    for method, name in SAME_CUT.items():
        one_cut[name] = bench.cut([run], method)
        found = bench.ratios(one_cut[name].model)
        show(name, found)
        keep(ratios, f"{name}_same_cut", found)
    print(f"{count} blocks out, each method's own best cut")
    for name, (cuts, method) in own_cuts(bench, count).items():
        pruned = bench.cut(cuts, method)
        if name in OURS:  # as `lj.prune` chooses
            pruned = lowest_loss([pruned, one_cut[name]], bench.calibration)
        found = bench.ratios(pruned.model)
        show(f"{name} {spans_said(pruned.spans)}", found)
        keep(ratios, name, found)
        if name == "fold":
            speed(pruned)
            keep(ratios, "distil", distilled(bench, pruned))
    return ratios


def distilled(bench: Bench, pruned: Pruned) -> Found:
    start = time.perf_counter()
    steps = steps_in(bench, pruned, bench.calibration)
    with tempfile.TemporaryDirectory() as folder:
        trained = distill(
            pruned, bench.calibration, folder, steps=steps, kl_weight=1.0, train_all_weights=True
        )
    found = bench.ratios(trained.model)
    show(f"distil, {(time.perf_counter() - start) / 60:.1f} minutes", found)
    return found


def keep(ratios: Ratios, name: str, found: Found) -> None:
    for text, (value, _, _) in found.items():
        ratios[text][name] = round(value, 4)


def one_run(bench: Bench, count: int) -> Span:
    """The run whose loss on select documents is least with a full map in place."""
    given = bench.ours if bench.ours.spans(count) else bench.ends_stay
    one = BlockSelector(given.model, given.fit, given.validation, given.protected, contiguous=True)
    return contiguous_spans(one.select("loss", count))[0]


def own_cuts(bench: Bench, count: int) -> dict[str, tuple[list[Span], str]]:
    """Method → the cuts it chooses, and what stands in for them."""
    chosen = {
        "remove_bi": (bench.published, "influence", "remove"),
        "deepest": (bench.ends_stay, "deepest", "remove"),
        "replaceme": (bench.ends_stay, "angle", "replaceme"),
    }
    found = {
        name: (contiguous_spans(given.select(how, count)), method)
        for name, (given, how, method) in chosen.items()
    }
    ours = contiguous_spans(bench.by_loss[:count])
    return found | {"linear": (ours, "linear"), "fold": (ours, "rotation")}


def steps_in(bench: Bench, pruned: Pruned, calibration: CalibrationData) -> int:
    """As many training steps as the minutes allow: a step costs about three passes of the whole model."""
    batch = calibration.fit[0]
    start = time.perf_counter()
    token_losses(bench.model, [batch])
    token_losses(pruned.model, [batch])
    return max(4, int(60 * bench.minutes / (2 * (time.perf_counter() - start))))


@torch.no_grad()
def speed(pruned: Pruned) -> None:
    """Tokens a second of the checkpoint as Hugging Face loads it, beside the original, and the two logits."""
    original: Any = pruned.original.hf
    prompt = torch.tensor(
        [pruned.original.tokenization.encode(["Once upon a time there was a"])[0]]
    )
    settings = {"max_new_tokens": 32, "min_new_tokens": 32, "do_sample": False, "pad_token_id": 0}
    with tempfile.TemporaryDirectory() as folder:
        pruned.save(Path(folder) / "model", force=True)
        short = AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
    here, there = (model(prompt).logits for model in (pruned.model.hf, short))
    apart = float((here - there).abs().max())
    seconds = time_alternately(
        {
            "original": lambda: original.generate(prompt, **settings),
            "exported": lambda: short.generate(prompt, **settings),
        },
        repeats=3,
    )
    each = {name: 32 / min(times) for name, times in seconds.items()}
    gain = ratio(seconds["original"], seconds["exported"])
    print(
        f"  exported {each['exported']:.1f} tokens/s, original {each['original']:.1f}: {gain:.2f}×; its logits "
        f"differ by {apart:.1e} from those in memory"
    )


def show(name: str, found: Found) -> None:
    said = "; ".join(f"{t} {v:.3f} ({lo:.3f} to {hi:.3f})" for t, (v, lo, hi) in found.items())
    print(f"  {name:<28} {said}", flush=True)


def spans_said(cuts: Sequence[Span]) -> str:
    return ",".join(f"{i + 1}-{j}" if j > i + 1 else str(j) for i, j in cuts)


if __name__ == "__main__":
    main()
