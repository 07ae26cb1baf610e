"""Write a pruned model with its model card, and load a pruned model with replacement maps.

A pruned model is an ordinary checkpoint. With the method `linear` no weight holds the maps, so the folder has the
checkpoint in `base/` and jumps next to it; `layerjump.load` puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from layerjump import __version__
from layerjump.errors import BadArtifact, BadPruning, WrongModel, one_line
from layerjump.io import read_json, replace_folder, write_json, write_text
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.jumps.serialization import StrictRecord, read_record
from layerjump.models.discovery import main_output
from layerjump.models.fingerprint import fingerprint
from layerjump.models.hooks import attach_map
from layerjump.models.loading import LINEAR, quiet_transformers
from layerjump.models.model import Model
from layerjump.models.self_check import sample, tolerance
from layerjump.models.sites import Site
from layerjump.models.weight_forms import (
    avoid_failing_kernels,
    is_offloaded,
    quantized_weights,
    restore_order,
    stored_tensors,
)
from layerjump.pruning.fit_replacements import METHODS, level_after_pruning
from layerjump.pruning.prune import Distillation, LossComparison, Pruned, TextLoss, on_disk
from layerjump.pruning.refit_projections import RefitStep

RECORD_FILE = "pruning.json"
BASE = "base"
"""Subfolder of the checkpoint without its maps: a plain loader must not mistake it for the pruned model."""
_REPLACEMENTS = METHODS | {"truncate": "a jump to the state after the final norm, folded into an untied unembedding"}


RUN_INFO_KEYS = ("fingerprint", "text", "text_sha256", "tokens", "split", "seed")


class ParameterCounts(BaseModel):
    """Numbers of parameters before and after pruning."""

    before: int
    after: int


class PruningRecord(StrictRecord):
    """Everything that `pruning.json` holds: what was dropped, on what text, and the cost."""

    model_config = ConfigDict(populate_by_name=True)

    kind: Literal["layerjump pruning"] = "layerjump pruning"
    layerjump: str
    """Version of layerjump that pruned the model."""
    model: str
    fingerprint: str
    """Hash of the original weights."""
    method: str
    criterion: str = on_disk("choice")
    blocks: int
    dropped: list[int]
    parameters: ParameterCounts
    text: str
    text_sha256: str
    tokens: int
    split: str
    seed: int
    loss: LossComparison | None
    distilled: Distillation | None
    texts: list[TextLoss] = []
    """Losses on each text of a mixture, and on texts that were not calibrated on."""
    refitted: list[RefitStep] = []
    """Output projections that were refitted, or tried, in order."""

    @field_validator("method")
    @classmethod
    def _rename_method(cls, method: str) -> str:
        return "rotation" if method == "turn" else method  # its former name

    @field_validator("loss", "distilled", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return value or None

    @classmethod
    def of(cls, pruned: Pruned) -> PruningRecord:
        """Describe a pruned model."""
        before, after = pruned.parameters
        name = pruned.original.name
        return cls(
            layerjump=__version__,
            # The path of a folder describes a machine, not the model.
            model=Path(name).name if Path(name).exists() else name,
            method=pruned.method,
            criterion=pruned.criterion,
            blocks=pruned.original.n_blocks,
            dropped=list(pruned.dropped),
            parameters=ParameterCounts(before=before, after=after),
            loss=pruned.test_loss,
            distilled=pruned.distillation,
            texts=list(pruned.text_losses),
            refitted=list(pruned.refitted),
            **{key: getattr(pruned.info, key) for key in RUN_INFO_KEYS},
        )

    @classmethod
    def load(cls, folder: str | Path) -> PruningRecord:
        """Read the record of a pruned model's folder."""
        path = Path(folder).expanduser() / RECORD_FILE
        return read_record(cls, read_json(path), path)

    def to_json(self) -> dict[str, Any]:
        """Return the content of `pruning.json`."""
        content = self.model_dump(by_alias=True)
        return content | {key: content[key] or {} for key in ("loss", "distilled")}


