"""Text that stops early, with a rule calibrated to keep nine tokens of ten, and the full model's own text.

python examples/early_exit.py [MODEL] [TEXT]
"""

import sys

import layerjump as lj

model = lj.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
text = lj.load_text(sys.argv[2] if len(sys.argv) > 2 else "pydoc")

jumps = lj.fit(model, text, tokens=8_000)
found = lj.calibrate(model, jumps, text, target=0.9, documents=300)
print(found)

prompt = "One day, the"
full = lj.generate(model, None, prompt, max_new_tokens=24, do_sample=False)
early = lj.generate(model, jumps, prompt, exit=found.exit, max_new_tokens=24, do_sample=False)
lossless = lj.generate(
    model, jumps, prompt, exit="gap:0.9", verify=True, max_new_tokens=24, do_sample=False
)
for name, made in {"full": full, "early": early, "lossless": lossless}.items():
    print(
        f"{name}: {made.text[0]!r}\n  left at {made.exit_levels[0]}, {made.counts.block_runs} block runs"
    )
assert lossless.ids == full.ids
