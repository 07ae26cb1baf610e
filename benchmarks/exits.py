"""Which architectures of transformers can exit early.

Builds a small model with random weights of every causal and image–text architecture of the installed transformers and
checks whether its blocks, run one by one with a KV cache, give the logits of its forward pass.

    python benchmarks/exits.py            # all of them, about two minutes on two cores
    python benchmarks/exits.py --quick    # every sixth
"""

from __future__ import annotations

import argparse
import multiprocessing
import warnings
from collections import Counter

import torch
from transformers.utils import logging

from layerjump.errors import LayerjumpError, one_line
from layerjump.generation.exit_self_check import check_exits
from layerjump.models.small_models import Architecture, list_architectures, small_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every sixth architecture")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    architectures = [a for a in list_architectures() if a.task in ("causal", "image-text")]
    if options.quick:
        architectures = architectures[::6]
    # A process for each few models, so that memory is given back.
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=16) as pool:
        results = pool.map(_examine, architectures, chunksize=1)
    for architecture, (result, note) in zip(architectures, results, strict=True):
        print(f"{architecture!s:<42}{result:<18}{note}")
    print()
    for task in ("causal", "image-text"):
        counts = Counter(result for a, (result, _) in zip(architectures, results, strict=True) if a.task == task)
        print(f"{task:<11}" + "  ".join(f"{result} {count}" for result, count in sorted(counts.items())))


def _examine(architecture: Architecture) -> tuple[str, str]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    try:
        check = check_exits(small_model(architecture))
    except LayerjumpError as error:
        return "no model", one_line(error)
    if check.problem is not None:
        return "refused", check.problem
    if check.padding_problem is not None:
        return "without padding", check.padding_problem
    return "exits", f"difference {max(check.difference, check.padded_difference):.1e}"


if __name__ == "__main__":
    main()
