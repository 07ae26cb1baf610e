"""Imports go one way: a package imports only from earlier packages."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "layerjump"
PACKAGES = [
    "errors",
    "io",
    "notebook_tables",
    "data",
    "models",
    "metrics",
    "jumps",
    "lens",
    "interventions",
    "generation",
    "training",
    "pruning",
    "evaluation",
    "studies",
    "report",
    "server",
    "cli",
]
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str | None:
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return None if first in ("__init__", "__main__") else first


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("layerjump."):
            names.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("layerjump.")}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_data_flows_one_way(path):
    package = package_of(path)
    if package is None:
        return
    later = PACKAGES[PACKAGES.index(package) + 1 :]
    assert imported_packages(path) & set(later) == set()


def test_every_package_is_known():
    assert {package_of(path) for path in FILES} - {None} <= set(PACKAGES)
