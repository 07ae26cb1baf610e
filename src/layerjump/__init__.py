"""Linear shortcuts in transformers.

    import layerjump as lj
    model = lj.load("smollm2")                    # or a hub id, a folder, a GGUF file
    text = lj.read("pydoc")                       # or a file, a hub dataset, a list of strings
    jumps = lj.fit(model, text)                   # every level → last, in one pass, in closed form
    jumps[12, 30](states)                         # level 12 as level 30
    lj.Lens(model, jumps)("The capital of")       # what every level would predict

The rooms, in the order in which data flows (a module imports only from earlier rooms):

    inputs/    text → tokens → states: models, families, self-check, corpora, batches, forward hooks
    measure/   metrics, timing
    fit/       states → moments → jumps: sums, estimators, scores, files
    lens/      levels → predictions: trajectories of a text, readings of many positions, directions
    decode/    early exit: rules, caches, generation, calibration
    compress/  maps in the place of parts, blocks dropped, plain checkpoints
    train/     penalties on neighbouring levels, small models trained with them, fine-tuning
    evaluate/  benchmark tasks through lm-eval, perplexity with a sliding window
    studies/   experiments: protocol → numbers
    show/      numbers → figures, report, summary
    serve/     the local page
    cli/       the command line

Names are loaded on first use, so that `import layerjump` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerjump.compress.linearised import linearised as linearised
    from layerjump.compress.linearised import spliced as spliced
    from layerjump.compress.load import load as load
    from layerjump.compress.prune import prune as prune
    from layerjump.compress.truncate import truncate as truncate
    from layerjump.decode.calibrate import calibrate as calibrate
    from layerjump.decode.generate import early_exit as early_exit
    from layerjump.decode.generate import generate as generate
    from layerjump.fit.collect import collect as collect
    from layerjump.fit.collected import Collected as Collected
    from layerjump.fit.descent import train_n_njtc as train_n_njtc
    from layerjump.fit.fit import fit as fit
    from layerjump.fit.foreign.convert import export_lens as export_lens
    from layerjump.fit.foreign.convert import import_lens as import_lens
    from layerjump.fit.jacobian import jacobian as jacobian
    from layerjump.fit.jumps import Jumps as Jumps
    from layerjump.fit.moments import Moments as Moments
    from layerjump.inputs.batches import Batch as Batch
    from layerjump.inputs.batches import Batches as Batches
    from layerjump.inputs.batches import batches as batches
    from layerjump.inputs.batches import one_batch as one_batch
    from layerjump.inputs.check import self_check as self_check
    from layerjump.inputs.corpus import Corpus as Corpus
    from layerjump.inputs.corpus import read as read
    from layerjump.inputs.corpus import split as split
    from layerjump.inputs.models import Model as Model
    from layerjump.inputs.positions import Positions as Positions
    from layerjump.inputs.sites import Site as Site
    from layerjump.inputs.states import states as states
    from layerjump.lens.lens import Lens as Lens
    from layerjump.lens.refine import refine as refine
    from layerjump.lens.trajectory import Trajectory as Trajectory

__version__ = "0.1.0.dev0"

_HOME = {
    "Batch": "inputs.batches",
    "Batches": "inputs.batches",
    "Collected": "fit.collected",
    "Corpus": "inputs.corpus",
    "Jumps": "fit.jumps",
    "Lens": "lens.lens",
    "Model": "inputs.models",
    "Moments": "fit.moments",
    "Positions": "inputs.positions",
    "Site": "inputs.sites",
    "Trajectory": "lens.trajectory",
    "batches": "inputs.batches",
    "calibrate": "decode.calibrate",
    "collect": "fit.collect",
    "early_exit": "decode.generate",
    "export_lens": "fit.foreign.convert",
    "generate": "decode.generate",
    "import_lens": "fit.foreign.convert",
    "jacobian": "fit.jacobian",
    "linearised": "compress.linearised",
    "load": "compress.load",
    "one_batch": "inputs.batches",
    "prune": "compress.prune",
    "read": "inputs.corpus",
    "refine": "lens.refine",
    "self_check": "inputs.check",
    "split": "inputs.corpus",
    "spliced": "compress.linearised",
    "states": "inputs.states",
    "train_n_njtc": "fit.descent",
    "truncate": "compress.truncate",
}

__all__ = sorted([*_HOME, "fit"])


def __getattr__(name: str) -> Any:
    if name == "fit":
        return importlib.import_module("layerjump.fit")  # a room that can be called
    if name not in _HOME:
        raise AttributeError(f"module 'layerjump' has no attribute {name!r}")
    return getattr(importlib.import_module(f"layerjump.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
