"""Ways to spoil a file: its bytes, the JSON in it, a safetensors header, the members of a zip, the program of a pickle.

A way takes a source of chance and the bytes of a good file, and gives other bytes: the same chance, the same bytes.
"""

from __future__ import annotations

import io
import json
import pickletools
import zipfile
from collections.abc import Callable
from random import Random
from typing import Any

Way = Callable[[Random, bytes], bytes]

CANARY = "canary"
"""The folder that a pickle makes in the working directory if any of it is run."""
# posix.mkdir("canary"), and its result dropped again: fits between any two steps of a pickle.
PLANTED = b"cposix\nmkdir\n(X" + len(CANARY).to_bytes(4, "little") + CANARY.encode() + b"tR0"
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
    place = chance.randrange(len(data) + 1)
    length = chance.choice((1, 2, 8, 100))
    added = chance.choice((bytes(length), b"\xff" * length, chance.randbytes(length)))
    return data[:place] + added + data[place:]


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
    place = chance.choice((0, 4, 8, 16, chance.randrange(len(data) + 1)))
    value = chance.choice((0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1) - 1, 2**40, 2**31))
    return data[:place] + (value % 256**width).to_bytes(width, "little") + data[place + width :]


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
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.choice(_ODDITIES) + data[place:]


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
    found, waiting = [], [tree]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                waiting.append(holder[key])
    return found or [([None], 0)]


def _change(chance: Random, holder: Any, key: Any) -> None:
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice((f"{key} ", "", "0", "__class__"))] = holder.pop(key)
        case 1:
            holder[key:key] = [holder[key]] * chance.choice((1, 2000))
        case 2:
            holder[key] = _RAW
        case 3 if isinstance(holder[key], int | float):
            holder[key] = chance.choice(
                (-1, 0, 1, holder[key] + 1, holder[key] * 1000, str(holder[key]))
            )
        case _:
            holder[key] = chance.choice(_VALUES)


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
    said = (
        len(header)
        if chance.random() < 0.9
        else chance.choice((0, 2**63, len(header) + 1, len(data)))
    )
    return said.to_bytes(8, "little") + header + data[end:]


SAFETENSORS: tuple[Way, ...] = (header_changed, header_changed, *BYTES)


# Pickles

_GLOBALS = (
    b"builtins eval", b"builtins getattr", b"posix system", b"torch.serialization load", b"torch Size", b"torch device",
    b"torch._utils _rebuild_parameter", b"torch._utils _rebuild_meta_tensor_no_storage", b"torch FloatStorage",
    b"torch._utils _rebuild_sparse_tensor", b"torch._utils _rebuild_qtensor", b"collections OrderedDict",
    b"torch.storage UntypedStorage", b"torch._tensor _rebuild_from_type_v2", b"torch IntStorage",
    b"collections Counter",
    b"torch ComplexFloatStorage", b"torch.storage _load_from_bytes", b"torch._utils _rebuild_tensor_v2", b"a b",
)  # fmt: skip
_STEPS = (
    b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x3f",
    b"X\xff\xff\xff\x7f",
    b"\x96" + b"\xff" * 6 + b"\0\0", b"T\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f", b"I" + b"9" * 5000 + b"\n",
    b"(" * 5000,
    b"]" + b"]a" * 3, b"2", b"0", b"1", b".", b"N", b"b", b"R", b"\x81", b"Q", b"Px\n", b"}", b")", b"e", b"u",
    b"s", b"o",
    b"\x95" + b"\xff" * 8, PLANTED, PLANTED, PLANTED,
)  # fmt: skip


def pickle_changed(chance: Random, data: bytes) -> bytes:
    """The program changed: steps gone, doubled or put in (some would run code), other names, other numbers."""
    places = _steps_of(data)
    if len(places) < 2:
        return flipped(chance, data)
    at = chance.randrange(len(places) - 1)
    start, end = places[at], places[at + 1]
    step = data[start:end]
    match chance.randrange(5):
        case 0:
            step = b""
        case 1:
            step += step
        case 2:
            step = chance.choice(_STEPS) + step
        case 3:
            step = _other_name(chance, data, start) or step + chance.choice(_STEPS)
        case _ if len(step) > 1:
            step = step[:1] + blown(chance, step[1:])[: len(step) - 1]
        case _:
            step = chance.randbytes(1)
    return data[:start] + step + data[end:]


def _steps_of(data: bytes) -> list[int]:
    try:
        return [place for _, _, place in pickletools.genops(data) if place is not None]
    except ValueError:
        return []


def _other_name(chance: Random, data: bytes, start: int) -> bytes | None:
    """Another function in the place of one that the program names at this step."""
    if data[start : start + 1] not in (b"c", b"\x93"):
        return None
    module, name = chance.choice(_GLOBALS).split(b" ")
    called = b"c" + module + b"\n" + name + b"\n"
    # STACK_GLOBAL takes two strings off the stack first.
    return called if data[start : start + 1] == b"c" else b"00" + called


PICKLE: tuple[Way, ...] = (pickle_changed, pickle_changed, pickle_changed, *BYTES)


# Zip files (of torch.save)


def members_changed(chance: Random, data: bytes) -> bytes:
    """One member spoilt, gone, renamed, doubled or packed; the rest as it was."""
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        members = [(item.filename, packed.read(item)) for item in packed.infolist()]
    program = next(place for place, (name, _) in enumerate(members) if name.endswith("data.pkl"))
    at = program if chance.random() < 0.7 else chance.randrange(len(members))
    name, content = members[at]
    match chance.randrange(8):
        case 0:
            del members[at]
        case 1:
            members[at] = (name + chance.choice(("x", "/", "/../x")), content)
        case 2:
            members.append(members[chance.randrange(len(members))])
        case 3:
            members[at] = name, bytes(10**8) if chance.random() < 0.02 else content * 3
        case _ if at == program:
            members[at] = name, chance.choice(PICKLE)(chance, content)
        case _:
            members[at] = name, chance.choice(BYTES)(chance, content)
    return _zipped(members, zipfile.ZIP_DEFLATED if chance.random() < 0.1 else zipfile.ZIP_STORED)


def _zipped(members: list[tuple[str, bytes]], method: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as packed:
        for name, content in members:
            # A fixed date: the same chance must give the same bytes on any day.
            packed.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def directory_changed(chance: Random, data: bytes) -> bytes:
    """Sizes and offsets in the list at a zip's end changed."""
    place = chance.choice(_found(data, b"PK\x01\x02") + _found(data, b"PK\x05\x06"))
    field = place + chance.randrange(4, 46)
    return data[:field] + blown(chance, data[field : field + 8]) + data[field + 8 :]


def _found(data: bytes, mark: bytes) -> list[int]:
    places, at = [], data.find(mark)
    while at >= 0:
        places.append(at)
        at = data.find(mark, at + 1)
    return places


ZIP: tuple[Way, ...] = (
    members_changed,
    members_changed,
    members_changed,
    directory_changed,
    *BYTES,
)
