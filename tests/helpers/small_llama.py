"""A small random Llama on disk, wide enough for the kernels of quantised layers, with the tokenizer of tiny-gpt2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


def save_small_llama(folder: Path, **changes: Any) -> Path:
    """Write the checkpoint into a folder, and return the folder."""
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tiny-gpt2")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    settings = {"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}
    torch.manual_seed(0)
    # Larger than Hugging Face's first weights: blocks then change the stream, and outliers occur.
    hf = LlamaForCausalLM(LlamaConfig(**(sizes | ids | settings | {"initializer_range": 0.15} | changes)))
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
