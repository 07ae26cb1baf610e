"""Everything end to end on each kind of architecture: train a small model, fit, lens, studies, generate, prune.

    python benchmarks/kinds.py [--kinds moe,hybrid] [--quick] [--steps 300]

Every step is a command of layerjump, run as a user would: `pretrain`, `fit`, `lens`, `study r2 submodules`,
`generate --verify`, `prune --method remove` and `--method fold`. Training reads the train sample of TinyStories, all
else the valid sample, of which `fit`, `study` and `prune` hold out their own test documents:
  loss      validation loss of the trained model, nats per token
  R²        of the jump `mat` from level L/2 to level L, on held-out documents
  verified  whether verified early exit writes the model's own greedy text (true, false), or why it is refused
  remove    perplexity after / before, with one block removed; the checkpoint is loaded again
  fold      the same, with a map folded into the block before it, or why it is refused
Last line: JSON, kind → these.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import layerjump as lj
from layerjump.metrics.timing import describe_machine

SHARED = Path(__file__).parents[2] / "shared"
TRAIN, VALID = (SHARED / f"text/tinystories/tinystories_{name}_sample.txt" for name in ("train", "valid"))
KINDS = {
    "moe": "qwen3_moe",
    "hybrid": "lfm2",
    "state-space": "falcon_h1",
    "parallel": "gpt_neox",
    "parallel-scaled": "cohere",
    "sandwich": "gemma2",
    "scaled": "granite",
    "image-text": "gemma3",
}
"""Kind → model type: experts; convolutions and attention in turns; attention beside a state-space mixer; attention and
feed-forward in parallel (the second multiplies its logits by 1/16, and learns slowly); norms before and after each
part; a factor of all that is added; a text stack beside an image encoder."""
QUICK = ("moe", "hybrid")
PROMPTS = ("Once upon a time there was a", "The little dog wanted to")
LEVELS = 4


class CommandFailed(Exception):  # noqa: N818  (a refusal is a result here)
    """The message of a command that ended with an error."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=None, help=f"of {','.join(KINDS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="two kinds, few steps: under two minutes")
    parser.add_argument("--steps", type=int, default=None, help="steps of each training")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = options.kinds.split(",") if options.kinds else list(QUICK if options.quick else KINDS)
    steps = options.steps or (40 if options.quick else 300)
    tokens = 6_000 if options.quick else 40_000
    print(describe_machine())
    print(f"{TRAIN.name}, {steps} steps of 16 × 64 tokens, seed {options.seed}; fits on {tokens:,} tokens")
    print(f"{'kind':16}{'model':12}{'loss':>7}{'R²':>7}{'verified':>10}{'remove':>8}{'fold':>8}  seconds")
    figures: dict[str, dict[str, Any]] = {}
    refusals: list[str] = []
    for kind in kinds:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            figures[kind] = measure(KINDS[kind], Path(folder), steps=steps, tokens=tokens, seed=options.seed)
        row = figures[kind]
        cells = [_cell(row[name]) for name in ("loss", "r2", "verified", "remove", "fold")]
        widths = (7, 7, 10, 8, 8)
        numbers = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        print(f"{kind:16}{KINDS[kind]:12}{numbers}  {time.perf_counter() - start:.0f}", flush=True)
        refusals += [f"{kind}, {name}: {value}" for name, value in row.items() if _is_refusal(name, value)]
    print("\n".join(refusals))
    print(json.dumps(figures))


def measure(model_type: str, folder: Path, *, steps: int, tokens: int, seed: int) -> dict[str, Any]:
    """Train one model and run every command on it."""
    model = folder / "model"
    training = _run(
        "pretrain", "--text", TRAIN, "--eval-text", VALID, "--arch", model_type, "--layers", LEVELS, "--heads", 4,
        "--hidden-size", 64, "--vocab-size", 1024, "--length", 64, "--steps", steps, "--eval-every", steps,
        "--batch-size", 16, "--learning-rate", 3e-3, "--seed", seed, "-o", model,
    )  # fmt: skip
    text = ("--text", VALID, "--tokens", tokens, "--seed", seed)
    _run("fit", model, *text, "--estimator", "mat", "-o", folder / "jumps", json_output=False)
    jumps = lj.Jumps.from_pretrained(folder / "jumps")
    info = jumps.info[LEVELS // 2, LEVELS]
    _run("lens", model, PROMPTS[0], "--jumps", folder / "jumps", json_output=False)
    _run("study", model, "r2", "submodules", *text, "-o", folder / "study", json_output=False)
    studies = json.loads((folder / "study" / "results.json").read_text())["studies"]
    row: dict[str, Any] = {
        "model": model_type,
        "parameters": training["parameters"],
        "tokens": steps * 16 * 64,
        "loss": round(training["tables"]["steps"][-1]["loss"], 4),
        "r2": round(info.r2[0], 4) if info.r2 else None,
        "verified": verify_generation(model, folder / "jumps"),
        "most linear part": studies["submodules"]["headline"]["most_tolerant"],
    }
    for method in ("remove", "fold"):
        try:
            pruned = folder / method
            _run(
                "prune", model, *text, "--method", method, "--drop", 1, "--criterion", "loss", "-o", pruned,
                json_output=False,
            )  # fmt: skip
            row[method] = round(json.loads((pruned / "pruning.json").read_text())["loss"]["ratio"], 4)
            assert lj.load(pruned).n_blocks == lj.load(model).n_blocks - 1
        except CommandFailed as error:
            row[method] = str(error)
    return row


def verify_generation(model: Path, jumps: Path) -> bool | str:
    """Compare verified early exit with Hugging Face's own greedy text."""
    loaded = lj.load(model)
    hf: Any = loaded.hf
    try:
        texts = [
            _run(
                "generate", model, prompt, "--jumps", jumps, "--exit", "fixed:2", "--verify",
                "--max-new-tokens", 24,
            )
            for prompt in PROMPTS
        ]  # fmt: skip
    except CommandFailed as error:
        return str(error)
    same = []
    for prompt, ours in zip(PROMPTS, texts, strict=True):
        inputs = loaded.tokenization.generation_inputs([prompt])
        with torch.no_grad():
            plain = hf.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
        new = plain[0, inputs["input_ids"].shape[1] :]
        same.append(new.tolist() == ours["texts"][0]["ids"])
    return all(same)


def _run(*arguments: object, json_output: bool = True) -> Any:
    """Run a command of layerjump and return its JSON; `CommandFailed` with its message where it refuses."""
    command = [sys.executable, "-m", "layerjump", *map(str, arguments), *(["--json"] if json_output else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        if any("Traceback" in line for line in lines):
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
        message = " ".join(lines).rpartition("error: ")[2]
        raise CommandFailed(re.sub(r"\S+/model ", "the model ", message))
    return json.loads(done.stdout) if json_output else None


def _is_refusal(name: str, value: Any) -> bool:
    return name in ("verified", "remove", "fold") and isinstance(value, str)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "refused" if isinstance(value, str) else "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