class LinearHeader(BaseModel):
    """Content of `linear.json`, which marks a folder with a checkpoint and the maps of the method `linear`."""

    kind: str = "layerjump linear model"
    format: int = 1
    cuts: list[tuple[int, int]]
    """Spans of dropped blocks: a map from level i to level j for each (i, j)."""
    fingerprint: str | None = None
    """Hash of the checkpoint's weights."""


def save(pruned: Pruned, folder: Path, *, force: bool = False) -> None:
    """Write a pruned model, its card and its record into a new folder (`force`: or over an existing one)."""

    def write(new_folder: Path) -> None:
        try:
            save_checkpoint(pruned.model, new_folder if pruned.jumps is None else new_folder / BASE)
        except ValueError as error:  # a configuration checks itself
            raise _not_described(pruned.model, f"it cannot be saved ({one_line(error)})") from error
        if pruned.jumps is not None:
            pruned.jumps.save_pretrained(new_folder)
            weights = fingerprint(pruned.model.hf, attached=False)
            header = LinearHeader(cuts=list(pruned.spans), fingerprint=weights)
            write_json(new_folder / LINEAR, header.model_dump(mode="json"))
        record = PruningRecord.of(pruned)
        write_json(new_folder / RECORD_FILE, record.to_json())
        write_text(new_folder / "README.md", model_card(record))
        _require_same_logits(pruned.model, new_folder, is_linear=pruned.jumps is not None)

    replace_folder(folder.expanduser(), write, force=force)


def save_checkpoint(model: Model, folder: Path) -> None:
    """Write weights, configuration, generation configuration and tokenizer in Hugging Face format."""
    restore_order(model.hf)
    with quiet_transformers():
        model.hf.save_pretrained(folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)


@torch.no_grad()
def _require_same_logits(model: Model, folder: Path, *, is_linear: bool) -> None:
    """Raise `BadPruning` if a saved checkpoint does not give the model's logits.

    A configuration that computes the kind of a block from its number may not be able to describe the remaining blocks.
    """
    if type(model.hf).__module__.startswith("transformers_modules"):  # code that is not in the folder
        return
    batch = sample(model)
    problem = ""
    try:
        with quiet_transformers():
            hf: Any = type(model.hf).from_pretrained(
                folder / BASE if is_linear else folder, dtype=model.dtype, device_map=_places(model)
            )
        avoid_failing_kernels(hf)
        saved = replace(model, hf=hf.eval())
        if not _has_same_weights(hf, model.hf):
            problem = "other weights"
        if not is_linear:  # its maps are not in the checkpoint
            read = model.structure.anatomy.read_logits or main_output
            ours, theirs = (read(each.run_whole(batch)) for each in (model, saved))
            # Not equal to the last bit: results may depend on where a tensor lies in memory, and a model of float64
            # may hold buffers of float32.
            difference = (
                0.0
                if ours is None or theirs is None
                else float((ours - theirs.to(ours.device)).abs().max() / ours.abs().max())
            )
            if not difference <= max(tolerance(model, model.dtype), tolerance(model, torch.float32)):
                problem = f"logits that differ by {difference:.2g} of the largest"
    except Exception as error:  # of whichever library, for sizes that do not fit
        problem = f"an error ({type(error).__name__}: {one_line(error)})"
    if problem:
        raise _not_described(model, f"a model loaded from the saved checkpoint gives {problem}")


def _places(model: Model) -> Any:
    """Where to load a model that is as large as another: a `device_map`."""
    if is_offloaded(model.hf):
        return {"": "disk"}
    is_spread = len({weight.device for weight in model.hf.parameters()}) > 1
    return "auto" if is_spread else {"": model.device}


def _has_same_weights(saved: Any, hf: Any) -> bool:
    if is_offloaded(hf) or quantized_weights(hf):  # one by one, because all may not fit into memory
        pairs = zip(stored_tensors(saved), stored_tensors(hf), strict=True)
        return all(name == other and torch.equal(a, b.to(a.dtype)) for (name, a), (other, b) in pairs)
    weights = hf.state_dict()
    return all(torch.equal(weight, weights[name].to(weight.device)) for name, weight in saved.state_dict().items())


