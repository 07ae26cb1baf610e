"""What can go wrong, as a tree. Catch `LayerjumpError` to catch everything this package raises on purpose.

    LayerjumpError
    ├── BadModel               the model given cannot be used
    │   ├── ModelNotFound      no such folder, file, hub id; or the hub cannot be reached
    │   ├── UnsupportedModel   its family is not in the table
    │   ├── SelfCheckFailed    its states do not reassemble to its own output
    │   └── NoPredictions      its head was not in the checkpoint, so it predicts nothing
    ├── BadText                the text given cannot be used
    │   └── TextTooShort       fewer documents or tokens than asked for
    ├── BadMoments             the sums given cannot be solved
    ├── BadEstimator           no such estimator, or a setting it cannot use
    ├── BadJumps               maps and what is said about them do not fit together
    │   └── NoSuchJump         the set holds no jump between these sites (a KeyError too)
    ├── BadArtifact            a file cannot be read or written
    │   ├── NewerFormat        its format is newer than this library
    │   ├── WrongModel         it was fitted on other weights than the model given
    │   └── BadForeignLens     a lens of another tool cannot be read or written
    │       └── UnsafePickle   it asks for more than tensors; nothing of it was run
    ├── BadPruning             blocks that cannot be dropped, or not in the way asked for
    ├── BadEvaluation          no such task, data that are not a task's, or no lm-eval
    ├── BadTraining            a model that cannot be trained as asked
    │   └── Diverged           its loss grew out of all bounds
    ├── BadStudy               no such study, or one that cannot be done as asked
    ├── CannotServe            the page cannot be served as asked
    ├── BadExit                an exit rule, or a way of generating, that cannot be had here
    ├── TooLarge               a run would not fit in memory
    └── RunStopped             somebody stopped the run, or one of its processes died

Every message says what was given, what was wanted and what to do. The command line prints it as one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LayerjumpError(Exception):
    """The root of all errors raised on purpose."""


class BadModel(LayerjumpError):
    """The model given cannot be used."""


class ModelNotFound(BadModel):
    """There is no such folder, file or hub id, or the hub cannot be reached."""


class UnsupportedModel(BadModel):
    """The model's family is not in the table of `inputs/families.py`."""


class SelfCheckFailed(BadModel):
    """The captured states do not reassemble to the model's own output."""


class NoPredictions(BadModel):
    """Weights between the last level and the logits were missing from the checkpoint."""


class BadText(LayerjumpError):
    """The text given cannot be read, or an option about it makes no sense."""


class TextTooShort(BadText):
    """There are fewer documents or tokens than asked for."""


class BadMoments(LayerjumpError):
    """The sums given cannot be solved: empty, not finite, or of shapes that do not fit together."""


class BadEstimator(LayerjumpError):
    """There is no such estimator, or a setting of it is missing, senseless or not its own."""


class BadJumps(LayerjumpError):
    """Maps, and what is said about them, do not fit together."""


class NoSuchJump(BadJumps, KeyError):
    """The set holds no jump between the two sites asked for."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class BadArtifact(LayerjumpError):
    """A file or folder cannot be read or written."""


class NewerFormat(BadArtifact):
    """The file's format version is newer than this library knows."""


class WrongModel(BadArtifact):
    """What the file holds was fitted on other weights than those of the model given."""


class BadForeignLens(BadArtifact):
    """A lens of another tool cannot be read, or jumps cannot be written as one."""


class UnsafePickle(BadForeignLens):
    """A file asks for functions or classes that tensors do not need; nothing of it was run."""


class BadPruning(LayerjumpError):
    """The blocks to drop, or what is to stand in for them, cannot be had from this model and text."""


class BadEvaluation(LayerjumpError):
    """There is no such task, its data cannot be used, the model cannot do it, or lm-eval is not installed."""


class BadTraining(LayerjumpError):
    """A model, a penalty or a way of training that cannot be had as asked."""


class Diverged(BadTraining):
    """The loss grew out of all bounds; the message names the last good checkpoint."""


class BadStudy(LayerjumpError):
    """There is no such study, or it cannot be done as asked."""


class CannotServe(LayerjumpError):
    """The page cannot be served as asked: the port is taken, or an option makes no sense."""


class BadExit(LayerjumpError):
    """An exit rule that this model cannot follow, or a way of generating that early exit does not have."""


class TooLarge(LayerjumpError):
    """A run would need more memory than is free."""


class RunStopped(LayerjumpError):
    """The user stopped the run, or one of its processes died."""

    def __init__(self, message: str, *, resumable: bool = False) -> None:
        """`resumable`: progress is saved, and the message says how to resume."""
        super().__init__(message)
        self.resumable = resumable


def one_line(error: BaseException, limit: int = 200) -> str:
    """What an error says, on one line and not too long; its kind where it says nothing."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def argument(name: str, value: object = None) -> str:
    """Name a function's argument in an error message: `tokens`, or `tokens=100` with a value to pass.

    The command line installs a renderer that shows the option instead: `--tokens`, or `--tokens 100`.
    """
    return _render_argument(name, value)


@contextmanager
def render_arguments_as(render: Callable[[str, object], str]) -> Iterator[None]:
    """Choose how `argument` shows names inside the context: the command line shows its own options."""
    global _render_argument
    previous, _render_argument = _render_argument, render
    try:
        yield
    finally:
        _render_argument = previous


def _as_python(name: str, value: object) -> str:
    return name if value is None else f"{name}={value!r}"


_render_argument: Callable[[str, object], str] = _as_python
