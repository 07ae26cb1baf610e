"""How exactly the rows of an attribution add up, for every family of transformers.

Builds a small model with random weights of every text architecture of the installed transformers whose structure is
fully known, in float64 (float32 where its kernels know no other), and attributes the difference of two logits at the
last level and a middle position. The reading is compared with the model's own logits, the parts with the reading,
attention heads with their attention, and source positions with their head. Differences are absolute.

    python benchmarks/attribution.py            # all of them, about ten minutes on two cores
    python benchmarks/attribution.py --quick    # every twelfth

The last line is JSON: the number of architectures, the largest differences, and those that were refused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

import layerjump as lj
from layerjump.errors import one_line
from layerjump.lens.attribution import Attribution, attribute
from layerjump.lens.prepare_prompt import Prompt
from layerjump.models.hugging_face_config import example_tokens
from layerjump.models.small_models import Architecture, list_architectures, small_model
from layerjump.models.support_table import read_table

LENGTH, POSITION = 9, 6
TOKEN, AGAINST = 3, 6


@dataclass(frozen=True)
class Errors:
    """The largest differences of one architecture; None where it has no such rows."""

    architecture: str
    dtype: str = ""
    reading: float = 0.0
    parts: float = 0.0
    heads: float | None = None
    sources: float | None = None
    refusal: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every twelfth architecture")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    full = {(row.task, row.model_type) for row in read_table() if row.degree == "full"}
    architectures = [a for a in list_architectures() if (a.task, a.model_type) in full and a.task != "image-text"]
    if options.quick:
        architectures = architectures[::12]
    # A process for each few models, so that memory is given back.
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=16) as pool:
        rows = pool.map(_examine, architectures, chunksize=1)
    print(f"{'architecture':<42}{'dtype':<9}{'reading':>9}{'parts':>9}{'heads':>9}{'sources':>9}")
    for row in rows:
        cells = "".join(f"{_cell(value):>9}" for value in (row.reading, row.parts, row.heads, row.sources))
        print(f"{row.architecture:<42}" + (row.refusal or f"{row.dtype:<9}{cells}"))
    result: dict[str, Any] = {"architectures": len(rows)}
    for dtype in ("float64", "float32"):
        attributed = [row for row in rows if row.dtype == dtype]
        result[dtype] = {"architectures": len(attributed)}
        for name in ("reading", "parts", "heads", "sources"):
            values = [value for row in attributed if (value := getattr(row, name)) is not None]
            result[dtype][name] = {"architectures": len(values), "largest": max(values, default=None)}
    result["refused"] = {row.architecture: row.refusal for row in rows if row.refusal}
    print(json.dumps(result))


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def _examine(architecture: Architecture) -> Errors:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    refusal = ""
    for dtype in (torch.float64, torch.float32):
        try:
            return measure(small_model(architecture), str(architecture), dtype)
        except Exception as error:  # a kernel without float64, or a model that is refused
            refusal = one_line(error, 160)
    return Errors(str(architecture), refusal=refusal)


@torch.no_grad()
def measure(model: lj.Model, name: str, dtype: torch.dtype) -> Errors:
    """Attribute a difference of two logits of one model and compare the sums of its rows."""
    model.hf.to(dtype)  # type: ignore[arg-type]  # the stub of a wrapped method lacks self
    ids = example_tokens(model.hf, 1, LENGTH)
    arguments: dict[str, Any] = {}
    if model.task == "seq2seq":
        source = example_tokens(model.hf, 1, LENGTH, seed=1)
        arguments = {"input_ids": source, "attention_mask": torch.ones_like(source)}
    elif model.extra_inputs is not None:
        arguments = dict(model.extra_inputs(ids))
    prompt = Prompt(tuple(ids[0].tolist()), tuple(range(LENGTH)), inputs=arguments or None)
    attribution = attribute(model, lj.Lens(model).readout(model.n_blocks), prompt, POSITION, TOKEN, against=AGAINST)
    read = {"decoder_input_ids" if model.task == "seq2seq" else "input_ids": ids}
    masks = {} if "attention_mask" in arguments else {"attention_mask": torch.ones_like(ids)}
    logits = model.hf(**arguments, **read, **masks).logits[0, POSITION].double()
    return Errors(
        name,
        str(dtype).removeprefix("torch."),
        reading=abs(attribution.reading - float(logits[TOKEN] - logits[AGAINST])),
        parts=abs(attribution.error),
        heads=_largest_gap(attribution, "heads"),
        sources=_largest_gap(attribution, "sources"),
    )


def _largest_gap(attribution: Attribution, detail: str) -> float | None:
    """The largest difference of heads from their attention, or of sources from their head."""
    sums: dict[Any, float] = defaultdict(float)
    whole: dict[Any, float] = {}
    if detail == "heads":
        for row in attribution.heads:
            sums[row.block, row.part] += row.value
        whole = {(row.block, row.part): row.value for row in attribution.parts}
    else:
        for row in attribution.sources:
            sums[row.block, row.part, row.head] += row.value
        whole = {(row.block, row.part, row.head): row.value for row in attribution.heads}
    return max((abs(value - whole[key]) for key, value in sums.items()), default=None)


if __name__ == "__main__":
    main()
