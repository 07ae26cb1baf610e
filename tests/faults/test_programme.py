"""A short run of the fault programme: every fault, each on some commands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMME = Path(__file__).with_name("programme.py")
FAULTS = (
    "SIGKILL",
    "Ctrl-C",
    "Ctrl-C twice",
    "disk full",
    "read-only folder",
    "removed directory",
    "two runs",
    "clock jump",
)


@pytest.fixture(scope="module")
def tallies():
    process = subprocess.run(
        [sys.executable, str(PROGRAMME), "--rounds", "1", "--seed", "0", "--only", "fit,prune"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout, process.stderr
    by_fault = json.loads(process.stdout.splitlines()[-1])
    # Findings, and nothing else, make it fail: `make soak` goes by that.
    assert process.returncode == any(tally["findings"] for tally in by_fault.values()), process.stderr
    return by_fault


@pytest.mark.parametrize("fault", FAULTS)
def test_every_command_survives_the_fault(fault, tallies):
    tally = tallies[fault]
    if tally["skipped"]:
        pytest.skip(tally["skipped"])
    assert tally["findings"] == []
    assert tally["survived"] == tally["injected"] > 0
