"""How many text architectures of transformers are supported, and how far.

Builds a small model with random weights of every architecture of the installed transformers, discovers its structure
and proves it by the self-check. Then it misreads structures on purpose and counts those that the proof accepts.

    python benchmarks/architectures.py            # all of them, about fifteen minutes on two cores
    python benchmarks/architectures.py --quick    # every sixth
    python benchmarks/architectures.py --record   # all of them; write the table in the package
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from misreadings import MISREADINGS, is_accepted
from transformers.utils import logging

from layerjump.errors import one_line
from layerjump.models.self_check import prove
from layerjump.models.small_models import NOT_RUNNABLE, Architecture, list_architectures, small_model
from layerjump.models.support_table import TABLE, Support, describe, render_table

MISREAD_TYPES = ("llama", "gpt2", "gptj", "gemma2", "granite", "qwen3_moe", "falcon_h1", "bert")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every sixth architecture")
    parser.add_argument("--record", action="store_true", help="write the table in the package")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    architectures = list_architectures()
    if options.quick:
        architectures = architectures[::6]
    # A process for each few models, so that memory is given back.
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=8) as pool:
        rows = pool.map(_examine, architectures, chunksize=1)
        accepted = pool.map(_misread, [a for a in list_architectures() if _is_misread(a)], chunksize=1)
    for row in rows:
        print(f"{row.task:<11}{row.model_type:<30}{row.degree:<9}{row.parts:<40.40} {row.note[:100]}")
    degrees = Counter(row.degree for row in rows)
    by_task = {
        task: dict(Counter(row.degree for row in rows if row.task == task)) for task in sorted({r.task for r in rows})
    }
    print()
    for task, counts in by_task.items():
        print(f"{task:<11}" + "  ".join(f"{degree} {count}" for degree, count in sorted(counts.items())))
    if options.record and not options.quick:
        path = Path(__file__).parents[1] / "src/layerjump/models" / TABLE
        path.write_text(render_table(rows, transformers.__version__), encoding="utf-8")
    result = {
        "transformers": transformers.__version__,
        "total": len(rows),
        "full": degrees["full"],
        "levels": degrees["levels"],
        "states": degrees["states"],
        "refused": degrees["refused"],
        "misreadings": len(MISREADINGS),
        "wrong_acceptances": sum(accepted),
        "by_task": by_task,
    }
    print(json.dumps(result))


def examine(architecture: Architecture) -> Support:
    """Build a small model of an architecture, discover its structure and prove it."""
    if reason := NOT_RUNNABLE.get(architecture.model_type):
        return Support(architecture.task, architecture.model_type, "refused", "", reason)
    try:
        model = prove(small_model(architecture))
    except Exception as error:  # the model's own code; a refusal either way
        return Support(architecture.task, architecture.model_type, "refused", "", one_line(error, 160))
    return replace(describe(model), task=architecture.task, model_type=architecture.model_type)


def _is_misread(architecture: Architecture) -> bool:
    tasks = ("masked",) if architecture.model_type == "bert" else ("causal",)
    return architecture.model_type in MISREAD_TYPES and architecture.task in tasks


def _set_up() -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def _examine(architecture: Architecture) -> Support:
    _set_up()
    return examine(architecture)


def _misread(architecture: Architecture) -> int:
    _set_up()
    model = small_model(architecture)
    return sum(is_accepted(model, misread) for misread in MISREADINGS.values())


if __name__ == "__main__":
    main()
