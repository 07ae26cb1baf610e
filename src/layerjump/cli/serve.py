"""`layerjump serve`: the local web page."""

from __future__ import annotations

import os

import typer

from layerjump.cli._options import LoadModel, loads_model, option
from layerjump.cli._printing import log


@loads_model
def serve(
    models: list[str] | None = typer.Argument(
        None, metavar="MODEL", help="Hub ids, folders or GGUF files (default: the bundled `smollm2`)."
    ),
    jumps: list[str] | None = option(
        None, "A folder of jumps to offer as a lens, under its name or NAME; repeatable.", metavar="[NAME=]FOLDER"
    ),
    port: int = typer.Option(8417, min=0, max=65535, help="Port to listen on; 0 takes any free port."),
    browser: bool = option(True, "Open the page in a browser."),
    *,
    load: LoadModel,
) -> None:
    """Show what every level predicts on a page in the browser. The server listens on this machine only.

    [bold]layerjump serve[/]                                        the bundled model
    [bold]layerjump serve gpt2 ./my-model[/]                        two models
    [bold]layerjump serve gpt2 --jumps wiki-jumps --no-browser[/]   with jumps that `layerjump fit` wrote
    """
    log("starting …")  # the imports take some seconds
    from layerjump.server.app import serve as run
    from layerjump.server.served_models import ModelRegistry, load_jump_sets

    registry = ModelRegistry(models or ["smollm2"], load_jump_sets(jumps or []), load)
    run(registry, port=port, browser=browser, log=lambda line: print(line, flush=True))
    if registry.is_busy:
        # Python aborts with a traceback if it ends while a worker thread is in torch's code. Files are written
        # atomically, and the operating system releases locks.
        os._exit(0)
