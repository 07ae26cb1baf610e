"""Input and output of the peers' scripts; runs in a peer's environment, without layerjump.

A job is a folder with `tokens.json`: the path of the checkpoint (`model`), the token sequences to fit on (`fit`), those
for the selection of settings (`select`), and log-probabilities that the model must give (`check`). The check fails at
once if another version of transformers reads the checkpoint differently.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

TOLERANCE = 1e-3  # nats: another version may add float32 numbers in another order


@dataclass(frozen=True)
class Job:
    """Token sequences of one model, the same for every lens."""

    model: str
    fit: list[list[int]]
    select: list[list[int]]
    check: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Job:
        job = json.loads((folder / "tokens.json").read_text())
        return cls(**job | {"model": str((folder / job["model"]).resolve())})

    @torch.no_grad()
    def require_same(self, logits: Any) -> None:
        """Stop unless `logits`, a function from (1, tokens) ids to logits, is the model that wrote the job."""
        actual = logits(torch.tensor([self.check["ids"]]))[0, -1].float().log_softmax(-1)
        expected = torch.tensor(self.check["log_probabilities"])
        difference = float((actual[self.check["tokens"]] - expected).abs().max())
        if difference > TOLERANCE:
            raise SystemExit(
                f"the log-probabilities of the model in {self.model} differ by {difference:.2g} from those in the job; "
                f"this transformers reads the checkpoint differently: adapt its config.json so that both agree"
            )


@dataclass
class Clock:
    """Total CPU and wall seconds of the code in its `with` blocks."""

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
    """Write and print the cost of a lens; call this after the lens is saved."""
    path.write_text(json.dumps(cost, indent=1) + "\n")
    print(json.dumps({name: value for name, value in cost.items() if name != "curve"}))
