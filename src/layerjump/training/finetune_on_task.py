"""Fine-tune a causal model on a multiple-choice task, and score it by the likelihood of the answers."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Self, cast

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, model_validator
from torch import Tensor
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from layerjump.data.tokenization import Tokenization
from layerjump.errors import BadText
from layerjump.models.loading import quiet_transformers
from layerjump.models.model import Model
from layerjump.training.packed_rows import IGNORE_INDEX
from layerjump.training.trainer import silence_trainer

BATCH_SIZE = 8
LEARNING_RATE = 5e-5
SCORING_BATCH_SIZE = 16
_FORMATS = "pass lines of JSON with `query`, `choices` and `gold`, or with `premise`, `hypothesis` and `label`"

Example = tuple[Tensor, Tensor]
"""Token ids of a prompt with its answer, and labels that leave the prompt out."""


@dataclass(frozen=True)
class ChoiceItem:
    """A prompt, its possible answers, and the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    gold: int


class _ChoiceRow(BaseModel):
    model_config = ConfigDict(strict=True)
    query: str
    choices: list[str]
    gold: NonNegativeInt

    @model_validator(mode="after")
    def _check_gold(self) -> Self:
        if self.gold >= len(self.choices):
            raise ValueError("`gold` is not the index of a choice")
        return self

    def to_item(self, labels: Sequence[str]) -> ChoiceItem:
        return ChoiceItem(self.query.rstrip(), tuple(self.choices), self.gold)


class _EntailmentRow(BaseModel):
    model_config = ConfigDict(strict=True)
    premise: str
    hypothesis: str
    label: str

    def to_item(self, labels: Sequence[str]) -> ChoiceItem:
        prompt = f"{self.premise}\nQuestion: {self.hypothesis}\nAnswer:"
        return ChoiceItem(prompt, tuple(label.replace("_", " ") for label in labels), labels.index(self.label))


def load_task(path: str | Path) -> list[ChoiceItem]:
    """Load a task file with one JSON object a line: `query`, `choices`, `gold`, or `premise`, `hypothesis`, `label`.

    The prompt of an entailment item is "premise", "Question: hypothesis", "Answer:" (our wording); its choices are
    all labels of the file.
    """
    path = Path(path).expanduser()
    try:
        lines = path.read_text("utf-8").split("\n")  # splitlines() also splits at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise BadText(f"the task {path} cannot be read ({error}); {_FORMATS}") from error
    rows: list[_ChoiceRow | _EntailmentRow] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            kind = _EntailmentRow if isinstance(values, dict) and "label" in values else _ChoiceRow
            rows.append(kind.model_validate(values))
        except (ValueError, RecursionError) as error:
            raise BadText(f"line {number} of the task {path} is not an item; {_FORMATS}") from error
    if not rows:
        raise BadText(f"the task {path} has no items; {_FORMATS}")
    labels = sorted({row.label for row in rows if isinstance(row, _EntailmentRow)})
    return [row.to_item(labels) for row in rows]


def encode_example(tokenization: Tokenization, prompt: str, answer: str) -> Example:
    """Return the token ids of prompt and answer, and labels of the answer alone; a long prompt loses its beginning."""
    prompt_ids, answer_ids = tokenization.encode([prompt, f" {answer.strip()}"])
    n_prompt = tokenization.max_length - len(tokenization.prefix) - len(answer_ids)
    if n_prompt < 1:
        raise BadText(
            f"the answer {answer[:30]!r} has {len(answer_ids)} tokens, and the model takes {tokenization.max_length}; "
            "pass shorter answers, or a model with more positions"
        )
    ids = [*tokenization.prefix, *prompt_ids[-n_prompt:], *answer_ids]
    labels = [IGNORE_INDEX] * (len(ids) - len(answer_ids)) + answer_ids
    return torch.tensor(ids), torch.tensor(labels)


def pad_examples(examples: Sequence[Example], pad_id: int) -> dict[str, Tensor]:
    """Return a batch of examples, padded on the right."""
    ids, labels = [ids for ids, _ in examples], [labels for _, labels in examples]
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad_id),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX),
    }


@torch.no_grad()
def accuracy(model: Model, items: Sequence[ChoiceItem]) -> float:
    """Return the share of items whose right answer has the highest mean log-likelihood per token."""
    tokenization = model.tokenization
    examples = [encode_example(tokenization, item.prompt, choice) for item in items for choice in item.choices]
    scores: list[float] = []
    for start in range(0, len(examples), SCORING_BATCH_SIZE):
        batch = pad_examples(examples[start : start + SCORING_BATCH_SIZE], tokenization.pad)
        ids, mask, labels = (tensor.to(model.device) for tensor in batch.values())
        logits = model.hf(input_ids=ids, attention_mask=mask).logits[:, :-1]
        is_answer = labels[:, 1:] != IGNORE_INDEX
        targets = labels[:, 1:].clamp(min=0)[..., None]
        likelihood = log_softmax(logits.float(), -1).gather(-1, targets)[..., 0] * is_answer
        scores += (likelihood.sum(1) / is_answer.sum(1)).tolist()
    remaining, n_right = iter(scores), 0
    for item in items:
        item_scores = list(islice(remaining, len(item.choices)))
        n_right += item_scores.index(max(item_scores)) == item.gold
    return n_right / len(items)


def finetune(
    model: Model, items: Sequence[ChoiceItem], *, steps: int, learning_rate: float = LEARNING_RATE, seed: int = 0
) -> Model:
    """Return a copy of the model, trained for `steps` batches of eight items to write the right answer.

    The loss is over the tokens of the answers alone.
    """
    tokenization = model.tokenization
    examples = [encode_example(tokenization, item.prompt, item.choices[item.gold]) for item in items]
    hf = copy.deepcopy(model.hf)
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        trainer = Trainer(
            hf,
            TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=BATCH_SIZE,
                learning_rate=learning_rate,
                lr_scheduler_type="linear",
                warmup_steps=max(1, steps // 20),
                save_strategy="no",
                report_to=[],
                use_cpu=model.device.type == "cpu",
                seed=seed,
                disable_tqdm=True,  # it prints to standard output
            ),
            train_dataset=cast(Dataset[Example], examples),  # a list has all that a Dataset needs
            data_collator=lambda batch: pad_examples(batch, tokenization.pad),
        )
        silence_trainer(trainer)
        trainer.train()
    return Model.wrap(hf.eval(), model.tokenizer, name=f"{model.name} (fine-tuned)")
