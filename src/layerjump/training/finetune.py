"""Fine-tune a causal model on a multiple-choice task.

Multiple-choice tasks: read from a file, learnt as text, scored by likelihood.

Fine-tune a causal model on a task: it learns to write the right answer behind the prompt.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText
from layerjump.models.loading import quiet_transformers
from layerjump.models.model import Model
from layerjump.training.data import IGNORE_INDEX
from layerjump.training.hf_trainer import silence_trainer

ROWS = 16
"""Answers that are scored at once."""
_FORMATS = "give lines of JSON with `query`, `choices` and `gold`, or with `premise`, `hypothesis` and `label`"


@dataclass(frozen=True)
class ChoiceItem:
    """A prompt, what may follow it, and which of these is right."""

    prompt: str
    choices: tuple[str, ...]
    gold: int


def load_task(path: str | Path) -> list[ChoiceItem]:
    """Read a task file, one item a line: `query`, `choices`, `gold`, or an entailment set's `premise` … `label`.

    An entailment item becomes "premise", "Question: hypothesis", "Answer:", and its choices are the labels of the file:
    the wording is ours.
    """
    place = Path(path).expanduser()
    try:
        lines = place.read_text("utf-8").split("\n")  # splitlines() also cuts at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise BadText(f"the task {place} cannot be read ({error}); {_FORMATS}") from error
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found.append(_parsed(line, place, number))
    if not found:
        raise BadText(f"the task {place} has no items; {_FORMATS}")
    labels = sorted({row["label"] for row in found if "label" in row})
    return [_item(row, labels) for row in found]


def _parsed(line: str, place: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
        if "label" in row:
            good = all(isinstance(row[name], str) for name in ("premise", "hypothesis", "label"))
        else:
            choices = row["choices"]
            good = isinstance(row["query"], str) and isinstance(choices, list)
            good = good and all(isinstance(one, str) for one in choices)
            good = good and type(row["gold"]) is int and 0 <= row["gold"] < len(choices)
    except (ValueError, KeyError, TypeError, RecursionError):
        good = False
    if not good:
        raise BadText(f"line {number} of the task {place} is no item; {_FORMATS}")
    return row


def _item(row: dict[str, Any], labels: Sequence[str]) -> ChoiceItem:
    if "label" in row:
        prompt = f"{row['premise']}\nQuestion: {row['hypothesis']}\nAnswer:"
        words = tuple(label.replace("_", " ") for label in labels)
        return ChoiceItem(prompt, words, labels.index(row["label"]))
    return ChoiceItem(row["query"].rstrip(), tuple(row["choices"]), row["gold"])


def encode_example(tokens: Tokenization, prompt: str, answer: str) -> tuple[Tensor, Tensor]:
    """Ids of a prompt and an answer, and the labels of the answer alone; a long prompt loses its beginning."""
    before, after = tokens.encode([prompt, f" {answer.strip()}"])
    room = tokens.max_length - len(tokens.prefix) - len(after)
    if room < 1:
        raise BadText(
            f"the answer {answer[:30]!r} has {len(after)} tokens, and the model takes {tokens.max_length}; give "
            "shorter answers, or a model with more positions"
        )
    ids = [*tokens.prefix, *before[-room:], *after]
    labels = [IGNORE_INDEX] * (len(ids) - len(after)) + after
    return torch.tensor(ids), torch.tensor(labels)


def pad_examples(rows: Sequence[tuple[Tensor, Tensor]], pad: int) -> dict[str, Tensor]:
    """Sequences side by side, padded on the right."""
    ids = pad_sequence([row[0] for row in rows], batch_first=True, padding_value=pad)
    labels = pad_sequence([row[1] for row in rows], batch_first=True, padding_value=IGNORE_INDEX)
    mask = pad_sequence([torch.ones_like(row[0]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def accuracy(model: Model, items: Sequence[ChoiceItem]) -> float:
    """The share of items whose right answer has the highest likelihood, mean over its tokens."""
    tokens = model.tokenization
    rows = [
        encode_example(tokens, item.prompt, choice) for item in items for choice in item.choices
    ]
    scores: list[float] = []
    for start in range(0, len(rows), ROWS):
        batch = pad_examples(rows[start : start + ROWS], tokens.pad)
        ids, mask, labels = (tensor.to(model.device) for tensor in batch.values())
        shares = log_softmax(
            model.hf(input_ids=ids, attention_mask=mask).logits[:, :-1].float(), -1
        )
        there = labels[:, 1:] != IGNORE_INDEX
        each = shares.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * there
        scores += (each.sum(1) / there.sum(1)).tolist()
    right, at = 0, 0
    for item in items:
        mine = scores[at : at + len(item.choices)]
        right += mine.index(max(mine)) == item.gold
        at += len(item.choices)
    return right / len(items)


BATCH = 8
LEARNING_RATE = 5e-5


def finetune(
    model: Model,
    items: Sequence[ChoiceItem],
    *,
    steps: int,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
) -> Model:
    """A copy of the model, trained for so many batches of eight; the loss is of the answers' tokens alone."""
    tokens = model.tokenization
    rows = [encode_example(tokens, item.prompt, item.choices[item.gold]) for item in items]
    hf = copy.deepcopy(model.hf)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        trainer = Trainer(
            hf,
            TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=BATCH,
                learning_rate=learning_rate,
                lr_scheduler_type="linear",
                warmup_steps=max(1, steps // 20),
                save_strategy="no",
                report_to=[],
                use_cpu=model.device.type == "cpu",
                seed=seed,
                disable_tqdm=True,  # it would print to standard output
            ),
            train_dataset=_Items(rows),
            data_collator=lambda chosen: pad_examples(chosen, tokens.pad),
        )
        silence_trainer(trainer)
        trainer.train()
    return Model.wrap(hf.eval(), model.tokenizer, name=f"{model.name} (fine-tuned)")


class _Items(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._rows[index]
