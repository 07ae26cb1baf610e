"""Effect of a penalty during pretraining: none, cosine, mse and jump, with equal architecture, data, steps and seeds.

    python benchmarks/penalties.py [--quick] [--seeds 3] [--steps 600] [--keep FOLDER]

A Mistral (as in "Your Transformer is Secretly Linear", arXiv 2405.12250) of 6 blocks, width 128 and 1,024 tokens is
trained on TinyStories (the train sample and stories sampled from stories15M). The held-out text is the validation
sample, so that over-fitting shows. The penalty weights are the paper's 0.5 for cosine and mse; 0.5 for jump is ours.
  linearity    without residual, by block and on average, on held-out text (and in sample, as in the paper)
  perplexity   of held-out text, and the training loss at the end
  accuracy     COPA and BoolQ items through lm-eval with its own prompts (chance: 0.5)
  stories      sampled at temperature 1: perplexity under stories15M, and distinct 1- and 2-grams, in place of the
               paper's judge; real stories are measured in the same way for comparison
  jump strength, mean agreement of the lens over levels
Each penalty is compared with none, seed by seed: a difference is significant if its mean is more than 4.3 times (3
seeds; Student's t, 95 %) the standard error. Last line: JSON, penalty → measure → mean, sd.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import layerjump as lj
from layerjump.data.batches import make_batches
from layerjump.data.corpus import Corpus
from layerjump.data.positions import ALL_POSITIONS
from layerjump.evaluation.tasks import evaluate
from layerjump.metrics.timing import describe_machine
from layerjump.metrics.token_loss import token_losses
from layerjump.models.model import Model
from layerjump.training.pretrain import PretrainingRecord, Recipe, join_corpora, pretrain

SHARED = Path(__file__).parents[2] / "shared"
STORIES = SHARED / "text/tinystories"
TRAIN = [STORIES / f"tinystories_{name}.txt" for name in ("train_sample", "sampled")]
HELD_OUT = STORIES / "tinystories_valid_sample.txt"
JUDGE = SHARED / "models/stories15M"
TASKS, TASK_DATA = "copa,boolq", SHARED / "text/eval"
MAX_ITEMS = 200
"""Largest number of items of each task."""
PENALTY_WEIGHTS = {"none": 0.0, "cosine": 0.5, "mse": 0.5, "jump": 0.5}
FULL = Recipe(
    arch="mistral",
    layers=6,
    hidden_size=128,
    heads=4,
    max_positions=128,
    vocab_size=1024,
    length=128,
    steps=600,
    batch_size=16,
    learning_rate=1e-3,
)
QUICK = replace(
    FULL, layers=3, hidden_size=64, heads=4, max_positions=64, vocab_size=512, length=64, steps=200, learning_rate=3e-3
)
T_QUANTILES = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Number of paired differences → 95 % quantile of t."""