def _not_described(model: Model, reason: str) -> BadPruning:
    return BadPruning(
        f"the configuration of {model.model_type} does not describe the remaining blocks: {reason}; drop other blocks"
    )


def load_linear(folder: Path, load_base: Callable[[Path], Model]) -> Model:
    """Load a folder of the method `linear`: its checkpoint by `load_base`, with the maps attached."""
    path = folder / LINEAR
    try:
        header = LinearHeader.model_validate(read_json(path))
    except ValidationError as error:
        raise BadArtifact(f"{path} is damaged: {error.errors()[0]['msg']}; prune again") from error
    model = load_base(folder / BASE)
    if header.fingerprint != fingerprint(model.hf):
        raise WrongModel(f"{folder / BASE} holds other weights than those the jumps were saved with; prune again")
    jumps = Jumps.from_pretrained(folder)
    for i, j in header.cuts:
        if (Site(i), Site(j)) not in jumps:
            raise BadArtifact(
                f"{path} names a map from level {str(i)[:20]} to {str(j)[:20]}, which {folder} does not hold; prune "
                f"again"
            )
        attach_map(model.structure.tap(Site(level_after_pruning(i, header.cuts))), jumps[i, j], apply_map)
    return model


def model_card(record: PruningRecord) -> str:
    """Return the README.md of a pruned model."""
    training, loss = record.distilled, record.loss
    refitted = [step for step in record.refitted if step.strength is not None]
    refits = record.refitted and (
        f"\n- Refitted output projections: {len(refitted)} of {len(record.refitted)} that were tried; `{RECORD_FILE}` "
        f"names them."
    )
    distilled = training and (
        f"\n- Then distilled: {training.steps} steps of {training.trained}, KL weight {training.kl_weight}, "
        f"{training.minutes} minutes."
    )
    if loss is None:
        losses = "The loss was not measured."
    else:
        losses = f"""| on test documents of that text | before | after |
|---|---|---|
| loss, nats per token | {loss.loss_before:.4f} | {loss.loss_after:.4f} |
| perplexity | {loss.perplexity_before:.3f} | {loss.perplexity_after:.3f} |

Perplexity ratio {loss.ratio:.3f} (95 % interval over documents {loss.low:.3f} to {loss.high:.3f}), {loss.tokens:,} \
tokens.
"""
    for each in record.texts:
        kind = "calibrated on other documents of it" if each.in_domain else "not calibrated on"
        losses += (
            f"\n- `{each.text}` ({kind}): perplexity ratio {each.loss.ratio:.3f} ({each.loss.low:.3f} to "
            f"{each.loss.high:.3f}), {each.loss.tokens:,} tokens"
        )
    usage = (
        "The maps are stored next to the checkpoint in `base/`: load the folder with `layerjump.load(folder)`."
        if record.method == "linear"
        else "An ordinary checkpoint: `AutoModelForCausalLM.from_pretrained(folder)` (encoders: "
        "`AutoModelForMaskedLM`) loads it without layerjump."
    )
    return f"""---
library_name: transformers
tags:
- layerjump
- pruned
---

# {record.model}, {record.blocks - len(record.dropped)} of {record.blocks} blocks

Made from `{record.model}` (weights {record.fingerprint[:12]}) by layerjump {record.layerjump}.
- Dropped blocks, counted from 1: {", ".join(map(str, record.dropped))} (selected by: {record.criterion}).
- Replacement (`{record.method}`): {_REPLACEMENTS[record.method]}.
- Fitted in closed form on text `{record.text}`: {record.tokens:,} tokens in all, split {record.split}, seed \
{record.seed}.
- Parameters: {record.parameters.before:,} before, {record.parameters.after:,} after.{refits or ""}{distilled or ""}

{losses}

{usage}
"""
