"""Add a penalty on the distance between levels to your own training loop: three lines, marked below.

    python examples/penalty.py

Trains a small Llama on Python's documentation with and without the penalty and prints how linear its blocks are. With
the penalty, a linear map explains less of what a block adds to the residual stream.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerjump as lj
from layerjump.data.tokenization import Tokenization
from layerjump.training.linearity_profile import measure_profile
from layerjump.training.packed_rows import pack_rows
from layerjump.training.regularizers import cosine
from layerjump.training.tokenizer import train_tokenizer
from layerjump.training.trainer import LevelStates

text, steps, length = lj.load_text("pydoc"), 60, 64
tokenizer = train_tokenizer(text.documents, 512, length, masked=False)
rows = pack_rows(text.documents, Tokenization.of(tokenizer, max_positions=length), length).long()
shape = {"hidden_size": 64, "intermediate_size": 168, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=3, **shape)

for weight in (0.0, 0.5):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))]
        with LevelStates(model) as levels:  # 1: capture the block outputs
            loss = model(input_ids=batch, labels=batch).loss
        penalty = cosine(levels.states)  # 2: pass the attention mask if there is padding
        (loss + weight * penalty).backward()  # 3
        optimiser.step()
        optimiser.zero_grad()
    profile = measure_profile(lj.Model.wrap(model, tokenizer), text)
    linear = profile.mean("without residual held out")
    print(f"penalty weight {weight}: loss {loss.item():.3f}, linearity without residual {linear:.3f}")
