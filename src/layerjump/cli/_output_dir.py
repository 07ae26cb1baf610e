"""Decorator for commands that write a directory: exclusive lock; on Ctrl-C print how to resume."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from layerjump.errors import BadArtifact, RunStopped

Command = Callable[..., None]
JUMPS = {"jumps.safetensors": "jumps already"}
NOTHING: Mapping[str, str] = MappingProxyType({})


def writes_folder(
    go_on: Callable[[dict[str, Any]], str],
    *,
    replaced: bool = False,
    option: str = "output",
    holds: Mapping[str, str] = NOTHING,
) -> Callable[[Command], Command]:
    """Hold the folder (or file) given as `option` while a command runs.

    `go_on` says, from the options given, what a user who has stopped the command should do. Of several processes the
    first one holds the folder for all. Files that it `holds` (pattern → what they are) are not
    written over unasked.
    """

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            from layerjump.io import only_writer

            first = os.environ.get("RANK", "0") == "0"
            held = only_writer(given[option], replaced=replaced)
            try:
                with held if first else contextlib.nullcontext():
                    _require_free(given[option], holds, given)
                    _deaf_once_stopped(command, given)
            except (KeyboardInterrupt, RunStopped) as stop:
                if isinstance(stop, RunStopped) and stop.resumable:
                    raise
                raise RunStopped(f"{str(stop) or 'stopped'}; {go_on(given)}") from None

        return run

    return decorated


def _require_free(folder: Path, holds: Mapping[str, str], given: dict[str, Any]) -> None:
    """Refuse to write over what took somebody's time, unless told to, or to go on from the first of it."""
    for place, (pattern, what) in enumerate(holds.items()):
        if any(folder.expanduser().glob(pattern)) and not given["force"]:
            if place == 0 and given.get("resume"):
                return
            raise BadArtifact(
                f"{folder} holds {what}; give another folder with -o, or --force to write over it"
            )


def _deaf_once_stopped(command: Command, given: dict[str, Any]) -> None:
    """Another Ctrl-C has nothing to stop: it would cut off the message, or leave the lock behind."""
    try:
        command(**given)
    except (KeyboardInterrupt, RunStopped):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
