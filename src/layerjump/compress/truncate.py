"""The first blocks of a model with the jump to its output merged into the head: an ordinary, shorter checkpoint.

Level l goes through the final norm's core (its weight set to one), and a least-squares map from there to the state
after the whole model's final norm is merged into the head: E becomes E M. Any engine runs the result; it is also a
ready `assistant_model` for assisted generation with the whole one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from layerjump.compress.blocks import cannot_drop, without_blocks
from layerjump.compress.projections import map_input
from layerjump.compress.prune import Pruned, calibrate, measured
from layerjump.compress.turn import take_weight, untie
from layerjump.errors import BadPruning
from layerjump.fit.moments import Moments
from layerjump.fit.solve import solve
from layerjump.inputs.corpus import Corpus
from layerjump.inputs.models import Model, require_model
from layerjump.inputs.sites import FINAL, Site
from layerjump.inputs.states import states


def truncate(
    model: Model,
    text: Corpus | str | Path,
    level: int,
    *,
    tokens: int | None = None,
    sizes: str = "80/10/10",
    seed: int = 0,
) -> Pruned:
    """Keep blocks 1 to `level`; what they give goes through one map straight to the vocabulary."""
    require_model(model)
    _check(model, level)
    model.require_predictions()
    calibration = calibrate(model, text, tokens=tokens, sizes=sizes, seed=seed)
    student = without_blocks(model, range(level + 1, model.n_blocks + 1))
    norm = student.anatomy.final_steps[0]
    assert isinstance(norm, nn.Module)
    take_weight(norm)
    source, target = Site(level), FINAL
    sums = Moments([(source, target)], reservoir=0)
    for one in states(model, calibration.fit, [source, target]):
        with torch.no_grad():
            core = student.anatomy.to_final(one[source])
        sums.add({source: core, target: one[target]})
    (jump,) = solve("mat", sums.source(source), [sums.target(source, target)])
    untie(student)
    map_input(student.anatomy.head, jump.weight)
    cuts = ((level, model.n_blocks),)
    made = Pruned(student, model, cuts, "truncate", "the last blocks", {}, calibration.about)
    return measured(made, calibration)


def _check(model: Model, level: int) -> None:
    if reason := cannot_drop(model):
        raise BadPruning(reason)
    if not 1 <= level < model.n_blocks:
        raise BadPruning(
            f"the first {level} of {model.n_blocks} blocks were to be kept; keep 1 to {model.n_blocks - 1}"
        )
    steps = model.anatomy.final_steps
    if model.task != "causal" or len(steps) != 1 or not hasattr(steps[0], "weight"):
        raise BadPruning(
            f"{model.hf.config.model_type} has more, or less, than one norm between its last block and the head, so a "
            f"jump cannot be merged into the head; use `prune` instead"
        )
