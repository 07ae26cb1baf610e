"""Models of FSDP2 (`fully_shard`): every process holds a part of each block's weights, and whole ones while it runs.

All processes run the same modules at the same time, each on its own batch. The weights outside the blocks (embedding,
final norm, unembedding) are called on states too, so every process holds them whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from layerjump.errors import BadModel, argument
from layerjump.models.discovery import discover


def is_fully_sharded(hf: nn.Module) -> bool:
    """Whether FSDP2 gathers the weights of some modules for each call of them."""
    return any(isinstance(module, FSDPModule) for module in hf.modules())


def shard_fully(hf: PreTrainedModel, device: str) -> None:
    """Divide the weights of a loaded model among the processes that `torchrun` started, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        raise BadModel(
            f"expected processes of torchrun to share the model with {argument('fully_shard', True)}, got one process; "
            f"start several with torchrun, or leave it out"
        )
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    for block in dict.fromkeys(discover(hf).blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(hf, mesh=mesh)


def hold_outer_weights(hf: nn.Module) -> None:
    """Gather the weights outside the lists of blocks for good."""
    lists = [module for module in hf.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    inside = {module for blocks in lists for module in blocks.modules()}
    for module in hf.modules():
        if isinstance(module, FSDPModule) and module not in inside:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()


@contextmanager
def gathered(block: nn.Module) -> Iterator[None]:
    """Hold the whole weights of a block, whose modules are then called one by one; of other models nothing changes."""
    shards = [module for module in block.modules() if isinstance(module, FSDPModule)]
    try:
        for module in shards:
            module.unshard()
        yield
    finally:
        for module in shards:
            module.reshard()
