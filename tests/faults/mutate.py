"""Ways to spoil a file: its bytes, text or JSON in it, a safetensors header (`mutate_pickles.py`: pickles, zips).

A way takes a source of chance and the bytes of a good file, and gives other bytes: the same chance, the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

Way = Callable[[Random, bytes], bytes]

_WIDTHS = (1, 2, 4, 8)


# Bytes


def flipped(chance: Random, data: bytes) -> bytes:
    """A few bits turned."""
    spoilt = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 8))):
        if spoilt:
            spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
    return bytes(spoilt)


def cut(chance: Random, data: bytes) -> bytes:
    """The end gone, as a full disk or a broken download leaves it."""
    return data[: chance.randrange(len(data) + 1)]


def inserted(chance: Random, data: bytes) -> bytes:
    """Bytes in the middle that do not belong there."""
    offset = chance.randrange(len(data) + 1)
    length = chance.choice((1, 2, 8, 100))
    added = chance.choice((bytes(length), b"\xff" * length, chance.randbytes(length)))
    return data[:offset] + added + data[offset:]


def removed(chance: Random, data: bytes) -> bytes:
    """A piece of the middle gone."""
    start = chance.randrange(len(data) + 1)
    return data[:start] + data[start + chance.choice((1, 2, 8, 100)) :]


def doubled(chance: Random, data: bytes) -> bytes:
    """A piece of the file twice."""
    start = chance.randrange(len(data) + 1)
    piece = data[start : start + chance.choice((1, 8, 100, 5000))]
    return data[:start] + piece + data[start:]


def blown(chance: Random, data: bytes) -> bytes:
    """What may be a length says far too much, or nothing; the first bytes of a file most often."""
    width = chance.choice(_WIDTHS)
    offset = chance.choice((0, 4, 8, 16, chance.randrange(len(data) + 1)))
    value = chance.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1) - 1, 2**40, 2**31))
    return data[:offset] + (value % 256**width).to_bytes(width, "little") + data[offset + width :]


BYTES: tuple[Way, ...] = (flipped, cut, inserted, removed, doubled, blown)


def in_the_first(many: int, way: Way) -> Way:
    """The same way, but only in the first bytes, where a format says what follows."""
    return lambda chance, data: way(chance, data[:many]) + data[many:]


# Text

_ODDITIES = (
    b"\0", b"\r", b"\xef\xbb\xbf", b"\xff\xfe", b'"', b'""', b"'", b"\t", b",", b"\n\n\n", b"\xe2\x80\xa8",
    b"\xed\xa0\x80", b"\x1a", b"x" * 70_000, b"," * 5000, b'"' * 5001, b"\n" * 5000, b"\\ud800", b"=1+1",
)  # fmt: skip


def odd_text(chance: Random, data: bytes) -> bytes:
    """Characters that text readers stumble over; now and then the whole in another encoding."""
    if chance.random() < 0.1:
        return data.decode().encode(chance.choice(("utf-16", "utf-32", "utf-16-le")))
    offset = chance.randrange(len(data) + 1)
    return data[:offset] + chance.choice(_ODDITIES) + data[offset:]


def lines_changed(chance: Random, data: bytes) -> bytes:
    """Lines gone, twice, or in another order."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    match chance.randrange(3):
        case 0:
            del lines[at]
        case 1:
            lines[at:at] = lines[at : at + 1] * chance.choice((1, 50))
        case _:
            chance.shuffle(lines)
    return b"\n".join(lines)


TEXT: tuple[Way, ...] = (*BYTES, odd_text, lines_changed)


# JSON

_RAW = "@raw@"
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1000, 10**6, 2**31, 2**63, 10**30, 10**400, 0.5, -0.0, 1e-300, 1e300, "", "x", "1",
    "final", "a" * 2000, "\ud800", "../../x", "nan", "\0", [], {}, [[]], [1, 2, 3], [None], {"a": 1}, [-1, 10**12],
)  # fmt: skip
_TEXTS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "[" * 100_000 + "]" * 100_000,
    '{"a":' * 3000 + "1" + "}" * 3000, "[" * 900 + "]" * 900, '{"a": 1, "a": [2]}', "01", "'x'", "",
)  # fmt: skip


def json_changed(chance: Random, data: bytes) -> bytes:
    """One to three values swapped for others, taken away, renamed, doubled, or for what JSON does not allow."""
    tree = [json.loads(data)]  # in a list, so that the whole has a place too
    raw = chance.choice(_TEXTS)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _change(chance, *chance.choice(_places(tree)))
    text = json.dumps(tree)[1:-1]
    # Once: a long one in two thousand places would be a test of the disk.
    return text.replace(f'"{_RAW}"', raw, 1).encode(errors="surrogatepass")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree."""
    slots, waiting = [], [tree]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            slots.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return slots or [([None], 0)]


def _change(chance: Random, holder: Any, key: Any) -> None:
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice((f"{key} ", "", "0", "__class__"))] = holder.pop(key)
        case 1:
            # Containers once: two thousand of two thousand would be a test of the memory.
            many = chance.choice((1, 2000)) if not isinstance(holder[key], dict | list) else 1
            holder[key:key] = [deepcopy(holder[key]) for _ in range(many)]
        case 2:
            holder[key] = _RAW
        case 3 if isinstance(holder[key], int | float):
            holder[key] = chance.choice((-1, 0, 1, holder[key] + 1, holder[key] * 1000, str(holder[key])))
        case _:
            holder[key] = deepcopy(chance.choice(_VALUES))  # the next change may be inside it


def json_lines_changed(chance: Random, data: bytes) -> bytes:
    """One line's JSON changed."""
    lines = data.rstrip(b"\n").split(b"\n")
    at = chance.randrange(len(lines))
    lines[at] = json_changed(chance, lines[at])
    return b"\n".join(lines)


JSON: tuple[Way, ...] = (json_changed, json_changed, json_changed, *TEXT)
JSON_LINES: tuple[Way, ...] = (json_lines_changed, json_lines_changed, *TEXT)


# Safetensors


def header_changed(chance: Random, data: bytes) -> bytes:
    """The header's JSON changed; its length mostly made to fit, so that what it says is looked at."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json_changed(chance, data[8:end])
    stated_length = len(header) if chance.random() < 0.9 else chance.choice((0, 2**63, len(header) + 1, len(data)))
    return stated_length.to_bytes(8, "little") + header + data[end:]


SAFETENSORS: tuple[Way, ...] = (header_changed, header_changed, *BYTES)
