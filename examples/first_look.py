"""What does every level already predict? The logit lens beside fitted jumps, on one prompt.

layerjump fit smollm2 --tokens 16000 -o demo/jumps
python examples/first_look.py demo/jumps
"""

import sys
from pathlib import Path

import torch

import layerjump as lj

PROMPT = "The capital of France is the city of"


def main(folder: Path, prompt: str) -> None:
    jumps = lj.Jumps.from_pretrained(folder)
    model = lj.load(jumps.provenance.model)
    (ids,) = model.tokens.encode([prompt])
    batch = lj.one_batch(model.tokens.wrap(ids))
    (states,) = lj.states(model, [batch], range(model.n_blocks + 1))

    def best(state: torch.Tensor) -> str:
        chance, token = model.logits(state).softmax(-1).max(-1)
        return f"{model.tokens.tokenizer.decode(token)!r} {chance.item():.0%}"

    lines = [
        f"# {prompt} …",
        "",
        f"{jumps}",
        "",
        "| level | as it is | through the jump | test R² | identity's |",
    ]
    lines.append("|---|---|---|---|---|")
    for level in range(model.n_blocks):
        jump, info = jumps[level, model.n_blocks], jumps.info[level, model.n_blocks]
        state = states[level][-1]
        scores = " | ".join(f"{score[0]:.2f}" for score in (info.r2, info.r2_identity) if score)
        lines.append(f"| {level} | {best(state)} | {best(jump(state))} | {scores} |")
    lines.append(
        f"| {model.n_blocks} | {best(states[model.n_blocks][-1])} | the model itself | | |"
    )
    report = folder.parent / "report.md"
    report.write_text("\n".join(lines) + "\n")
    print("\n".join(lines), f"\nThe report is {report}")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(sys.argv[1]), PROMPT)
