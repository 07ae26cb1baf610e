"""Ways to spoil a pickle's program, and the zip that `torch.save` wraps around it."""

from __future__ import annotations

import io
import pickletools
import zipfile
from random import Random

from faults.mutate import BYTES, Way, blown, flipped

CANARY = "canary"
"""The folder that a pickle makes in the working directory if any of it is run."""
# posix.mkdir("canary"), and its result dropped again: fits between any two steps of a pickle.
PLANTED = b"cposix\nmkdir\n(X" + len(CANARY).to_bytes(4, "little") + CANARY.encode() + b"tR0"

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
        return [offset for _, _, offset in pickletools.genops(data) if offset is not None]
    except ValueError:
        return []


def _other_name(chance: Random, data: bytes, start: int) -> bytes | None:
    """Another function in place of one that the program names at this step."""
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
    program = next(index for index, (name, _) in enumerate(members) if name.endswith("data.pkl"))
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
    offset = chance.choice(_offsets_of(data, b"PK\x01\x02") + _offsets_of(data, b"PK\x05\x06"))
    field = offset + chance.randrange(4, 46)
    return data[:field] + blown(chance, data[field : field + 8]) + data[field + 8 :]


def _offsets_of(data: bytes, mark: bytes) -> list[int]:
    places, at = [], data.find(mark)
    while at >= 0:
        places.append(at)
        at = data.find(mark, at + 1)
    return places


ZIP: tuple[Way, ...] = (members_changed, members_changed, members_changed, directory_changed, *BYTES)
