"""Fingerprints that tell one model's weights, or one tokenizer, from another."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from layerjump.models.hooks import attached_maps
from layerjump.models.model import Model
from layerjump.models.weight_forms import PLAIN_DTYPES, stored_tensors

SAMPLES = 1024


@dataclass(frozen=True)
class ModelIdentity:
    """Which model something was fitted on. Fields are named as in jumps.json."""

    model: str
    """Hub id, folder or file that the model was loaded from."""
    revision: str | None
    fingerprint: str
    tokenizer: str | None
    """The tokenizer's hash; None for a model without one."""
    family: str
    """Hugging Face's `model_type`."""
    n_blocks: int
    width: int
    """d_model."""


def identify_model(model: Model) -> ModelIdentity:
    """The identity of a model; reads all its weights once."""
    return ModelIdentity(
        model=model.name,
        revision=model.revision,
        fingerprint=fingerprint(model.hf),
        tokenizer=tokenizer_hash(model.tokenizer),
        family=model.model_type,
        n_blocks=model.n_blocks,
        width=model.d_model,
    )


def fingerprint(hf: nn.Module, *, attached: bool = True) -> str:
    """The sha256 of every parameter's name, shape and up to 1,024 of its values; of a quantised one, its codes.

    It tells checkpoints apart, also a base model from its fine-tuned one. It does not detect every change: one of a
    few values outside the sample goes unnoticed. Attached maps (`hooks.attach_map`) count unless `attached` is False.
    Quantisation makes other weights; offloading does not.
    """
    # Samples, not tensors: an offloaded model does not fit into memory.
    entries = {name: _entry(name, tensor) for name, tensor in stored_tensors(hf)}
    if attached:
        for module, attachment in attached_maps(hf):
            for name, tensor in attachment.state_dict().items():
                name = f"{module}/attached.{name}"
                entries[name] = _entry(name, tensor)
    return hashlib.sha256(b"".join(entry for _, entry in sorted(entries.items()))).hexdigest()


def _entry(name: str, tensor: Tensor) -> bytes:
    return json.dumps([name, list(tensor.shape)]).encode() + _sample(tensor)


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.reshape(-1)
    # An odd step does not fall on the same few columns again and again: widths are even.
    sample = flat[:: -(-flat.numel() // SAMPLES) | 1]
    if tensor.dtype not in PLAIN_DTYPES:  # codes
        return bytes(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    # Rounded to bfloat16, the shortest type models are loaded in: upcasting is exact, so one checkpoint
    # gives the same values here whether it was loaded as float64, float32 or bfloat16. (float16
    # rounds elsewhere: a float32 checkpoint loaded as float16 counts as other weights.)
    rounded = sample.to(torch.bfloat16).cpu()
    return bytes(rounded.view(torch.int16).numpy().astype("<i2").tobytes())


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """The sha256 of a tokenizer's vocabulary, special tokens and rules; None for no tokenizer."""
    if tokenizer is None:
        return None
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, _rules(tokenizer)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules: dict[str, Any] = json.loads(backend.to_str())
    # These two depend on the last call that truncated or padded, not on the tokenizer.
    return {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
