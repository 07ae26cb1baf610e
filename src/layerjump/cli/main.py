"""The command-line application: commands, exit codes and one-line errors."""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
import typer.core

from layerjump import __version__
from layerjump.cli.calibrate import calibrate
from layerjump.cli.check import check
from layerjump.cli.eval import evaluate
from layerjump.cli.explain import explain
from layerjump.cli.families import families
from layerjump.cli.fit import fit
from layerjump.cli.generate import generate
from layerjump.cli.human_eval import human_eval
from layerjump.cli.import_export import export, import_lens
from layerjump.cli.inspect import inspect
from layerjump.cli.lens import lens
from layerjump.cli.merge import merge
from layerjump.cli.pretrain import pretrain
from layerjump.cli.prune import prune
from layerjump.cli.report import report
from layerjump.cli.serve import serve
from layerjump.cli.study import study
from layerjump.cli.survey import survey
from layerjump.errors import LayerjumpError, RunStopped, render_arguments_as

OPTION_NAMES = {
    "eval": {"blocks": "--linearize-blocks", "parts": "--linearize"},
    "fit": {"use_validation": "--save-moments"},
    "pretrain": {"levels": "--penalty-levels"},
    "prune": {"learning_rate": "--distill-learning-rate"},
    "study": {"checkpoints": "--checkpoint", "limit": "--eval-limit", "targets": "--target", "tasks": "--eval-tasks"},
}
"""Library arguments whose option has another name, by command."""
COMMON_OPTION_NAMES = {"features": "--source-scaling", "split": "--fit-val-test"}
"""The same for all commands."""


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
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"layerjump {__version__}")
        raise typer.Exit


@app.callback()
def _set_up(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, metavar="", help="Print the version.")
    ] = False,
) -> None:
    """Linear shortcuts in transformers: fit them, read hidden layers with them, exit early, prune."""
    names = COMMON_OPTION_NAMES | OPTION_NAMES.get(context.invoked_subcommand or "", {})
    context.with_resource(render_arguments_as(functools.partial(_render_option, names)))


COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Jumps and lenses": {
        "study": study,
        "report": report,
        "fit": fit,
        "lens": lens,
        "explain": explain,
        "survey": survey,
        "serve": serve,
        "calibrate": calibrate,
        "generate": generate,
    },
    "Models": {"prune": prune, "pretrain": pretrain, "eval": evaluate, "check": check, "families": families},
    "Files": {"inspect": inspect, "merge": merge, "import": import_lens, "export": export, "human-eval": human_eval},
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)


def _render_option(names: Mapping[str, str], name: str, value: object) -> str:
    """Name the option that sets a library argument: `--save-moments` for `save_moments=True`."""
    option = names.get(name, f"--{name.replace('_', '-')}")
    return option if value is None or value is True else f"{option} {value}"


def main() -> None:
    """Run the command line: one-line errors and exit code 1, tracebacks only with `--debug`."""
    logging.basicConfig(format="%(message)s", stream=sys.stderr, level=logging.WARNING)
    logging.getLogger("layerjump").setLevel(logging.INFO)
    for chatty in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns of unused kernels
        logging.getLogger(chatty).setLevel(logging.ERROR)
    app()
