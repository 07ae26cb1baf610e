"""`layerjump serve`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="Hub ids, folders, GGUF files (default: the built-in `smollm2`).",
        ),
    ] = None,
    jumps: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A folder of fitted jumps to read through, too."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes any free port.")
    ] = 8417,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Look at what every level predicts, on a page in the browser. Only this machine can reach it.

    [bold]layerjump serve[/]                                    the built-in model
    [bold]layerjump serve gpt2 ./my-model[/]                    two models to choose from
    [bold]layerjump serve gpt2 --jumps wiki=jumps --no-browser[/]   jumps that `layerjump fit` wrote
    """
    print("starting …", file=sys.stderr)  # the imports take some seconds
    from layerjump.server.launch import serve as run
    from layerjump.server.model_registry import ModelRegistry, jump_sets

    library = ModelRegistry(models or ["smollm2"], jump_sets(jumps or []))
    run(library, port=port, browser=browser, say=_say)
    if library.working:
        # Python would abort, loudly, if it ended while a thread of ours is in torch's code. Files are written whole or
        # not at all, and the system lets go of locks.
        os._exit(0)


def _say(line: str) -> None:
    print(line, flush=True)
