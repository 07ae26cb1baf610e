"""Llama blocks on CPU with fused calls and oneDNN-packed weights.

Products from weights in the layout that oneDNN likes best.

Time goes into reading the matrix, so a product of four rows should take as long as one of a single row. From weights as
torch keeps them it does not: two rows take nearly twice as long (SmolLM2, two cores). From packed ones they take as
long as one, and eight half as long again. Waiting tokens then cost next to nothing when they go along with another,
which is what exact caches and verification live on.

The same blocks and the same head with fewer and faster calls, where that is known to be right: plain float32 Llamas.

Everything here has a general counterpart that is used for all other models; tests hold the two against each other.
Queries, keys and values are one product, and so are the two halves of the gated network; all products are made from
packed weights (`packed.py`). Query heads that share a key are rows of one attention.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from layerjump.generation.block_runner import Blocks, HuggingFaceBlocks
from layerjump.generation.kv_cache import BlockCache
from layerjump.models.model import Model

Made = TypeVar("Made")
MOST_BYTES = 1 << 30
"""As much is kept a second time, at most; beyond that calls are a small part of the time anyway."""
ROWS = 4
"""Rows that the layout is chosen for; more of them are no slower than from plain weights."""


class PackedLinear:
    """x → x Wᵀ, where W may be several matrices of equal width, one above the other."""

    def __init__(self, *weights: Tensor) -> None:
        whole = torch.cat([weight.detach() for weight in weights])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(whole, ROWS)

    def __call__(self, states: Tensor) -> Tensor:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(
            states, self._packed, None, "none", [], ""
        )
        return found


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether these are float32 on a processor that oneDNN serves, and not too many."""
    weights = list(weights)
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and all(w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
        and sum(w.nbytes for w in weights) <= MOST_BYTES
    )


class WeightCache(Generic[Made]):
    """What was made from a module's weights, for as long as the module lives and its weights do not change."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[nn.Module, tuple[object, Made]] = (
            weakref.WeakKeyDictionary()
        )

    def get(self, module: nn.Module, make: Callable[[], Made]) -> Made:
        which = tuple((weight.data_ptr(), weight._version) for weight in module.parameters())
        known = self._held.get(module)
        if known is None or known[0] != which:
            known = which, make()
            self._held[module] = known
        return known[1]


FEW = 16
"""New tokens up to which heads that share a key are rows of one attention, so that keys need not be repeated."""


def blocks_of(model: Model) -> Blocks:
    """The fastest way to run this model's blocks that is right for it."""
    return LeanLlama(model) if _plain_llama(model) else HuggingFaceBlocks(model)


def with_lean_head(model: Model) -> Model:
    """The same model, whose vocabulary product is made the faster way where there is one."""
    head = model.structure.unembedding
    plain = type(head) is nn.Linear and head.bias is None and not _hooked(head)
    if not plain or not can_pack(head.parameters()):
        return model
    structure = copy(model.structure)
    structure.unembedding = _LeanHead(head)
    return replace(model, structure=structure)


class _LeanHead(nn.Module):
    """A vocabulary product from packed weights."""

    _kept: WeightCache[PackedLinear] = WeightCache()

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.weight = head.get_parameter("weight")
        self._product = self._kept.get(head, lambda: PackedLinear(self.weight))

    def forward(self, states: Tensor) -> Tensor:
        return self._product(states)


