"""Copy a model without some of its blocks."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from layerjump.errors import BadModel
from layerjump.models.model import Model
from layerjump.models.structure import Structure

PER_BLOCK = ("layer_types", "attention_layers")
"""Lists of a configuration that have an entry for each block."""
NUMBERS = ("layer_idx", "layer_id")
"""Where modules keep the number of their block: the cache finds its layer by it."""


def without_blocks(model: Model, dropped: Collection[int]) -> Model:
    """A copy that has all blocks but these, counted from 1; the model itself stays as it is."""
    if reason := cannot_drop(model):
        raise BadModel(reason)
    blocks, gone = model.structure.blocks, set(dropped)
    # What is thrown away need not be copied.
    nothing = {id(block): nn.Identity() for n, block in enumerate(blocks, start=1) if n in gone}
    hf = copy.deepcopy(model.hf, dict(nothing))
    kept = [n for n in range(1, model.n_blocks + 1) if n not in gone]
    path, _, name = model.structure.family.blocks.rpartition(".")
    parent = hf.get_submodule(path)
    listed = list(hf.get_submodule(model.structure.family.blocks).children())
    setattr(parent, name, nn.ModuleList(listed[n - 1] for n in kept))
    _shorten(hf.config, kept, model.n_blocks)
    for new, old in enumerate(kept, start=1):
        _renumber(listed[old - 1], hf.config, old, new)
    return Model(
        hf, Structure(hf), model.name, model.tokenizer, model.no_predictions, model.revision
    )


def cannot_drop(model: Model) -> str | None:
    """Why no block of this model can be taken out; None where they can."""
    kind = model.hf.config.model_type
    if model.task in ("seq2seq", "encoder"):
        return (
            f"{kind} is an encoder–decoder, and only models of one stack can be pruned; give a decoder or an encoder "
            f"model"
        )
    if "*" in model.structure.family.blocks:
        return f"{kind}'s blocks stand in groups that share weights, so dropping one has no meaning; give another model"
    return None


def _shorten(config: Any, kept: list[int], before: int) -> None:
    config.num_hidden_layers = len(kept)
    for name in PER_BLOCK:
        listed = getattr(config, name, None)
        if listed is not None and len(listed) == before:
            setattr(config, name, [listed[n - 1] for n in kept])
    if getattr(config, "attention_types", None) is not None:  # GPT-Neo's way to say the same
        config.attention_types = [[list(config.attention_layers), 1]]
    if (
        full := getattr(config, "max_window_layers", None)
    ) is not None:  # the first so many see all
        config.max_window_layers = sum(n <= full for n in kept)


@torch.no_grad()
def _renumber(block: nn.Module, config: Any, old: int, new: int) -> None:
    for module in block.modules():
        for name in NUMBERS:
            if isinstance(module.__dict__.get(name), int):
                setattr(module, name, new - 1)
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        # GPT-2 may divide attention scores by the block's number: queries make up for the new one.
        attention: Any = block.get_submodule("attn")
        queries = slice(0, attention.embed_dim)
        attention.c_attn.weight[:, queries] *= new / old
        attention.c_attn.bias[queries] *= new / old
        attention.scaling *= old / new
