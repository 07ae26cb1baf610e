"""Drop blocks, replace them by linear maps, write an ordinary checkpoint, and load it without layerjump.

python examples/prune.py [MODEL] [TEXT] [FOLDER]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import layerjump as lj

model = lj.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
text = lj.load_text(sys.argv[2] if len(sys.argv) > 2 else "pydoc")
folder = sys.argv[3] if len(sys.argv) > 3 else "smaller"

pruned = lj.prune(model, text, drop=1, criterion="influence", tokens=8_000)
print(pruned)
pruned.save(folder)

smaller, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
inputs = tokenizer("One day, the", return_tensors="pt")
ids = smaller.generate(**inputs, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(ids[0]))
