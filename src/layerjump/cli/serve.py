"""`layerjump serve`: the local web page."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Hub ids, folders or GGUF files (default: the bundled `smollm2`)."),
    ] = None,
    jumps: Annotated[
        list[str] | None, typer.Option(metavar="NAME=FOLDER", help="A folder of jumps to offer as a lens; repeatable.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free port.")] = 8417,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show what every level predicts on a page in the browser. The server listens on this machine only.

    [bold]layerjump serve[/]                                        the bundled model
    [bold]layerjump serve gpt2 ./my-model[/]                        two models
    [bold]layerjump serve gpt2 --jumps wiki=jumps --no-browser[/]   with jumps that `layerjump fit` wrote
    """
    print("starting …", file=sys.stderr)  # the imports take some seconds
    from layerjump.server.app import serve as run
    from layerjump.server.model_registry import ModelRegistry, load_jump_sets

    registry = ModelRegistry(models or ["smollm2"], load_jump_sets(jumps or []))
    run(registry, port=port, browser=browser, log=lambda line: print(line, flush=True))
    if registry.is_busy:
        # Python aborts with a traceback if it ends while a worker thread is in torch's code. Files are written
        # atomically, and the operating system releases locks.
        os._exit(0)
