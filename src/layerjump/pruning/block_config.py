"""Describe fewer blocks in a configuration: whatever it lists for each block, by a block's index, or by a count.

The names differ from type to type, so values are recognised by their form: a list (or pattern) with an entry for each
block, a list of indices of blocks, a count of the first or last blocks, a period with its offset. A saved checkpoint
proves the result: it must give the logits of the model that it was saved from (`checkpoint.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "num_decoder_layers", "layers"),
    *("encoder_layers", "num_encoder_layers", "depth", "num_blocks"),
)
"""Names of the number of blocks; two of them may name one value."""
_FIRST = ("max_window_layers", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Names of the number of first blocks of another kind."""
_LAST = ("num_kv_shared_layers",)
"""Names of the number of last blocks of another kind."""
_NOT_OF_BLOCKS = re.compile("token|section|architectures|keys_to_ignore|label|kernel|sizes$|shape$|range")
_INDICES = re.compile("idx|indices|indexes|ids$|layers$|layer_index")
_BY_INDEX_ONLY = re.compile("idx|indices|indexes|ids$|layer_index")
_PERIOD, _OFFSET = "_period", "_offset"


def select_blocks(config: PretrainedConfig, remaining: Sequence[int], n_blocks: int) -> None:
    """Change the configuration of a stack of `n_blocks` to that of the remaining blocks, counted from 1."""
    derived = _derived_lists(config, n_blocks)
    values = dict(vars(config))
    periods = [name.removesuffix(_PERIOD) for name in values if name.endswith(_PERIOD)]
    changes = {name: _selected(name, value, remaining, n_blocks) for name, value in values.items()}
    for name, value in changes.items():
        if value is not None:
            setattr(config, name, value)
    for name in _COUNTS:
        if values.get(config.attribute_map.get(name, name)) == n_blocks:
            setattr(config, name, len(remaining))
    if getattr(config, "attention_types", None) is not None:  # GPT-Neo's form of attention_layers
        config.attention_types = [[list(config.attention_layers), 1]]
    targets = {name: [entries[block - 1] for block in remaining] for name, entries in derived.items()}
    for name, value in values.items():
        # A pattern that repeats, such as RecurrentGemma's block_types, is spelled out.
        if isinstance(value, (list, tuple)) and 0 < len(value) < n_blocks:
            repeated = [value[index % len(value)] for index in range(n_blocks)]
            same = [target for other, target in targets.items() if derived[other] == repeated]
            if same:
                setattr(config, name, type(value)(same[0]))
    for name in periods:
        _fit_period(config, name, targets, n_blocks)


def _selected(name: str, value: Any, remaining: Sequence[int], n_blocks: int) -> Any:
    """The value of the remaining blocks; None where it does not depend on them."""
    if _NOT_OF_BLOCKS.search(name):
        return None
    if isinstance(value, dict):
        inner = {key: _selected(str(key), entry, remaining, n_blocks) for key, entry in value.items()}
        changed = {key: entry for key, entry in inner.items() if entry is not None}
        return value | changed if changed else None
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        if name in _FIRST:
            return sum(block <= value for block in remaining)
        return sum(block > n_blocks - value for block in remaining) if name in _LAST else None
    if isinstance(value, str):
        is_pattern = "pattern" in name and len(value) == n_blocks
        return "".join(value[block - 1] for block in remaining) if is_pattern else None
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if len(value) == n_blocks and not _BY_INDEX_ONLY.search(name):
        return type(value)(value[block - 1] for block in remaining)
    is_index = all(type(entry) is int and 0 <= entry <= n_blocks for entry in value) and len(set(value)) == len(value)
    if not is_index or not _INDICES.search(name):
        return None
    first = 1 if n_blocks in value else 0  # counted from 1 where the last block has the number of blocks
    new = {block - 1 + first: index + first for index, block in enumerate(remaining)}
    return type(value)(new[entry] for entry in value if entry in new)


def _derived_lists(config: PretrainedConfig, n_blocks: int) -> dict[str, list[Any]]:
    """Lists with an entry for each block that the class computes from other values."""
    names = {name for kind in type(config).__mro__ for name, value in vars(kind).items() if isinstance(value, property)}
    lists: dict[str, list[Any]] = {}
    for name in sorted(names):
        try:
            value = getattr(config, name)
        except Exception:  # a property of other settings
            continue
        if isinstance(value, list) and len(value) == n_blocks:
            lists[name] = list(value)
    return lists


def _fit_period(config: PretrainedConfig, name: str, targets: dict[str, list[Any]], n_blocks: int) -> None:
    """Every `period`-th block from `offset` on is of another kind: the values that give most of the derived lists."""
    if not hasattr(config, name + _OFFSET) or not targets:
        return

    def matches() -> int:
        return sum(getattr(config, other, None) == target for other, target in targets.items())

    before = getattr(config, name + _PERIOD), getattr(config, name + _OFFSET)
    candidates = [before, *((period, offset) for period in range(1, n_blocks + 2) for offset in range(period))]
    scores = []
    for period, offset in candidates:
        vars(config).update({name + _PERIOD: period, name + _OFFSET: offset})
        scores.append(matches())
    period, offset = candidates[max(range(len(scores)), key=scores.__getitem__)]
    vars(config).update({name + _PERIOD: period, name + _OFFSET: offset})
