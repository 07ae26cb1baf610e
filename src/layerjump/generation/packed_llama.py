"""Float32 Llama blocks and unembeddings on a CPU, with fused calls and oneDNN-packed weights.

Decoding time is the time to read weights, so a product with four rows should take as long as one with a single row.
With weights in torch's own layout two rows take nearly twice as long (SmolLM2, two cores); with packed weights they
take as long as one, and eight take half as long again. Running queued tokens along with a new one is then nearly
free, which is what makes the exact cache and verification pay off.

Queries, keys and values are one product, and so are the two halves of the gated feed-forward network. Query heads
that share a key are rows of one attention. Every other model runs on `HuggingFaceBlocks`; tests compare the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from layerjump.generation.block_runner import Blocks, HuggingFaceBlocks, KVCache
from layerjump.models.model import Model

T = TypeVar("T")
_MAX_BYTES = 1 << 30
"""Packed weights are a second copy of at most this size; larger models gain little from fewer calls."""
_PACKED_ROWS = 4  # rows that the packed layout is chosen for; with more it is as fast as plain weights
_GROUPED_TOKENS = 16
"""New tokens up to which query heads that share a key become rows of one attention, so that keys are not repeated."""


def choose_blocks(model: Model) -> Blocks:
    """The fastest implementation that is correct for this model's blocks."""
    config, blocks = model.hf.config, model.structure.blocks
    is_plain_llama = (
        config.model_type == "llama"
        and not (config.attention_bias or config.mlp_bias)
        and config._attn_implementation in ("sdpa", "eager")
        and can_pack(weight for block in blocks for weight in block.parameters())
        and all(type(block) is LlamaDecoderLayer for block in blocks)
        and not any(_hooked(part) for block in blocks for part in block.modules())
        # Not quantised.
        and all(type(part) is nn.Linear for b in blocks for name, part in b.named_modules() if name.endswith("_proj"))
    )
    return PackedLlamaBlocks(model) if is_plain_llama else HuggingFaceBlocks(model)


def pack_unembedding(model: Model) -> Model:
    """The same model with a packed unembedding, or the model itself where that is not possible."""
    unembedding = model.structure.unembedding
    plain = type(unembedding) is nn.Linear and unembedding.bias is None and not _hooked(unembedding)
    if not plain or not can_pack(unembedding.parameters()):
        return model
    structure = copy(model.structure)
    structure.unembedding = _PackedUnembedding(unembedding)
    return replace(model, structure=structure)


