"""Cost of capturing hidden states, relative to the bare body and the bare forward pass.

    python benchmarks/capture.py [--model smollm2] [--quick]

The rivals run the same batches alternately; `naive` captures from batches in text order, sixteen rows each.
Sentences come from Leipzig's English Wikipedia, documents are PubMed abstracts (both in `../shared/text`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch

import layerjump as lj
from layerjump.metrics.timing import describe_machine, ratio, time_alternately

TEXTS = {"sentences": "leipzig/eng_wikipedia_2016_10K-sentences.txt", "documents": "domains/biomedical.txt"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[2] / "shared" / "text")
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="fewer tokens: within two minutes")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.repeats = 1_000, 2

    model = lj.load(options.model)
    print(f"{describe_machine()}\n{model}, all levels at all positions, {options.repeats} repeats, seed 0\n")
    print(f"{'text':10} {'tokens':>7} {'rival':8} {'tokens/s':>9} {'over body':>10} {'padding':>8}")
    figures: dict[str, float] = {}
    for kind, name in TEXTS.items():
        figures |= measure(model, kind, options.text / name, options.tokens, options.repeats)
    print(json.dumps(figures))


def measure(model: lj.Model, kind: str, path: Path, tokens: int, repeats: int) -> dict[str, float]:
    """Time the rivals on one text; print their rows, return the figures."""
    corpus, positions = lj.load_text(path), lj.Positions("all", skip_first=0)
    ours = lj.make_batches(corpus, model.tokenization, positions, tokens=tokens)
    naive = naive_batches(model, corpus, ours)
    seconds = time_alternately(
        {
            "capture": lambda: capture(model, ours),
            "body": lambda: body(model, ours),
            "forward": lambda: forward(model, ours),
            "naive": lambda: capture(model, naive),
        },
        repeats=repeats,
    )
    for rival, times in seconds.items():
        batches = naive if rival == "naive" else list(ours)
        rate = ours.n_tokens / sorted(times)[len(times) // 2]
        over = ratio(times, seconds["body"])
        print(f"{kind:10} {ours.n_tokens:7} {rival:8} {rate:9.0f} {over:10.3f} {padding(batches):8.1%}")
    return {
        f"capture_over_body_{kind}": ratio(seconds["capture"], seconds["body"]),
        f"capture_over_forward_{kind}": ratio(seconds["capture"], seconds["forward"]),
        f"naive_over_capture_{kind}": ratio(seconds["naive"], seconds["capture"]),
    }


def capture(model: lj.Model, batches: Iterable[lj.Batch]) -> None:
    for _ in lj.capture_states(model, batches, range(model.n_blocks + 1)):
        pass


@torch.no_grad()
def body(model: lj.Model, batches: Iterable[lj.Batch]) -> None:
    for batch in batches:
        model.hf.base_model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)


@torch.no_grad()
def forward(model: lj.Model, batches: Iterable[lj.Batch]) -> None:
    for batch in batches:
        model.hf(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)


def naive_batches(model: lj.Model, corpus: lj.Corpus, ours: lj.Batches) -> list[lj.Batch]:
    """The same sequences in text order, sixteen to a batch."""
    rows = []
    for batch in ours:
        for row, document in {int(r): int(d) for r, d in zip(batch.row, batch.document, strict=True)}.items():
            rows.append((document, batch.input_ids[row, : int(batch.attention_mask[row].sum())]))
    rows.sort(key=lambda pair: pair[0])
    batches = []
    for start in range(0, len(rows), 16):
        ids = [row for _, row in rows[start : start + 16]]
        grid = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=model.tokenization.pad)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        where, position = mask.nonzero(as_tuple=True)
        batches.append(lj.Batch(grid, mask, where, position, where, grid[where, position]))
    return batches


def padding(batches: list[lj.Batch]) -> float:
    cells = sum(batch.input_ids.numel() for batch in batches)
    return 1 - sum(batch.n_tokens for batch in batches) / cells


if __name__ == "__main__":
    main()
