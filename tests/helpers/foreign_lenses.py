"""Lenses as other tools save them, and jumps to be saved so, of one tiny model."""

import hashlib
import json

import numpy as np
import pytest
import torch

from helpers import synthetic_jumps
from helpers.tiny_models import tiny_model
from layerjump.jumps.jumps import JumpInfo, Jumps
from layerjump.jumps.maps import Affine
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model
from layerjump.models.sites import Site

D, L = 32, 3
TO_LAST = [(level, L) for level in range(L)]
ALL_PAIRS = [(i, j) for i in range(L) for j in range(i + 1, L + 1)]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model.wrap(tiny_model("gpt2", dtype=torch.float32), name="tiny")


def drawn(model: Model, pairs, *, bias: bool = False, rank: int | None = None) -> Jumps:
    """Jumps of the model with random weights, in float32."""
    draw = torch.Generator().manual_seed(1)
    maps = {}
    for source, target in pairs:
        shapes = [(D, D)] if rank is None else [(D, rank), (rank, D)]
        factors = [torch.randn(shape, generator=draw) for shape in shapes]
        shift = torch.randn(D, generator=draw) if bias else None
        maps[Site(source), Site(target)] = Affine.of(*factors, bias=shift)
    infos = {pair: JumpInfo(*pair, "mat", rank=rank) for pair in maps}
    known = synthetic_jumps.provenance(
        n_blocks=L, width=D, fingerprint=fingerprint(model.hf), settings={"n_prompts": 7}
    )
    return Jumps.from_maps(maps, infos, known)


def same_maps(one: Jumps, other: Jumps) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def tuned_folder(folder, model, **changes):
    """A tuned lens as its package saves it."""
    draw = torch.Generator().manual_seed(2)
    state = {}
    for level in range(L):
        state[f"{level}.weight"] = 0.1 * torch.randn(D, D, generator=draw)
        state[f"{level}.bias"] = torch.randn(D, generator=draw)
    printed = np.array_str(model.hf.lm_head.weight.detach().numpy(), precision=1)
    config = {
        "base_model_name_or_path": "somebody/tiny",
        "d_model": D,
        "num_hidden_layers": L,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": hashlib.sha256(printed.encode()).hexdigest(),
        "lens_type": "linear_tuned_lens",
    }
    folder.mkdir()
    torch.save(state, folder / "params.pt")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return state, config


def jacobian_content(**changes):
    draw = torch.Generator().manual_seed(3)
    matrices = {layer: torch.randn(D, D, generator=draw).half() for layer in range(L - 1)}
    return {"J": matrices, "n_prompts": 12, "source_layers": [0, 1], "d_model": D} | changes
