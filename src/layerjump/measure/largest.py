"""The k largest of each row, where rows are as wide as a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

HEIGHT = 64
"""Elements of a column: a wide row is looked at as a table with so many rows."""
_WORTH = 4  # times k columns: below that the plain way is as fast


def largest(rows: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, falling, and their indices, as `torch.topk` gives them.

    A plain `topk` keeps house for every element. Here one sweep finds the largest of every column, and only the k
    columns with the largest ones are looked into: the k largest elements cannot be anywhere else.
    """
    width = rows.shape[-1]
    n_columns = width // HEIGHT
    if n_columns < _WORTH * k:
        found = rows.topk(k)
        return found.values, found.indices
    table = rows[:, : n_columns * HEIGHT].unflatten(1, (HEIGHT, n_columns))
    columns = table.amax(1).topk(k, sorted=False).indices
    steps = torch.arange(0, n_columns * HEIGHT, n_columns, device=rows.device)
    inside = (columns[:, :, None] + steps).flatten(1)
    rest = torch.arange(n_columns * HEIGHT, width, device=rows.device).expand(len(rows), -1)
    candidates = torch.cat([inside, rest], 1)
    found = rows.gather(1, candidates).topk(k)
    return found.values, candidates.gather(1, found.indices)
