"""Cost of finding and proving a model's structure at load, relative to reading its weights and to one forward pass.

    python benchmarks/load.py [--model smollm2] [--quick]

`discovery` traces one forward pass and reads the structure off the trace; `discovery, cached` is what the second model
of a class and configuration pays; `self-check` proves the structure. `from_pretrained` is transformers' own loading.
All run alternately on the same loaded model. `--model` takes a folder, or the bundled model.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import transformers

import layerjump as lj
from layerjump.metrics.timing import describe_machine, ratio, time_alternately
from layerjump.models import bundled_model, discovery
from layerjump.models.hugging_face_config import auto_class, example_tokens, forward_arguments
from layerjump.models.loading import quiet_transformers
from layerjump.models.self_check import sample, self_check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="five repeats")
    options = parser.parse_args()
    if options.quick:
        options.repeats = 5
    model = lj.load(options.model)
    folder = bundled_model.bundled_folder(options.model) if options.model in bundled_model.NAMES else options.model
    print(f"{describe_machine()}\n{model}, {options.repeats} repeats\n")
    seconds = measure(model, Path(folder), options.repeats)
    load = seconds["from_pretrained"]
    print(f"{'step':20} {'seconds':>9} {'over from_pretrained':>21} {'over forward':>13}")
    for step, times in seconds.items():
        over = f"{ratio(times, load):21.3f} {ratio(times, seconds['forward']):13.2f}"
        print(f"{step:20} {statistics.median(times):9.4f} {over}")
    cold = [sum(pair) for pair in zip(seconds["discovery"], seconds["self-check"], strict=True)]
    warm = [sum(pair) for pair in zip(seconds["discovery, cached"], seconds["self-check"], strict=True)]
    result = {
        "model": options.model,
        "n_blocks": model.n_blocks,
        **{f"seconds_{step.replace(', ', '_')}": statistics.median(times) for step, times in seconds.items()},
        "seconds_discovery_and_check": statistics.median(cold),
        "discovery_over_forward": ratio(seconds["discovery"], seconds["forward"]),
        "check_over_forward": ratio(seconds["self-check"], seconds["forward"]),
        "cold_over_from_pretrained": ratio(cold, load),
        "warm_over_from_pretrained": ratio(warm, load),
        "cold_over_forward": ratio(cold, seconds["forward"]),
        "warm_over_forward": ratio(warm, seconds["forward"]),
    }
    print(json.dumps(result))


def measure(model: lj.Model, folder: Path, repeats: int) -> dict[str, list[float]]:
    """The seconds of each step, run alternately."""
    config = transformers.AutoConfig.from_pretrained(folder)
    loader = getattr(transformers, auto_class(config))
    ids = example_tokens(model.hf, 2, 9)
    batch = sample(model)

    def load() -> None:
        with quiet_transformers():
            loader.from_pretrained(folder, dtype=model.dtype)

    def discover() -> None:
        discovery._CACHE.clear()
        discovery.discover(model.hf)

    @torch.no_grad()
    def forward(ids: torch.Tensor, mask: torch.Tensor) -> None:
        arguments = forward_arguments(model.hf, model.task, ids, mask, ids, mask)
        model.hf(**arguments)

    return time_alternately(
        {
            "from_pretrained": load,
            "forward": lambda: forward(ids, torch.ones_like(ids)),
            "forward, checked": lambda: forward(batch.input_ids, batch.attention_mask),
            "discovery": discover,
            "discovery, cached": lambda: discovery.discover(model.hf),
            "self-check": lambda: self_check(model),
        },
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
