"""Replace attention, MLP, norms or blocks of a model by linear maps.

    with linearised(model, jumps, parts="attn", blocks=range(4, 9)) as changed:
        changed.hf.generate(**inputs)             # attention of blocks 4 to 8 is a matrix here
    with spliced(model, jumps, 13, 16):           # level 13 becomes level 16 by one map
        model.hf(input_ids)

A part of a block that is replaced is still computed and its result thrown away, which is right in every family; blocks
are not run at all. A block that is not run still tells the cache how many tokens went by: Hugging Face makes masks as
long as the first layer of the cache says, and with padding would otherwise generate nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from layerjump.errors import BadModel
from layerjump.interventions.patching import Map, apply, patch, replace_by_map
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.pairs import Pair
from layerjump.models.hooks import hidden_output, watch_outputs
from layerjump.models.model import Model, require_model
from layerjump.models.self_check import sample
from layerjump.models.structure import Site

PARTS = {
    "attn": ("attn",),
    "xattn": ("xattn",),
    "ffn": ("ffn",),
    "norms": ("ln1", "lnx", "ln2"),
}
Span = tuple[int, int]
"""(i, j): level i becomes level j; blocks i + 1 to j are not run."""


@contextmanager
def linearize(
    model: Model, jumps: Jumps, *, parts: str = "attn", blocks: Iterable[int] | None = None
) -> Iterator[Model]:
    """Run the model, any way you like, with maps for `attn`, `ffn`, `norms` or each whole `block`.

    Blocks count from 1; all are taken unless told. The model is whole again afterwards, also after an exception.
    """
    require_model(model)
    chosen = _checked(model, blocks)
    if parts == "block":
        spans = {(block - 1, block): jumps[block - 1, block] for block in chosen}
        with jumping(model, spans):
            yield model
        return
    if parts not in PARTS:
        raise BadModel(f"the parts given are {parts!r}; give {', '.join(PARTS)} or block")
    pairs = [pair for block in chosen for pair in pairs_of(model, block, parts)]
    if chosen and not pairs:
        raise BadModel(f"this model has no {parts} to replace; give other parts")
    with patch(model, {pair: replace_by_map(jumps[pair]) for pair in pairs}):
        yield model


@contextmanager
def skip_blocks(model: Model, jumps: Jumps, source: int, target: int) -> Iterator[Model]:
    """Run the model with one jump from a level to a later one; the blocks in between are not run."""
    require_model(model)
    if not 0 <= source < target <= model.n_blocks:
        raise BadModel(
            f"a jump from level {source} to level {target} was given; give levels from 0 to {model.n_blocks}, the "
            f"earlier one first"
        )
    with jumping(model, {(source, target): jumps[source, target]}):
        yield model


def pairs_of(model: Model, block: int, part: str) -> list[Pair]:
    """The (input, output) sites of a part in a block; a norm that a family does not have is left out."""
    present = set(model.structure.sites())
    pairs = [(Site(block, f"{name}.in"), Site(block, f"{name}.out")) for name in PARTS[part]]
    return [pair for pair in pairs if pair[0] in present]


@contextmanager
def jumping(model: Model, spans: Mapping[Span, Map]) -> Iterator[Model]:
    """Run the model with maps over runs of blocks that do not overlap."""
    blocks = model.structure.blocks
    if model.task in ("seq2seq", "encoder") or len(set(blocks)) < len(blocks):
        # T5's first block makes what all others need; ALBERT's blocks are one module: these must run.
        levels = {(Site(i), Site(j)): replace_by_map(over) for (i, j), over in spans.items()}
        with patch(model, levels):
            yield model
        return
    shapes = _shapes(model) if spans else []
    with ExitStack() as stack:
        for (i, j), over in spans.items():
            for block in range(i + 1, j + 1):
                what = over if block == i + 1 else None
                stand_in = _stand_in(what, block - 1, shapes[block - 1])
                stack.enter_context(_forward_of(blocks[block - 1], stand_in))
        yield model


def _stand_in(over: Map | None, layer: int, beside: int | None) -> Callable[..., Any]:
    """What a block does instead: a map of its input, or its input; returned as the block itself returns it."""

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        for given in (*args, *kwargs.values()):
            if isinstance(given, Cache):
                _count(given, layer, hidden_states)
        made = hidden_states if over is None else apply(over, hidden_states)
        return made if beside is None else (made, *[None] * beside)

    return forward


def _count(cache: Cache, layer: int, states: Tensor) -> None:
    """Tell the cache that these positions went by, with keys and values of one number each."""
    nothing = states.new_zeros(states.shape[0], 1, states.shape[1], 1)
    cache.update(nothing, nothing, layer)


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Give one module another forward; hooks on the module, ours and others', go on working."""
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


@torch.no_grad()
def _shapes(model: Model) -> list[int | None]:
    """How each block returns its states: None for the bare tensor, else how many things come behind it."""
    found: list[int | None] = []

    def see(output: Any) -> None:
        assert hidden_output(output).dim() == 3
        found.append(len(output) - 1 if isinstance(output, tuple) else None)

    batch = sample(model, rows=1, length=2)
    with watch_outputs(model.structure.blocks, see):
        model.body(batch.input_ids, batch.attention_mask)
    return found


def _checked(model: Model, blocks: Iterable[int] | None) -> list[int]:
    every = range(1, model.n_blocks + 1)
    chosen = list(every if blocks is None else blocks)
    wrong = [block for block in chosen if block not in every]
    if wrong:
        raise BadModel(f"block {wrong[0]} was given; this model has blocks 1 to {model.n_blocks}")
    return chosen
