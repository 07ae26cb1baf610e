"""Options and output shared by several commands."""

from __future__ import annotations

import json
import sys
import time
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
Force = Annotated[bool, typer.Option("--force", help="Write over what the output holds.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
BETWEEN_LINES = 30.0
"""Seconds between two lines of progress in a log."""
SHORT = 16
"""Characters of a cell that stay on one line."""


def print_table(title: str, rows: list[dict[str, Any]], *, as_json: bool) -> None:
    """Print rows (all with the same keys) as a table, or as JSON."""
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0]:
        # Half a number is worse than a wide table; long words may be cut anywhere.
        whole = all(len(_cell(row[name])) <= SHORT for row in rows)
        head = name.replace(" − ", "−").replace(" ", "\n") if whole else name
        table.add_column(head, no_wrap=whole)
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console()
    if all(column.no_wrap for column in table.columns):
        wide = console.options.update(max_width=1000)
        console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print(title, style="italic", markup=False, highlight=False)
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if abs(value) >= 1000:
            return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.2e}"
        return f"{value:.3f}" if abs(value) >= 1e-3 else f"{value:.1e}"
    return str(value)


@contextmanager
def progress_bar(what: str, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error with tokens a second and the time left; a line now and then where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=1, rate="")

        def update(done: int, total: int) -> None:
            speed = progress.tasks[task].speed
            rate = f"{speed:,.0f} {unit}/s" if speed else ""
            progress.update(task, completed=done, total=total, rate=rate)

        yield update


def _lines(what: str, unit: str) -> Callable[[int, int], None]:
    """Progress for a log: how far it is, every half a minute."""
    last = began = time.monotonic()
    # Done when this pass began (by the run that is taken up), and at the last update.
    first = before = 0

    def update(done: int, total: int) -> None:
        nonlocal last, began, first, before
        now = time.monotonic()
        if before == 0 or done < before:
            began, first = now, done
        before = done
        if now - last >= BETWEEN_LINES and done > first:
            last, left = now, (now - began) / (done - first) * (total - done)
            print(
                f"{what}: {done:,} of {total:,} {unit}, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    return update
