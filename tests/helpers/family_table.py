"""Families read by hand: module paths, and the order in which a block adds its parts to the residual stream.

Discovery must find what these rows say.

Paths of `ln1 … ffn_adds` start at a block, the others at the model. A block of each kind computes

    pre        y = h + attn;       out = y + ffn         (each reads a norm of the stream)
    parallel   out = h + attn + ffn
    sandwich   like pre; attn and ffn are normed before they are added
    post       y = ln1(h + attn);  out = ln2(y + ffn)

The decoder of an encoder–decoder adds cross-attention between the two: y + xattn, or lnx(y + xattn).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["pre", "parallel", "sandwich", "post"]
Task = Literal["causal", "masked", "seq2seq", "encoder"]
"""`encoder` is the encoder of a seq2seq model by itself; no row has it."""


@dataclass(frozen=True)
class Family:
    """Where the models of a family have their parts."""

    blocks: str
    """The list of blocks; `*` steps into each entry's own list (ALBERT's groups)."""
    kind: Kind
    ln1: str | None
    ln2: str | None
    """The norms before attention and feed-forward (post: after them). None: absent, or the same module as ln1."""
    attn: str
    """The module whose input is attention's input."""
    attn_adds: str
    """The module whose output attention adds to the stream."""
    attn_out_proj: str
    """The attention output projection: its input has one slice per attention head."""
    ffn: str
    """The module whose input is the feed-forward's input."""
    ffn_adds: str
    """The module whose output the feed-forward adds to the stream."""
    to_final: tuple[str, ...]
    """The modules between level L and the unembedding; `@gelu` is the bare activation."""
    unembedding: str
    task: Task = "causal"
    lnx: str | None = None
    xattn: str | None = None
    """Cross-attention and its norm, as ln1 and attn are self-attention's."""
    encoder: Mapping[str, Any] | None = None
    """The fields of an encoder–decoder's encoder that differ from its decoder's."""
    final_scale: float = 1.0
    """The factor of the state just before the unembedding."""
    variant: Callable[[Any], dict[str, Any]] | None = None
    """The fields that depend on the configuration: config → fields to replace."""

    def of(self, config: Any) -> Family:
        """This row with the configuration's variant applied."""
        return replace(self, **self.variant(config)) if self.variant else self


def _gpt_neox(config: Any) -> dict[str, Any]:
    return {} if config.use_parallel_residual else {"kind": "pre"}


def _opt(config: Any) -> dict[str, Any]:
    tail: tuple[str, ...] = ()
    if config.do_layer_norm_before and not config._remove_final_layer_norm:
        tail += ("model.decoder.final_layer_norm",)
    if config.word_embed_proj_dim != config.hidden_size:
        tail += ("model.decoder.project_out",)
    return {"kind": "pre" if config.do_layer_norm_before else "post", "to_final": tail}


def _falcon(config: Any) -> dict[str, Any]:
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1:
        return {"ln1": "ln_attn", "ln2": "ln_mlp"}
    if config.new_decoder_architecture or config.parallel_attn:
        return {}
    return {"kind": "pre", "ln2": "post_attention_layernorm"}


def _t5(config: Any) -> dict[str, Any]:
    # The first T5 scales the state before its tied unembedding; version 1.1 does not.
    return {"final_scale": config.d_model**-0.5} if config.scale_decoder_outputs else {}


