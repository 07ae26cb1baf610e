"""Lens folders of the package tuned-lens: `config.json` and `params.pt`.

Translator l reads level l and is added to it: h ↦ h + W h + b predicts level L. Our jump is (I + W) h + b, rounded to
float32 as all jumps are, so that an imported lens loses the last bits of W's diagonal. An export is in float64, whose
bits suffice to restore the same jump.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from layerjump import io
from layerjump.errors import BadForeignLens, argument
from layerjump.jumps.convert import foreign_lens, safe_pickle
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.models.model import Model
from layerjump.models.sites import Pair, Site
from layerjump.models.weight_forms import module_weight

log = logging.getLogger("layerjump")

CONFIG, PARAMETERS = "config.json", "params.pt"
_LENS_TYPE = "linear_tuned_lens"
_MAX_CONFIG_BYTES = 1 << 20


def recognises(path: Path) -> bool:
    """Whether this is such a folder."""
    return (path / CONFIG).is_file() and (path / PARAMETERS).is_file()


def read(folder: Path, model: Model) -> foreign_lens.ForeignLens:
    """Read the translators of a folder as maps from every level to the last."""
    config_file, parameter_file = folder / CONFIG, folder / PARAMETERS
    safe_pickle.check_file(config_file, _MAX_CONFIG_BYTES)
    config = io.read_json(config_file)
    lens_type = config.get("lens_type", _LENS_TYPE)
    if lens_type != _LENS_TYPE:
        raise BadForeignLens(f"{config_file}: lens_type is {str(lens_type)[:50]!r}, expected {_LENS_TYPE}")
    foreign_lens.check_size("d_model", config.get("d_model"), model.d_model, config_file)
    foreign_lens.check_size("num_hidden_layers", config.get("num_hidden_layers"), model.n_blocks, config_file)
    expected_hash = config.get("unembed_hash")
    if expected_hash and expected_hash != unembedding_hash(model):
        # Not an error: the package's own hashes of one model are known to differ.
        log.warning("%s has the hash of another unembedding than that of %s", config_file, model.name)
    state = safe_pickle.read_torch(parameter_file, foreign_lens.max_bytes(model, model.n_blocks))
    if not isinstance(state, dict):
        raise BadForeignLens(f"expected a dictionary of tensors, but {parameter_file} holds a {type(state).__name__}")
    n_blocks = model.n_blocks
    weights, biases = ({f"{level}.{part}" for level in range(n_blocks)} for part in ("weight", "bias"))
    for name in sorted((weights | biases if biases & state.keys() else weights) - state.keys()):
        raise BadForeignLens(
            f"expected a translator for each of the {n_blocks} blocks, but {parameter_file} has no {name}"
        )
    for name in sorted(str(name) for name in state.keys() - weights - biases):
        raise BadForeignLens(
            f"{parameter_file} has a tensor {name[:50]!r}, which no tuned lens of {n_blocks} blocks has"
        )
    d, last = model.d_model, Site(model.n_blocks)
    maps = {}
    for level in range(model.n_blocks):
        name = f"{level}.weight"
        weight = foreign_lens.check_tensor(state[name], (d, d), name, parameter_file)
        name = f"{level}.bias"
        bias = foreign_lens.check_tensor(state[name], (d,), name, parameter_file) if name in state else None
        # The package writes a bias of zeros for lenses without one.
        bias = bias if bias is not None and bool(bias.any()) else None
        maps[Site(level), last] = Affine.of(weight + torch.eye(d, dtype=torch.float64), bias=bias)
    return foreign_lens.ForeignLens(maps, "tuned-lens", notes=foreign_lens.plain_values(config))


def write(jumps: Jumps, model: Model, folder: Path) -> list[Pair]:
    """Write the jumps from every level to the last; return those that were written."""
    pairs = [(Site(level), Site(model.n_blocks)) for level in range(model.n_blocks)]
    for source, target in pairs:
        if (source, target) not in jumps:
            raise BadForeignLens(
                f"{jumps} has no jump {source} → {target}, but a tuned lens has one from every level to the last; fit "
                f"with {argument('estimator', 'affine')} and {argument('pairs', 'to-last')} (calibrated maps predict "
                f"the state after the final norm)"
            )
    state: dict[str, Tensor] = {}
    for pair in pairs:
        affine, level = foreign_lens.plain_map(jumps, pair), pair[0].index
        state[f"{level}.weight"] = affine.weight - torch.eye(model.d_model, dtype=torch.float64)
        # The package cannot load a lens without biases.
        zeros = torch.zeros(model.d_model, dtype=torch.float64)
        state[f"{level}.bias"] = zeros if affine.bias is None else affine.bias
    config = {
        "base_model_name_or_path": model.name,
        "d_model": model.d_model,
        "num_hidden_layers": model.n_blocks,
        "bias": True,
        "base_model_revision": model.revision,
        "unembed_hash": unembedding_hash(model),
        "lens_type": _LENS_TYPE,
    }
    with io.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    safe_pickle.write_torch(folder / PARAMETERS, state)
    io.write_json(folder / CONFIG, config)
    return pairs


def unembedding_hash(model: Model) -> str:
    """Return the package's hash of an unembedding: the sha256 of the matrix as numpy prints it, to one decimal."""
    weight = module_weight(model.structure.unembedding).detach().cpu().float().numpy()
    return hashlib.sha256(np.array_str(weight, precision=1).encode()).hexdigest()
