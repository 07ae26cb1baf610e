"""A pass over a text layer by layer, for a model whose weights are read from the disk.

A pass batch by batch reads every weight once a batch. Here all batches run through one block before the next block is
read: the states of one level at all positions wait on the disk. Blocks are called as the model calls them, by their
recorded calls, so that the states have the same bytes. Models whose blocks exchange more than the residual stream do
not pass the check of `can_run_by_layer`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.jumps.spill_states import StateStore
from layerjump.models.hooks import Call, Capture, intercept_calls
from layerjump.models.joint_sources import WidenedBatch, plain_sites
from layerjump.models.model import Model, States, capture_states
from layerjump.models.self_check import sample
from layerjump.models.sites import EMBEDDING, FINAL, Site
from layerjump.models.structure import Structure
from layerjump.models.weight_forms import loaded_weights

_CHECKED: WeakKeyDictionary[Structure, bool] = WeakKeyDictionary()


def can_run_by_layer(model: Model) -> bool:
    """Whether a pass layer by layer gives the states of a plain pass, bit for bit; tried once on a few tokens."""
    if model.structure not in _CHECKED:
        _CHECKED[model.structure] = _gives_same_states(model)
    return _CHECKED[model.structure]


def _gives_same_states(model: Model) -> bool:
    anatomy = model.structure.anatomy
    if model.task == "seq2seq" or model.extra_inputs is not None or any(block.call for block in anatomy.blocks):
        return False
    batch, levels = sample(model), list(range(model.n_blocks + 1))
    try:
        (plain,) = capture_states(model, [batch], levels)
        (by_layer,) = capture_by_layer(model, [batch], [Site(level) for level in levels])
    except Exception:  # the model's own code, called one block at a time
        return False
    return all(torch.equal(plain[level], by_layer[level]) for level in levels)


@torch.no_grad()
def capture_by_layer(
    model: Model, batches: Sequence[Batch], sites: Sequence[Site], folder: Path | None = None
) -> Generator[States]:
    """Yield the hidden states of each batch as `capture_states` does, reading each block's weights once.

    States wait in a folder inside `folder` (default: the system's folder for temporary files).
    """
    structure, n_blocks = model.structure, model.n_blocks
    widened = [WidenedBatch.of(batch, sites) for batch in batches]
    batches = [wide.batch for wide in widened]
    plain = plain_sites(sites)
    tapped = [Site(n_blocks) if site == FINAL else site for site in plain if site != EMBEDDING]
    last = max((site.index for site in tapped), default=0)
    with ExitStack() as stack:
        waiting = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="layerjump-", dir=folder)))

        def store(name: str, site: Site, n_rows: int) -> StateStore:
            return stack.enter_context(closing(StateStore([site], n_rows, waiting / name)))

        n_picks = sum(batch.n_picks for batch in batches)
        picked = {site: store(f"picks {site}", site, n_picks) for site in dict.fromkeys(tapped)}
        n_cells = sum(batch.input_ids.numel() for batch in batches)
        # Level after level: (rows · positions, d_model) of every batch.
        level = store("level 0", Site(0), n_cells)
        calls: list[list[Call]] = []
        with loaded_weights(
            model.hf, structure.anatomy.entry, without=[block.path for block in structure.anatomy.blocks]
        ):
            for batch in batches:
                with intercept_calls(structure) as recorded:
                    model.run_body(batch.input_ids, batch.attention_mask)
                level.append({Site(0): recorded[0].states.flatten(0, -2)})
                calls.append([_without_states(call) for call in recorded])
        for block in range(1, max(last, 1) + 1):
            # Level 0 is captured where block 1 reads it.
            own = [site for site in picked if site.index == block or (site == Site(0) and block == 1)]
            following = store(f"level {block}", Site(block), n_cells)
            with loaded_weights(model.hf, structure.anatomy.blocks[block - 1].path), Capture(structure, own) as capture:
                start = 0
                for batch, recorded in zip(batches, calls, strict=True):
                    shape = batch.input_ids.shape
                    rows = level.read(Site(block - 1), start, start := start + shape.numel())
                    capture.start(batch.row * shape[1] + batch.position, shape[1])
                    states = recorded[block - 1].repeat(structure.blocks[block - 1], rows.view(*shape, -1))
                    for site, picks in capture.take().items():
                        picked[site].append({site: picks})
                    following.append({Site(block): states.flatten(0, -2)})
            level.close()
            level = following
        start = 0
        for wide in widened:
            batch = wide.batch
            stop = start + batch.n_picks
            at = {site: rows.read(site, start, stop) for site, rows in picked.items()}
            if FINAL in plain:
                at[FINAL] = structure.to_final(at[Site(n_blocks)])
            if EMBEDDING in plain:
                at[EMBEDDING] = structure.embed(batch.input_ids[batch.row, batch.position])
            yield States(wide.original, wide.join(at, sites))
            start = stop


def _without_states(call: Call) -> Call:
    """The call with its other arguments alone: the states of all batches do not fit into memory."""
    empty = call.states.new_empty((0,) * call.states.dim())

    def emptied(value: object) -> object:
        if isinstance(value, tuple) and value and value[0] is call.states:
            return (empty, *value[1:])
        return empty if isinstance(value, Tensor) and value.data_ptr() == call.states.data_ptr() else value

    args = tuple(map(emptied, call.args))
    return replace(call, states=empty, args=args, kwargs={name: emptied(value) for name, value in call.kwargs.items()})
