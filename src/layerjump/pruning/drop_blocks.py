"""Drop blocks of a model: a copy without them, whose configuration and block indices fit."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from layerjump.errors import BadModel, LayerjumpError, one_line
from layerjump.models.discovery import discover
from layerjump.models.fully_sharded import is_fully_sharded
from layerjump.models.hugging_face_config import text_config
from layerjump.models.model import Model
from layerjump.models.weight_forms import offloaded_weights, require_plain
from layerjump.pruning.block_config import select_blocks

BLOCK_INDEX_NAMES = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")
"""Attributes with a module's block index, which selects its layer of the KV cache."""


def cannot_drop(model: Model) -> str | None:
    """Return why no block of this model can be dropped, or None if blocks can be."""
    model_type = model.model_type
    if model.task in ("seq2seq", "encoder"):
        return (
            f"{model_type} is an encoder–decoder, and only models with a single stack can be pruned; pass a decoder or "
            f"an encoder model"
        )
    if model.structure.block_list is None:
        return f"the blocks of {model_type} form groups that share weights, so none can be dropped; pass another model"
    if any(block.call for block in model.structure.anatomy.blocks):
        return f"the blocks of {model_type} run several times, so none can be dropped; pass another model"
    if is_fully_sharded(model.hf):
        return (
            "each process holds a part of every weight of this model (FSDP2), and such a model cannot be copied; load "
            "it without fully_shard"
        )
    return None


@torch.no_grad()
def without_blocks(model: Model, dropped: Collection[int]) -> Model:
    """Return a copy of the model without the dropped blocks, counted from 1."""
    if reason := cannot_drop(model):
        raise BadModel(reason)
    remaining = [block for block in range(1, model.n_blocks + 1) if block not in set(dropped)]
    # Dropped blocks are not copied.
    placeholders: dict[int, Any] = {id(model.structure.blocks[block - 1]): nn.Identity() for block in dropped}
    # States that a module keeps from its last forward pass are no parameters, and only those can be copied.
    states = [value for module in model.hf.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    placeholders |= {id(state): state.detach().clone() for state in states if not state.is_leaf}
    # Weights outside the model's memory are not edited, and read where they are.
    placeholders |= {id(weights): weights for weights in offloaded_weights(model.hf)}
    hf = copy.deepcopy(model.hf, placeholders)
    modules = [hf.get_submodule(anatomy.path) for anatomy in model.structure.anatomy.blocks]
    path, _, name = (model.structure.block_list or "").rpartition(".")
    setattr(hf.get_submodule(path), name, nn.ModuleList(modules[old - 1] for old in remaining))

    config = text_config(hf)
    try:
        if isinstance(config, PretrainedConfig) and dropped:
            select_blocks(config, remaining, model.n_blocks)
    except Exception as error:  # a configuration checks itself
        raise _cannot_do_without(model, dropped, error) from error

    for new, old in enumerate(remaining, start=1):
        for module in modules[old - 1].modules():
            for name in BLOCK_INDEX_NAMES:
                if isinstance(module.__dict__.get(name), int):
                    setattr(module, name, new - 1)
        if getattr(config, "scale_attn_by_inverse_layer_idx", False) and new != old:
            # This GPT-2 divides attention scores by the block's number; queries compensate for the new number.
            attention: Any = modules[old - 1].get_submodule("attn")
            queries = slice(0, attention.embed_dim)
            require_plain(
                attention.c_attn.weight, f"attn.c_attn of block {old}, which has to be scaled for its new place"
            )
            attention.c_attn.weight[:, queries] *= new / old
            attention.c_attn.bias[queries] *= new / old
            attention.scaling *= old / new
    try:
        structure = discover(hf, extra_inputs=model.extra_inputs)
    except LayerjumpError as error:
        raise _cannot_do_without(model, dropped, error) from error
    return replace(model, hf=hf, structure=structure)


def _cannot_do_without(model: Model, dropped: Collection[int], error: Exception) -> BadModel:
    blocks = ", ".join(map(str, sorted(dropped)))
    return BadModel(
        f"{model.model_type} does not run without block {blocks}, on which other blocks depend: "
        f"{one_line(error.__cause__ or error)}; drop other blocks"
    )


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameters of a model; shared parameters count once."""
    return sum(parameter.numel() for parameter in model.parameters())
