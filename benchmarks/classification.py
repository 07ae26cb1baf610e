"""Early exit of a trained classifier: labels that levels predict, and blocks saved at 99 % agreement.

Trains a small BERT from scratch to tell which of five texts a sentence comes from (news, Wikipedia, judgments, PubMed
abstracts, children's stories; all in `../shared/text`). Jumps are fitted and the exit rule is calibrated on sentences
that the classifier was not trained on, and all numbers are of a third set of sentences.

    python benchmarks/classification.py            # 6 blocks of width 128, about six minutes of one core
    python benchmarks/classification.py --quick    # 4 blocks of width 64, within two minutes
"""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification

import layerjump as lj
from layerjump.generation.classifier_exit import Classified
from layerjump.generation.exit_rules import ExitConfig
from layerjump.lens.evaluate import evaluate_lenses
from layerjump.training.tokenizer import train_tokenizer

SOURCES = {
    "news": "leipzig/eng_news_2020_10K-sentences.txt",
    "wikipedia": "leipzig/eng_wikipedia_2016_10K-sentences.txt",
    "law": "domains/legal.txt",
    "medicine": "domains/biomedical.txt",
    "stories": "tinystories/tinystories_sampled.txt",
}
ESTIMATORS = ("mat", "ridge", "calibrated")
LENGTH = 48
"""Tokens of a sentence at most."""


@dataclass(frozen=True)
class Sentences:
    """Sentences and the index of the text that each comes from."""

    texts: list[str]
    labels: torch.Tensor

    def part(self, start: int, end: int) -> Sentences:
        return Sentences(self.texts[start:end], self.labels[start:end])


def read_sentences(folder: Path, per_label: int, seed: int) -> Sentences:
    """As many sentences of each text, shuffled."""
    rng, items = np.random.default_rng(seed), list[tuple[str, int]]()
    for label, path in enumerate(SOURCES.values()):
        documents = lj.load_text(folder / path).documents
        sentences = [s for document in documents for s in re.split(r"(?<=[.!?])\s+", document)]
        unique = [s for s in dict.fromkeys(sentences) if 6 <= len(s.split()) <= 30]
        items += [(unique[index], label) for index in rng.permutation(len(unique))[:per_label]]
    order = rng.permutation(len(items))
    return Sentences([items[i][0] for i in order], torch.tensor([items[i][1] for i in order]))


