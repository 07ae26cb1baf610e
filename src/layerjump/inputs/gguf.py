"""What a GGUF file states about itself, held against what it holds before anything of those sizes is built."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NoReturn

from layerjump.errors import BadModel

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a value → its bytes; the other two are strings and lists."""
_STRING, _LIST = 8, 9
_MOST = 4_000_000
"""Entries of a list: ten times those of the largest vocabulary."""


def check_sizes(path: Path) -> None:
    """Refuse a file that leaves out a size, or has fewer blocks than it says.

    transformers would put in the size of a large model, take its time to build that, and only then miss the weights.
    """
    from gguf import GGUFReader

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Header(data, path).check()
    reader = GGUFReader(path)
    family = _stated(reader, "general.architecture", path)
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in reader.tensors}
    found = {
        "block_count": 1 + max((_block(name) for name in shapes), default=-1),
        "embedding_length": _width(shapes, "token_embd.weight", 0),
        "feed_forward_length": _width(shapes, "blk.0.ffn_up.weight", 1),
    }
    for name, size in found.items():
        if size is None:
            continue
        stated = _stated(reader, f"{family}.{name}", path)
        if stated != size:
            raise BadModel(
                f"{path} states {family}.{name} {stated!r}, but its tensors have {size}: it is incomplete; "
                f"get it again"
            )
    # A table is made of so many angles before anything is compared with them.
    rope = reader.get_field(f"{family}.rope.dimension_count")
    width = found["embedding_length"]
    if rope is not None and width is not None and not 0 <= int(rope.contents()) <= width:
        raise BadModel(
            f"{path} states {family}.rope.dimension_count {rope.contents()}, but the model is {width} wide: it is "
            f"damaged; get it again"
        )


class _Header:
    """A walk over the values before the tensors: every length must lie within the file.

    The reader itself would go through a list of a trillion entries, all behind the end of the file.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 4  # behind the mark
        self._order = "<"

    def check(self) -> None:
        if self._number("I") & 0xFFFF == 0:  # the version, in the other order of bytes
            self._order = ">"
        self._number("Q")  # tensors
        for _ in range(self._count(least=8)):
            self._skip(self._count(least=1))
            self._pass(self._number("I"))

    def _pass(self, kind: int, inside: int = 0) -> None:
        if kind in _SCALARS:
            self._skip(_SCALARS[kind])
        elif kind == _STRING:
            self._skip(self._count(least=1))
        elif kind == _LIST and inside < 4:
            entries = self._number("I")
            count = self._count(least=_SCALARS.get(entries, 8))
            if count > _MOST:
                self._damaged(f"a list has {count:,} entries")
            if entries in _SCALARS:
                self._skip(count * _SCALARS[entries])
                return
            for _ in range(count):
                self._pass(entries, inside + 1)
        else:
            self._damaged(f"a value has the type {kind}")

    def _count(self, least: int) -> int:
        """A number of things that take so many bytes at least."""
        count = self._number("Q")
        if count * least > len(self._data) - self._at:
            self._damaged(f"{count:,} entries cannot be in {len(self._data):,} bytes")
        return count

    def _number(self, kind: str) -> int:
        form = struct.Struct(self._order + kind)
        start = self._at
        self._skip(form.size)
        return int(form.unpack_from(self._data, start)[0])

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            self._damaged("it ends within its first part")

    def _damaged(self, reason: str) -> NoReturn:
        raise BadModel(f"{self._path} is cut short or damaged: {reason}; get it again")


def _stated(reader: object, key: str, path: Path) -> object:
    field = reader.get_field(key)  # type: ignore[attr-defined]
    if field is None:
        raise BadModel(
            f"{path} does not state {key}: it is incomplete, or holds no language model; give another file"
        )
    return field.contents()


def _block(name: str) -> int:
    """The number in blk.7.attn_q.weight; −1 where there is none."""
    start, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    return int(number) if start == "blk" and number.isdecimal() else -1


def _width(shapes: dict[str, list[int]], name: str, axis: int) -> int | None:
    shape = shapes.get(name, [])
    return shape[axis] if axis < len(shape) else None
