"""Good model folders and GGUF files, as small as they come, and how they are read."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from helpers.tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import layerjump as lj

LETTERS = "abcdefghijklmnopqrstuvwxyz"
D, VOCABULARY = 8, 32


def make_folder(folder: Path) -> None:
    """A GPT-2 of three blocks and its tokenizer, which knows letters."""
    tiny_model("gpt2", dtype=torch.float32).save_pretrained(folder)
    words = {letter: index for index, letter in enumerate(LETTERS)} | {"[UNK]": 60}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)


def read_folder(path: Path) -> None:
    read(path.parent)


def read(source: Path) -> None:
    """Load, check, and read a word where there is a tokenizer to read it."""
    loaded = lj.load(source)
    if loaded.tokenizer is not None:
        loaded.tokenization.encode(["abba"])


def make_gguf(folder: Path) -> None:
    """A Llama of one block with random weights."""
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(2 * D)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(D // 2)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*LETTERS, *(f"<{n}>" for n in range(VOCABULARY - len(LETTERS)))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(26)
    writer.add_eos_token_id(27)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, D), "output_norm": (D,), "output": (VOCABULARY, D)}
    square, wide = (D, D), (2 * D, D)
    inside = {"attn_norm": (D,), "attn_q": square, "attn_k": square, "attn_v": square}
    inside |= {"attn_output": square, "ffn_norm": (D,), "ffn_gate": wide, "ffn_up": wide}
    inside |= {"ffn_down": (D, 2 * D)}
    for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in inside.items()}).items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
