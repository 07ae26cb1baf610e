"""Good lenses of other tools, and how they are read."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch

import layerjump as lj
from faults.small import D, L, model
from layerjump.jumps import serialization


def make_tuned_lens(folder: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    shapes = {f"{level}.weight": (D, D) for level in range(L)} | {f"{n}.bias": (D,) for n in range(L)}
    torch.save({n: torch.randn(s, generator=draw) for n, s in shapes.items()}, folder / "params.pt")
    config = {"d_model": D, "num_hidden_layers": L, "bias": True, "lens_type": "linear_tuned_lens"}
    (folder / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "tiny"}))


def make_mat(folder: Path) -> None:
    draw = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(D, D, generator=draw), torch.randn(D, generator=draw)
    (folder / "0_3.pickle").write_bytes(pickle.dumps(weight))
    (folder / "1_3.pickle").write_bytes(pickle.dumps([weight, bias]))


def make_jacobian(folder: Path) -> None:
    draw = torch.Generator().manual_seed(4)
    maps = {layer: torch.randn(D, D, generator=draw).half() for layer in range(L - 1)}
    about = {"n_prompts": 12, "source_layers": [0, 1], "d_model": D, "metadata": {"corpus": "x"}}
    torch.save({"J": maps} | about, folder / "lens.pt")


def read(kind: str, path: Path) -> None:
    source = path.parent if kind == "tuned-lens" else path
    serialization.save(lj.import_lens(source, model(), format=kind), "imported")
