"""What commands print and write: tables, progress, an output folder that is locked; and the options for it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerjump.cli._options import Command, Panel
from layerjump.errors import BadArtifact, RunStopped

if TYPE_CHECKING:
    from layerjump.models.model import Model

output_option = Panel("Output")
FORCE = output_option(False, "Overwrite the output.", "--force")
JSON = output_option(False, "Print JSON instead of a table.", "--json")

Options = dict[str, Any]
JUMPS = {"jumps.safetensors": "jumps already"}
LOG_INTERVAL = 30.0
"""Seconds between two lines of progress in a log."""
NO_WRAP_WIDTH = 16
"""Cells of at most this many characters stay on one line."""


def output_folder(default: str) -> Path:
    """Declare the output folder of a command."""
    return output_option(Path(default), "Output folder.", "-o", "--output", metavar="<folder>")


def log(line: object) -> None:
    """Print a line that is not the command's result, to standard error."""
    print(line, file=sys.stderr, flush=True)


def note_plain_text(model: Model, texts: Sequence[str]) -> None:
    """Print a note on standard error if a chat model reads a text without its chat template."""
    from layerjump.data.chat_template import plain_text_note, template_markers

    note = plain_text_note(model.name, model.tokenizer, texts)
    if note:
        marker = template_markers(model.tokenizer)[0]
        log(f"note: {note}; for a chat, write its markers, such as {marker}, into the text")


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


def locks_output(
    resume_hint: str | Callable[[Options], str],
    *,
    is_replaced: bool = False,
    option: str = "output",
    refuses: Mapping[str, str] | None = None,
) -> Callable[[Command], Command]:
    """Lock the folder (or file) that `option` names while a command runs.

    `resume_hint` tells a user who stops the command what to do next; it may depend on the options. `is_replaced`: the
    command replaces the whole folder at its end. `refuses` maps patterns of files to descriptions: without `--force`
    the command does not overwrite them. In a distributed run the first process locks the folder for all.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**options: Any) -> None:
            from layerjump.io import only_writer

            folder: Path = options[option]
            is_first = os.environ.get("RANK", "0") == "0"
            try:
                with only_writer(folder, replaced=is_replaced) if is_first else contextlib.nullcontext():
                    if refuses is not None and not options["force"]:
                        _refuse_overwriting(folder, refuses, resume=options.get("resume", False))
                    try:
                        command(**options)
                    except (KeyboardInterrupt, RunStopped):
                        # Another Ctrl-C would cut off the message or keep the lock.
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                        raise
            except (KeyboardInterrupt, RunStopped) as stop:
                if isinstance(stop, RunStopped) and stop.resumable:
                    raise
                hint = resume_hint if isinstance(resume_hint, str) else resume_hint(options)
                raise RunStopped(f"{str(stop) or 'stopped'}; {hint}") from None

        return run

    return decorate


def _refuse_overwriting(folder: Path, refuses: Mapping[str, str], *, resume: bool) -> None:
    """Refuse to overwrite results; `--resume` continues from the first kind of files."""
    for index, (pattern, description) in enumerate(refuses.items()):
        if any(folder.expanduser().glob(pattern)):
            if index == 0 and resume:
                return
            raise BadArtifact(f"{folder} holds {description}; give another folder with -o, or --force to overwrite it")
