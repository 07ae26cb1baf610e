"""Models whose weight matrices are spread over several processes (tensor parallelism), through transformers."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from layerjump.errors import BadModel, argument
from layerjump.models.discovery import discover


def check_processes(processes: int) -> None:
    """Raise `BadModel` unless the processes that `torchrun` started can hold models of this many processes each."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if processes < 1 or world % processes:
        raise BadModel(
            f"expected {argument('tensor_parallel')} that divides the number of processes, got {processes} and {world} "
            f"processes; start a multiple of it with torchrun"
        )


def spread(hf: PreTrainedModel, processes: int, device: str) -> None:
    """Divide the weights of a loaded model among groups of processes that follow each other in rank.

    transformers can read each process's part alone, but only if all processes hold one model; and the structure is
    discovered from the whole model, because a trace does not see the processes' sums.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    discover(hf)  # it is remembered for the configuration
    mesh = init_device_mesh(
        torch.device(device).type, (dist.get_world_size() // processes, processes), mesh_dim_names=("data", "model")
    )
    apply_tensor_parallelism(hf, mesh["model"])
