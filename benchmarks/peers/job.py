"""What every peer's script is given, and what it gives back; runs in a peer's environment, without layerjump.

A job is a folder with `tokens.json`: where the checkpoint is (`model`), the token sequences to fit on (`fit`), those to
choose settings by (`select`), and `check`: log-probabilities that the model must give, so that a checkpoint that
another version of transformers reads differently is found out before hours are spent on it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 1e-3  # nats: float32 in another version adds up in another order


@dataclass(frozen=True)
class Job:
    """Token sequences of one model, the same for every lens."""

    model: str
    fit: list[list[int]]
    select: list[list[int]]
    check: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Job:
        known = json.loads((folder / "tokens.json").read_text())
        return cls(**known | {"model": str((folder / known["model"]).resolve())})

    @torch.no_grad()
    def require_same(self, logits: Any) -> None:
        """Stop unless `logits`, a function from (1, tokens) ids to logits, is the model that wrote the job."""
        found = logits(torch.tensor([self.check["ids"]]))[0, -1].float().log_softmax(-1)
        wanted = torch.tensor(self.check["log_probabilities"])
        apart = float((found[self.check["tokens"]] - wanted).abs().max())
        if apart > TOLERANCE:
            raise SystemExit(
                f"the model in {self.model} gives log-probabilities {apart:.2g} from those in the job; this version of "
                f"transformers reads the checkpoint differently: write its config.json so that both agree"
            )


@dataclass
class Clock:
    """CPU and wall seconds of what runs inside its `with` blocks, added up."""

    cpu: float = 0.0
    wall: float = 0.0
    _since: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

    def __enter__(self) -> Clock:
        self._since = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu += time.process_time() - self._since[0]
        self.wall += time.perf_counter() - self._since[1]


def report(path: Path, cost: dict[str, Any]) -> None:
    """Write what a lens cost; the file is there only when the lens is."""
    path.write_text(json.dumps(cost, indent=1) + "\n")
    print(json.dumps({name: value for name, value in cost.items() if name != "curve"}))
