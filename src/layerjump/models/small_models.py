"""Small models of every text architecture of transformers, from the architecture's own default configuration.

`list_architectures` names them, `small_config` shrinks the default configuration of a model type to a few blocks,
`build` makes a seeded model of it, and `text_inputs` gives the arguments of a forward on text alone.

A small configuration keeps what makes an architecture itself (flags, kinds of blocks, ratios of heads) and shrinks
what costs memory. Every kind of block of a hybrid or mixture of experts is present, and windows are shorter than a
short text, so that a fault of masks, windows or routing shows.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from layerjump.errors import UnsupportedModel
from layerjump.models.discovery import ExtraInputs, discover
from layerjump.models.model import Model

Task = Literal["causal", "masked", "seq2seq", "image-text"]
MAPPINGS: dict[Task, str] = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image-text": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}
"""Task → the mapping of transformers that lists its architectures."""

PAD, BOS, EOS, MASK = 0, 1, 2, 3
WINDOW = 4  # of sliding, local and chunked attention
EXPERTS, EXPERTS_PER_TOKEN = 4, 2


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers that reads text, and the task it is listed under."""

    task: Task
    model_type: str
    class_name: str

    def __str__(self) -> str:
        return f"{self.task}:{self.model_type}"


def list_architectures() -> list[Architecture]:
    """All architectures of the installed transformers that read text, by task and model type."""
    return [
        Architecture(task, model_type, name if isinstance(name, str) else name[0])
        for task, mapping in MAPPINGS.items()
        for model_type, name in getattr(modeling_auto, mapping).items()
    ]


NOT_RUNNABLE: dict[str, str] = {
    "gemma4_assistant": "a draft head: reads the states and the keys and values of another model, not text",
    "gemma4_unified_assistant": "a draft head: reads the states and the keys and values of another model, not text",
    "pi0": "reads the state of a robot and gives actions: there are no logits of tokens",
}
"""Model type → why no forward on text alone exists."""


@dataclass(frozen=True)
class _Sizes:
    """The sizes of one stack: of the text model, or of an encoder of images or sound beside it."""

    blocks: int
    width: int
    heads: int
    vocab: int
    positions: int

    @property
    def head(self) -> int:
        return self.width // self.heads

    def beside(self) -> _Sizes:
        """An encoder of another modality: two blocks suffice."""
        return _Sizes(min(2, self.blocks), self.width, self.heads, self.vocab, self.positions)


