"""Names of places in a network.

5             level 5: what leaves block 5 (0: what enters block 1; L: what leaves the last block)
5.attn.in     the input of attention in block 5       5.attn.out   what attention adds to the stream
5.ln1.in …    likewise ln1, ln2 and ffn               5.mid        the stream after attention is added
5.heads       the output projection's input           5.attn_raw   attention's own output, before a post-norm
5.xattn.in …  cross-attention and its norm lnx        5.mid2       the stream after cross-attention is added
final         just before the vocabulary product
"""

from __future__ import annotations

from dataclasses import dataclass

from layerjump.errors import BadModel

BLOCK_PARTS = (
    "ln1.in",
    "ln1.out",
    "attn.in",
    "heads",
    "attn_raw",
    "attn.out",
    "mid",
    "lnx.in",
    "lnx.out",
    "xattn.in",
    "xattn.out",
    "mid2",
    "ln2.in",
    "ln2.out",
    "ffn.in",
    "ffn_raw",
    "ffn.out",
)


@dataclass(frozen=True, order=True)
class Site:
    """A place: a level, a part of block `index` (blocks count from 1), or `final`."""

    index: int
    part: str = "level"

    def __str__(self) -> str:
        if self.part == "final":
            return "final"
        return str(self.index) if self.part == "level" else f"{self.index}.{self.part}"

    @property
    def between_blocks(self) -> bool:
        """Whether it is a level or `final`, not a part of a block."""
        return self.part in ("level", "final")

    @classmethod
    def parse(cls, text: str | int | Site) -> Site:
        """Read a site's name, such as `5`, `5.attn.in` or `final`."""
        if isinstance(text, Site):
            return text
        name = str(text).strip()
        if name == "final":
            return FINAL
        index, _, part = name.partition(".")
        if index.isdecimal() and (not part or part in BLOCK_PARTS):
            return cls(int(index), part or "level")
        raise BadModel(
            f"{name[:50]!r} names no site; give a level (5), a part of a block "
            f"(5.attn.in; parts: {', '.join(BLOCK_PARTS)}) or final"
        )


FINAL = Site(-1, "final")
