"""Several processes under `torchrun`: each takes its share of the batches, and their sums are added at the end."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerjump.errors import RunStopped
from layerjump.fit.moments import Moments
from layerjump.inputs.sites import Site


@dataclass(frozen=True)
class Group:
    """This process's place among the processes of a run."""

    rank: int = 0
    world: int = 1

    @classmethod
    def from_environment(cls) -> Group:
        """Join the group `torchrun` started, if it did."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))  # each its own
        if not dist.is_initialized():
            # Sums are on the devices, counts and samples in memory.
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), world)

    def leave(self) -> None:
        """Leave the group: a process that ends with its connections open may be aborted on the way out."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def share_shift(self, moments: Moments, first: dict[Site, Tensor] | None) -> None:
        """Give every process the first process's shift: sums about one shift simply add."""
        if self.world == 1:
            return
        mine = moments.shift or (moments.shift_for(first) if first else {})
        box: list[Any] = [{str(site): shift.cpu() for site, shift in mine.items()}]
        _together(lambda: dist.broadcast_object_list(box, src=0))
        if moments.n == 0:
            moments.set_shift({Site.parse(site): shift for site, shift in box[0].items()})

    def reduce(self, moments: Moments) -> None:
        """Add all processes' sums into the first process's."""
        if self.world == 1:
            return
        count = torch.tensor(moments.n, dtype=torch.float64)
        _together(lambda: [dist.reduce(total, dst=0) for total in [count, *moments.sums.values()]])
        moments.n = int(count.item())
        reservoirs: list[Any] | None = [None] * self.world if self.rank == 0 else None
        _together(lambda: dist.gather_object(moments.reservoir, reservoirs, dst=0))
        for other in (reservoirs or [])[1:]:
            moments.reservoir.merge(other)


def _together(action: Any) -> None:
    try:
        action()
    except RuntimeError as error:
        raise RunStopped(
            "another process of this run has died; run the same command with --resume to go on from the saved sums"
        ) from error
