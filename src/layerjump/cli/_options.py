"""Options of several commands: declared once, as the default values of parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

if TYPE_CHECKING:
    from layerjump.models.model import Model

Value = TypeVar("Value")
Command = Callable[..., None]
LoadModel = Callable[..., "Model"]
"""Loads the model of a name or path, as the loading options of the command line say; takes more arguments of `load`."""


@dataclass(frozen=True)
class OptionPanel:
    """Declares options that `--help` shows in one panel; without a heading, in the general one."""

    heading: str | None = None

    def __call__(self, default: Value, help: str, *names: str, metavar: str | None = None) -> Value:
        """Return the default value of a parameter, with the option's help; a switch states its name."""
        if isinstance(default, bool):
            metavar = ""  # a switch takes no value
        declared = typer.Option(default, *names, help=help, metavar=metavar, rich_help_panel=self.heading)
        return cast(Value, declared)


option, text_option, loading_option = OptionPanel(), OptionPanel("Text"), OptionPanel("Model loading")
output_option = OptionPanel("Output")

MODEL: str = typer.Argument(help="A hub id, a folder, a GGUF file, or the bundled `smollm2`.")
TEXT = text_option("pydoc", "A file, a hub dataset, `-` for standard input, or `pydoc`.")
COLUMN: str | None = text_option(None, "Column of a CSV, JSON or Parquet text.")
TOKENS: int | None = text_option(None, "Number of tokens to use (default: the whole text).")
SPLIT = text_option("80/10/10", "Fit/validation/test split, in percent or in documents.", "--fit-val-test")
SEED = text_option(0, "Seed of the split and of sampled positions.")
LENS: str | None = option(
    None,
    "The lens: identity, pretrained, or an estimator, which the first use fits (default: pretrained if there is one, "
    "else mat).",
    "--lens",
)
JUMPS: Path | None = option(None, "Folder of jumps that `layerjump fit` wrote, instead of --lens.", "--jumps")
CHAT = option(False, "Read the text as a user's message, in the model's chat template.", "--chat")
ALLOW_OTHER_WEIGHTS = loading_option(
    False, "Accept jumps fitted on other weights, e.g. those of a base model.", "--allow-other-weights"
)
FORCE = output_option(False, "Overwrite the output.", "--force")
JSON = output_option(False, "Print JSON instead of a table.", "--json")


def output_folder(default: str) -> Path:
    """Declare the output folder of a command."""
    return output_option(Path(default), "Output folder.", "-o", "--output", metavar="<folder>")


def loads_model(command: Command) -> Command:
    """Add the options for loading a model to a command, which gets them as one function, its parameter `load`."""
    added = dict(inspect.signature(_loading_options, eval_str=True).parameters)
    signature = inspect.signature(command, eval_str=True)
    declared = [option for name, option in signature.parameters.items() if name != "load"]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        loading = {name: options.pop(name) for name in added}

        def load_model(name: str, **more: Any) -> Model:
            from layerjump.models.loading import load

            return load(name, **loading, **more)

        command(**options, load=load_model)

    run.__signature__ = signature.replace(parameters=[*declared, *added.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {}  # typer reads the signature
    return run


def _loading_options(
    *,
    revision: str | None = loading_option(None, "Hub revision: a branch, tag or commit."),
    device: str | None = loading_option(None, "cpu, cuda, cuda:1 … (default: a GPU if available)."),
    dtype: str | None = loading_option(None, "float32, bfloat16, float16 … (default: float32 on a CPU)."),
    device_map: str | None = loading_option(
        None, "`auto` spreads a large model over devices, `disk` reads its weights from disk; replaces --device."
    ),
    quantization: str | None = loading_option(
        None, "Quantise the weights: int8, nf4, fp4 (bitsandbytes) or torchao-int8 (default: none)."
    ),
    trust_remote_code: bool = loading_option(False, "Run code from the model's repository.", "--trust-remote-code"),
) -> None:
    """Declares the options that `loads_model` adds."""


def parse_numbers(text: str, error: type[Exception]) -> tuple[int, ...]:
    """The integers of a list such as `1,30`; raise `error` for anything else."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise error(f"expected numbers such as 3,4, got {text!r}") from None
