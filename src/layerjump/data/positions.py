"""Select the positions of a sequence that enter a fit or an evaluation.

A draw depends on the seed, the document, the sequence's number in it, its length and the settings alone: batch size,
order and number of processes do not change which positions are drawn.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from layerjump.errors import BadText, argument

Kind = Literal["one", "all", "sample", "share", "first", "last"]

MASKED_SHARE = "15%"
"""The default share of positions that are masked in a masked model: the share it was trained with."""
_NOTATION = re.compile(r"(one|all|first|last)|sample=([0-9]+)|([0-9]+(?:\.[0-9]+)?)%")
_EXPECTED = "`one`, `all`, `sample=8` (a number per sequence), `15%` (a share of each sequence), `first` or `last`"


@dataclass(frozen=True)
class Positions:
    """How positions are drawn: one per document, all, a number per sequence, a share of each, or a document's end.

    `first` and `last` are where a classification head reads a document, special tokens included.

    `amount` is the number for `sample` and the fraction for `share`. `skip_first` leaves out the first positions of a
    sequence, special tokens included; position 0 is an attention sink, unlike any other. Special tokens around the
    text are drawn only if `special`.
    """

    kind: Kind
    amount: float = 0
    skip_first: int = 1
    special: bool = False

    def __post_init__(self) -> None:
        if not _makes_sense(self.kind, self.amount):
            raise BadText(
                f"expected {argument('positions')} of {_EXPECTED}, got {self.kind!r} with amount {self.amount}"
            )
        if self.skip_first < 0:
            raise BadText(f"expected {argument('skip_first')} of 0 or more, got {self.skip_first}")

    @classmethod
    def parse(cls, text: str, *, skip_first: int = 1, special: bool = False) -> "Positions":
        """Parse `one`, `all`, `sample=8`, `15%`, `first` or `last`; the last two skip nothing."""
        match = _NOTATION.fullmatch(text)
        plain, number, percent = match.groups() if match else ("", None, None)
        kind: Any = plain or ("sample" if number else "share")
        amount = float(number or percent or 0) / (100 if percent else 1)
        if not _makes_sense(kind, amount):
            raise BadText(f"expected {argument('positions')} of {_EXPECTED}, got {text!r}")
        if kind in ("first", "last"):
            return cls(kind, skip_first=0, special=True)
        return cls(kind, amount, skip_first, special)

    @property
    def one_per_document(self) -> bool:
        """Whether only the first sequence of a document is used, at one position."""
        return self.kind in ("one", "first", "last")

    def __str__(self) -> str:
        if self.kind == "sample":
            return f"sample={int(self.amount)}"
        # 12 digits, so that 0.07 is written as 7% and not as 7.000000000000001%
        return f"{100 * self.amount:.12g}%" if self.kind == "share" else self.kind

    def masks(self) -> bool:
        """Whether a masked model reads [MASK] at these positions; if all were masked, there would be no context."""
        return self.kind != "all"

    def eligible(self, length: int, n_prefix: int, n_suffix: int) -> range:
        """The positions that may be drawn from a sequence of this length, which includes special tokens."""
        start = 0 if self.special else n_prefix
        end = length if self.special else length - n_suffix
        return range(max(start, self.skip_first), max(end, 0))

    def count(self, length: int, n_prefix: int, n_suffix: int) -> int:
        """How many positions `draw` returns for a sequence of this length."""
        eligible = len(self.eligible(length, n_prefix, n_suffix))
        if self.one_per_document:
            return min(1, eligible)
        counts = {"all": eligible, "sample": int(self.amount), "share": max(1, round(self.amount * eligible))}
        return min(counts[self.kind], eligible)

    def draw(
        self, length: int, n_prefix: int, n_suffix: int, *, seed: int, document: int, sequence: int
    ) -> NDArray[np.int64]:
        """Draw positions of a sequence, ascending."""
        eligible = self.eligible(length, n_prefix, n_suffix)
        every = np.arange(eligible.start, eligible.stop)
        count = self.count(length, n_prefix, n_suffix)
        if count == len(every):
            return every
        if self.kind in ("first", "last"):
            return every[:1] if self.kind == "first" else every[-1:]
        # Raw bits: numpy promises that these stay the same in all versions.
        bits = np.random.Philox(np.random.SeedSequence([seed, document, sequence]))
        return np.sort(every[np.argsort(bits.random_raw(len(every)))[:count]])


def _makes_sense(kind: str, amount: float) -> bool:
    if kind == "sample":
        return amount >= 1 and float(amount).is_integer()
    return 0 < amount <= 1 if kind == "share" else kind in ("one", "all", "first", "last") and amount == 0


PAPER = Positions("one", skip_first=0, special=True)
"""One position per document, any position: as in the paper that introduced `mat`."""
ALL_POSITIONS = Positions("all", skip_first=0, special=True)
"""Every position, special tokens included."""
