"""Linear shortcuts in transformers.

    import layerjump as lj
    model = lj.load("smollm2")                    # or a hub id, a folder, a GGUF file
    text = lj.load_text("pydoc")                       # or a file, a hub dataset, a list of strings
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
    from layerjump.data.batches import Batch as Batch
    from layerjump.data.batches import Batches as Batches
    from layerjump.data.batches import batch_from_ids as batch_from_ids
    from layerjump.data.batches import make_batches as make_batches
    from layerjump.data.corpus import Corpus as Corpus
    from layerjump.data.corpus import load_text as load_text
    from layerjump.data.corpus import split_documents as split_documents
    from layerjump.data.positions import Positions as Positions
    from layerjump.generation.calibration.calibrate import calibrate as calibrate
    from layerjump.generation.generate import early_exit as early_exit
    from layerjump.generation.generate import generate as generate
    from layerjump.interventions.linearize import linearize as linearize
    from layerjump.interventions.linearize import skip_blocks as skip_blocks
    from layerjump.jumps.collect import SplitMoments as SplitMoments
    from layerjump.jumps.collect import collect_moments as collect_moments
    from layerjump.jumps.convert.convert import export_lens as export_lens
    from layerjump.jumps.convert.convert import import_lens as import_lens
    from layerjump.jumps.estimators.gradient import fit_jacobian as fit_jacobian
    from layerjump.jumps.estimators.gradient import train_n_njtc as train_n_njtc
    from layerjump.jumps.fit import fit as fit
    from layerjump.jumps.jumps import Jumps as Jumps
    from layerjump.jumps.statistics import Moments as Moments
    from layerjump.lens.lens import Lens as Lens
    from layerjump.lens.trajectory import Trajectory as Trajectory
    from layerjump.lens.tuning import refine as refine
    from layerjump.models.activations import capture_states as capture_states
    from layerjump.models.loading import load as load
    from layerjump.models.model import Model as Model
    from layerjump.models.self_check import self_check as self_check
    from layerjump.models.structure import Site as Site
    from layerjump.pruning.draft_model import make_draft_model as make_draft_model
    from layerjump.pruning.prune import prune as prune

__version__ = "0.1.0.dev0"

_HOME = {
    "Batch": "data.batches",
    "Batches": "data.batches",
    "SplitMoments": "jumps.collect",
    "Corpus": "data.corpus",
    "Jumps": "jumps.jumps",
    "Lens": "lens.lens",
    "Model": "models.model",
    "Moments": "jumps.statistics",
    "Positions": "data.positions",
    "Site": "models.structure",
    "Trajectory": "lens.trajectory",
    "make_batches": "data.batches",
    "calibrate": "generation.calibration.calibrate",
    "collect_moments": "jumps.collect",
    "early_exit": "generation.generate",
    "export_lens": "jumps.convert.convert",
    "fit": "jumps.fit",
    "generate": "generation.generate",
    "import_lens": "jumps.convert.convert",
    "fit_jacobian": "jumps.estimators.gradient",
    "linearize": "interventions.linearize",
    "load": "models.loading",
    "batch_from_ids": "data.batches",
    "prune": "pruning.prune",
    "load_text": "data.corpus",
    "refine": "lens.tuning",
    "self_check": "models.self_check",
    "split_documents": "data.corpus",
    "skip_blocks": "interventions.linearize",
    "capture_states": "models.activations",
    "train_n_njtc": "jumps.estimators.gradient",
    "make_draft_model": "pruning.draft_model",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'layerjump' has no attribute {name!r}")
    return getattr(importlib.import_module(f"layerjump.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
