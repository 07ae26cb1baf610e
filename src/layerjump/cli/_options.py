"""Options of several commands: declared once, as the default values of parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

if TYPE_CHECKING:
    from layerjump.models.model import Model

Value = TypeVar("Value")
Command = Callable[..., None]
LoadModel = Callable[[str], "Model"]
"""Loads the model of a name or path, as the loading options of the command line say."""


@dataclass(frozen=True)
class Panel:
    """Declares options that `--help` shows in one panel; without a heading, in the general one."""

    heading: str | None = None

    def __call__(self, default: Value, help: str, *names: str, metavar: str | None = None) -> Value:
        """Return the default value of a parameter, with the option's help; a switch states its name."""
        declared = typer.Option(default, *names, help=help, metavar=metavar, rich_help_panel=self.heading)
        return cast(Value, declared)


option, text_option, loading_option = Panel(), Panel("Text"), Panel("Model loading")

MODEL: str = typer.Argument(help="A hub id, a folder, a GGUF file, or the bundled `smollm2`.")
TEXT = text_option("pydoc", "A file, a hub dataset, `-` for standard input, or `pydoc`.")
COLUMN: str | None = text_option(None, "Column of a CSV, JSON or Parquet text.")
TOKENS: int | None = text_option(None, "Number of tokens to use (default: the whole text).")
SPLIT = text_option("80/10/10", "Fit/validation/test split, in percent or in documents.")
SEED = text_option(0, "Seed of the split and of sampled positions.")
ALLOW_OTHER_WEIGHTS = loading_option(
    False, "Accept jumps fitted on other weights, e.g. those of a base model.", "--allow-other-weights"
)


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
    revision: str | None = loading_option(None, "Hub revision: a branch, tag or commit."),
    device: str | None = loading_option(None, "cpu, cuda, … (default: a GPU if available)."),
    dtype: str | None = loading_option(None, "float32, bfloat16, float16 … (default: float32 on a CPU)."),
    device_map: str | None = loading_option(None, "`auto` spreads a large model over devices (needs accelerate)."),
    trust_remote_code: bool = loading_option(False, "Run code from the model's repository.", "--trust-remote-code"),
) -> None:
    """Declares the options that `loads_model` adds."""


def parse_numbers(text: str, error: type[Exception]) -> tuple[int, ...]:
    """The integers of a list such as `1,30`; raise `error` for anything else."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise error(f"expected numbers such as 3,4, got {text!r}") from None