def train(data: Sentences, *, blocks: int, width: int, steps: int, vocabulary: int, seed: int) -> lj.Model:
    """Train a BERT with a classification head from scratch."""
    tokenizer = train_tokenizer(data.texts, vocabulary, LENGTH, masked=True)
    torch.manual_seed(seed)
    names = list(SOURCES)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=LENGTH,
        pad_token_id=tokenizer.pad_token_id,
        hidden_dropout_prob=0.0,  # fewer than two epochs
        attention_probs_dropout_prob=0.0,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )
    hf = BertForSequenceClassification(config).train()
    optimiser = torch.optim.AdamW(hf.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=1e-3, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        rows = torch.randint(len(data.texts), (32,), generator=generator)
        batch = tokenizer(
            [data.texts[row] for row in rows], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        loss = hf(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=data.labels[rows]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    return lj.Model.wrap(hf, tokenizer, name=f"bert-{blocks}x{width}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2] / "shared" / "text")
    parser.add_argument("--target", type=float, default=0.99, help="agreement with the full model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a smaller model and less text: within two minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = (
        {"blocks": 4, "width": 64, "steps": 400, "vocabulary": 2048}
        if options.quick
        else {"blocks": 6, "width": 128, "steps": 1200, "vocabulary": 4096}
    )
    per_label = 2_000 if options.quick else 7_000
    data = read_sentences(options.text, per_label, options.seed)
    n, started = len(data.texts), time.perf_counter()
    ends = (0, 6 * n // 10, 9 * n // 10, n)
    train_set, fit_set, test_set = (data.part(*pair) for pair in zip(ends, ends[1:], strict=False))
    model = train(train_set, **sizes, seed=options.seed)
    print(f"trained in {time.perf_counter() - started:.0f} s; {model}, labels {', '.join(model.labels or ())}")

    fit_text = lj.Corpus("sentences to fit on", tuple(fit_set.texts), "sentences")
    jumps = {name: lj.fit(model, fit_text, estimator=name, split="50/10/40", seed=options.seed) for name in ESTIMATORS}
    lenses = {"identity": lj.Lens(model), **{name: lj.Lens(model, fitted) for name, fitted in jumps.items()}}
    test_text = lj.Corpus("test sentences", tuple(test_set.texts), "sentences")
    batches = lj.make_batches(test_text, model.tokenization, model.prediction_positions)
    scores = evaluate_lenses(model, lenses, batches)
    gold = test_set.labels[scores.document]
    accuracy = (scores.top == gold).double().mean(-1)
    agreement = (scores.top == scores.model_top).double().mean(-1)
    print(f"\naccuracy / agreement with the full model on {len(gold):,} sentences ({batches.n_tokens:,} tokens)")
    print("level  " + "".join(f"{name:>18}" for name in lenses))
    for level in range(model.n_blocks + 1):
        cells = [f"{accuracy[row, level]:.3f} / {agreement[row, level]:.3f}" for row in range(len(lenses))]
        print(f"{level:<7}" + "".join(f"{cell:>18}" for cell in cells))

    full, full_seconds = _timed_classify(model, None, test_set.texts, "never")
    exits = {}
    print(f"\nexit calibrated to {options.target:.0%} agreement (95 % confidence), on the test sentences")
    print(f"{'jumps':<12}{'levels':<14}{'gap':>7}{'agreement':>11}{'accuracy':>10}{'blocks saved':>14}{'time':>7}")
    for name in lenses:
        fitted = jumps.get(name)
        # Without jumps as many sentences are left out, so that all are calibrated on the same ones.
        left = lj.Corpus("left", tuple(fit_set.texts[i] for i in _unseen(jumps["mat"], fit_text)), "sentences")
        calibration = lj.calibrate_classifier(model, fitted, left, target=options.target, seed=options.seed)
        early, seconds = _timed_classify(model, fitted, test_set.texts, calibration.exit)
        agree = float(np.mean([a == b for a, b in zip(early.labels, full.labels, strict=True)]))
        right = _accuracy(early, test_set)
        exits[name] = {
            "levels": calibration.levels,
            "threshold": calibration.threshold,
            "agreement": round(agree, 4),
            "accuracy": round(right, 4),
            "blocks_saved": round(early.blocks_saved, 4),
            "relative_time": round(seconds / full_seconds, 3),
        }
        gap = "–" if calibration.threshold is None else f"{calibration.threshold:.3f}"
        levels = ",".join(map(str, calibration.levels)) or "never"
        print(
            f"{name:<12}{levels:<14}{gap:>7}{agree:>11.4f}{right:>10.4f}{early.blocks_saved:>14.1%}"
            f"{seconds / full_seconds:>7.2f}"
        )
    result = {
        "model": model.name,
        "seed": options.seed,
        "train": len(train_set.texts),
        "fit": jumps["mat"].provenance.n_fit,
        "test": len(test_set.texts),
        "test_tokens": batches.n_tokens,
        "full_accuracy": round(_accuracy(full, test_set), 4),
        "accuracy": {name: [round(float(v), 4) for v in accuracy[row]] for row, name in enumerate(lenses)},
        "agreement": {name: [round(float(v), 4) for v in agreement[row]] for row, name in enumerate(lenses)},
        "target": options.target,
        "exits": exits,
    }
    print(json.dumps(result))


def _accuracy(classified: Classified, data: Sentences) -> float:
    predicted = torch.tensor([list(SOURCES).index(label) for label in classified.labels])
    return float((predicted == data.labels).double().mean())


def _unseen(jumps: lj.Jumps, text: lj.Corpus) -> list[int]:
    splits = lj.split_indices(len(text.documents), jumps.provenance.split, seed=jumps.provenance.seed)
    return [*splits.test]


def _timed_classify(
    model: lj.Model, jumps: lj.Jumps | None, texts: list[str], exit: ExitConfig | str
) -> tuple[Classified, float]:
    """Labels, and the least seconds of three runs."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        result = lj.classify(model, jumps, texts, exit=exit)
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


if __name__ == "__main__":
    main()
