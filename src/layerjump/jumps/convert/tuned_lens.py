"""Lens folders of the package tuned-lens.

Translator l reads level l and is added to it: h ↦ h + W h + b lands at level L. Our jump is (I + W) h + b, rounded to
float32 as all jumps are, so that an imported lens loses the last bits of W's diagonal. An export is in float64, whose
bits suffice to come back to the same jump.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerjump import io
from layerjump.errors import BadForeignLens, argument
from layerjump.jumps.convert.foreign_lens import (
    ForeignLens,
    check_said,
    check_size,
    checked,
    most_bytes,
    notes,
    plain_map,
)
from layerjump.jumps.convert.safe_unpickle import read_torch, write_torch
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.jumps.pairs import Pair
from layerjump.models.model import Model
from layerjump.models.structure import Site

log = logging.getLogger("layerjump")

CONFIG, PARAMETERS = "config.json", "params.pt"
_KIND = "linear_tuned_lens"
_MOST_TEXT = 1 << 20


def recognises(path: Path) -> bool:
    """Whether this is such a folder."""
    return (path / CONFIG).is_file() and (path / PARAMETERS).is_file()


def read(folder: Path, model: Model) -> ForeignLens:
    """The translators of a folder as maps from every level to the last."""
    config_file, parameter_file = folder / CONFIG, folder / PARAMETERS
    check_size(config_file, _MOST_TEXT)
    config = io.read_json(config_file)
    _check_config(config, model, config_file)
    state = read_torch(parameter_file, most_bytes(model, model.n_blocks))
    _check_names(state, model.n_blocks, parameter_file)
    last = Site(model.n_blocks)
    maps = {
        (Site(level), last): _map(state, level, model.d_model, parameter_file)
        for level in range(model.n_blocks)
    }
    return ForeignLens(maps, "tuned-lens", said=notes(config))


def write(jumps: Jumps, model: Model, folder: Path) -> list[Pair]:
    """Write the jumps from every level to the last; gives back those that were written."""
    pairs = [(Site(level), Site(model.n_blocks)) for level in range(model.n_blocks)]
    for source, target in pairs:
        if (source, target) not in jumps:
            raise BadForeignLens(
                f"{jumps} has no jump {source} → {target}, but a tuned lens has one from every level to the last; fit "
                f"with {argument('estimator', 'affine')} and {argument('pairs', 'to-last')} (calibrated maps land "
                f"after the final norm, where it has none)"
            )
    state: dict[str, Tensor] = {}
    for pair in pairs:
        affine, level = plain_map(jumps, pair), pair[0].index
        state[f"{level}.weight"] = affine.weight - torch.eye(model.d_model, dtype=torch.float64)
        # The package cannot load a lens without biases.
        none = torch.zeros(model.d_model, dtype=torch.float64)
        state[f"{level}.bias"] = none if affine.bias is None else affine.bias
    config = {
        "base_model_name_or_path": model.name,
        "d_model": model.d_model,
        "num_hidden_layers": model.n_blocks,
        "bias": True,
        "base_model_revision": model.revision,
        "unembed_hash": unembedding_hash(model),
        "lens_type": _KIND,
    }
    with io.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_torch(folder / PARAMETERS, state)
    io.write_json(folder / CONFIG, config)
    return pairs


def unembedding_hash(model: Model) -> str:
    """By what the package tells unembeddings apart: the sha256 of the matrix as numpy prints it, to one decimal."""
    weight = model.structure.unembedding.get_parameter("weight").detach().cpu().float().numpy()
    return hashlib.sha256(np.array_str(weight, precision=1).encode()).hexdigest()


def _check_config(config: dict[str, Any], model: Model, path: Path) -> None:
    kind = config.get("lens_type", _KIND)
    if kind != _KIND:
        raise BadForeignLens(
            f"{path}: lens_type is {str(kind)[:50]!r}, but {_KIND} was wanted; give such a lens"
        )
    check_said("d_model", config.get("d_model"), model.d_model, path)
    check_said("num_hidden_layers", config.get("num_hidden_layers"), model.n_blocks, path)
    said = config.get("unembed_hash")
    if said and said != unembedding_hash(model):
        # No error: the package's own hashes of one model are known to differ.
        log.warning("%s has the hash of another unembedding than that of %s", path, model.name)


def _check_names(state: Any, n_blocks: int, path: Path) -> None:
    if not isinstance(state, dict):
        raise BadForeignLens(
            f"{path} holds a {type(state).__name__}, but a dictionary of tensors was wanted; give another file"
        )
    weights = {f"{level}.weight" for level in range(n_blocks)}
    biases = {f"{level}.bias" for level in range(n_blocks)}
    missing = sorted((weights | biases if biases & state.keys() else weights) - state.keys())
    if missing:
        raise BadForeignLens(
            f"{path} has no {missing[0]}, but a translator for each of the {n_blocks} blocks was wanted; give another"
        )
    strange = sorted(str(name) for name in state.keys() - weights - biases)
    if strange:
        raise BadForeignLens(
            f"{path} has a tensor {strange[0][:50]!r} that no tuned lens of {n_blocks} blocks has; give another file"
        )


def _map(state: dict[str, Any], level: int, width: int, path: Path) -> Affine:
    weight = checked(state[f"{level}.weight"], (width, width), f"{level}.weight", path)
    bias = None
    if (found := state.get(f"{level}.bias")) is not None:
        bias = checked(found, (width,), f"{level}.bias", path)
    # A bias of zeros is none: the package writes one for lenses without.
    bias = None if bias is None or not bool(bias.any()) else bias
    return Affine.of(weight + torch.eye(width, dtype=torch.float64), bias=bias)
