"""A draft model: the first blocks of a model, with the jump to the output folded into the unembedding.

Level n passes the final norm with its weight set to one. A least-squares map from there to the original model's state
after the final norm is folded into the unembedding E, which becomes E M. The result is an ordinary checkpoint and
can be the `assistant_model` in assisted generation with the original model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from layerjump.data.corpus import Corpus
from layerjump.errors import BadPruning
from layerjump.jumps.estimators.registry import solve
from layerjump.jumps.moments import Moments
from layerjump.models.model import Model, capture_states, require_model
from layerjump.models.sites import FINAL, Site
from layerjump.pruning.drop_blocks import cannot_drop, without_blocks
from layerjump.pruning.prune import Pruned, prepare_calibration, with_test_loss
from layerjump.pruning.rotate_stream import (
    absorb_norm_weight,
    cannot_edit_unembedding,
    fold_input_map,
    untie_unembedding,
)


def make_draft_model(
    model: Model,
    text: Corpus | str | Path,
    n_blocks: int,
    *,
    tokens: int | None = None,
    split: str = "80/10/10",
    seed: int = 0,
) -> Pruned:
    """Return a model of the first `n_blocks` blocks, whose last level one map takes to the unembedding.

    `text`, `tokens`, `split` and `seed` are those of `prune`; the model stays as it is.
    """
    require_model(model)
    if reason := cannot_drop(model):
        raise BadPruning(reason)
    if not 1 <= n_blocks < model.n_blocks:
        raise BadPruning(
            f"the first {n_blocks} of {model.n_blocks} blocks cannot be kept; keep 1 to {model.n_blocks - 1}"
        )
    steps = model.structure.final_steps
    if model.task != "causal" or len(steps) != 1 or not hasattr(steps[0], "weight"):
        raise BadPruning(
            f"{model.model_type} does not have exactly one norm between its last block and the unembedding, "
            f"so a jump cannot be folded into the unembedding; use `prune` instead"
        )
    model.require_predictions()
    if reason := cannot_edit_unembedding(model):
        raise BadPruning(f"a jump cannot be folded into the unembedding: {reason}")
    calibration = prepare_calibration(model, text, tokens=tokens, split=split, seed=seed)
    shorter = without_blocks(model, range(n_blocks + 1, model.n_blocks + 1))
    norm = shorter.structure.final_steps[0]
    assert isinstance(norm, nn.Module)
    absorb_norm_weight(norm)
    source, target = Site(n_blocks), FINAL
    moments = Moments([(source, target)], reservoir=0)
    for states in capture_states(model, calibration.fit, [source, target]):
        with torch.no_grad():
            normed = shorter.structure.to_final(states[source])
        moments.add({source: normed, target: states[target]})
    (jump,) = solve("mat", moments.source(source), [moments.target(source, target)])
    untie_unembedding(shorter)
    fold_input_map(shorter.structure.unembedding, jump.weight)
    spans = ((n_blocks, model.n_blocks),)
    draft = Pruned(shorter, model, spans, "truncate", "the last blocks", calibration.info)
    return with_test_loss(draft, calibration)
