"""Replace parts of blocks, or runs of blocks, by linear maps.

    with linearize(model, jumps, parts="attn", blocks=range(4, 9)):
        model.hf.generate(**inputs)               # the attention of blocks 4 to 8 is a linear map here
    with skip_blocks(model, jumps, 13, 16):
        model.hf.generate(**inputs)               # one map takes level 13 to level 16

A replaced sub-module still runs and its output is discarded, which works in every family. Replaced blocks do not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from layerjump.errors import BadModel, argument
from layerjump.interventions.change_states import Map, change_states, replace_by_map
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import apply_map
from layerjump.models.hooks import hidden_output, watch_outputs
from layerjump.models.model import Model, require_model
from layerjump.models.self_check import sample
from layerjump.models.sites import Pair, Site

PARTS = {"attn": ("attn",), "mixer": ("mixer",), "xattn": ("xattn",), "ffn": ("ffn",), "norms": ("ln1", "lnx", "ln2")}
"""Values of `parts` besides `block` → the sub-modules that are replaced."""
Span = tuple[int, int]
"""(i, j): a map from level i to level j replaces blocks i + 1 to j."""


@contextmanager
def linearize(
    model: Model, jumps: Jumps, *, parts: str = "attn", blocks: Iterable[int] | None = None
) -> Iterator[Model]:
    """Replace `attn`, `xattn`, `ffn`, `norms` or each whole `block` by its jump inside the `with` block.

    `blocks` count from 1 (default: all). The model is restored afterwards, also after an exception.
    """
    require_model(model)
    every_block = range(1, model.n_blocks + 1)
    selected = list(every_block if blocks is None else blocks)
    for block in selected:
        if block not in every_block:
            raise BadModel(f"expected {argument('blocks')} of blocks 1 to {model.n_blocks}, got {block}")
    if parts == "block":
        with replace_blocks(model, {(b - 1, b): jumps[b - 1, b] for b in selected}):
            yield model
        return
    if parts not in PARTS:
        raise BadModel(f"expected {argument('parts')} of {', '.join(PARTS)} or block, got {parts!r}")
    pairs = [pair for block in selected for pair in submodule_pairs(model, block, parts)]
    if selected and not pairs:
        raise BadModel(f"this model has no {parts} to replace; pass other {argument('parts')}")
    with change_states(model, {pair: replace_by_map(jumps[pair]) for pair in pairs}):
        yield model


def submodule_pairs(model: Model, block: int, part: str) -> list[Pair]:
    """The (input, output) sites of a part in a block, without norms that the family does not have."""
    present = set(model.structure.sites())
    pairs = [(Site(block, f"{name}.in"), Site(block, f"{name}.out")) for name in PARTS[part]]
    return [pair for pair in pairs if pair[0] in present]


@contextmanager
def skip_blocks(model: Model, jumps: Jumps, source: int, target: int) -> Iterator[Model]:
    """Replace the blocks between two levels by one jump inside the `with` block; they do not run."""
    require_model(model)
    if not 0 <= source < target <= model.n_blocks:
        raise BadModel(
            f"expected a source level below the target level, both levels from 0 to {model.n_blocks}, got {source} and "
            f"{target}"
        )
    with replace_blocks(model, {(source, target): jumps[source, target]}):
        yield model


@contextmanager
def replace_blocks(model: Model, spans: Mapping[Span, Map]) -> Iterator[Model]:
    """Replace runs of blocks that do not overlap by one map each inside the `with` block."""
    blocks = model.structure.blocks
    if model.task in ("seq2seq", "encoder") or len(set(blocks)) < len(blocks):
        # These blocks must run: T5's first block computes a bias for all others, ALBERT's blocks are one module.
        with change_states(model, {span: replace_by_map(jump) for span, jump in spans.items()}):
            yield model
        return
    n_extras = _count_extra_outputs(model) if spans else []
    with ExitStack() as stack:
        for (source, target), jump in spans.items():
            for index in range(source, target):
                # An attribute of the module, so that hooks on it keep working.
                attributes = blocks[index].__dict__
                stack.callback(attributes.update, {name: attributes[name] for name in attributes if name == "forward"})
                stack.callback(attributes.pop, "forward")
                attributes["forward"] = _block_forward(jump if index == source else None, index, n_extras[index])
        yield model


def _block_forward(jump: Map | None, index: int, n_extras: int | None) -> Callable[..., Any]:
    """A forward that maps a block's input, or hands it on, and returns it in the form that the block returns."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache):
                # Hugging Face makes masks as long as the first layer of the KV cache, so the layer must still count
                # these positions: with keys and values of size 1.
                empty = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
                value.update(empty, empty, index)
        states = hidden_states if jump is None else apply_map(jump, hidden_states)
        return states if n_extras is None else (states, *[None] * n_extras)

    return forward


@torch.no_grad()
def _count_extra_outputs(model: Model) -> list[int | None]:
    """How many values each block returns after the hidden states; None if it returns the bare tensor."""
    counts: list[int | None] = []

    def count(output: Any) -> None:
        assert hidden_output(output).dim() == 3
        counts.append(len(output) - 1 if isinstance(output, tuple) else None)

    batch = sample(model, rows=1, length=2)
    with watch_outputs(model.structure.blocks, count):
        model.run_body(batch.input_ids, batch.attention_mask)
    return counts
