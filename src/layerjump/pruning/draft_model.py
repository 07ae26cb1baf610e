"""A draft model: the first blocks, with the jump to the output folded into the LM head.

Level l goes through the final norm's core (its weight set to one), and a least-squares map from there to the state
after the whole model's final norm is merged into the head: E becomes E M. Any engine runs the result; it is also a
ready `assistant_model` for assisted generation with the whole one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from layerjump.data.corpus import Corpus
from layerjump.errors import BadPruning
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.statistics import Moments
from layerjump.models.activations import capture_states
from layerjump.models.model import Model, require_model
from layerjump.models.structure import FINAL, Site
from layerjump.pruning.drop_layers import cannot_drop, without_blocks
from layerjump.pruning.prune import Pruned, prepare_calibration, with_test_loss
from layerjump.pruning.residual_weights import absorb_norm_weight, fold_input_map, untie_unembedding


def make_draft_model(
    model: Model,
    text: Corpus | str | Path,
    level: int,
    *,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
) -> Pruned:
    """Keep blocks 1 to `level`; what they give goes through one map straight to the vocabulary."""
    require_model(model)
    _check(model, level)
    model.require_predictions()
    calibration = prepare_calibration(model, text, tokens=tokens, split=split, seed=seed)
    student = without_blocks(model, range(level + 1, model.n_blocks + 1))
    norm = student.structure.final_steps[0]
    assert isinstance(norm, nn.Module)
    absorb_norm_weight(norm)
    source, target = Site(level), FINAL
    sums = Moments([(source, target)], reservoir=0)
    for one in capture_states(model, calibration.fit, [source, target]):
        with torch.no_grad():
            core = student.structure.to_final(one[source])
        sums.add({source: core, target: one[target]})
    (jump,) = solve("mat", sums.source(source), [sums.target(source, target)])
    untie_unembedding(student)
    fold_input_map(student.structure.unembedding, jump.weight)
    cuts = ((level, model.n_blocks),)
    made = Pruned(student, model, cuts, "truncate", "the last blocks", {}, calibration.about)
    return with_test_loss(made, calibration)


def _check(model: Model, level: int) -> None:
    if reason := cannot_drop(model):
        raise BadPruning(reason)
    if not 1 <= level < model.n_blocks:
        raise BadPruning(
            f"the first {level} of {model.n_blocks} blocks were to be kept; keep 1 to {model.n_blocks - 1}"
        )
    steps = model.structure.final_steps
    if model.task != "causal" or len(steps) != 1 or not hasattr(steps[0], "weight"):
        raise BadPruning(
            f"{model.hf.config.model_type} has more, or less, than one norm between its last block and the head, so a "
            f"jump cannot be merged into the head; use `prune` instead"
        )