def _overrides(sizes: _Sizes) -> dict[str, dict[str, Any]]:
    """Model type → values that the general rules cannot know, also for a sub-configuration of that type."""
    blocks, width, heads, head, vocab = sizes.blocks, sizes.width, sizes.heads, sizes.head, sizes.vocab

    def cycle(*kinds: Any) -> list[Any]:
        return [kinds[i % len(kinds)] for i in range(max(blocks, len(kinds)))]

    side = 3 * head // 16  # height and width alike
    image: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "intermediate_size": 2 * width,
    }
    siglip = CONFIG_MAPPING["siglip_vision_model"]  # in place of encoders that need the timm library
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    axes = {"mrope_section": _sections(head // 2)}
    indexer = {"indexer_n_heads": heads, "indexer_kv_heads": 1, "indexer_head_dim": head}
    windows = {"layer_types": cycle("full_attention", "sliding_attention"), "sliding_window": WINDOW}
    per_kind = {"rope_parameters": {"full_attention": plain, "sliding_attention": plain}}
    qwen4 = indexer | {"indexer_budget": WINDOW, "indexer_compress_ratio": 2, "ple_layer_ids": [1]}
    qwen4 |= {"eos_token_id": EOS}
    ngrams = {"ngram_vocab_size_base": 61, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4}
    shifted: dict[str, Any] = {"max_position_embeddings": sizes.positions + 2}
    zamba: dict[str, Any] = {"attention_hidden_size": 2 * width, "attention_head_dim": 2 * head}
    zamba |= {
        "layers_block_type": cycle("linear_attention", "hybrid", "linear_attention", "hybrid")
    }  # two share weights
    pictures = {"vocabulary_map": {"<image>": vocab - 1, "<|extra_200|>": vocab - 2}}
    return {
        # kinds of blocks that the default configuration does not show
        "bamba": {"attn_layer_indices": list(range(1, blocks, 2)) or [0]},
        "cohere_compass_text": windows
        | {"rope_parameters": {"full_attention": None, "sliding_attention": plain | axes}},
        "deepseek_ocr2_text": {"mlp_layer_types": cycle("dense", "sparse")},
        "granitemoehybrid": {"layer_types": cycle("linear_attention", "full_attention")},
        "inkling_text": {"mlp_layer_types": cycle("dense", "sparse")},
        "jamba": {"attn_layer_period": 4, "attn_layer_offset": min(2, blocks - 1)},
        "laguna": windows,
        "lfm2": {"layer_types": cycle("conv", "full_attention"), "full_attn_idxs": list(range(1, blocks, 2))},
        "lfm2_moe": {"layer_types": cycle("conv", "full_attention")},
        "mellum": windows,
        "minimax_m3_vl_text": {
            "layer_types": cycle("full_attention", "minimax_m3_sparse"),
            "mlp_layer_types": cycle("dense", "sparse"),
        },
        "qwen4_exp_text": qwen4 | ngrams,
        "step3p5": windows | per_kind,
        "zamba": zamba,
        "zamba2": zamba,
        "zaya": {"layer_types": cycle("hybrid", "hybrid_sliding"), "sliding_window": WINDOW},
        "funnel": {"block_sizes": [blocks - blocks // 2, blocks // 2], "block_repeats": None},
        "gemma3n_text": {"num_kv_shared_layers": 2},  # the last two use the keys and values of earlier ones
        "gpt_neo": {
            "attention_types": [[cycle("global", "local"), 1]],
            "num_layers": max(blocks, 2),
            "window_size": WINDOW,
        },
        "hunyuan_v1_moe": {"num_experts": EXPERTS, "moe_topk": EXPERTS_PER_TOKEN},
        "llama4_text": {"moe_layers": list(range(1, blocks, 2))},
        "mllama_text_model": {"cross_attention_layers": [blocks - 1]},
        "nemotron_h": {"layers_block_type": cycle("linear_attention", "moe", "full_attention", "mlp")},
        "pegasus_x": {"block_size": WINDOW},
        "perceiver": {"num_blocks": 1, "num_self_attends_per_block": blocks},
        "switch_transformers": {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        # sizes that depend on one another
        "diffusion_gemma_text": {"global_head_dim": 2 * head},
        "gemma4_text": {"global_head_dim": 2 * head},
        "gemma4_unified_text": {"global_head_dim": 2 * head},
        "mobilebert": {"true_hidden_size": width // 2, "intra_bottleneck_size": width // 2},
        "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
        "ernie4_5_vl_moe_text": {"rope_parameters": {"mrope_section": [side, side, head // 2 - 2 * side]}},
        "glm5_next_text": {"index_kpool": 2},
        "xlstm": {
            "qk_dim_factor": 0.5 if width % 128 == 0 else 1.0,  # its states are rounded up to multiples of 64
            "use_cache": False,  # written in place, which gradients forbid
        },
        "hrm_text": {"num_layers_per_stack": max(1, blocks // 2), "num_hidden_layers": 8 * max(1, blocks // 2)},
        "mamba2": {"num_heads": 2 * width // head},
        "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
        "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": vocab - 1},
        "rwkv": {"attention_hidden_size": width},
        "reformer": {
            "axial_pos_embds_dim": [width // 4, width - width // 4],
            "axial_pos_shape": [8, sizes.positions // 8],
            "local_attn_chunk_length": WINDOW,
            "lsh_attn_chunk_length": WINDOW,
            "hash_seed": 0,
        },
        # positions counted from the padding's id
        **dict.fromkeys(
            _names("""camembert data2vec-text ibert jina_embeddings_v3 layoutlm longformer luke mpnet roberta
            roberta-prelayernorm xlm-roberta xlm-roberta-xl"""),
            shifted,
        ),
        # values that the default leaves out
        "blt": {"use_cache": False},  # its configuration has no number of layers, which a cache needs
        "chameleon": pictures,
        "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
        "emu3": pictures,
        "esm": shifted | {"pad_token_id": PAD, "mask_token_id": MASK},
        "blip-2": {"image_token_index": vocab},
        "instructblip": {"image_token_index": vocab},
        "instructblipvideo": {"video_token_index": vocab},
        "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2"},
        "paddleocr_vl_text": {"rope_parameters": plain | axes},
        "qwen2_5_omni_thinker": {"vision_start_token_id": vocab + 1},
        "qwen3_omni_moe_thinker": {"vision_start_token_id": vocab + 1},
        "xmod": shifted | {"languages": ["en_XX", "de_DE"], "default_language": "en_XX"},
        # encoders of images and sound
        "fast_vlm": {"vision_config": siglip(**image)},
        "deepseek_ocr2_sam_vision_model": {"downsample_channels": [16, width]},
        "unlimited_ocr_sam_vision_model": {"downsample_channels": [16, width]},
        "chameleon_vqgan": {"channel_multiplier": [1] * 5, "num_res_blocks": 1},
        "emu3_vqgan": {"channel_multiplier": [1] * 4, "num_res_blocks": 1},
        "janus_vqgan": {"channel_multiplier": [1] * 5, "num_res_blocks": 1},
        "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
        "florence_vision": {"embed_dim": [8, 16, 32, width], "num_heads": [1, 2, 4, 4], "num_groups": [1, 2, 4, 4]},
        "muse_spark_audio": {"hidden_sizes": [16, 16, 32, 32]},
        "perception_lm": {"vision_config": siglip(**(image | {"model_args": {"embed_dim": width}}))},
        "pp_formulanet_vision": {"post_conv_in_channels": width},
    }


def _sections(half: int) -> list[int]:
    """Rotary frequencies of time, height and width."""
    return [half - 2 * (half // 4), half // 4, half // 4]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Names of settings, by the rule that shrinks them.
_WIDTH = _names("""hidden_size d_model n_embd dim emb_dim embed_dim embedding_dim d_latents
    out_hidden_size output_dim text_hidden_size projection_dim projector_hidden_size projector_input_dim
    projector_output_dim vision_output_dim vision_hidden_size image_text_hidden_size hidden_size_global
    encoder_hidden_size decoder_hidden_size cross_attention_hidden_size word_embed_proj_dim
    pooler_hidden_size pooler_output_size prediction_head_size lru_width
    entity_emb_size pronunciation_embed_dim shape_embed_dim ple_embed_dim projection_hidden_size
    patch_embed_hidden_size audio_hidden_size backbone_hidden_size moe_hidden_size router_hidden_size
    merged_hidden_size downsample_hidden_size hidden_dim input_size
    image_token_embed_dim output_channels scale classifier_proj_size""")
_EMBEDDING = _names("embedding_size input_embedding_size output_embedding_size")
_FFN = _names("""intermediate_size ffn_dim d_ff dff d_inner dim_ff encoder_ffn_dim decoder_ffn_dim mlp_dim
    ffn_hidden_size feed_forward_size n_inner moe_intermediate_size shared_expert_intermediate_size
    shared_intermediate_size dense_intermediate_size moe_shared_expert_intermediate_size intermediate_size_mlp
    expert_ffn_hidden_size share_expert_dim prefix_dense_intermediate_size alignment_intermediate_size
    projection_intermediate_size speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim""")
_BLOCKS = _names("""num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
    num_encoder_layers layers depth num_blocks""")
_FEW_BLOCKS = _names("""speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_global_layers resampler_depth
    aligner_num_add_layers num_self_attends_per_block conf_num_hidden_layers num_layers_per_stack""")
_HEADS = _names("""num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
    attention_heads num_encoder_attention_heads num_decoder_attention_heads speech_encoder_attention_heads
    t2u_encoder_attention_heads t2u_decoder_attention_heads num_self_attention_heads num_cross_attention_heads
    conf_num_attention_heads swa_num_attention_heads num_sliding_attention_heads linear_num_heads
    linear_num_value_heads resampler_n_heads resampler_heads index_n_heads""")
_KV_HEADS = _names("""num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads linear_num_key_heads
    num_query_groups""")
_HEAD = _names("""head_dim d_kv dim_head d_head attention_head_size kv_channels v_head_dim qk_nope_head_dim
    index_head_dim swa_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim resampler_head_dim
    resampler_dim_head query_pre_attn_scalar mamba_d_head mamba_head_dim mamba_headdim""")
_EXPERTS = _names("num_experts num_local_experts n_routed_experts moe_num_experts")
_PER_TOKEN = _names("num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts")
_WINDOW = _names("""sliding_window attention_chunk_size local_attention attention_window attention_window_size
    sliding_window_size index_topk keep_window_size""")
_POSITIONS = _names("""max_position_embeddings n_positions n_ctx max_seq_len max_source_positions max_target_positions
    max_encoder_position_embeddings max_decoder_position_embeddings t2u_max_position_embeddings context_length
    num_position_embeddings position_embedding_size""")
_VOCAB = _names("""vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input vocab_offset
    audio_vocab_size""")
_TEXT = _names("text_config encoder decoder text_encoder vlm_config global_config encoder_config decoder_config")
_FILL: dict[str, Callable[[_Sizes], int]] = {  # where the default is None
    "vocab_size": lambda sizes: sizes.vocab,
    "head_dim": lambda sizes: sizes.head,
    "num_key_value_heads": lambda sizes: max(1, sizes.heads // 2),
    "n_routed_experts": lambda sizes: EXPERTS,
    "num_experts": lambda sizes: EXPERTS,
    "num_experts_per_tok": lambda sizes: EXPERTS_PER_TOKEN,
    "top_k_experts": lambda sizes: EXPERTS_PER_TOKEN,
    "n_shared_experts": lambda sizes: 1,
    "moe_intermediate_size": lambda sizes: sizes.width,
}
_TOKENS = {
    **dict.fromkeys(_names("pad_token_id _pad_token_id"), PAD),
    **dict.fromkeys(_names("bos_token_id cls_token_id forced_bos_token_id"), BOS),
    **dict.fromkeys(_names("eos_token_id sep_token_id eod_token_id forced_eos_token_id"), EOS),
    "mask_token_id": MASK,
}
_SMALL: dict[str, int] = {  # at most these
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "zero_expert_num": 2,
    "n_group": 2, "num_expert_group": 2, "topk_group": 1, "n_groups": 2,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "num_kv_shared_layers": 0, "moe_layer_end_index": 3,
    "num_nextn_predict_layers": 0, "num_mtp_layers": 0,
    "state_size": 8, "ssm_state_size": 8, "mamba_d_state": 8,
    "time_step_rank": 8, "mamba_dt_rank": 8, "chunk_size": 8, "mamba_chunk_size": 8,
    "altup_num_inputs": 4, "laurel_rank": 8, "hidden_size_per_layer_input": 16, "embedding_rank": 16, "local_radius": 3,
    "global_block_size": 4, "num_global_tokens": 4, "entity_vocab_size": 32, "type_vocab_size": 4,
    "pronunciation_vocab_size": 32, "shape_vocab_size": 32, "unit_hifi_gan_vocab_size": 32, "t2u_vocab_size": 32,
    "char_vocab_size": 32, "mel_vocab_size": 32, "codebook_size": 32, "num_embeddings": 32, "codebook_dim": 16,
    "num_latents": 8, "resampler_n_latents": 8, "resampler_num_latents": 8, "latent_query_num": 8,
    "num_query_tokens": 8, "max_2d_position_embeddings": 64, "max_num_patches": 64, "num_mel_bins": 16,
    "num_filters": 8, "base_channels": 32, "latent_channels": 32, "hc_lowrank": 16, "o_lora_rank": 16, "o_groups": 2,
    "gated_norm_rank": 8, "encoder_hash_byte_group_vocab": 64, "nemo_conv_channels": 16, "ext_pw_out_channel": 16,
    "depthwise_separable_out_channel": 16, "post_conv_mid_channels": 16, "post_conv_out_channels": 32,
    "adapter_rank": 8, "max_window_layers": 2, "d_rel": 8,
    "upsample_initial_channel": 32, "lang_embed_dim": 16, "spkr_embed_dim": 16, "unit_embed_dim": 16,
    "vocoder_num_spkrs": 4, "prompt_length": 8, "position_bias_num_buckets": 32, "index_block_size": 4,
    "index_topk_blocks": 2, "rel_extent": 16,
}  # fmt: skip


_SCALES = ("logits_scaling", "logit_scale")


def _shrunk(config: PretrainedConfig, sizes: _Sizes) -> dict[str, Any]:
    """A configuration's values with small sizes; sub-configurations included."""
    own = {field.name for field in dataclasses.fields(type(config))} | set(config.attribute_map.values())
    own.add("model_type")  # all else follows from these
    default = {key: value for key, value in config.to_dict().items() if key in own}
    result: dict[str, Any] = {}
    changes = _overrides(sizes).get(config.model_type, {})
    kinds = changes.get("layer_types") or changes.get("layers_block_type") or ()
    sizes = dataclasses.replace(sizes, blocks=max(sizes.blocks, len(kinds)))
    width = next((default[key] for key in ("hidden_size", "d_model", "n_embd", "dim") if _is_size(default.get(key))), 0)
    for key, value in default.items():
        if isinstance(value, dict) and isinstance(part := getattr(config, key, None), PretrainedConfig):
            result[key] = _shrunk(part, sizes if key in _TEXT else sizes.beside())
        elif value is None and key in _FILL:
            result[key] = _FILL[key](sizes)
        elif _is_size(value):
            result[key] = _shrunk_size(key, value, sizes, width, default)
        elif isinstance(value, float) and value == 1.0 and ("multiplier" in key or key in _SCALES):
            result[key] = 0.7  # a factor of one would hide
        else:
            result[key] = copy.deepcopy(value)
            if key == "eos_token_id" and value is not None:  # several
                result[key] = EOS
            elif key in _FFN and isinstance(value, list):
                result[key] = [_shrunk_size(key, size, sizes, width, default) for size in value]
    _shorten_lists(default, result, sizes, width)
    _fit_heads(default, result)
    _fit_rotary(config, result, sizes)
    _merge(result, changes)
    return result


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shrunk_size(key: str, value: int, sizes: _Sizes, width: int, default: dict[str, Any]) -> int:
    """One size of a configuration: in proportion where the proportion is part of the architecture."""
    if key in _TOKENS:
        return _TOKENS[key]
    if key == "decoder_start_token_id":
        return PAD if value == default.get("pad_token_id") else EOS
    if key.endswith(("_token_id", "_token_index")) or key in ("im_start_id", "im_end_id", "im_newline_id"):
        return sizes.vocab + value % 97  # of images and sounds: beyond the ids of text
    if value <= 0:
        return value
    if key in _WIDTH:
        return sizes.width
    if key in _EMBEDDING:  # narrower or wider than the stream, where the default is
        return sizes.width // 2 if value < width else 2 * sizes.width if value > width else sizes.width
    if key in _FFN:
        ratio = min(4.0, max(0.5, value / width)) if width else 2.0
        return max(16, round(sizes.width * ratio / 16) * 16)
    if key in _BLOCKS:
        return sizes.blocks
    if key in _FEW_BLOCKS:
        return min(value, 2)
    if key in _HEADS:
        return sizes.heads
    if key in _KV_HEADS:
        return _kv_heads(value, default, sizes)
    if key in _HEAD:
        return sizes.head
    if key in _EXPERTS:
        return min(value, EXPERTS)
    if key in _PER_TOKEN:
        return min(value, EXPERTS_PER_TOKEN)
    if key in _WINDOW:
        return WINDOW
    if key in _POSITIONS:
        return min(value, sizes.positions)
    if key in _VOCAB:
        return sizes.vocab
    if key in ("qk_rope_head_dim", "rotary_dim"):
        return min(value, sizes.head // 2)
    if key in ("q_lora_rank", "kv_lora_rank"):
        return min(value, sizes.width // 2 if key == "q_lora_rank" else sizes.width // 4)
    if key in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"):
        return 2 * sizes.width // sizes.head
    if key == "mamba_d_ssm":
        return 2 * sizes.width
    if key == "image_size":
        patch = default.get("patch_size")
        return min(value, 4 * patch if isinstance(patch, int) else 64)
    return min(value, _SMALL[key]) if key in _SMALL else value


def _kv_heads(value: int, default: dict[str, Any], sizes: _Sizes) -> int:
    """As many as heads, one, or half as many: as in the default."""
    heads = next((default[key] for key in _HEADS if _is_size(default.get(key))), value)
    return sizes.heads if value == heads else 1 if value == 1 else max(1, sizes.heads // 2)


def _fit_heads(default: dict[str, Any], result: dict[str, Any]) -> None:
    """The head sizes of latent attention, which depend on one another."""
    if default.get("qk_rope_head_dim") is None or default.get("qk_nope_head_dim") is None:
        return
    rope, both = result["qk_rope_head_dim"], result["qk_rope_head_dim"] + result["qk_nope_head_dim"]
    if "qk_head_dim" in default:
        result["qk_head_dim"] = both
    if default.get("head_dim"):
        result["head_dim"] = rope if default["head_dim"] == default["qk_rope_head_dim"] else both
    rotary = result.get("rope_parameters")
    share = default["qk_rope_head_dim"] / (default["qk_rope_head_dim"] + default["qk_nope_head_dim"])
    if isinstance(rotary, dict) and rotary.get("partial_rotary_factor") == share:
        rotary["partial_rotary_factor"] = rope / both


def _fit_rotary(config: PretrainedConfig, result: dict[str, Any], sizes: _Sizes) -> None:
    """Rotary positions of several axes share the frequencies of a head."""
    rotary = result.get("rope_parameters")
    if not isinstance(rotary, dict) or "mrope_section" not in getattr(config, "ignore_keys_at_rope_validation", ()):
        return
    for part in [rotary] if "rope_theta" in rotary else [part for part in rotary.values() if part]:
        part["mrope_section"] = _sections(int(sizes.head * part.get("partial_rotary_factor", 1.0)) // 2)


def _shorten_lists(default: dict[str, Any], result: dict[str, Any], sizes: _Sizes, width: int) -> None:
    """One entry per block: a prefix of the default's pattern, changed so that every kind of block is present."""
    count = next((default[key] for key in _BLOCKS if _is_size(default.get(key))), 0)
    lists = [
        key
        for key, value in default.items()
        if isinstance(value, list) and len(value) == count and count > 1 and isinstance(value[0], str | int | float)
    ]
    if not lists:
        return
    kinds = list(zip(*(default[key] for key in lists), strict=True))
    numbered = [key for key in lists if default[key] == list(range(count))]
    kinds = [tuple(None if key in numbered else part for key, part in zip(lists, kind, strict=True)) for kind in kinds]
    chosen = _pattern(kinds, sizes.blocks)
    for i, key in enumerate(lists):
        values = range(len(chosen)) if key in numbered else [kind[i] for kind in chosen]
        one = key.removesuffix("_per_layer")
        result[key] = [
            _shrunk_size(one, value, sizes, width, default) if _is_size(value) else value for value in values
        ]
    for key in _BLOCKS:
        if key in result and default[key] == count:
            result[key] = len(chosen)


def _pattern(kinds: list[Any], length: int) -> list[Any]:
    """The first `length` kinds, the last repeated ones replaced by those that are missing."""
    distinct = list(dict.fromkeys(kinds))
    chosen = kinds[: max(length, len(distinct))]
    chosen += [kinds[i % len(kinds)] for i in range(len(chosen), length)]
    for kind in (kind for kind in distinct if kind not in chosen):
        last = max(i for i, other in enumerate(chosen) if chosen.count(other) > 1)
        chosen[last] = kind
    return chosen


def small_config(
    model_type: str,
    *,
    n_blocks: int = 4,
    d_model: int = 64,
    n_heads: int = 4,
    vocab_size: int = 128,
    n_positions: int = 128,
    **overrides: Any,
) -> PretrainedConfig:
    """A small configuration of any model type, with every kind of block of its default configuration.

    `overrides` are values of the configuration itself, nested dictionaries for sub-configurations; they win.
    A type whose kinds of blocks do not fit in `n_blocks` gets as many as it needs. Heads (`d_model / n_heads`) of 16
    or more and a `d_model` of 64 or more suit every type; many take less.
    """
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"no model type {model_type!r} in transformers {transformers.__version__}")
    if model_type in NOT_RUNNABLE:
        raise UnsupportedModel(f"{model_type}: {NOT_RUNNABLE[model_type]}")
    kind = CONFIG_MAPPING[model_type]
    sizes = _Sizes(n_blocks, d_model, n_heads, vocab_size, n_positions)
    names = getattr(kind, "attribute_map", {})
    with _quiet():
        values = _shrunk(kind(), sizes)
        _merge(values, {names.get(key, key): value for key, value in overrides.items()})
        del values["model_type"]
        config: PretrainedConfig = kind(**values)
    if model_type == "gemma3n":  # its image encoder needs the timm library, and the type of the field is checked
        vars(config)["vision_config"] = _overrides(sizes)["fast_vlm"]["vision_config"]
        vars(config.vision_config).update(vocab_size=8, vocab_offset=vocab_size, rms_norm_eps=1e-6)
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Default configurations warn about their own token ids."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _merge(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(values.get(key), dict) and "model_type" not in value:
            _merge(values[key], value)
        else:
            values[key] = value


def build(
    architecture: Architecture, config: PretrainedConfig, *, seed: int = 0, perturb: bool = True
) -> PreTrainedModel:
    """A model of the architecture: float32, in evaluation mode, the same weights for the same seed.

    `perturb`: also randomise what initialisation leaves at 0 or 1 (biases, norms, gates, layer scales) and enlarge
    small weights, so that a structural mistake changes the logits. Without it: the initialisation of transformers.
    """
    config = copy.deepcopy(config)
    if architecture.task == "causal" and not config.is_encoder_decoder:
        for key in ("is_decoder", "causal"):
            if hasattr(config, key):
                setattr(config, key, True)
    kind = getattr(transformers, architecture.class_name)
    if not isinstance(config, kind.config_class):  # a text model listed under the type of a larger model
        config = next((part for part in _parts(config) if isinstance(part, kind.config_class)), config)
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        model: PreTrainedModel = kind._from_config(config, dtype=torch.float32).eval()
        if perturb:
            _perturb(model)
    return model


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    return [part for key in config.sub_configs if isinstance(part := getattr(config, key, None), PretrainedConfig)]


@torch.no_grad()
def _perturb(model: nn.Module) -> None:
    """Weights and biases without zeros, ones or tiny values that hide mistakes."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or parameter.numel() == 0:
            continue
        spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
        if name.endswith("bias") or parameter.dim() < 2 or spread == 0:
            parameter.add_(0.3 * torch.randn_like(parameter))
        elif spread < 0.1:
            parameter.mul_(0.1 / spread)
    for name, buffer in model.named_buffers():
        if name.endswith(("logits_bias", "layer_scalar", "correction_bias")) and buffer.is_floating_point():
            buffer.add_(0.3 * torch.randn_like(buffer))


def text_inputs(hf: PreTrainedModel, task: Task, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """The arguments of a forward on text alone; the decoder of an encoder–decoder reads the same text.

    Where a model insists on an image or a sound, it gets the same random one in every row.
    """
    config = hf.config
    rows, length = ids.shape
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}

    def noise(*shape: int) -> torch.Tensor:
        one = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return one.to(hf.device, hf.dtype).expand(rows, *shape)

    def image() -> torch.Tensor:
        return noise(3, config.vision_config.image_size, config.vision_config.image_size)

    match config.model_type:
        case "blip" | "blip-2":  # cross-attention to, or a prefix of, an image
            inputs["pixel_values"] = image()
        case "instructblip":
            inputs |= {"pixel_values": image(), "qformer_input_ids": ids}
        case "instructblipvideo":  # frames
            inputs |= {"pixel_values": image()[:, None], "qformer_input_ids": ids}
        case "idefics":  # cross-attention to the states of an image encoder
            states = noise(1, 4, config.vision_config.embed_dim)
            inputs |= {"image_encoder_embeddings": states, "image_attention_mask": torch.ones_like(ids)[..., None]}
        case "kosmos-2":  # no image, at no position
            states = noise(0, config.text_config.embed_dim)
            inputs |= {"image_embeds": states, "image_embeds_position_mask": torch.zeros_like(ids)}
        case "musicgen_decoder" | "musicgen_melody_decoder":  # rows are codebooks: all read the same
            inputs["input_ids"] = ids.repeat_interleave(config.num_codebooks, 0)
        case "pix2struct":  # its encoder reads patches alone: row, column, pixels
            patches = noise(4, 2 + config.vision_config.patch_embed_hidden_size).clone()
            patches[..., :2] = torch.tensor([[1, 1], [1, 2], [2, 1], [2, 2]])
            inputs = {"flattened_patches": patches} | {k: v for k, v in inputs.items() if k.startswith("decoder")}
        case "pp_formulanet":  # its encoder reads an image alone
            inputs |= {"encoder_outputs": (noise(4, config.text_config.d_model),)}
        case "udop":  # every token has a box on the page
            box = torch.linspace(0.1, 0.8, length).to(ids.device)
            inputs["bbox"] = torch.stack([box, box, box + 0.1, box + 0.1], -1).expand(rows, length, 4)
        case "vision-encoder-decoder":  # its encoder reads an image alone
            del inputs["input_ids"], inputs["attention_mask"]
            inputs["pixel_values"] = noise(3, config.encoder.image_size, config.encoder.image_size)
        case "voxtral_realtime":  # adds a frame of sound to every token
            inputs["encoder_inputs_embeds"] = noise(length * config.downsample_factor, config.audio_config.hidden_size)
    return inputs


_TOKEN_ARGUMENTS = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")


def small_model(architecture: Architecture, **sizes: Any) -> Model:
    """A small model of an architecture with random weights, its structure discovered and not yet proven."""
    hf = build(architecture, small_config(architecture.model_type, **sizes))
    extra_inputs = _extra_inputs(hf, architecture)
    structure = discover(hf, extra_inputs=extra_inputs)
    return Model(hf, structure, str(architecture), extra_inputs=extra_inputs)


def _extra_inputs(hf: PreTrainedModel, architecture: Architecture) -> ExtraInputs | None:
    def extra_inputs(ids: torch.Tensor) -> Mapping[str, Any]:
        inputs = text_inputs(hf, architecture.task, ids, torch.ones_like(ids))
        return {name: value for name, value in inputs.items() if name not in _TOKEN_ARGUMENTS}

    return extra_inputs if extra_inputs(torch.ones(2, 9, dtype=torch.long)) else None
