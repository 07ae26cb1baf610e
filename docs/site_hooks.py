"""Hooks of the documentation site: pages that are generated, and what differs between GitHub and MkDocs."""

import ast
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import layerjump as lj

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/layerjump/layerjump"
TITLES = {
    "data": "Text and batches",
    "models": "Models and states",
    "jumps": "Jumps",
    "lens": "Lens",
    "interventions": "Interventions",
    "generation": "Early exit",
    "pruning": "Pruning",
    "training": "Training",
    "evaluation": "Evaluation",
}
LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)")
ITEM = re.compile(r"\s*([-*]|\d+\.) ")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the changelog and the pages of the API reference."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changelog))
    for path, content in api_pages().items():
        files.append(File.generated(config, path, content=content))
    for file in list(files):
        if file.src_uri.endswith(".py"):
            files.remove(file)
    return files


def api_pages() -> dict[str, str]:
    """Return the pages of the API reference by path: one for each package, and an index of every public name."""
    names: dict[str, list[str]] = {package: [] for package in TITLES}
    for name in lj.__all__:
        names[lj._HOME[name].split(".")[0]].append(name)
    index = ["# Python", "", "Every name below is an attribute of the package: `import layerjump as lj`.", ""]
    pages = {}
    for package, members in names.items():
        lines = [f"# {TITLES[package]}", ""]
        index += [f"## {TITLES[package]}", "", "| name | |", "|---|---|"]
        for name in members:
            identifier, summary = _describe(name)
            lines += [f"::: {identifier}", ""]
            index.append(f"| [`lj.{name}`]({package}.md#{identifier}) | {summary} |")
        index.append("")
        pages[f"api/{package}.md"] = "\n".join(lines)
    pages["api/index.md"] = "\n".join(index)
    return pages


def _describe(name: str) -> tuple[str, str]:
    """Return the identifier of a public name for mkdocstrings, and the first line of its docstring.

    Both are read from the source: importing torch takes seconds.
    """
    home = lj._HOME[name]
    body = ast.parse((ROOT / "src" / "layerjump" / f"{home.replace('.', '/')}.py").read_text(encoding="utf-8")).body
    defined = {node.name: node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    if name in defined:
        return f"layerjump.{name}", _first_line(defined[name])
    # A function's name for a class: `early_exit = EarlyExit`.
    values = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in body if isinstance(node, ast.Assign)}
    return f"layerjump.{home}.{values[name]}", _first_line(defined[values[name]])


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> str:
    return (ast.get_docstring(node) or "").splitlines()[0].replace("|", "\\|")


def on_page_markdown(markdown: str, *, page: Page, config: Any, files: Files) -> str:
    """Point links out of docs/ at the repository, and put a blank line before lists, which MkDocs needs."""
    markdown = LINK.sub(lambda link: link[1] + _in_repository(link[2], page.file.src_uri), markdown)
    return _separate_lists(markdown)


def _in_repository(target: str, page: str) -> str:
    """Return the address of a file outside docs/ that a page links to; an error if there is no such file."""
    path = (ROOT / "docs" / PurePosixPath(page).parent / target).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return target
    if not path.exists():
        raise FileNotFoundError(f"{page} links to {target}, which does not exist")
    return f"{REPOSITORY}/{'tree' if path.is_dir() else 'blob'}/main/{path.relative_to(ROOT)}"


def _separate_lists(markdown: str) -> str:
    lines: list[str] = []
    in_code = False
    for line in markdown.splitlines():
        previous = lines[-1] if lines else ""
        if line.lstrip().startswith("```"):
            in_code = not in_code
        # A line that continues an item is indented; one that ends a paragraph is not.
        elif not in_code and ITEM.match(line) and previous[:1].strip() and not ITEM.match(previous):
            lines.append("")
        lines.append(line)
    return "\n".join(lines)
