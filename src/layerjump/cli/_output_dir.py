"""Decorator for commands that write a folder: take an exclusive lock; on Ctrl-C print how to resume."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerjump.errors import BadArtifact, RunStopped

Command = Callable[..., None]
Options = dict[str, Any]
JUMPS = {"jumps.safetensors": "jumps already"}
NO_FILES: Mapping[str, str] = {}


def locks_output(
    resume_hint: str | Callable[[Options], str],
    *,
    is_replaced: bool = False,
    option: str = "output",
    refuses: Mapping[str, str] = NO_FILES,
) -> Callable[[Command], Command]:
    """Lock the folder (or file) that `option` names while a command runs.

    `resume_hint` tells a user who stops the command what to do next; it may depend on the options. `is_replaced`: the
    command replaces the whole folder at its end. `refuses` maps patterns of files to descriptions: without `--force`
    the command does not overwrite them. In a distributed run the first process locks the folder for all.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**options: Any) -> None:
            from layerjump.io import only_writer

            is_first = os.environ.get("RANK", "0") == "0"
            lock = only_writer(options[option], replaced=is_replaced)
            try:
                with lock if is_first else contextlib.nullcontext():
                    _refuse_overwriting(options[option], refuses, options)
                    _run_once_interruptible(command, options)
            except (KeyboardInterrupt, RunStopped) as stop:
                if isinstance(stop, RunStopped) and stop.resumable:
                    raise
                hint = resume_hint if isinstance(resume_hint, str) else resume_hint(options)
                raise RunStopped(f"{str(stop) or 'stopped'}; {hint}") from None

        return run

    return decorate


def _refuse_overwriting(folder: Path, refuses: Mapping[str, str], options: Options) -> None:
    """Refuse to overwrite results without `--force`; `--resume` continues from the first kind of files."""
    for index, (pattern, description) in enumerate(refuses.items()):
        if any(folder.expanduser().glob(pattern)) and not options["force"]:
            if index == 0 and options.get("resume"):
                return
            raise BadArtifact(f"{folder} holds {description}; give another folder with -o, or --force to overwrite it")


def _run_once_interruptible(command: Command, options: Options) -> None:
    """Run the command; after the first Ctrl-C ignore others, which would cut off the message or keep the lock."""
    try:
        command(**options)
    except (KeyboardInterrupt, RunStopped):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
