"""Compare three lenses by their KL to the model's own prediction at each level.

python examples/better_lens.py [MODEL] [TEXT]
"""

import sys

import torch

import layerjump as lj

model = lj.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
text = lj.load_text(sys.argv[2] if len(sys.argv) > 2 else "pydoc")
tokens = 8_000  # enough for a first look; more text gives better maps

mat = lj.fit(model, text, tokens=tokens)
calibrated = lj.fit(model, text, estimator="calibrated", tokens=tokens)
lenses = {"logit lens": None, "mat": mat, "calibrated": calibrated}

held_out = lj.split_indices(len(text.documents), "80/10/10", seed=0).test
batches = lj.make_batches(text, model.tokenization, lj.Positions("all"), documents=held_out, tokens=600)
levels = range(0, model.n_blocks + 1, max(1, model.n_blocks // 6))
divergence = {name: torch.zeros(len(levels)) for name in lenses}
with torch.no_grad():
    for states in lj.capture_states(model, batches, levels, logits=True):
        model_log_probs = states.logits.log_softmax(-1)
        for name, jumps in lenses.items():
            lens = lj.Lens(model, jumps)
            for index, level in enumerate(levels):
                log_probs = lens.logits(level, states.at[lj.Site(level)]).log_softmax(-1)
                kl = (model_log_probs.exp() * (model_log_probs - log_probs)).sum(-1)
                divergence[name][index] += kl.mean() / len(batches)
print("KL(model || lens), mean over held-out positions")
print("level".ljust(12), *(f"{level:7}" for level in levels))
for name, kl in divergence.items():
    print(name.ljust(12), *(f"{value:7.3f}" for value in kl.tolist()))
