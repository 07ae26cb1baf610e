"""The processes that `torchrun` started, and how they share one run.

Every process runs some of the batches through the model, but adds up the second moments of its own sources only: the
states of each batch go to the processes that hold sums of them. So every sum is formed in the order of the batches,
as in one process, and ends in the same bytes whatever the number of processes; and together they hold the sums once.
Processes that hold one copy of the model together (tensor parallel) run the same batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerjump.errors import LayerjumpError, RunStopped, argument
from layerjump.jumps.moments import Moments
from layerjump.models.sites import Pair, Site, sites_of

TIMEOUT = timedelta(hours=2)
"""How long a process waits for the others: one may load a large model or write large sums. (Of a process that has died
the others hear at once.)"""
GRAM_COST = 0.58
"""Arithmetic of a Gram matrix, of which one half is formed, in products of a pair."""

Layout = dict[Site, tuple[int, torch.dtype]]
"""Width and dtype of the states at every site."""


@dataclass(frozen=True)
class ProcessGroup:
    """The rank of this process, and the number of processes that share a run."""

    rank: int = 0
    world: int = 1
    model_ranks: int = 1
    """Processes that hold one copy of the model together; their ranks follow each other."""

    @classmethod
    def from_environment(cls, *, model_ranks: int = 1) -> ProcessGroup:
        """Join the process group that `torchrun` started, if it did."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if model_ranks < 1 or world % model_ranks:
            raise LayerjumpError(
                f"expected {argument('tensor_parallel')} that divides the number of processes, got {model_ranks} and "
                f"{world} processes; start a multiple of it with torchrun"
            )
        if world == 1:
            return cls()
        back_ends = "cpu:gloo"
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and _travels(accelerator):
            local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
            if local >= devices:
                raise LayerjumpError(
                    f"expected at most {devices} processes on this machine, one for each {accelerator.type} device, "
                    f"got a process of local rank {local}; start fewer with torchrun"
                )
            torch.accelerator.set_device_index(local)
            back_ends += f",{accelerator.type}:{dist.get_default_backend_for_device(accelerator)}"
        if not dist.is_initialized():
            dist.init_process_group(back_ends, timeout=TIMEOUT)
        return cls(dist.get_rank(), world, model_ranks)

    @property
    def replicas(self) -> int:
        """The number of copies of the model, each of which runs batches of its own."""
        return self.world // self.model_ranks

    @property
    def replica(self) -> int:
        """The copy of the model that this process holds, or holds a part of."""
        return self.rank // self.model_ranks

    def leave(self) -> None:
        """Leave the group: a process that ends with open connections may be aborted on exit."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def divide_sources(self, pairs: Sequence[Pair]) -> list[list[Site]]:
        """Return the sources whose sums each process holds, in about equal parts; it depends on these two alone."""
        costs: dict[Site, float] = {}
        for source, _ in pairs:
            costs[source] = costs.get(source, GRAM_COST) + 1
        shares: list[list[Site]] = [[] for _ in range(self.world)]
        totals = [0.0] * self.world
        for source in sorted(costs, key=lambda source: -costs[source]):
            lightest = totals.index(min(totals))
            shares[lightest].append(source)
            totals[lightest] += costs[source]
        return shares

    def share_layout(self, states: Mapping[Site, Tensor] | None) -> Layout:
        """Tell every process the first one's widths and dtypes: some have no batch to see them in."""
        message: list[Any] = [None if states is None else {s: (x.shape[-1], x.dtype) for s, x in states.items()}]
        if self.world > 1:
            _communicate(lambda: dist.broadcast_object_list(message, src=0))
        layout: Layout = message[0]
        return layout

    def exchange(
        self,
        states: Mapping[Site, Tensor] | None,
        n_rows: Sequence[int],
        pairs: Sequence[Pair],
        layout: Layout,
        device: torch.device,
    ) -> list[Mapping[Site, Tensor]]:
        """Send the states of this process's batch to the holders of their sums; return all batches' states for ours.

        `n_rows` are the rows of the batches of this round, one of each copy of the model; a process beyond them has no
        states. Only the sites that our sources' sums need are in the result.
        """
        if self.replicas == 1:
            return [] if states is None else [states]
        # Processes of the same place in their copies of the model talk to each other.
        peers = [replica * self.model_ranks + self.rank % self.model_ranks for replica in range(self.replicas)]
        shares = self.divide_sources(pairs)
        needed = {peer: sites_of([pair for pair in pairs if pair[0] in shares[peer]]) for peer in peers}
        transport = device if _travels(device) else torch.device("cpu")
        operations: list[dist.P2POp] = []
        sent: list[Tensor] = []  # alive until they have arrived
        received: list[dict[Site, Tensor]] = []
        for replica, (peer, rows) in enumerate(zip(peers, n_rows, strict=False)):
            if replica == self.replica:
                assert states is not None
                received.append({site: states[site] for site in needed[peer]})
                continue
            buffers = {
                site: torch.empty(rows, layout[site][0], dtype=layout[site][1], device=transport)
                for site in needed[self.rank]
            }
            operations += [dist.P2POp(dist.irecv, buffer, peer) for buffer in buffers.values()]
            received.append(buffers)
        if states is not None:
            moved = {site: rows.to(transport).contiguous() for site, rows in states.items()}
            sent += moved.values()
            operations += [
                dist.P2POp(dist.isend, moved[site], peer)
                for peer in peers
                if peer != self.rank
                for site in needed[peer]
            ]
        if operations:
            _communicate(lambda: [work.wait() for work in dist.batch_isend_irecv(operations)])
        return [{site: rows.to(device) for site, rows in batch.items()} for batch in received]

    def combine_masks(self, masks: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows that any process has marked, batch by batch."""
        if self.world == 1:
            return list(masks)
        joined = torch.cat([mask.to(torch.uint8) for mask in masks])
        _communicate(lambda: dist.all_reduce(joined, dist.ReduceOp.MAX))
        return list(joined.bool().split([len(mask) for mask in masks]))

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Return which flags are set in any process."""
        if self.world == 1:
            return flags
        joined = torch.tensor(flags, dtype=torch.uint8)
        _communicate(lambda: dist.all_reduce(joined, dist.ReduceOp.MAX))
        return tuple(joined.bool().tolist())

    def lowest(self, number: int) -> int:
        """Return the smallest of all processes' numbers. No process returns before all have called."""
        if self.world == 1:
            return number
        joined = torch.tensor(number)
        _communicate(lambda: dist.all_reduce(joined, dist.ReduceOp.MIN))
        return int(joined)

    def gather(self, ours: Moments | None, whole: Moments) -> None:
        """Fill the first process's `whole` with the sums of all processes; `ours` are this one's, if it has any."""
        if self.rank > 0:
            if ours is not None:
                _communicate(partial(self._send, ours))
            return
        assert ours is not None  # the first share is never empty
        parts = [ours]
        for rank, sources in enumerate(self.divide_sources(whole.pairs)[1:], start=1):
            if sources:
                parts.append(whole.subset([pair for pair in whole.pairs if pair[0] in sources], sample=True))
                _communicate(partial(self._receive, parts[-1], rank, device=_device_of(ours)))
        whole.join(parts)

    def _send(self, moments: Moments) -> None:
        shift = {site: vector.cpu() for site, vector in moments.shift.items()}
        dist.send_object_list([moments.n, shift, moments.reservoir], dst=0)
        for total in moments.sums.named().values() if moments.sums else ():
            dist.send(total if _travels(total.device) else total.cpu(), dst=0)

    def _receive(self, part: Moments, rank: int, *, device: torch.device) -> None:
        message: list[Any] = [None] * 3
        dist.recv_object_list(message, src=rank)
        part.n, shift, part.reservoir = message
        if not shift:
            return
        part.set_shift({site: vector.to(device) for site, vector in shift.items()})
        for total in part.sums.named().values() if part.sums else ():
            buffer = total if _travels(total.device) else torch.empty_like(total, device="cpu")
            dist.recv(buffer, src=rank)
            total.copy_(buffer)


def _device_of(moments: Moments) -> torch.device:
    return next((vector.device for vector in moments.shift.values()), torch.device("cpu"))


def _travels(device: torch.device) -> bool:
    """Whether the processes exchange tensors of a device directly; others go through memory."""
    if not torch.accelerator.is_available():
        return device.type == "cpu"
    return device.type == "cpu" or dist.get_default_backend_for_device(device) != "gloo"


def _communicate(action: Callable[[], object]) -> None:
    try:
        action()
    except RuntimeError as error:
        raise RunStopped(
            f"another process of this run has died; run the same command with {argument('resume', True)} to continue "
            f"from the saved sums",
            resumable=True,
        ) from error
