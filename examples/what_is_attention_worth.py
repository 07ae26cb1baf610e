"""Replace the attention of one block at a time by a linear map, and count how often the top token stays.

python examples/what_is_attention_worth.py [MODEL] [TEXT]
"""

import sys

import torch

import layerjump as lj

model = lj.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
text = lj.load_text(sys.argv[2] if len(sys.argv) > 2 else "pydoc")

maps = lj.fit(model, text, pairs="submodules", tokens=4_000)
held_out = lj.split_indices(len(text.documents), "80/10/10", seed=0).test
(batch, *_) = lj.make_batches(text, model.tokenization, lj.Positions("all"), documents=held_out, tokens=200)
inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
with torch.no_grad():
    top_token = model.hf(**inputs).logits.argmax(-1)
    for block in range(1, model.n_blocks + 1):
        with lj.linearize(model, maps, parts="attn", blocks=[block]):
            same = model.hf(**inputs).logits.argmax(-1) == top_token
        agreement = same[batch.row, batch.position].float().mean()
        r2 = maps.info[f"{block}.attn.in", f"{block}.attn.out"].r2[0]
        print(f"block {block:2}: R² of the map {r2:6.3f}, agreement {agreement:.1%}")
