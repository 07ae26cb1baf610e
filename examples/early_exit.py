"""Generate with a calibrated exit rule (90 % agreement), and losslessly with verified drafts.

python examples/early_exit.py [MODEL] [TEXT]
"""

import sys

import layerjump as lj

model = lj.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
text = lj.load_text(sys.argv[2] if len(sys.argv) > 2 else "pydoc")

jumps = lj.fit(model, text, tokens=8_000)
calibration = lj.calibrate(model, jumps, text, target=0.9, documents=300)
print(calibration)

prompt = "One day, the"
full = lj.generate(model, None, prompt, max_new_tokens=24, do_sample=False)
early = lj.generate(model, jumps, prompt, exit=calibration.exit, max_new_tokens=24, do_sample=False)
lossless = lj.generate(model, jumps, prompt, exit="gap:0.9", verify=True, max_new_tokens=24, do_sample=False)
for name, generated in {"full": full, "early": early, "lossless": lossless}.items():
    print(f"{name}: {generated.text[0]!r}")
    print(f"  exit levels {generated.exit_levels[0]}, {generated.counts.block_runs} block runs")
assert lossless.ids == full.ids