class PackedLinear:
    """x → x Wᵀ from packed weights; several matrices of equal width are stacked into one product."""

    def __init__(self, *weights: Tensor) -> None:
        stacked = torch.cat([weight.detach() for weight in weights])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(stacked, _PACKED_ROWS)

    def __call__(self, states: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(states, self._packed, None, "none", [], "")
        return output


def can_pack(weights: Iterable[Tensor]) -> bool:
    """Whether oneDNN can pack these weights: plain float32 tensors on a CPU, within the size limit."""
    weights = list(weights)
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        # Exact types: a subclass may report float32 and hold codes.
        and all(type(w) in (Tensor, nn.Parameter) for w in weights)
        and all(w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
        and sum(w.nbytes for w in weights) <= _MAX_BYTES
    )


class WeightCache(Generic[T]):
    """Objects derived from a module's weights, for as long as the module lives and its weights do not change."""

    def __init__(self) -> None:
        self._derived: weakref.WeakKeyDictionary[nn.Module, tuple[object, T]] = weakref.WeakKeyDictionary()

    def get(self, module: nn.Module, make: Callable[[], T]) -> T:
        """The object derived from this module, made anew if its weights have changed."""
        version = tuple((weight.data_ptr(), weight._version) for weight in module.parameters())
        entry = self._derived.get(module)
        if entry is None or entry[0] != version:
            entry = version, make()
            self._derived[module] = entry
        return entry[1]


class _PackedUnembedding(nn.Module):
    _packed: WeightCache[PackedLinear] = WeightCache()

    def __init__(self, unembedding: nn.Module) -> None:
        super().__init__()
        self.weight = unembedding.get_parameter("weight")
        self._product = self._packed.get(unembedding, lambda: PackedLinear(self.weight))

    def forward(self, states: Tensor) -> Tensor:
        return self._product(states)


class _BlockWeights:
    """The weights of one Llama block."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.ln1, self.ln2 = block.input_layernorm.weight, block.post_attention_layernorm.weight
        self.qkv = PackedLinear(attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        self.o = PackedLinear(attention.o_proj.weight)
        self.gate_up = PackedLinear(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down = PackedLinear(mlp.down_proj.weight)


class PackedLlamaBlocks:
    """The blocks of a plain Llama such as SmolLM2: RMS norm, rotary embedding, grouped queries, gated
    feed-forward."""

    _packed: WeightCache[list[_BlockWeights]] = WeightCache()

    def __init__(self, model: Model) -> None:
        hf: Any = model.hf
        first: Any = model.structure.blocks[0]
        self._embed, self._rotary = hf.model.embed_tokens, hf.model.rotary_emb
        self._eps = first.input_layernorm.variance_epsilon
        self._head_dim, self._scale = first.self_attn.head_dim, first.self_attn.scaling
        self._groups = first.self_attn.num_key_value_groups
        self._n_queries = hf.config.num_attention_heads
        self._n_rotated = self._n_queries + hf.config.num_key_value_heads
        self._act = first.mlp.act_fn
        blocks = model.structure.blocks
        self._weights = self._packed.get(hf, lambda: [_BlockWeights(block) for block in blocks])

    def embed(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: KVCache) -> Tensor:
        self._mask, self._positions, self._cache = mask, positions, cache
        self._length = ids.shape[1]
        self._contexts: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        states: Tensor = self._embed(ids[:, cache.lengths[0] :])
        return states

    def run(self, index: int, states: Tensor) -> Tensor:
        w = self._weights[index]
        queries, keys, values, mask = self._update_cache(index, states)
        mixed = self._attend(queries, keys, values, mask)  # (rows, heads, tokens, d_head)
        states = states + w.o(mixed.transpose(1, 2).reshape(*states.shape[:-1], -1))
        x = functional.rms_norm(states, w.ln2.shape, w.ln2, self._eps)
        gate, up = w.gate_up(x).chunk(2, -1)
        return states + w.down(self._act(gate) * up)

    def store(self, index: int, states: Tensor) -> None:
        self._update_cache(index, states)

    def _update_cache(self, index: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Store the states' keys and values; their queries, all keys and values, and the attention mask."""
        w = self._weights[index]
        cos, sin, mask = self._context(self._cache.lengths[index], states)
        x = functional.rms_norm(states, w.ln1.shape, w.ln1, self._eps)
        heads = w.qkv(x).view(*x.shape[:-1], -1, self._head_dim).transpose(1, 2)
        unrotated = heads[:, : self._n_rotated]
        # x cos + rotate_half(x) sin, with the signs of rotate_half in the sine table.
        rotated = torch.addcmul(unrotated * cos, unrotated.roll(self._head_dim // 2, -1), sin)
        keys, values = self._cache.update(rotated[:, self._n_queries :], heads[:, self._n_rotated :], index)
        self._cache.lengths[index] += states.shape[1]
        return rotated[:, : self._n_queries], keys, values, mask

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        attend = functional.scaled_dot_product_attention
        rows, _, new, width = queries.shape
        if new > _GROUPED_TOKENS:
            settings = {"is_causal": mask is None, "scale": self._scale, "enable_gqa": self._groups > 1}
            return attend(queries, keys, values, attn_mask=mask, **settings)
        grouped = queries.reshape(rows, -1, self._groups * new, width)
        mixed = attend(grouped, keys, values, attn_mask=mask, scale=self._scale)
        return mixed.view(queries.shape)

    def _context(self, stored: int, states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Rotary tables and additive mask of the tokens after the first `stored`, computed once a step.

        The mask is None where the attention kernel needs none or applies the causal one itself.
        """
        if stored in self._contexts:
            return self._contexts[stored]
        cos, sin = self._rotary(states, position_ids=self._positions[:, stored:])
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        new, mask = self._length - stored, None
        if self._mask is not None or (new > 1 and (stored > 0 or new <= _GROUPED_TOKENS)):
            # Finite, because left padding attends to nothing at all and must not become NaN.
            lowest = torch.finfo(torch.float32).min
            mask = torch.full((new, self._length), lowest).triu(stored + 1)
            if self._mask is not None:
                mask = mask.masked_fill(~self._mask.bool()[:, None, None], lowest)
            mask = mask if new > _GROUPED_TOKENS else torch.cat([mask] * self._groups, -2)
        self._contexts[stored] = cos[:, None], signed[:, None], mask
        return self._contexts[stored]


def _hooked(module: nn.Module) -> bool:
    """Whether the module has forward hooks, or an instance attribute in place of its `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
