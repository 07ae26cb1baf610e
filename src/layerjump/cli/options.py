"""Options and output that several commands share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

ModelName = Annotated[
    str, typer.Argument(help="A hub id, a folder, a GGUF file, or the built-in `smollm2`.")
]
Revision = Annotated[str | None, typer.Option(help="Hub revision: a branch, tag or commit.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, … (default: a GPU where there is one).")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, float64, bfloat16, float16 (default: float32 on a CPU)."),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="`auto` spreads a large model over devices (needs accelerate)."),
]
Trust = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run code that comes with the model. Off by default."),
]
OtherWeights = Annotated[
    bool,
    typer.Option(
        "--allow-other-weights", help="Take jumps fitted on other weights, e.g. a base model's."
    ),
]
Column = Annotated[str | None, typer.Option(help="Column of a table to read.")]
Split = Annotated[str, typer.Option(help="fit/select/test: percentages or documents.")]
Seed = Annotated[int, typer.Option(help="Seed of splits and positions.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def print_table(title: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print rows (all with the same keys) as a table, or as JSON."""
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=title, title_justify="left", box=box.SIMPLE)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) >= 1e-3 else f"{value:.1e}"
    return str(value)


@contextmanager
def progress_bar(what: str, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error with tokens a second and the time left; silent when that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=1, rate="")

        def update(done: int, total: int) -> None:
            speed = progress.tasks[task].speed
            rate = f"{speed:,.0f} {unit}/s" if speed else ""
            progress.update(task, completed=done, total=total, rate=rate)

        yield update
