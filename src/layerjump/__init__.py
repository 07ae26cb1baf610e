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
    from layerjump.data.corpus import split_indices as split_indices
    from layerjump.data.positions import Positions as Positions
    from layerjump.evaluation.perplexity import perplexity as perplexity
    from layerjump.evaluation.tasks import evaluate as evaluate
    from layerjump.generation.calibration.calibrate import calibrate as calibrate
    from layerjump.generation.classifier_exit import calibrate_classifier as calibrate_classifier
    from layerjump.generation.classifier_exit import classify as classify
    from layerjump.generation.generate import early_exit as early_exit
    from layerjump.generation.generate import generate as generate
    from layerjump.interventions.causal_tests import measure_ablation as measure_ablation
    from layerjump.interventions.lens_interventions import ablate as ablate
    from layerjump.interventions.lens_interventions import patch as patch
    from layerjump.interventions.lens_interventions import steer as steer
    from layerjump.interventions.lens_interventions import swap as swap
    from layerjump.interventions.linearize import linearize as linearize
    from layerjump.interventions.linearize import skip_blocks as skip_blocks
    from layerjump.jumps.collect_moments import collect_moments as collect_moments
    from layerjump.jumps.convert.import_export import export_lens as export_lens
    from layerjump.jumps.convert.import_export import import_lens as import_lens
    from layerjump.jumps.default_jumps import load_jumps as load_jumps
    from layerjump.jumps.estimators.finite_differences import fit_finite_differences as fit_finite_differences
    from layerjump.jumps.estimators.jacobian import fit_jacobian as fit_jacobian
    from layerjump.jumps.estimators.n_njtc import train_n_njtc as train_n_njtc
    from layerjump.jumps.fit import fit as fit
    from layerjump.jumps.jumps import Jumps as Jumps
    from layerjump.jumps.moments import Moments as Moments
    from layerjump.jumps.moments_of_splits import SplitMoments as SplitMoments
    from layerjump.lens.attribution import Attribution as Attribution
    from layerjump.lens.lens import Lens as Lens
    from layerjump.lens.refine import refine as refine
    from layerjump.lens.survey import Survey as Survey
    from layerjump.lens.survey import survey as survey
    from layerjump.lens.trajectory import Trajectory as Trajectory
    from layerjump.models.discovery import StructureHints as StructureHints
    from layerjump.models.loading import load as load
    from layerjump.models.model import Model as Model
    from layerjump.models.model import capture_states as capture_states
    from layerjump.models.self_check import self_check as self_check
    from layerjump.models.sites import Site as Site
    from layerjump.models.write_gguf import write_gguf as write_gguf
    from layerjump.pruning.draft_model import make_draft_model as make_draft_model
    from layerjump.pruning.prune import prune as prune
    from layerjump.training.pretrain import Recipe as Recipe
    from layerjump.training.pretrain import pretrain as pretrain

__version__ = "0.1.0"

_HOME = {
    "Attribution": "lens.attribution",
    "Batch": "data.batches",
    "Batches": "data.batches",
    "Corpus": "data.corpus",
    "Jumps": "jumps.jumps",
    "Lens": "lens.lens",
    "Model": "models.model",
    "Moments": "jumps.moments",
    "Positions": "data.positions",
    "Recipe": "training.pretrain",
    "Site": "models.sites",
    "SplitMoments": "jumps.moments_of_splits",
    "StructureHints": "models.discovery",
    "Survey": "lens.survey",
    "Trajectory": "lens.trajectory",
    "ablate": "interventions.lens_interventions",
    "batch_from_ids": "data.batches",
    "calibrate": "generation.calibration.calibrate",
    "calibrate_classifier": "generation.classifier_exit",
    "capture_states": "models.model",
    "classify": "generation.classifier_exit",
    "collect_moments": "jumps.collect_moments",
    "early_exit": "generation.generate",
    "evaluate": "evaluation.tasks",
    "export_lens": "jumps.convert.import_export",
    "fit": "jumps.fit",
    "fit_finite_differences": "jumps.estimators.finite_differences",
    "fit_jacobian": "jumps.estimators.jacobian",
    "generate": "generation.generate",
    "import_lens": "jumps.convert.import_export",
    "linearize": "interventions.linearize",
    "load": "models.loading",
    "load_jumps": "jumps.default_jumps",
    "load_text": "data.corpus",
    "make_batches": "data.batches",
    "make_draft_model": "pruning.draft_model",
    "measure_ablation": "interventions.causal_tests",
    "patch": "interventions.lens_interventions",
    "perplexity": "evaluation.perplexity",
    "pretrain": "training.pretrain",
    "prune": "pruning.prune",
    "refine": "lens.refine",
    "self_check": "models.self_check",
    "skip_blocks": "interventions.linearize",
    "split_indices": "data.corpus",
    "steer": "interventions.lens_interventions",
    "survey": "lens.survey",
    "swap": "interventions.lens_interventions",
    "train_n_njtc": "jumps.estimators.n_njtc",
    "write_gguf": "models.write_gguf",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'layerjump' has no attribute {name!r}")
    return getattr(importlib.import_module(f"layerjump.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
