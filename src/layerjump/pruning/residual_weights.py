"""Weights that read or write the residual stream; fold a map or rotation into them.

The matrices of a block by what they do: write to the stream, or read a norm of it; and maps merged into them.

Only families whose feed-forward output enters the stream directly have a row: elsewhere a norm stands behind it, and no
map can be merged through a norm.

Turn and stretch the stream of later blocks, exactly: the model computes the same in other coordinates.

An RMSNorm does not care about rotations, nor about scale. So from a level on the stream h may become c Q h: every
product that reads it takes Qᵀ (and the norm's own weight), every product that writes to it takes c Q, and the head
takes Qᵀ too, for which it must no longer share its weights with the embedding. A LayerNorm allows the scale alone,
which leaves the head as it is. (Norms add a tiny ε to the variance, so a scale changes results by about that much.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from layerjump.errors import BadModel
from layerjump.models.model import Model


@dataclass(frozen=True)
class Projections:
    """Paths inside a block."""

    last: str
    """The last product of feed-forward."""
    first: tuple[str, ...] = ()
    """What reads ln1."""
    second: tuple[str, ...] = ()
    """What reads ln2. Both are known only where the norms are RMSNorms, whose stream may be turned."""


_GATED = Projections(
    "mlp.down_proj",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("mlp.gate_proj", "mlp.up_proj"),
)
PROJECTIONS: dict[str, Projections] = {
    "gpt2": Projections("mlp.c_proj"),
    "gpt_neo": Projections("mlp.c_proj"),
    "gptj": Projections("mlp.fc_out"),
    "gpt_neox": Projections("mlp.dense_4h_to_h"),
    "opt": Projections("fc2"),
    "bloom": Projections("mlp.dense_4h_to_h"),
    "falcon": Projections("mlp.dense_4h_to_h"),
    "phi": Projections("mlp.fc2"),
    "llama": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "gemma": _GATED,
    "phi3": Projections("mlp.down_proj", ("self_attn.qkv_proj",), ("mlp.gate_up_proj",)),
}


def cannot_fold(model: Model) -> str | None:
    """Why no map can be merged into this model's feed-forward; None where one can."""
    kind, family = model.hf.config.model_type, model.structure.family
    if model.task != "causal":
        return f"a {model.task} model's blocks do not hand the feed-forward's output on as it is"
    if family.kind in ("sandwich", "post") or kind not in PROJECTIONS:
        return f"in {kind} blocks a norm stands behind the feed-forward, and a map cannot be merged through a norm"
    return None


def cannot_rotate(model: Model) -> str | None:
    """Why this model's stream cannot be turned; None where it can."""
    if reason := cannot_fold(model):
        return reason
    kind = model.hf.config.model_type
    if not PROJECTIONS[kind].first or not model.structure.family.to_final:
        return f"{kind} takes the mean off the stream in its norms, so the stream cannot be turned freely"
    return None


def ffn_output_layer(model: Model, block: int) -> nn.Module:
    """The last product of the feed-forward of a block, counted from 1."""
    row = PROJECTIONS[model.hf.config.model_type]
    return model.structure.blocks[block - 1].get_submodule(row.last)


def writers(model: Model, block: int) -> list[nn.Module]:
    """What writes to the stream in a block: the last products of attention and feed-forward."""
    attention = model.structure.blocks[block - 1].get_submodule(model.structure.family.heads)
    return [attention, ffn_output_layer(model, block)]


def readers(model: Model, block: int) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Each norm of a block, and the products that read it."""
    row, family = PROJECTIONS[model.hf.config.model_type], model.structure.family
    module = model.structure.blocks[block - 1]
    for norm, paths in ((family.ln1, row.first), (family.ln2, row.second)):
        if norm is None:
            raise BadModel("a block without both norms cannot be turned")
        yield module.get_submodule(norm), [module.get_submodule(path) for path in paths]


@torch.no_grad()
def fold_output_map(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> None:
    """Merge a map of the output: W becomes T W, and the layer's own bias b becomes T b + c."""
    own = layer.get_parameter("weight")
    transposed = isinstance(layer, Conv1D)
    matrix = (own.mT if transposed else own).double()
    made = weight.to(matrix) @ matrix
    own.copy_(made.mT if transposed else made)
    shift = getattr(layer, "bias", None)
    if shift is not None:
        mapped = weight.to(matrix) @ shift.double()
        shift.copy_(mapped if bias is None else mapped + bias.to(mapped))
    elif bias is not None:
        raise BadModel("a map with an intercept was to be merged into a product that has no bias")


@torch.no_grad()
def fold_input_map(layer: nn.Module, weight: Tensor) -> None:
    """Merge a map of the input: W becomes W T."""
    own = layer.get_parameter("weight")
    if isinstance(layer, Conv1D):
        own.copy_(weight.mT.to(own.device).double() @ own.double())
    else:
        own.copy_(own.double() @ weight.to(own.device).double())


def can_scale(model: Model) -> bool:
    """Whether a norm stands between the last level and the head, so that scale is forgotten there."""
    steps = model.structure.final_steps
    return bool(steps) and "norm" in type(steps[0]).__name__.lower()


@torch.no_grad()
def rotate_stream(model: Model, level: int, rotation: Tensor | None, scale: float = 1.0) -> None:
    """Change the weights so that what was h from this level on is scale · rotation @ h (None: not turned)."""
    eye = torch.eye(model.d_model, dtype=torch.float64)
    inside = eye if rotation is None else rotation.double().cpu()
    for block in range(level + 1, model.n_blocks + 1):
        for layer in writers(model, block):
            fold_output_map(layer, scale * inside)
        if rotation is not None:
            for norm, layers in readers(model, block):
                diagonal = absorb_norm_weight(norm)
                for layer in layers:
                    fold_input_map(layer, diagonal[:, None] * inside.mT)
    if rotation is not None:
        _turn_head(model, inside)


def _turn_head(model: Model, rotation: Tensor) -> None:
    norm = model.structure.final_steps[0]
    if not isinstance(norm, nn.Module):
        raise BadModel("a stream cannot be turned where no norm stands before the head")
    untie_unembedding(model)
    fold_input_map(model.structure.unembedding, absorb_norm_weight(norm)[:, None] * rotation.mT)


def untie_unembedding(model: Model) -> None:
    """Give the head weights of its own, where it shares them with the embedding."""
    head = model.structure.unembedding
    embedding = model.hf.get_input_embeddings()
    if head.weight is embedding.weight:
        assert isinstance(head.weight, Tensor)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=True)
    model.hf.config.tie_word_embeddings = False


def absorb_norm_weight(norm: nn.Module) -> Tensor:
    """What the norm multiplies by, in float64; afterwards it multiplies by one and adds nothing."""
    weight = norm.get_parameter("weight")
    # Gemma keeps the weight less one.
    less = 1.0 if "Gemma" in type(norm).__name__ else 0.0
    taken = weight.double().cpu() + less
    with torch.no_grad():
        weight.fill_(1.0 - less)
        if getattr(norm, "bias", None) is not None:
            norm.get_parameter("bias").zero_()
    return taken
