"""The command line as a user meets it, in this process or in a child."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from helpers.processes import end_of, start
from layerjump.cli import main


def refused(monkeypatch, capsys, *arguments: str) -> str:
    """Run a command that is to fail: exit 1, and its last line is the error; what it said."""
    monkeypatch.setattr(sys, "argv", ["layerjump", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    error: str = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("error: ")
    return error


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, input: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own: forked, so that it need not import torch and transformers again."""
    with contextlib.ExitStack() as stack:
        standard = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(3)]
        standard[0].write(input or "")
        for file in standard:
            file.flush()
            file.seek(0)
        code = end_of(start(lambda: _run_here(arguments, env, [file.fileno() for file in standard])))
        for file in standard:
            file.seek(0)
        return subprocess.CompletedProcess([*arguments], code, standard[1].read(), standard[2].read())


def _run_here(arguments: Sequence[str | Path], env: Mapping[str, str] | None, standard: list[int]) -> NoReturn:
    """Become the process of a command: its arguments, environment and standard streams; end with its exit code."""
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, encoding="utf-8") for n, mode in enumerate("rww"))
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    warnings.resetwarnings()  # pytest turns some into errors; a new process ignores these
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    torch.set_num_threads(1)  # threads do not survive a fork
    sys.argv = ["layerjump", *map(str, arguments)]
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
