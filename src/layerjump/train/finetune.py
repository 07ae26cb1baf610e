"""Fine-tune a causal model on a task: it learns to write the right answer behind the prompt."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence

from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from layerjump.compress.training import quieten
from layerjump.inputs.loading import quiet_transformers
from layerjump.inputs.models import Model
from layerjump.train.tasks import Item, padded, sequence

BATCH = 8
LEARNING_RATE = 5e-5


def finetuned(
    model: Model,
    items: Sequence[Item],
    *,
    steps: int,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
) -> Model:
    """A copy of the model, trained for so many batches of eight; the loss is of the answers' tokens alone."""
    tokens = model.tokens
    rows = [sequence(tokens, item.prompt, item.choices[item.gold]) for item in items]
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
            data_collator=lambda chosen: padded(chosen, tokens.pad),
        )
        quieten(trainer)
        trainer.train()
    return Model.wrap(hf.eval(), model.tokenizer, name=f"{model.name} (fine-tuned)")


class _Items(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, rows: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._rows[index]
