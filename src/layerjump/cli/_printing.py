"""What commands print: tables, JSON, progress, notes on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerjump.data.chat import Message
    from layerjump.models.model import Model


LOG_INTERVAL = 30.0
"""Seconds between two lines of progress in a log."""
NO_WRAP_WIDTH = 16
"""Cells of at most this many characters stay on one line."""


def log(line: object) -> None:
    """Print a line that is not the command's result, to standard error."""
    print(line, file=sys.stderr, flush=True)


def note_plain_text(model: Model, texts: Sequence[str]) -> None:
    """Print a note on standard error if a chat model reads a text without its chat template."""
    from layerjump.data.chat import plain_text_note

    note = plain_text_note(model.name, model.tokenizer, texts)
    if note:
        log(f"note: {note}; for a chat, pass --chat")


def read_prompt(model: Model, text: str, chat: bool) -> str | list[Message]:
    """A text, or with `chat` the chat in which it is the user's message; a note if a chat model gets a plain text."""
    if chat:
        return [{"role": "user", "content": text}]
    note_plain_text(model, [text])
    return text


def print_json(content: Any) -> None:
    """Print the command's result as JSON."""
    print(json.dumps(content, indent=2, ensure_ascii=False))


def print_table(title: str, rows: list[dict[str, Any]], *, as_json: bool = False) -> None:
    """Print rows (all with the same keys) as a table, or as JSON."""
    if as_json:
        print_json(rows)
        return
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0]:
        # A truncated number is worse than a wide table; long words may be cut anywhere.
        no_wrap = all(len(_format_cell(row[name])) <= NO_WRAP_WIDTH for row in rows)
        header = name.replace(" − ", "−").replace(" ", "\n") if no_wrap else name
        table.add_column(header, no_wrap=no_wrap)
    for row in rows:
        table.add_row(*(_format_cell(value) for value in row.values()))
    console = Console()
    if all(column.no_wrap for column in table.columns):
        unbounded = console.options.update(max_width=1000)
        console.width = max(console.width, Measurement.get(console, unbounded, table).maximum)
    console.print(title, style="italic", markup=False, highlight=False)
    console.print(table)


def _format_cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if abs(value) >= 1000:
            return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.2e}"
        return f"{value:.3f}" if abs(value) >= 1e-3 else f"{value:.1e}"
    return str(value)


@contextlib.contextmanager
def progress_bar(label: str, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """Show progress on standard error: a bar in a terminal, a line every 30 seconds in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _log_progress(label, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {unit}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(label, total=1, rate="")

        def update(done: int, total: int) -> None:
            speed = progress.tasks[task].speed
            rate = f"{speed:,.0f} {unit}/s" if speed else ""
            progress.update(task, completed=done, total=total, rate=rate)

        yield update


def _log_progress(label: str, unit: str) -> Callable[[int, int], None]:
    """Return a callback that prints progress and the time left at most every `LOG_INTERVAL` seconds."""
    last_line = start = time.monotonic()
    # A resumed run starts with tokens done: they do not count towards its speed.
    done_at_start = previous = 0

    def update(done: int, total: int) -> None:
        nonlocal last_line, start, done_at_start, previous
        now = time.monotonic()
        if previous == 0 or done < previous:
            start, done_at_start = now, done
        previous = done
        if now - last_line >= LOG_INTERVAL and done > done_at_start:
            last_line = now
            left = (now - start) / (done - done_at_start) * (total - done)
            log(f"{label}: {done:,} of {total:,} {unit}, about {left:.0f} s left")

    return update
