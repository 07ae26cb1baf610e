"""The tree shows the flow: a room imports only from earlier rooms, files and functions stay small."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "layerjump"
ROOMS = [
    "errors",
    "inputs",
    "measure",
    "fit",
    "lens",
    "decode",
    "compress",
    "train",
    "evaluate",
    "studies",
    "show",
    "serve",
    "cli",
]
FILES = sorted(SOURCE.rglob("*.py"))


def room_of(path: Path) -> str | None:
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return None if first in ("__init__", "__main__") else first


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("layerjump.")
        ):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("layerjump.")}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_data_flows_one_way(path):
    room = room_of(path)
    if room is None:
        return
    later = ROOMS[ROOMS.index(room) + 1 :]
    assert imported_rooms(path) & set(later) == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_fit(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    # A command's help is its docstring, and its options are its signature.
    most = 55 if room_of(path) == "cli" else 42
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.body[0].lineno < most, node.name


def test_every_room_is_known():
    assert {room_of(path) for path in FILES} - {None} <= set(ROOMS)
