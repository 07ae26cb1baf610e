"""The command line as a user meets it, in this process."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Run the command line as a process."""
    return subprocess.run(
        [sys.executable, "-m", "layerjump", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )
