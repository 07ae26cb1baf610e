"""Options, tables and progress bars that several commands share."""

from __future__ import annotations

import functools
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from layerjump.models.model import Model


def option_group(heading: str) -> Callable[..., Any]:
    """Return a `typer.Option` whose options `--help` shows under a heading of their own."""
    return functools.partial(typer.Option, rich_help_panel=heading)


text_option, output_option = option_group("Text"), option_group("Output")
loading_option = option_group("Model loading")
ModelName = Annotated[str, typer.Argument(help="A hub id, a folder, a GGUF file, or the bundled `smollm2`.")]

TextSource = Annotated[str, text_option(help="A file, a hub dataset, `-` for standard input, or `pydoc`.")]
TextSources = Annotated[
    list[str] | None, text_option(help="A file, a hub dataset, `-` for standard input, or `pydoc`; may be repeated.")
]
Column = Annotated[str | None, text_option(help="Column of a CSV, JSON or Parquet text.")]
Tokens = Annotated[int | None, text_option(help="Number of tokens to use (default: the whole text).")]
Split = Annotated[str, text_option(help="Fit/validation/test split, in percent or in documents.")]
Seed = Annotated[int, text_option(help="Seed of the split and of sampled positions.")]

OutputFolder = Annotated[Path, output_option("-o", "--output", metavar="<folder>", help="Output folder.")]
Force = Annotated[bool, output_option("--force", help="Overwrite the output.")]
AsJson = Annotated[bool, output_option("--json", help="Print JSON instead of a table.")]

AllowOtherWeights = Annotated[
    bool,
    loading_option("--allow-other-weights", help="Accept jumps fitted on other weights, e.g. those of a base model."),
]

Command = Callable[..., None]
LoadModel = Callable[[str], "Model"]
"""Loads the model of a name or path, as the loading options of the command line say."""


def loads_model(*, device_map: bool = False) -> Callable[[Command], Command]:
    """Add the options for loading a model to a command, which gets them as one function, its parameter `load`."""

    def decorate(command: Command) -> Command:
        added = dict(inspect.signature(_loading_options, eval_str=True).parameters)
        if not device_map:
            del added["device_map"]
        signature = inspect.signature(command, eval_str=True)
        declared = [option for name, option in signature.parameters.items() if name != "load"]

        @functools.wraps(command)
        def run(**options: Any) -> None:
            loading = {name: options.pop(name) for name in added}

            def load_model(name: str) -> Model:
                from layerjump.models.loading import load

                return load(name, **loading)

            command(**options, load=load_model)

        run.__signature__ = signature.replace(parameters=[*declared, *added.values()])  # type: ignore[attr-defined]
        run.__annotations__ = {}  # typer reads the signature
        return run

    return decorate


def _loading_options(
    *,
    revision: Annotated[str | None, loading_option(help="Hub revision: a branch, tag or commit.")] = None,
    device: Annotated[str | None, loading_option(help="cpu, cuda, … (default: a GPU if available).")] = None,
    dtype: Annotated[
        str | None, loading_option(help="float32, bfloat16, float16 … (default: float32 on a CPU).")
    ] = None,
    device_map: Annotated[
        str | None, loading_option(help="`auto` spreads a large model over devices (needs accelerate).")
    ] = None,
    trust_remote_code: Annotated[
        bool, loading_option("--trust-remote-code", help="Run code from the model's repository.")
    ] = False,
) -> None:
    """Declares the options that `loads_model` adds."""


LOG_INTERVAL = 30.0
"""Seconds between two lines of progress in a log."""
NO_WRAP_WIDTH = 16
"""Cells of at most this many characters stay on one line."""


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


def note_plain_text(model: Model, texts: Sequence[str]) -> None:
    """Print a note on standard error if a chat model reads a text without its chat template."""
    from layerjump.data.chat_template import plain_text_note, template_markers

    note = plain_text_note(model.name, model.tokenizer, texts)
    if note:
        marker = template_markers(model.tokenizer)[0]
        print(f"note: {note}; for a chat, write its markers, such as {marker}, into the text", file=sys.stderr)


def parse_numbers(text: str, error: type[Exception]) -> tuple[int, ...]:
    """The integers of a list such as `1,30`; raise `error` for anything else."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise error(f"expected numbers such as 3,4, got {text!r}") from None


@contextmanager
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
            line = f"{label}: {done:,} of {total:,} {unit}, about {left:.0f} s left"
            print(line, file=sys.stderr, flush=True)

    return update
