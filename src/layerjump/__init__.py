"""Linear shortcuts in transformers.

    import layerjump as lj
    model = lj.load("smollm2")                    # or a hub id, a folder, a GGUF file
    text = lj.load_text("pydoc")                  # or a file, a hub dataset, a list of strings
    jumps = lj.fit(model, text)                   # every level → last level, one pass, closed form
    jumps[12, 30](states)                         # predict level 30 from states at level 12
    lj.Lens(model, jumps)("The capital of")       # the predictions of every level

Packages, in the order in which data flows (each imports only from earlier ones):

    data/           documents, tokenization, positions, batches
    models/         one model: loading, discovery of its structure, self-check, hidden states
    metrics/        statistics of logits, loss, linearity, intervals, timing
    jumps/          linear maps: second moments, estimators, scores, files
    lens/           predictions from hidden levels
    interventions/  activations and sub-modules replaced in a running model
    generation/     early exit and verified drafts, calibration of exit rules
    training/       penalties on hidden states, pretraining, fine-tuning
    pruning/        blocks dropped and replaced by maps, plain checkpoints
    evaluation/     benchmark tasks through lm-eval, perplexity
    studies/        experiments: protocol, numbers, figures
    report/         the page of a run
    server/         the local web page
    cli/            the command line

Names load on first use, so `import layerjump` does not import torch.
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
    from layerjump.generation.classify import calibrate_classifier as calibrate_classifier
    from layerjump.generation.classify import classify as classify
    from layerjump.generation.generate import early_exit as early_exit
    from layerjump.generation.generate import generate as generate
    from layerjump.interventions.linearize import linearize as linearize
    from layerjump.interventions.linearize import skip_blocks as skip_blocks
    from layerjump.jumps.collect_moments import collect_moments as collect_moments
    from layerjump.jumps.convert import export_lens as export_lens
    from layerjump.jumps.convert import import_lens as import_lens
    from layerjump.jumps.estimators.jacobian import fit_jacobian as fit_jacobian
    from layerjump.jumps.estimators.low_rank import train_n_njtc as train_n_njtc
    from layerjump.jumps.fit import fit as fit
    from layerjump.jumps.jumps import Jumps as Jumps
    from layerjump.jumps.moments import Moments as Moments
    from layerjump.jumps.moments import SplitMoments as SplitMoments
    from layerjump.lens.lens import Lens as Lens
    from layerjump.lens.refine import refine as refine
    from layerjump.lens.trajectory import Trajectory as Trajectory
    from layerjump.models.families import Override as Override
    from layerjump.models.loading import load as load
    from layerjump.models.model import Model as Model
    from layerjump.models.model import capture_states as capture_states
    from layerjump.models.self_check import self_check as self_check
    from layerjump.models.structure import Site as Site
    from layerjump.pruning.draft_model import make_draft_model as make_draft_model
    from layerjump.pruning.prune import prune as prune

__version__ = "0.1.0.dev0"

_HOME = {
    "Batch": "data.batches",
    "Batches": "data.batches",
    "SplitMoments": "jumps.moments",
    "Corpus": "data.corpus",
    "Jumps": "jumps.jumps",
    "Lens": "lens.lens",
    "Model": "models.model",
    "Moments": "jumps.moments",
    "Override": "models.families",
    "Positions": "data.positions",
    "Site": "models.structure",
    "Trajectory": "lens.trajectory",
    "make_batches": "data.batches",
    "calibrate": "generation.calibration.calibrate",
    "calibrate_classifier": "generation.classify",
    "classify": "generation.classify",
    "collect_moments": "jumps.collect_moments",
    "early_exit": "generation.generate",
    "export_lens": "jumps.convert",
    "fit": "jumps.fit",
    "generate": "generation.generate",
    "import_lens": "jumps.convert",
    "fit_jacobian": "jumps.estimators.jacobian",
    "linearize": "interventions.linearize",
    "load": "models.loading",
    "batch_from_ids": "data.batches",
    "prune": "pruning.prune",
    "load_text": "data.corpus",
    "refine": "lens.refine",
    "self_check": "models.self_check",
    "split_documents": "data.corpus",
    "skip_blocks": "interventions.linearize",
    "capture_states": "models.model",
    "train_n_njtc": "jumps.estimators.low_rank",
    "make_draft_model": "pruning.draft_model",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'layerjump' has no attribute {name!r}")
    return getattr(importlib.import_module(f"layerjump.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
