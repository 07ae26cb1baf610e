"""Fingerprints that tell one model's weights, or one tokenizer, from another."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from layerjump.errors import BadModel
from layerjump.models.hooks import attached_maps
from layerjump.models.model import Model

SAMPLES = 1024


def fingerprint(hf: PreTrainedModel, *, attached: bool = True) -> str:
    """The sha256 of every parameter's name, shape and up to 1,024 of its values.

    It tells checkpoints apart, base from fine-tuned too. It does not detect every change: one of a few values outside
    the sample goes unnoticed. Maps attached to the model (`prune --method linear`) count, unless `attached` is False.
    """
    parameters = dict(hf.named_parameters())
    for module, attachment in attached_maps(hf) if attached else ():
        parameters |= {
            f"{module}/attached.{name}": parameter
            for name, parameter in attachment.state_dict().items()
        }
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        if parameter.is_meta:
            raise BadModel(
                f"the weight {name} is not in memory, so the model has no fingerprint; "
                "load the model without disk offloading"
            )
        digest.update(json.dumps([name, list(parameter.shape)]).encode())
        digest.update(_sample(parameter.detach()))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> bytes:
    flat = tensor.reshape(-1)
    # An odd step does not fall on the same few columns again and again: widths are even.
    step = -(-flat.numel() // SAMPLES) | 1
    # Rounded to bfloat16, the shortest type models are loaded in: widening is exact, so one checkpoint
    # gives the same values here whether it was loaded as float64, float32 or bfloat16. (float16
    # rounds elsewhere: a float32 checkpoint loaded so counts as other weights.)
    rounded = flat[::step].to(torch.bfloat16).cpu()
    return bytes(rounded.view(torch.int16).numpy().astype("<i2").tobytes())


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """The sha256 of a tokenizer's vocabulary, special tokens and rules; None for no tokenizer."""
    if tokenizer is None:
        return None
    said = [sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map, _rules(tokenizer)]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def describe_model(model: Model) -> dict[str, Any]:
    """What is remembered of the model that something was fitted on."""
    return {
        "model": model.name,
        "revision": model.revision,
        "fingerprint": fingerprint(model.hf),
        "tokenizer": tokenizer_hash(model.tokenizer),
        "family": model.hf.config.model_type,
        "n_blocks": model.n_blocks,
        "width": model.d_model,
    }


def _rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules: dict[str, Any] = json.loads(backend.to_str())
    # These two are left over from the last call that cut or padded, and say nothing about the tokenizer.
    return {key: value for key, value in rules.items() if key not in ("truncation", "padding")}
