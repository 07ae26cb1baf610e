"""A penalty on how far levels lie apart, in a training loop of your own: three lines, marked below.

    python examples/penalty.py

Trains a small Llama on Python's own manual twice, without and with the cosine penalty, and prints how large the penalty
is and how linear the blocks have become.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layerjump as lj
from layerjump.inputs.tokens import Tokens
from layerjump.train.levels import Levels
from layerjump.train.packing import pack
from layerjump.train.penalties import cosine
from layerjump.train.profile import profile
from layerjump.train.vocabulary import train_tokenizer

STEPS, ROWS, LENGTH = 60, 16, 64

text = lj.read("pydoc")
tokenizer = train_tokenizer(text.documents, 512, LENGTH, masked=False)
rows = pack(text.documents, Tokens.of(tokenizer, max_positions=LENGTH), LENGTH).long()
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=168,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=len(tokenizer),
    max_position_embeddings=LENGTH,
)

for strength in (0.0, 0.5):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        batch = rows[torch.randint(len(rows), (ROWS,))]
        with Levels(model) as levels:  # 1: hold on to what leaves the blocks
            loss = model(input_ids=batch, labels=batch).loss
        penalty = cosine(levels.states)  # 2: with padding, give the attention mask too
        (loss + strength * penalty).backward()  # 3
        optimiser.step()
        optimiser.zero_grad()
    found = profile(lj.Model.wrap(model, tokenizer), text).row()
    print(
        f"strength {strength}: loss {loss.item():.3f}, penalty {penalty.item():.3f}, linearity without residual "
        f"{found['without residual held out']:.3f}"
    )
