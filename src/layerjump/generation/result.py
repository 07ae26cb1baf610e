"""Generated: text, exit levels and counts of a generation."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

PARTS = ("blocks", "heads", "rules", "rest")


@dataclass
class Counts:
    """What was done during one generation, prompt included."""

    block_runs: int = 0
    """How often a block was run, on however many tokens."""
    block_tokens: int = 0
    """Tokens that went through blocks, each block counted."""
    lost: int = 0
    """Of these, tokens that had left but went along, because another row of their batch went deeper."""
    filled: int = 0
    """Keys and values of a block made from a predicted or copied state."""
    heads: int = 0
    """Products with the whole vocabulary, of however many tokens."""
    short_heads: int = 0
    """Products with a shortlist of it."""
    gates: int = 0
    """Gate evaluations."""
    drafts: int = 0
    """Tokens that left early and were then held against the full model (`verify`)."""
    accepted: int = 0
    rollbacks: int = 0
    """How often tokens were taken back."""
    near_ties: int = 0
    """Verified tokens whose two best logits differ by less than 1e-4: there, rounding decides."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def __post_init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self, part: str) -> None:
        """The time since the last lap was spent on this part."""
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Generated:
    """Generated texts; lists have one entry a prompt."""

    text: list[str]
    """What was added to each prompt; empty strings where the model has no tokenizer."""
    ids: list[list[int]]
    """The new tokens, an end-of-text token included, padding not."""
    levels: list[list[int]]
    """The level at which each of them left: L where the whole model ran."""
    n_blocks: int
    counts: Counts

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def blocks_saved(self) -> float:
        """The share of blocks that tokens did not wait for: 1 − mean level / L, the paper's count.

        With the `exact` cache most of these blocks are run later, together with another token's.
        """
        levels = [level for row in self.levels for level in row]
        return 1 - sum(levels) / (len(levels) * self.n_blocks) if levels else 0.0

    @property
    def agreement(self) -> float | None:
        """How many of the tokens that left early the full model would have given; known only with `verify`."""
        return self.counts.accepted / self.counts.drafts if self.counts.drafts else None

    def __repr__(self) -> str:
        seconds = sum(self.counts.seconds.values())
        return (
            f"Generated({self.n_tokens} tokens, {self.blocks_saved:.0%} of blocks not waited for, "
            f"{self.n_tokens / seconds if seconds else 0:.1f} tokens/s)"
        )
