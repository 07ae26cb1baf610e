"""The command-line application, its commands and exit codes."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
import typer.core

from layerjump import __version__
from layerjump.cli.evaluate import evaluate
from layerjump.cli.families import families
from layerjump.cli.fit import fit
from layerjump.cli.generate import calibrate, generate
from layerjump.cli.human_evaluation import plausibility
from layerjump.cli.import_export import export_lens, import_lens
from layerjump.cli.inspect import show
from layerjump.cli.lens import lens
from layerjump.cli.pretrain import pretrain
from layerjump.cli.prune import prune
from layerjump.cli.serve import serve
from layerjump.cli.study import report, study
from layerjump.errors import LayerjumpError, RunStopped, render_arguments_as

OPTION_NAMES = {
    "pretrain": {"vocabulary": "--vocab", "strength": "--penalty-weight"},
    "study": {
        "checkpoints": "--checkpoint",
        "runs": "--finetune-runs",
        "steps": "--train-steps",
        "task": "--finetune-task",
    },
}
"""Library arguments whose option has another name, by command."""


class _Commands(typer.core.TyperGroup):
    """The commands; their errors become one line and an exit code, or a traceback with `--debug`."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LayerjumpError as error:
            if ctx.params["debug"]:
                raise
            if isinstance(error, RunStopped):
                # The process is ending: another Ctrl-C has nothing to stop.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(130 if isinstance(error, RunStopped) else 1) from None
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="layerjump",
    cls=_Commands,
    help="Linear shortcuts in transformers: fit them, read hidden layers with them, exit early, prune.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"layerjump {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before the command."""
    options = OPTION_NAMES.get(context.invoked_subcommand or "", {})
    context.with_resource(render_arguments_as(lambda name, value: _as_option(options, name, value)))


for command in (study, report, fit, show, lens, serve, generate, calibrate, prune, pretrain):
    app.command()(command)
# Names that Python has for something else.
app.command("eval")(evaluate)
app.command("import")(import_lens)
app.command("export")(export_lens)
app.command()(families)
app.add_typer(plausibility, name="plausibility")


def _as_option(options: Mapping[str, str], name: str, value: object) -> str:
    """A library argument as the option that sets it: `save_moments=True` is `--save-moments`."""
    option = options.get(name, f"--{name.replace('_', '-')}")
    return option if value is None or value is True else f"{option} {value}"


def main() -> None:
    """Run the command line: one-line errors and exit code 1, tracebacks only with `--debug`."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("layerjump").setLevel(logging.INFO)
    app()