Measures = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 200 steps, two seeds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--keep", type=Path, help="folder to keep the models in; models that are there are not trained again"
    )
    options = parser.parse_args()
    recipe = QUICK if options.quick else FULL
    steps = options.steps or recipe.steps
    recipe = replace(recipe, steps=steps, eval_every=max(1, steps // 10))
    seeds = min(2, options.seeds) if options.quick else options.seeds
    print(describe_machine())
    text = join_corpora([lj.load_text(path) for path in TRAIN])
    judge, held_out = lj.load(JUDGE), lj.load_text(HELD_OUT)
    stories = 8 if options.quick else 60
    real = long_stories(text, stories)
    print(f"real stories: {judge_stories(judge, real)}")
    runs_by_penalty: dict[str, list[Measures]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        models_folder = options.keep or Path(temporary)
        for seed in range(seeds):
            for penalty, weight in PENALTY_WEIGHTS.items():
                one = replace(recipe, penalty=penalty, penalty_weight=weight, seed=seed)
                folder = models_folder / f"{penalty}-{seed}"
                record = train_or_load(text, held_out, one, folder)
                measures = measure(record, folder, judge, stories)
                runs_by_penalty.setdefault(penalty, []).append(measures)
                print(f"seed {seed} {penalty:<7} {format_measures(measures)}", flush=True)
    print_table(runs_by_penalty)
    print(json.dumps(summarise(runs_by_penalty)))


def train_or_load(text: Corpus, held_out: Corpus, recipe: Recipe, folder: Path) -> PretrainingRecord:
    """Train a model, or use the one in the folder; return its record."""
    if not folder.exists():
        pretrain(text, folder, recipe, eval_text=held_out)
    record = PretrainingRecord.load(folder)
    if recipe.seed == 0 and recipe.penalty == "none":
        passes = f"the text {record.passes:.1f} times ({record.tokens:,} tokens)"
        print(f"{record.parameters:,} parameters, {passes}, {record.minutes} min a run")
    return record


def measure(record: PretrainingRecord, folder: Path, judge: Model, stories: int) -> Measures:
    """Return all measures of one model."""
    last = record.tables.steps[-1]
    measures: Measures = {
        name: value for name, value in last.items() if name not in ("step", "chance floor") and value is not None
    }
    measures["loss in training"] = record.log[-1]["lm_loss"]
    step = last["step"]
    for row in record.tables.blocks:
        value = row["without residual held out"]
        if row["step"] == step and value is not None:
            measures[f"without residual held out, block {row['block']}"] = value
    return measures | task_accuracy(folder) | judge_stories(judge, sample_stories(folder, stories))


def task_accuracy(folder: Path) -> Measures:
    """Return the accuracy on each task, as lm-eval scores it."""
    evaluation = evaluate(lj.load(folder), TASKS, TASK_DATA, limit=MAX_ITEMS, batch_size=8)
    return {f"accuracy {row.task}": row.value for row in evaluation.scores if row.metric == "acc"}


@torch.no_grad()
def sample_stories(folder: Path, count: int) -> list[str]:
    """Sample stories from the end-of-text token at temperature 1, as long as the model's context."""
    model = lj.load(folder)
    hf: Any = model.hf
    end = model.tokenization.tokenizer.eos_token_id
    torch.manual_seed(0)
    samples = hf.generate(
        torch.full((count, 1), end),
        attention_mask=torch.ones(count, 1, dtype=torch.long),
        do_sample=True,
        max_new_tokens=model.max_positions - 1,
        pad_token_id=end,
    )
    texts = model.tokenization.tokenizer.batch_decode(samples, skip_special_tokens=True)
    return [text.strip() for text in texts if len(text.split()) > 3]


def long_stories(text: Corpus, count: int) -> list[str]:
    return [document for document in text.documents if len(document.split()) > 60][:count]


def judge_stories(judge: Model, texts: list[str]) -> Measures:
    """Return the perplexity of stories under a larger model, and their share of distinct n-grams."""
    if not texts:
        return {"judge's perplexity": math.nan, "distinct 1": math.nan, "distinct 2": math.nan}
    corpus = Corpus("samples", tuple(texts), "")
    measures = {
        "judge's perplexity": token_losses(judge, make_batches(corpus, judge.tokenization, ALL_POSITIONS)).perplexity
    }
    for n in (1, 2):
        grams = [gram for text in texts for gram in ngrams(text.split(), n)]
        measures[f"distinct {n}"] = len(set(grams)) / max(1, len(grams))
    return measures


def ngrams(words: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def summarise(runs_by_penalty: dict[str, list[Measures]]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return penalty → measure → mean and sd over seeds."""
    return {
        penalty: {
            name: {"mean": round(average, 5), "sd": round(spread, 5)}
            for name in runs[0]
            for average, spread in [mean_sd([run[name] for run in runs])]
        }
        for penalty, runs in runs_by_penalty.items()
    }


def mean_sd(values: list[float]) -> tuple[float, float]:
    return mean(values), stdev(values) if len(values) > 1 else 0.0


def print_table(runs_by_penalty: dict[str, list[Measures]]) -> None:
    """Print one line a measure, with a star where the difference from no penalty is significant."""
    names = list(runs_by_penalty)
    print(f"{'mean ± sd over seeds':<38}" + "".join(f"{name:>22}" for name in names))
    for measure in runs_by_penalty["none"][0]:
        cells = []
        for name in names:
            average, spread = mean_sd([run[measure] for run in runs_by_penalty[name]])
            star = "*" if name != "none" and is_significant(runs_by_penalty, name, measure) else " "
            cells.append(f"{average:>12.4g} ± {spread:<6.2g}{star}")
        print(f"{measure:<38}" + "".join(cells))
    ours, plain = (
        mean_sd([run["without residual held out"] for run in runs_by_penalty[name]])[0] for name in ("cosine", "none")
    )
    sure = is_significant(runs_by_penalty, "cosine", "without residual held out")
    verdict = "reproduced" if ours < plain else "contradicted"
    print(
        f"The paper: a cosine penalty lowers linearity without residual. Here {plain:.3f} → {ours:.3f}: "
        f"{verdict if sure else 'no difference beyond noise'}"
    )


def is_significant(runs_by_penalty: dict[str, list[Measures]], name: str, measure: str) -> bool:
    """Return whether the mean of the differences from no penalty, seed by seed, is significant."""
    pairs = zip(runs_by_penalty[name], runs_by_penalty["none"], strict=True)
    differences = [ours[measure] - plain[measure] for ours, plain in pairs]
    if len(differences) < 2:
        return False
    average, spread = mean_sd(differences)
    student = T_QUANTILES.get(len(differences), 2.6)
    return abs(average) > student * spread / math.sqrt(len(differences))


def format_measures(measures: Measures) -> str:
    shown = ["perplexity", "without residual held out", "jump strength", "agreement map"]
    shown += ["accuracy copa", "judge's perplexity"]
    return ", ".join(f"{name} {measures[name]:.3f}" for name in shown)


if __name__ == "__main__":
    main()
