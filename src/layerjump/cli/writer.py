"""What all commands that write a folder share: they have it for themselves, and a stop says how to go on."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from layerjump.errors import RunStopped

Command = Callable[..., None]


def writes_folder(
    go_on: Callable[[dict[str, Any]], str], *, replaced: bool = False, option: str = "output"
) -> Callable[[Command], Command]:
    """Hold the folder (or file) given as `option` while a command runs.

    `go_on` says, from the options given, what a user who has stopped the command should do. Of several processes the
    first one holds the folder for all.
    """

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            from layerjump.fit.output import only_writer

            first = os.environ.get("RANK", "0") == "0"
            held = only_writer(given[option], replaced=replaced)
            try:
                with held if first else contextlib.nullcontext():
                    _deaf_once_stopped(command, given)
            except (KeyboardInterrupt, RunStopped) as stop:
                if "run the same command" in str(stop):
                    raise
                raise RunStopped(f"{str(stop) or 'stopped'}; {go_on(given)}") from None

        return run

    return decorated


def _deaf_once_stopped(command: Command, given: dict[str, Any]) -> None:
    """Another Ctrl-C has nothing to stop: it would cut off the message, or leave the lock behind."""
    try:
        command(**given)
    except (KeyboardInterrupt, RunStopped):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
