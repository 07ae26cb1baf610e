"""Real child processes: forked ones share what is imported, and may be limited or killed; others start anew."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable


def start(action: Callable[[], object]) -> int:
    """Run an action in a child; returns its process id."""
    child = os.fork()
    if child:
        return child
    # A run that was started in the background ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        action()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def end_of(child: int) -> int:
    """Wait for a child: 0 if all went well, 1 after an exception, −signal if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(action: Callable[[], object]) -> int:
    return end_of(start(action))


def printed_by(code: str) -> str:
    """What code prints in a Python of its own, one thread, that finds all that this one does."""
    paths = os.pathsep.join(map(str, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )
    return done.stdout
