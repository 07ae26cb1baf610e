"""The model that spoilt files are read with: three blocks, d 32, random weights."""

from __future__ import annotations

from functools import cache

import torch
from helpers.tiny_models import tiny_model

import layerjump as lj

D, L = 32, 3


@cache
def model() -> lj.Model:
    return lj.Model.wrap(tiny_model("gpt2", dtype=torch.float32), name="tiny")
