"""All that decides what a pretraining run ends with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from layerjump.errors import BadTraining
from layerjump.train.architectures import ARCHITECTURES, Architecture, Shape
from layerjump.train.penalties import PENALTIES

NONE = "none"


@dataclass(frozen=True)
class Recipe:
    """A run's settings; the same settings and text give the same model."""

    arch: str = "llama"
    shape: Shape = field(default_factory=Shape)
    vocabulary: int = 2048
    length: int = 128
    """Tokens in a row."""
    penalty: str = NONE
    strength: float = 0.5
    levels: tuple[int, ...] | None = None
    """The levels that are penalised (None: 1 to L)."""
    steps: int = 1000
    batch: int = 32
    """Rows in a step, over all processes and parts."""
    learning_rate: float = 1e-3
    seed: int = 0
    every: int = 100
    """Steps between measurements, and between checkpoints."""
    bf16: bool = False

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise BadTraining(
                f"there is no architecture {self.arch!r} to train; give one of {', '.join(ARCHITECTURES)}"
            )
        if self.penalty not in (NONE, *PENALTIES):
            raise BadTraining(
                f"there is no penalty {self.penalty!r}; give one of {NONE}, {', '.join(PENALTIES)}"
            )
        for name in ("steps", "batch", "every", "length"):
            if getattr(self, name) < 1:
                raise BadTraining(f"{name} given is {getattr(self, name)}; give 1 or more")
        if self.seed < 0:
            raise BadTraining(f"the seed given is {self.seed}; give 0 or more")
        if not self.learning_rate > 0 or not math.isfinite(self.learning_rate):
            raise BadTraining(f"the learning rate given is {self.learning_rate}; give one above 0")
        if not self.strength >= 0 or not math.isfinite(self.strength):
            raise BadTraining(f"the strength given is {self.strength}; give 0 or more")
        if self.length > self.shape.positions:
            raise BadTraining(
                f"sequences of {self.length} tokens were asked for, but the model has {self.shape.positions} "
                f"positions; give --length {self.shape.positions} or less, or --positions {self.length}"
            )
        outside = [level for level in self.levels or () if not 1 <= level <= self.shape.layers]
        if outside:
            raise BadTraining(
                f"the levels to penalise are {list(self.levels or ())}; give some of 1 to {self.shape.layers}"
            )

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.arch]
