"""Growing texts: which tokens are decided, which rows are finished, what the streamer has been given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Stops = Callable[[Tensor, Any], Tensor]
"""(ids so far, scores) → which rows are finished: a `StoppingCriteriaList`."""


class Texts:
    """The rows of a batch. A token is *known* once nothing can change it any more.

    Without verification that is at once. With it, rows may be known to different lengths: after a disagreement all go
    back to the shortest, and the others say again what they already know.
    """

    def __init__(
        self, prompt: Tensor, stops: Stops, *, pad: int | None, ends: frozenset[int], streamer: Any
    ) -> None:
        self.ids = prompt
        self.prompt = prompt.shape[1]
        rows = len(prompt)
        self.known = [self.prompt] * rows
        self.levels: list[dict[int, int]] = [{} for _ in range(rows)]
        """The level at which the token of a column left."""
        self.ended: list[int | None] = [None] * rows
        """The column of each row's last token."""
        self.ends = ends
        """Tokens that end a text."""
        self._pad, self._stops, self._streamer = pad, stops, streamer
        self._streamed = self.prompt
        if streamer is not None:
            streamer.put(prompt.cpu())

    @property
    def idle(self) -> list[bool]:
        """Rows that need no more tokens. Where nothing ends a text, Hugging Face goes on until all rows are done."""
        return [bool(self.ends) and end is not None for end in self.ended]

    @property
    def shortest(self) -> int:
        """How many tokens all rows that go on are known to."""
        going = [known for known, idle in zip(self.known, self.idle, strict=True) if not idle]
        return min(going, default=self.width)

    @property
    def width(self) -> int:
        """One more than the last column that any row has ended at so far."""
        return max((end + 1 for end in self.ended if end is not None), default=self.prompt)

    @property
    def done(self) -> bool:
        return all(end is not None for end in self.ended) and self.shortest >= self.width

    def busy(self, column: int) -> Tensor:
        """Rows whose token of this column is still to be decided, (rows,) booleans."""
        wanted = [
            not idle and known <= column for idle, known in zip(self.idle, self.known, strict=True)
        ]
        return torch.tensor(wanted, device=self.ids.device)

    def put(self, column: int, tokens: Tensor, rows: Tensor, levels: list[int]) -> None:
        """Write tokens into a column, for some rows; idle rows get padding."""
        if column == self.ids.shape[1]:
            blank = self.ids.new_full((len(self.ids), 1), self._pad or 0)
            self.ids = torch.cat([self.ids, blank], 1)
        self.ids[:, column] = torch.where(rows, tokens, self.ids[:, column])
        for row in rows.nonzero()[:, 0].tolist():
            self.levels[row][column] = levels[row]

    def fix(self, column: int, rows: Tensor, scores: Tensor) -> None:
        """These rows' tokens of this column are known now; see which rows end with them."""
        ended = self._stops(self.ids[:, : column + 1], scores)
        for row in rows.nonzero()[:, 0].tolist():
            self.known[row] = column + 1
            if bool(ended[row]) and self.ended[row] is None:
                self.ended[row] = column

    def stream(self) -> None:
        """Give the streamer the columns that all rows are known to; one that has `left` hears the levels first."""
        if self._streamer is None:
            return
        left = getattr(self._streamer, "left", None)
        for column in range(self._streamed, self.shortest):
            if left is not None:
                left([levels.get(column) for levels in self.levels])
            self._streamer.put(self.result(column + 1)[:, column].cpu())
        self._streamed = max(self._streamed, self.shortest)
        if self.done:
            self._streamer.end()

    def result(self, width: int | None = None) -> Tensor:
        """The texts so far, padded behind rows that ended."""
        ids = self.ids[:, : self.width if width is None else width].clone()
        for row, end in enumerate(self.ended):
            if self.idle[row] and end is not None:
                ids[row, end + 1 :] = self._pad or 0
        return ids

    def new(self, row: int) -> list[int]:
        """A row's new tokens, without padding."""
        end = self.ended[row]
        stop = self.width if end is None or not self.idle[row] else end + 1
        return self.ids[row, self.prompt : stop].tolist()
