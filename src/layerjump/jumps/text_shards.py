"""Which documents a run has read: shards of texts, so that runs are merged without counting a document twice."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from layerjump.errors import BadText, argument

MAX_SHARDS = 100_000


@dataclass(frozen=True)
class TextShard:
    """One of `count` equal parts of a text: every `count`-th document of each split, from `index` on."""

    text: str
    """The name of the text."""
    sha256: str
    index: int = 0
    count: int = 1

    def overlaps(self, other: TextShard) -> bool:
        """Whether some documents are in both."""
        return self.sha256 == other.sha256 and (self.index - other.index) % math.gcd(self.count, other.count) == 0


def parse_shard(shard: str) -> tuple[int, int]:
    """Parse `2/8`, the third of eight parts, into index and count."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", shard)
    index, count = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 <= index < count <= MAX_SHARDS:
        raise BadText(
            f"expected {argument('shard')} as index/count with an index from 0 to count − 1, such as 0/8 … 7/8, got "
            f"{shard!r}"
        )
    return index, count


def describe_shards(shards: Sequence[TextShard]) -> str:
    """Return the names of texts, with the shards that there are of those that are not complete."""
    by_text: dict[str, list[TextShard]] = {}
    for shard in shards:
        by_text.setdefault(shard.sha256, []).append(shard)
    names = []
    for parts in by_text.values():
        if sum(1 / part.count for part in parts) > 1 - 0.5 / MAX_SHARDS:
            names.append(parts[0].text)
        else:
            indices = ", ".join(f"{part.index}/{part.count}" for part in sorted(parts, key=lambda part: part.index))
            names.append(f"{parts[0].text} (shard {indices})")
    return " + ".join(names)
