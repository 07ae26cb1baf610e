"""What of a model is evaluated: all of it, the levels where an exit rule stops, or maps in the place of parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from layerjump.compress.linearised import linearised
from layerjump.decode import kept
from layerjump.decode.rules import Fixed, Never, Rule, parse
from layerjump.errors import BadEvaluation
from layerjump.evaluate.reader import Reader
from layerjump.fit.jumps import Jumps
from layerjump.inputs.models import Model


@dataclass(frozen=True)
class How:
    """Jumps, and what they are for: an exit rule, or parts of blocks. Without either it is the model as it is."""

    jumps: Jumps | None = None
    rule: Rule = Never()
    parts: str | None = None
    blocks: tuple[int, ...] | None = None

    @contextmanager
    def changed(self, model: Model) -> Iterator[Model]:
        """The model with maps in the place of parts, if that is asked for; whole again afterwards."""
        if self.parts is None or self.jumps is None:
            yield model
            return
        with linearised(model, self.jumps, parts=self.parts, blocks=self.blocks):
            yield model

    def reader(self, model: Model) -> Reader:
        """What reads positions where the rule stops."""
        return Reader(model, None if self.parts else self.jumps, self.rule)


def how(
    model: Model,
    *,
    jumps: str | Path | Jumps | None = None,
    exit: str | Rule | None = None,
    level: int | None = None,
    parts: str | None = None,
    blocks: str | None = None,
) -> How:
    """Settings as they are given on a command line, checked.

    `exit` is a rule such as gap:0.9 and `level` one level for all (L: the whole model); neither, with jumps, is the
    rule that `layerjump calibrate` left in their folder. `parts` (attn, ffn, norms, block) and `blocks` (3-5) put
    maps in.
    """
    require_causal(model)
    folder = None if jumps is None or isinstance(jumps, Jumps) else Path(jumps).expanduser()
    if folder is not None:
        jumps = Jumps.from_pretrained(folder, model=model)
    assert jumps is None or isinstance(jumps, Jumps)
    if sum(given is not None for given in (exit, level, parts)) > 1:
        raise BadEvaluation("give one of an exit rule, a level and parts, not several")
    if blocks is not None and parts is None:
        raise BadEvaluation(f"blocks {blocks} were given, but not which parts of them; give parts")
    if parts is not None:
        if jumps is None:
            raise BadEvaluation(
                f"{parts} cannot be replaced without maps; give jumps fitted for it"
            )
        return How(jumps, parts=parts, blocks=None if blocks is None else numbers(blocks))
    if exit is None and level is None and jumps is not None:
        exit = _calibrated(folder, model)
    if level is not None:
        return How(jumps, Never() if level == model.n_blocks else Fixed(level))
    return How(jumps, parse(exit) if isinstance(exit, str) else exit or Never())


def require_causal(model: Model) -> None:
    """Raise `BadEvaluation` for a model that does not predict next tokens."""
    if model.task != "causal":
        raise BadEvaluation(
            f"{model.name} is a {model.task} model, but tasks and perplexity score the next token; give a causal "
            f"language model"
        )
    model.require_predictions()


def numbers(text: str) -> tuple[int, ...]:
    """Blocks such as 3-5 or 1,4,7-9."""
    found: list[int] = []
    try:
        for part in str(text).split(","):
            first, dash, last = part.strip().partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        found = []
    if not found:
        raise BadEvaluation(f"blocks were given as {text!r}; give numbers, such as 3-5 or 1,4")
    return tuple(found)


def _calibrated(folder: Path | None, model: Model) -> Rule:
    if folder is None or not (folder / kept.NAME).is_file():
        raise BadEvaluation(
            "jumps were given, but neither an exit rule nor parts to replace, and none was calibrated; give one"
        )
    return kept.load(folder, model=model).rule