_GPT2 = Family(
    blocks="transformer.h",
    kind="pre",
    ln1="ln_1",
    ln2="ln_2",
    attn="attn",
    attn_adds="attn",
    attn_out_proj="attn.c_proj",
    ffn="mlp",
    ffn_adds="mlp",
    to_final=("transformer.ln_f",),
    unembedding="lm_head",
)
_OPT = Family(
    blocks="model.decoder.layers",
    kind="pre",
    ln1="self_attn_layer_norm",
    ln2="final_layer_norm",
    attn="self_attn",
    attn_adds="self_attn",
    attn_out_proj="self_attn.out_proj",
    ffn="fc1",
    ffn_adds="fc2",
    to_final=("model.decoder.final_layer_norm",),
    unembedding="lm_head",
    variant=_opt,
)
_LLAMA = Family(
    blocks="model.layers",
    kind="pre",
    ln1="input_layernorm",
    ln2="post_attention_layernorm",
    attn="self_attn",
    attn_adds="self_attn",
    attn_out_proj="self_attn.o_proj",
    ffn="mlp",
    ffn_adds="mlp",
    to_final=("model.norm",),
    unembedding="lm_head",
)
_GEMMA2 = replace(
    _LLAMA,
    kind="sandwich",
    ln2="pre_feedforward_layernorm",
    attn_adds="post_attention_layernorm",
    ffn_adds="post_feedforward_layernorm",
)
_BERT = Family(
    blocks="bert.encoder.layer",
    kind="post",
    ln1="attention.output.LayerNorm",
    ln2="output.LayerNorm",
    attn="attention.self",
    attn_adds="attention.output.dense",
    attn_out_proj="attention.output.dense",
    ffn="intermediate",
    ffn_adds="output.dense",
    to_final=("cls.predictions.transform",),
    unembedding="cls.predictions.decoder",
    task="masked",
)

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "gpt_neo": replace(_GPT2, attn_out_proj="attn.attention.out_proj"),
    "gptj": replace(_GPT2, kind="parallel", ln2=None, attn_out_proj="attn.out_proj"),
    "gpt_neox": Family(
        blocks="gpt_neox.layers",
        kind="parallel",
        ln1="input_layernorm",
        ln2="post_attention_layernorm",
        attn="attention",
        attn_adds="attention",
        attn_out_proj="attention.dense",
        ffn="mlp",
        ffn_adds="mlp",
        to_final=("gpt_neox.final_layer_norm",),
        unembedding="lm_head",
        variant=_gpt_neox,
    ),
    "opt": _OPT,
    "bloom": Family(
        blocks="transformer.h",
        kind="pre",
        ln1="input_layernorm",
        ln2="post_attention_layernorm",
        attn="self_attention",
        # The outputs of the modules contain the stream already; those of their last layers do not.
        attn_adds="self_attention.dense",
        attn_out_proj="self_attention.dense",
        ffn="mlp",
        ffn_adds="mlp.dense_4h_to_h",
        to_final=("transformer.ln_f",),
        unembedding="lm_head",
    ),
    "falcon": Family(
        blocks="transformer.h",
        kind="parallel",
        ln1="input_layernorm",
        ln2=None,
        attn="self_attention",
        attn_adds="self_attention",
        attn_out_proj="self_attention.dense",
        ffn="mlp",
        ffn_adds="mlp",
        to_final=("transformer.ln_f",),
        unembedding="lm_head",
        variant=_falcon,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi": replace(
        _LLAMA, kind="parallel", ln2=None, attn_out_proj="self_attn.dense", to_final=("model.final_layernorm",)
    ),
    "phi3": _LLAMA,
    "olmo2": replace(
        _LLAMA,
        kind="sandwich",
        ln1=None,
        ln2=None,
        attn_adds="post_attention_layernorm",
        ffn_adds="post_feedforward_layernorm",
    ),
    "bert": _BERT,
    "roberta": replace(
        _BERT,
        blocks="roberta.encoder.layer",
        to_final=("lm_head.dense", "@gelu", "lm_head.layer_norm"),
        unembedding="lm_head.decoder",
    ),
    "distilbert": replace(
        _BERT,
        blocks="distilbert.transformer.layer",
        ln1="sa_layer_norm",
        ln2="output_layer_norm",
        attn="attention",
        attn_adds="attention",
        attn_out_proj="attention.out_lin",
        ffn="ffn",
        ffn_adds="ffn",
        to_final=("vocab_transform", "activation", "vocab_layer_norm"),
        unembedding="vocab_projector",
    ),
    "electra": replace(
        _BERT, blocks="electra.encoder.layer", to_final=("generator_predictions",), unembedding="generator_lm_head"
    ),
    "albert": replace(
        _BERT,
        blocks="albert.encoder.albert_layer_groups.*.albert_layers",
        ln1="attention.LayerNorm",
        ln2="full_layer_layer_norm",
        attn="attention",
        attn_adds="attention.dense",
        attn_out_proj="attention.dense",
        ffn="ffn",
        ffn_adds="ffn_output",
        to_final=("predictions.dense", "predictions.activation", "predictions.LayerNorm"),
        unembedding="predictions.decoder",
    ),
    "t5": Family(
        blocks="decoder.block",
        kind="pre",
        ln1="layer.0.layer_norm",
        ln2="layer.2.layer_norm",
        attn="layer.0.SelfAttention",
        attn_adds="layer.0.SelfAttention",
        attn_out_proj="layer.0.SelfAttention.o",
        ffn="layer.2.DenseReluDense",
        ffn_adds="layer.2.DenseReluDense",
        to_final=("decoder.final_layer_norm",),
        unembedding="lm_head",
        task="seq2seq",
        lnx="layer.1.layer_norm",
        xattn="layer.1.EncDecAttention",
        encoder={
            "blocks": "encoder.block",
            "ln2": "layer.1.layer_norm",
            "ffn": "layer.1.DenseReluDense",
            "ffn_adds": "layer.1.DenseReluDense",
        },
        variant=_t5,
    ),
    "bart": replace(
        _OPT,
        kind="post",
        to_final=(),
        task="seq2seq",
        lnx="encoder_attn_layer_norm",
        xattn="encoder_attn",
        encoder={"blocks": "model.encoder.layers"},
        variant=None,
    ),
}


def family_of(config: Any) -> Family:
    """The row of a configuration's family, its variant applied."""
    return FAMILIES[config.model_type].of(config)
