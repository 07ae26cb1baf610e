"""The exceptions of this package. Catch `LayerjumpError` to catch everything it raises on purpose.

Every message says what was expected, what it got, and what to do. The command line prints it as one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LayerjumpError(Exception):
    """The base class of all errors that this package raises on purpose."""


class BadModel(LayerjumpError):
    """The model cannot be used."""


class ModelNotFound(BadModel):
    """There is no such folder, file or hub id, or the hub cannot be reached."""


class UnsupportedModel(BadModel):
    """Discovery does not find the structure of the model; the message says what is missing."""


class SelfCheckFailed(BadModel):
    """The captured states do not reassemble to the model's own output."""


class NoPredictions(BadModel):
    """Weights between the last level and the logits were missing from the checkpoint."""


class BadText(LayerjumpError):
    """The text cannot be read, or a setting of it makes no sense."""


class TextTooShort(BadText):
    """There are fewer documents or tokens than requested."""


class BadMoments(LayerjumpError):
    """The second moments cannot be solved: empty, not finite, or of shapes that do not fit together."""


class BadEstimator(LayerjumpError):
    """There is no such estimator, or a setting is missing, makes no sense or belongs to another estimator."""


class BadJumps(LayerjumpError):
    """Maps and their metadata do not fit together."""


class NoSuchJump(BadJumps, KeyError):
    """The set has no jump between the two sites."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class BadArtifact(LayerjumpError):
    """A file or folder cannot be read or written."""


class JumpsNotFound(BadArtifact):
    """There are no jumps of the model in the package, in the cache or on the hub."""


class NewerFormat(BadArtifact):
    """The file's format version is newer than this library knows."""


class WrongModel(BadArtifact):
    """The content of the file was fitted on other weights than those of the model."""


class BadForeignLens(BadArtifact):
    """A lens of another tool cannot be read, or jumps cannot be written as one."""


class UnsafePickle(BadForeignLens):
    """A file needs functions or classes that tensors do not need; none of its code was run."""


class BadPruning(LayerjumpError):
    """The blocks cannot be dropped from this model, or not replaced by this method with this text."""


class BadIntervention(LayerjumpError):
    """The levels, positions or directions of an intervention make no sense for this model."""


class BadEvaluation(LayerjumpError):
    """There is no such task, its data cannot be used, the model cannot do it, or lm-eval is not installed."""


class BadTraining(LayerjumpError):
    """A model, a regulariser or a training setting that cannot be used."""


class Diverged(BadTraining):
    """The loss grew beyond all bounds; the message names the last good checkpoint."""


class BadStudy(LayerjumpError):
    """There is no such study, or it cannot run with these settings."""


class CannotServe(LayerjumpError):
    """The page cannot be served: the port is taken, or an option makes no sense."""


class BadExit(LayerjumpError):
    """An exit rule that this model cannot follow, or a generation setting that early exit does not support."""


class TooLarge(LayerjumpError):
    """A run would need more memory than is free."""


class RunStopped(LayerjumpError):
    """The user stopped the run, or one of its processes died."""

    def __init__(self, message: str, *, resumable: bool = False) -> None:
        """`resumable`: progress is saved, and the message says how to resume."""
        super().__init__(message)
        self.resumable = resumable


def one_line(error: BaseException, limit: int = 200) -> str:
    """The message of an error on one line of limited length; its type if it has no message."""
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