@dataclass(frozen=True)
class _Weights:
    """One block's."""

    ln1: Tensor
    qkv: PackedLinear
    o: PackedLinear
    ln2: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class LeanLlama:
    """The blocks of a plain Llama, such as SmolLM2: RMS norms, rotary embeddings, grouped queries, a gated network."""

    _kept: WeightCache[list[_Weights]] = WeightCache()

    def __init__(self, model: Model) -> None:
        hf: Any = model.hf
        first: Any = model.structure.blocks[0]
        self._embed, self._rotary = hf.model.embed_tokens, hf.model.rotary_emb
        self._eps = first.input_layernorm.variance_epsilon
        self._head_dim, self._scale = first.self_attn.head_dim, first.self_attn.scaling
        self._groups = first.self_attn.num_key_value_groups
        self._n_queries = hf.config.num_attention_heads
        self._n_turned = self._n_queries + hf.config.num_key_value_heads
        self._act = first.mlp.act_fn
        self._weights = self._kept.get(hf, lambda: [_weights(b) for b in model.structure.blocks])

    def enter(
        self, ids: Tensor, mask: Tensor | None, position: Tensor, cache: BlockCache
    ) -> Tensor:
        self._mask, self._position, self._cache = mask, position, cache
        self._length = ids.shape[1]
        self._made: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        states: Tensor = self._embed(ids[:, cache.lengths[0] :])
        return states

    def run(self, index: int, states: Tensor) -> Tensor:
        w = self._weights[index]
        queries, keys, values, mask = self._stored(index, states)
        mixed = self._attend(queries, keys, values, mask)
        states = states + w.o(mixed.transpose(1, 2).reshape(*states.shape[:-1], -1))
        x = functional.rms_norm(states, w.ln2.shape, w.ln2, self._eps)
        gate, up = w.gate_up(x).chunk(2, -1)
        return states + w.down(self._act(gate) * up)

    def store(self, index: int, states: Tensor) -> None:
        self._stored(index, states)

    def _stored(self, index: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries of these states, all keys and values once theirs are kept, and who may see whom."""
        w = self._weights[index]
        cos, sin, mask = self._around(self._cache.lengths[index], states)
        x = functional.rms_norm(states, w.ln1.shape, w.ln1, self._eps)
        heads = w.qkv(x).view(*x.shape[:-1], -1, self._head_dim).transpose(1, 2)
        turned = _turned(heads[:, : self._n_turned], cos, sin)
        keys, values = self._cache.update(
            turned[:, self._n_queries :], heads[:, self._n_turned :], index
        )
        return turned[:, : self._n_queries], keys, values, mask

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        attend = functional.scaled_dot_product_attention
        rows, _, new, width = queries.shape
        if new > FEW:
            causal = mask is None
            how = {"is_causal": causal, "scale": self._scale, "enable_gqa": self._groups > 1}
            return attend(queries, keys, values, attn_mask=mask, **how)
        together = queries.reshape(rows, -1, self._groups * new, width)
        mixed = attend(together, keys, values, attn_mask=mask, scale=self._scale)
        return mixed.view(queries.shape)

    def _around(self, seen: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotary tables and mask for the tokens after the first `seen`, made once a step."""
        if seen not in self._made:
            cos, sin = self._rotary(states, position_ids=self._position[:, seen:])
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            self._made[seen] = cos[:, None], signed[:, None], self._allowed(seen)
        return self._made[seen]

    def _allowed(self, seen: int) -> Tensor | None:
        """What is added to each query's scores of keys; None where the kernel knows by itself."""
        new, length = self._length - seen, self._length
        if self._mask is None and (new == 1 or (seen == 0 and new > FEW)):
            return None
        # Not infinite: padding before a text sees nothing at all, and must not become NaN.
        lowest = torch.finfo(torch.float32).min
        added = torch.full((new, length), lowest).triu(seen + 1)
        if self._mask is not None:
            added = added.masked_fill(~self._mask.bool()[:, None, None], lowest)
        return added if new > FEW else torch.cat([added] * self._groups, -2)


def _turned(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    """Rotary embedding: x cos + rotate_half(x) sin, with the halves' signs in the table."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed)


def _weights(block: Any) -> _Weights:
    attention, mlp = block.self_attn, block.mlp
    return _Weights(
        ln1=block.input_layernorm.weight,
        qkv=PackedLinear(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight),
        o=PackedLinear(attention.o_proj.weight),
        ln2=block.post_attention_layernorm.weight,
        gate_up=PackedLinear(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=PackedLinear(mlp.down_proj.weight),
    )


def _plain_llama(model: Model) -> bool:
    """Whether every block is Hugging Face's own Llama block, unquantised, unhooked, without biases, in float32."""
    config = model.hf.config
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
        return False
    if config._attn_implementation not in ("sdpa", "eager"):
        return False
    blocks = model.structure.blocks
    return can_pack(weight for block in blocks for weight in block.parameters()) and all(
        type(block) is LlamaDecoderLayer
        and not any(_hooked(part) for part in block.modules())
        and all(
            type(part) is nn.Linear
            for name, part in block.named_modules()
            if name.endswith("_proj")
        )
        for block in blocks
    )


def _hooked(module: nn.Module) -> bool:
    """Whether somebody listens here, or has put another function in place of `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
