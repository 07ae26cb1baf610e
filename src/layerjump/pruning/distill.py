"""Train the replacements of dropped blocks to match the whole model's states.

The loss is the squared error at every level behind a cut beside the whole model's state, over that state's own square,
mean over positions and levels ("Your Transformer is Secretly Linear" trains its replacements with the layer-wise error
alone); `kl_weight` adds so many times the KL from the whole model's predictions. What is trained: the stand-ins alone,
or every weight of the pruned model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax
from torch.utils.data import Dataset
from transformers import TrainingArguments

from layerjump.data.batches import Batch, Batches
from layerjump.errors import BadPruning
from layerjump.models.hooks import Capture
from layerjump.models.model import Model
from layerjump.models.structure import Site
from layerjump.pruning.prune import CalibrationData, Pruned, with_test_loss
from layerjump.pruning.replace import StreamTransform
from layerjump.pruning.residual_weights import ffn_output_layer
from layerjump.training.trainer import ResumableTrainer, find_checkpoint, silence_trainer


def distill(
    pruned: Pruned,
    calibration: CalibrationData,
    folder: str | Path,
    *,
    steps: int = 200,
    learning_rate: float = 1e-4,
    kl_weight: float = 0.0,
    train_all_weights: bool = False,
    seed: int = 0,
) -> Pruned:
    """Train for so many batches of the fit documents, and measure again.

    `folder` holds the Trainer's checkpoints: a run that was stopped goes on from the last one. The weights of
    `pruned.model` are changed in place.
    """
    if steps < 1:
        raise BadPruning(f"the steps given are {steps}; give 1 or more")
    trainee, place = (
        DistillationModule(pruned, kl_weight=kl_weight, train_all_weights=train_all_weights),
        Path(folder),
    )
    told = {
        "steps": steps,
        "learning_rate": learning_rate,
        "kl": kl_weight,
        "whole": train_all_weights,
        "seed": seed,
    }
    before = find_checkpoint(place, _run(pruned, told))
    trainer = ResumableTrainer(
        model=trainee,
        args=_arguments(
            place,
            steps,
            learning_rate=learning_rate,
            seed=seed,
            use_cpu=pruned.model.device.type == "cpu",
        ),
        train_dataset=_Batches(calibration.fit),
        data_collator=lambda found: found[0],
    )
    start = time.perf_counter()
    silence_trainer(trainer)
    trainer.train(resume_from_checkpoint=before)
    trainee.finish()
    done = {
        "steps": steps,
        "trained": "every weight" if train_all_weights else "the stand-ins",
        "kl weight": kl_weight,
        "minutes": round((time.perf_counter() - start) / 60, 1),
    }
    return with_test_loss(replace(pruned, distilled=done), calibration)


def _arguments(place: Path, steps: int, **given: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(place),
        max_steps=steps,
        per_device_train_batch_size=1,  # one of our batches, which has many rows
        lr_scheduler_type="linear",
        save_steps=max(1, min(50, steps // 4)),
        save_total_limit=2,
        logging_steps=max(1, steps // 20),
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,  # it would print to standard output
        **given,
    )


class DistillationModule(nn.Module):
    """What the Trainer sees: the parameters that are trained, and the loss of a batch.

    Both models are held in a list, out of the Trainer's sight: it would save, move and train all of them.
    """

    def __init__(self, pruned: Pruned, *, kl_weight: float, train_all_weights: bool) -> None:
        super().__init__()
        self._models = [pruned.model, pruned.original]
        self._kl = kl_weight
        self._frames = pruned.frames
        self._levels = _levels(pruned)
        chosen = list(pruned.model.hf.parameters()) if train_all_weights else []
        chosen += _stand_ins(pruned)
        if not chosen:
            raise BadPruning(
                f"{pruned.method} leaves no stand-in to train; train every weight, or give another method"
            )
        for parameter in pruned.model.hf.parameters():
            parameter.requires_grad_(False)
        for parameter in chosen:
            parameter.requires_grad_(True)
        self.trained = nn.ParameterList({id(p): p for p in chosen}.values())

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The loss of one batch."""
        student, teacher = self._models
        with torch.no_grad():
            theirs = _states(teacher, batch, [theirs for _, theirs in self._levels])
        ours = _states(student, batch, [ours for ours, _ in self._levels])
        errors = []
        for here, there in self._levels:
            target = self._framed(here, theirs[Site(there)])
            error = (ours[Site(here)] - target).square().sum(-1)
            errors.append((error / target.square().sum(-1).clamp_min(1e-12)).mean())
        loss = torch.stack(errors).mean()
        if self._kl:
            loss = loss + self._kl * self._divergence(ours, theirs)
        return {"loss": loss}

    def finish(self) -> None:
        """The student as it was handed over: nothing asks for gradients that did not before."""
        for parameter in self.trained:
            parameter.requires_grad_(False)
            parameter.grad = None
        for parameter in self._models[0].hf.parameters():
            parameter.requires_grad_(True)

    def _framed(self, level: int, states: Tensor) -> Tensor:
        """The whole model's states as the pruned model's stream holds them there."""
        frame = StreamTransform(0)
        for found in self._frames:
            frame = found if found.level <= level else frame
        turned = states if frame.rotation is None else states @ frame.rotation.mT.to(states)
        return frame.scale * turned

    def _divergence(self, ours: dict[Site, Tensor], theirs: dict[Site, Tensor]) -> Tensor:
        student, teacher = self._models
        with torch.no_grad():
            wanted = log_softmax(teacher.logits(theirs[Site(teacher.n_blocks)]).float(), -1)
        given = log_softmax(student.logits(ours[Site(student.n_blocks)]).float(), -1)
        return kl_div(given, wanted, reduction="batchmean", log_target=True)


def _run(pruned: Pruned, told: dict[str, Any]) -> dict[str, Any]:
    """All that a training's end depends on."""
    about = {name: pruned.about[name] for name in ("fingerprint", "text_sha256", "tokens", "split")}
    return about | told | {"method": pruned.method, "dropped": list(pruned.dropped)}


class _Batches(Dataset[dict[str, Batch]]):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, Batch]:
        return {"batch": self._batches[index]}


def _states(model: Model, batch: Batch, levels: list[int]) -> dict[Site, Tensor]:
    with Capture(model.structure, [Site(level) for level in levels]) as capture:
        capture.start(batch.row * batch.input_ids.shape[1] + batch.position)
        model.body(batch.input_ids, batch.attention_mask)
        return capture.take()


def _levels(pruned: Pruned) -> list[tuple[int, int]]:
    """The pruned model's levels from its first cut on, each with the level it stands for."""
    gone, first = set(pruned.dropped), pruned.cuts[0]
    kept = [block for block in range(1, pruned.original.n_blocks + 1) if block not in gone]
    ends = dict(pruned.cuts)
    pairs = [(new, ends.get(old, old)) for new, old in enumerate(kept, start=1)]
    return [(0, first[1])] * (first[0] == 0) + [pair for pair in pairs if pair[1] >= first[1]]


def _stand_ins(pruned: Pruned) -> list[nn.Parameter]:
    """The maps beside the model, or the products into which maps were merged."""
    if pruned.jumps is not None:
        return list(pruned.jumps.parameters())
    if pruned.method not in ("replaceme", "fold", "rotation"):
        return []
    return [parameter for layer in _folded(pruned) for parameter in layer.parameters()]


def _folded(pruned: Pruned) -> Iterator[nn.Module]:
    gone = set(pruned.dropped)
    for i, _ in pruned.cuts:
        yield ffn_output_layer(pruned.model, i - sum(block <= i for block in gone))
