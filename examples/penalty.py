"""A penalty on how far levels lie apart, in a training loop of your own: three lines, marked below.

    python examples/penalty.py

Trains a small Llama on Python's own manual without and with it, and prints how linear the blocks have become: with it,
a block adds less that a matrix could say (the number falls).
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerjump as lj
from layerjump.data.tokenization import Tokenization
from layerjump.training.data import pack_rows, train_tokenizer
from layerjump.training.monitor import measure_profile
from layerjump.training.regularizers import cosine
from layerjump.training.trainer import LevelStates

text, steps, length = lj.load_text("pydoc"), 60, 64
tokenizer = train_tokenizer(text.documents, 512, length, masked=False)
rows = pack_rows(text.documents, Tokenization.of(tokenizer, max_positions=length), length).long()
shape = {"hidden_size": 64, "intermediate_size": 168, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=len(tokenizer), num_hidden_layers=3, **shape)

for strength in (0.0, 0.5):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))]
        with LevelStates(model) as levels:  # 1: hold on to what leaves the blocks
            loss = model(input_ids=batch, labels=batch).loss
        penalty = cosine(levels.states)  # 2: with padding, give the attention mask too
        (loss + strength * penalty).backward()  # 3
        optimiser.step()
        optimiser.zero_grad()
    found = measure_profile(lj.Model.wrap(model, tokenizer), text).row()
    linear = found["without residual held out"]
    print(f"strength {strength}: loss {loss.item():.3f}, linearity without residual {linear:.3f}")
