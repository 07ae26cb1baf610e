"""The output folder of a command: locked while it runs, and never overwritten unless asked to."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from layerjump.cli._options import Command
from layerjump.errors import BadArtifact, RunStopped

Options = dict[str, Any]
JUMPS = {"jumps.safetensors": "jumps already"}


def locks_output(
    resume_hint: str | Callable[[Options], str],
    *,
    is_replaced: bool = False,
    option: str = "output",
    refuses: Mapping[str, str] | None = None,
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

            folder: Path = options[option]
            is_first = os.environ.get("RANK", "0") == "0"
            try:
                with only_writer(folder, replaced=is_replaced) if is_first else contextlib.nullcontext():
                    if refuses is not None and not options["force"]:
                        _refuse_overwriting(folder, refuses, resume=options.get("resume", False))
                    try:
                        command(**options)
                    except (KeyboardInterrupt, RunStopped):
                        # Another Ctrl-C would cut off the message or keep the lock.
                        signal.signal(signal.SIGINT, signal.SIG_IGN)
                        raise
            except (KeyboardInterrupt, RunStopped) as stop:
                if isinstance(stop, RunStopped) and stop.resumable:
                    raise
                hint = resume_hint if isinstance(resume_hint, str) else resume_hint(options)
                raise RunStopped(f"{str(stop) or 'stopped'}; {hint}") from None

        return run

    return decorate


def _refuse_overwriting(folder: Path, refuses: Mapping[str, str], *, resume: bool) -> None:
    """Refuse to overwrite results; `--resume` continues from the first kind of files."""
    for index, (pattern, description) in enumerate(refuses.items()):
        if any(folder.expanduser().glob(pattern)):
            if index == 0 and resume:
                return
            raise BadArtifact(f"{folder} holds {description}; give another folder with -o, or --force to overwrite it")
