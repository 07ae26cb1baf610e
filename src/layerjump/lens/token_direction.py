"""The direction at a site that a lens decodes as a token, and the effect of ablating it.

A lens computes the logit of token t at a site as ⟨u_t, norm(W h)⟩, with u_t a row of the unembedding. Up to the norm's
division by the length this is linear in h, along Wᵀ (w ⊙ (u_t − ū)). Here w is the norm's weight and ū the mean row: a
shift of all logits changes no probability. That the lens reads a direction does not mean that the model uses it, so
`ablate_directions` projects it out of the hidden state and runs the rest of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layerjump.data.batches import Batch
from layerjump.errors import BadJumps, BadModel, argument
from layerjump.jumps.maps import Features, to_affine
from layerjump.lens.trajectory import BATCH_TOKENS, Prompt, Readout, tokenize_prompts
from layerjump.metrics.logits import chunks, upcast
from layerjump.models.hooks import Patch
from layerjump.models.model import Model, capture_states
from layerjump.models.structure import Site, norm_weight


@dataclass(frozen=True)
class DirectionAblation:
    """How each token's logit changes when its direction is projected out of a level.

    Logits are relative to their mean over the vocabulary.
    """

    level: int
    tokens: tuple[int, ...]
    predicted: Tensor
    """(texts, tokens) changes by the lens, from the ablated state alone."""
    actual: Tensor
    """(texts, tokens) changes by the model, run on from the ablated state."""

    @property
    def correlation(self) -> float:
        """Pearson correlation over all texts and tokens; NaN for fewer than two values or without any change."""
        both = torch.stack([self.predicted.flatten(), self.actual.flatten()]).double()
        return float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 1 else float("nan")


@torch.no_grad()
def token_direction(model: Model, readout: Readout, token: str | int) -> Tensor:
    """The unit vector at the readout's site along which the logit of a token grows."""
    unembedding = model.structure.unembedding.get_parameter("weight").double()
    direction = unembedding[model.prediction_id(token)] - unembedding.mean(0)
    if readout.needs_final_norm:
        weight = norm_weight(model)
        if weight is None:
            raise BadModel(
                f"{model.name} has more than one norm between level L and the unembedding, so no single direction at "
                f"level L stands for a token; use jumps to `final`, fitted with {argument('pairs', '3:final')} for "
                f"example"
            )
        direction = weight * direction
        if isinstance(model.structure.final_steps[0], nn.LayerNorm):
            # A layer norm subtracts the mean, so it ignores what all coordinates have in common.
            direction = direction - direction.mean()
    for jump in reversed(readout.maps):
        if any(isinstance(step, Features) for step in jump.modules()):
            raise BadJumps(
                f"the jump from {readout.site} reads more than the raw state, so no single direction stands for a "
                f"token; fit it with {argument('features', 'raw')}"
            )
        for factor in to_affine(jump).factors:
            direction = factor.to(direction).mT @ direction
    return direction / direction.norm()


@torch.no_grad()
def ablate_directions(
    model: Model, readout: Readout, tokens: Sequence[str | int], texts: Sequence[str]
) -> DirectionAblation:
    """Project each token's direction out of a level, at the last position read of each text, and run the model on.

    The predicted change is the lens' logit for the ablated state, less its logit for the original state.
    """
    ids = [model.prediction_id(token) for token in tokens]
    directions = torch.stack([token_direction(model, readout, token) for token in ids])
    predicted, actual = [], []
    for prompt in tokenize_prompts(model, texts):
        at_once = max(1, BATCH_TOKENS // len(prompt.ids) - 1)
        parts = [
            _logit_changes(model, readout, prompt, directions[rows], ids[rows]) for rows in chunks(len(ids), at_once)
        ]
        predicted.append(torch.cat([by_lens for by_lens, _ in parts]))
        actual.append(torch.cat([by_model for _, by_model in parts]))
    level = readout.site.index
    return DirectionAblation(level, tuple(ids), torch.stack(predicted), torch.stack(actual))


def _logit_changes(
    model: Model, readout: Readout, prompt: Prompt, directions: Tensor, ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Changes by the lens and by the model: row 0 of the batch runs unchanged, row i + 1 without direction i."""
    site, last = readout.site, Site(model.n_blocks)
    position = prompt.positions[-1]
    rows = torch.arange(len(ids) + 1)
    inputs = torch.tensor(prompt.ids).repeat(len(rows), 1)
    positions = torch.full_like(rows, position)
    batch = Batch(inputs, torch.ones_like(inputs), rows, positions, rows, inputs[rows, positions])

    def ablate(states: Tensor) -> Tensor:
        states = states.clone()
        rows = states[1:, position].double()
        unit = directions.to(rows)
        ablated = rows - (rows * unit).sum(-1, keepdim=True) * unit
        states[1:, position] = ablated.to(states.dtype)
        return states

    # Entered first, so that the captured state is the ablated one.
    with Patch({model.structure.tap(site): ablate}):
        (states,) = capture_states(model, [batch], [site, last])
    tokens, changes = torch.tensor(list(ids)), []
    for logits in (upcast(readout.logits(states[site])), upcast(model.logits(states[last]))):
        # Token i's logit in row i + 1 less the one in row 0, both relative to their row's mean.
        centred = (logits - logits.mean(-1, keepdim=True)).cpu()
        changes.append(centred[1:].gather(1, tokens[:, None])[:, 0] - centred[0, tokens])
    return changes[0], changes[1]
