"""Rows of states before they are added: wide enough, finite, and what is typical of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from layerjump.errors import BadMoments
from layerjump.inputs.sites import Site

OUTLYING = 8.0
"""Rows whose shifted norm is this many times the batch's median are multiplied in float64."""


def require_finite(states: Mapping[Site, Tensor]) -> None:
    """Before anything is added: a NaN or infinity makes the sum of its rows one."""
    for site, state in states.items():
        if not torch.isfinite(state.sum(dtype=torch.float64)):
            raise BadMoments(f"the states at site {site} hold NaN or infinite values")


def typical(states: Tensor) -> Tensor:
    """The mean of the rows that are not outlying: a few attention sinks would drag it far from all others.

    It is rounded to float32, so that taking it from float32 states is as exact as they are.
    """
    norm = torch.linalg.vector_norm(states, dim=-1)
    return states[norm <= OUTLYING * norm.median()].double().mean(0).float().double()


def at_least_float32(states: Tensor) -> Tensor:
    """Half-precision products would lose what the sums are for."""
    return states if states.dtype in (torch.float32, torch.float64) else states.float()
