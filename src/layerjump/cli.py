"""The command line: parse, call one function, print. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump import __version__
from layerjump.errors import LayerjumpError

if TYPE_CHECKING:
    from layerjump.inputs.models import Model

app = typer.Typer(
    name="layerjump",
    help="Linear shortcuts in transformers: fit them, read hidden layers with them, exit early, prune.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Revision = Annotated[str | None, typer.Option(help="Hub revision: a branch, tag or commit.")]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, … (default: a GPU where there is one).")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, float64, bfloat16, float16 (default: float32 on a CPU)."),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that comes with the model. Off unless you say so."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"layerjump {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""


@app.command()
def families(
    model: Annotated[
        str | None,
        typer.Argument(help="A hub id, folder, GGUF file or `smollm2`: check this model."),
    ] = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """List the model families, or check that one model is understood.

    [bold]layerjump families[/]                 the table
    [bold]layerjump families smollm2[/]         load the built-in model and run the self-check
    [bold]layerjump families ./my-bert --json[/]
    """
    if model is None:
        _print_table(*_family_rows(), as_json)
        return
    from layerjump.inputs.check import self_check
    from layerjump.inputs.models import load

    loaded = load(
        model, revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    _print_checks(loaded, self_check(loaded), as_json)


def _family_rows() -> tuple[str, list[str], list[list[str]]]:
    from layerjump.inputs.families import FAMILIES

    heads = ["family", "task", "kind", "blocks", "level L to logits", "before level 0"]
    rows = [
        [name, row.task, row.kind, row.blocks, " → ".join([*row.to_final, row.head]), row.before]
        for name, row in FAMILIES.items()
    ]
    return "Model families", heads, rows


def _print_checks(model: Model, checks: list[Any], as_json: bool) -> None:
    heads = ["check", "fact", "difference", "passed", "note"]
    rows = [
        [
            check.name,
            check.fact,
            "–" if check.difference is None else f"{check.difference:.1e}",
            "yes" if check.passed else "NO",
            check.note,
        ]
        for check in checks
    ]
    _print_table(repr(model), heads, rows, as_json)


def _print_table(title: str, heads: list[str], rows: list[list[str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*heads, title=title, title_justify="left", box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    """Run the command line: one-line errors and exit code 1, tracebacks only with `--debug`."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("layerjump").setLevel(logging.INFO)
    try:
        app()
    except LayerjumpError as error:
        if "--debug" in sys.argv:
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
