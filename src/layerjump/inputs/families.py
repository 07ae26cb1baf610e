"""One row per model family (`family.py` says what its fields mean).

Adding a family is adding a row to `FAMILIES`; the self-check at load and the contract tests then prove it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from layerjump.errors import UnsupportedModel
from layerjump.inputs.family import Family


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
    # The first T5 divides what it hands to its tied head; version 1.1 does not.
    return {"final_scale": config.d_model**-0.5} if config.scale_decoder_outputs else {}


_GPT2 = Family(
    blocks="transformer.h",
    kind="pre",
    ln1="ln_1",
    ln2="ln_2",
    attn="attn",
    attn_adds="attn",
    heads="attn.c_proj",
    ffn="mlp",
    ffn_adds="mlp",
    to_final=("transformer.ln_f",),
    head="lm_head",
    before="token + learned position embedding",
)
_OPT = Family(
    blocks="model.decoder.layers",
    kind="pre",
    ln1="self_attn_layer_norm",
    ln2="final_layer_norm",
    attn="self_attn",
    attn_adds="self_attn",
    heads="self_attn.out_proj",
    ffn="fc1",
    ffn_adds="fc2",
    to_final=("model.decoder.final_layer_norm",),
    head="lm_head",
    before="token (projected in the 350m) + learned position embedding",
    variant=_opt,
)
_LLAMA = Family(
    blocks="model.layers",
    kind="pre",
    ln1="input_layernorm",
    ln2="post_attention_layernorm",
    attn="self_attn",
    attn_adds="self_attn",
    heads="self_attn.o_proj",
    ffn="mlp",
    ffn_adds="mlp",
    to_final=("model.norm",),
    head="lm_head",
)
_GEMMA2 = replace(
    _LLAMA,
    kind="sandwich",
    ln2="pre_feedforward_layernorm",
    attn_adds="post_attention_layernorm",
    ffn_adds="post_feedforward_layernorm",
    softcap="final_logit_softcapping",
    needs_bos=True,
    before="token embedding × √d",
)
_BERT = Family(
    blocks="bert.encoder.layer",
    kind="post",
    ln1="attention.output.LayerNorm",
    ln2="output.LayerNorm",
    attn="attention.self",
    attn_adds="attention.output.dense",
    heads="attention.output.dense",
    ffn="intermediate",
    ffn_adds="output.dense",
    to_final=("cls.predictions.transform",),
    head="cls.predictions.decoder",
    task="masked",
    before="token + position + type embedding, normed",
)

FAMILIES: dict[str, Family] = {
    "gpt2": _GPT2,
    "gpt_neo": replace(_GPT2, heads="attn.attention.out_proj"),
    "gptj": replace(
        _GPT2, kind="parallel", ln2=None, heads="attn.out_proj", before="token embedding"
    ),
    "gpt_neox": Family(
        blocks="gpt_neox.layers",
        kind="parallel",
        ln1="input_layernorm",
        ln2="post_attention_layernorm",
        attn="attention",
        attn_adds="attention",
        heads="attention.dense",
        ffn="mlp",
        ffn_adds="mlp",
        to_final=("gpt_neox.final_layer_norm",),
        head="lm_head",
        variant=_gpt_neox,
    ),
    "opt": _OPT,
    "bloom": Family(
        blocks="transformer.h",
        kind="pre",
        ln1="input_layernorm",
        ln2="post_attention_layernorm",
        attn="self_attention",
        # The modules' own outputs already contain the stream; their last layers' do not.
        attn_adds="self_attention.dense",
        heads="self_attention.dense",
        ffn="mlp",
        ffn_adds="mlp.dense_4h_to_h",
        to_final=("transformer.ln_f",),
        head="lm_head",
        before="token embedding, normed",
    ),
    "falcon": Family(
        blocks="transformer.h",
        kind="parallel",
        ln1="input_layernorm",
        ln2=None,
        attn="self_attention",
        attn_adds="self_attention",
        heads="self_attention.dense",
        ffn="mlp",
        ffn_adds="mlp",
        to_final=("transformer.ln_f",),
        head="lm_head",
        variant=_falcon,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": replace(_LLAMA, needs_bos=True, before="token embedding × √d"),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi": replace(
        _LLAMA,
        kind="parallel",
        ln2=None,
        heads="self_attn.dense",
        to_final=("model.final_layernorm",),
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
        head="lm_head.decoder",
        reserved_positions=2,
    ),
    "distilbert": replace(
        _BERT,
        blocks="distilbert.transformer.layer",
        ln1="sa_layer_norm",
        ln2="output_layer_norm",
        attn="attention",
        attn_adds="attention",
        heads="attention.out_lin",
        ffn="ffn",
        ffn_adds="ffn",
        to_final=("vocab_transform", "activation", "vocab_layer_norm"),
        head="vocab_projector",
        before="token + position embedding, normed",
    ),
    "electra": replace(
        _BERT,
        blocks="electra.encoder.layer",
        to_final=("generator_predictions",),
        head="generator_lm_head",
        before="token + position + type embedding, normed, projected",
    ),
    "albert": replace(
        _BERT,
        blocks="albert.encoder.albert_layer_groups.*.albert_layers",
        ln1="attention.LayerNorm",
        ln2="full_layer_layer_norm",
        attn="attention",
        attn_adds="attention.dense",
        heads="attention.dense",
        ffn="ffn",
        ffn_adds="ffn_output",
        to_final=("predictions.dense", "predictions.activation", "predictions.LayerNorm"),
        head="predictions.decoder",
        before="token + position + type embedding, normed, projected",
    ),
    "t5": Family(
        blocks="decoder.block",
        kind="pre",
        ln1="layer.0.layer_norm",
        ln2="layer.2.layer_norm",
        attn="layer.0.SelfAttention",
        attn_adds="layer.0.SelfAttention",
        heads="layer.0.SelfAttention.o",
        ffn="layer.2.DenseReluDense",
        ffn_adds="layer.2.DenseReluDense",
        to_final=("decoder.final_layer_norm",),
        head="lm_head",
        task="seq2seq",
        lnx="layer.1.layer_norm",
        xattn="layer.1.EncDecAttention",
        xattn_adds="layer.1.EncDecAttention",
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
        xattn_adds="encoder_attn",
        encoder={"blocks": "model.encoder.layers"},
        logits_bias="final_logits_bias",
        before="token + learned position embedding, normed",
        variant=None,
    ),
}


def family_of(config: Any) -> Family:
    """The row of a configuration's family, its variant applied."""
    row = FAMILIES.get(config.model_type)
    if row is None:
        raise UnsupportedModel(
            f"models of type {config.model_type!r} are not supported; the supported types are "
            f"{', '.join(FAMILIES)} (docs/families.md says how to add one)"
        )
    return row.of(config)
