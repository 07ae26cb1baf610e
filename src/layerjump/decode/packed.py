"""Products from weights in the layout that oneDNN likes best.

Time goes into reading the matrix, so a product of four rows should take as long as one of a single row. From weights as
torch keeps them it does not: two rows take nearly twice as long (SmolLM2, two cores). From packed ones they take as
long as one, and eight half as long again. Waiting tokens then cost next to nothing when they go along with another,
which is what exact caches and verification live on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Made = TypeVar("Made")
MOST_BYTES = 1 << 30
"""As much is kept a second time, at most; beyond that calls are a small part of the time anyway."""
ROWS = 4
"""Rows that the layout is chosen for; more of them are no slower than from plain weights."""


class Product:
    """x → x Wᵀ, where W may be several matrices of equal width, one above the other."""

    def __init__(self, *weights: Tensor) -> None:
        whole = torch.cat([weight.detach() for weight in weights])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)

    def __call__(self, states: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self._packed, None, "none", [], ""
        )
        return found


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether these are float32 on a processor that oneDNN serves, and not too many."""
    weights = list(weights)
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and all(w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
        and sum(w.nbytes for w in weights) <= MOST_BYTES
    )


class Kept(Generic[Made]):
    """What was made from a module's weights, for as long as the module lives and its weights do not change."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[nn.Module, tuple[object, Made]] = (
            weakref.WeakKeyDictionary()
        )

    def get(self, module: nn.Module, make: Callable[[], Made]) -> Made:
        which = tuple((weight.data_ptr(), weight._version) for weight in module.parameters())
        known = self._held.get(module)
        if known is None or known[0] != which:
            known = which, make()
            self._held[module] = known
        return known[1]
