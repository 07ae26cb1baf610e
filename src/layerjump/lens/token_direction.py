"""The direction at a site that a lens decodes as a token.

A lens computes the logit of token t at a site as ⟨u_t, norm(W h)⟩, with u_t a row of the unembedding. Up to the norm's
division by the length this is linear in h, along Wᵀ (w ⊙ (u_t − ū)). Here w is the norm's weight and ū the mean row: a
shift of all logits changes no probability. A jump that also reads h / rms(h), as `calibrated` jumps do, has a direction
for each state: with the rms frozen there, h / rms(h) is linear in h too. So has a model with more than one norm between
level L and the unembedding (BERT, T5): the direction is the gradient of the logit with scales frozen at the state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from layerjump.errors import BadJumps, BadModel, argument
from layerjump.jumps.maps import Features, apply_map, to_affine
from layerjump.lens.readout import Readout
from layerjump.models.frozen_scales import linearize_at
from layerjump.models.model import Model
from layerjump.models.structure import norm_weight
from layerjump.models.weight_forms import module_weight


def depends_on_state(model: Model, readout: Readout) -> bool:
    """Whether a token's direction at the readout's site differs from state to state."""
    reads_scale = any(isinstance(step, Features) and step.kind != "raw" for m in readout.maps for step in m.modules())
    return reads_scale or (readout.needs_final_norm and norm_weight(model) is None)


@torch.no_grad()
def token_direction(model: Model, readout: Readout, token: str | int, states: Tensor | None = None) -> Tensor:
    """The unit vector at the readout's site along which the logit of a token grows; with `states`, one for each."""
    ids = torch.tensor([model.prediction_id(token)])
    if states is None:
        return token_directions(model, readout, ids)[0]
    rows = states.reshape(-1, states.shape[-1])
    return token_directions(model, readout, ids, rows).expand(rows.shape).reshape(states.shape)


@torch.no_grad()
def token_directions(model: Model, readout: Readout, ids: Tensor, states: Tensor | None = None) -> Tensor:
    """Unit vectors (n, d) at the readout's site along which the logits of n tokens grow.

    `states` (n, d) hold a state for each token, or for one token any number of them. A jump that reads the raw state
    alone has the same direction at all states.
    """
    unembedding = module_weight(model.structure.unembedding)
    direction = unembedding[ids.to(unembedding.device)].double() - unembedding.mean(0, dtype=torch.float64)
    if readout.needs_final_norm:
        weight = norm_weight(model)
        if weight is None:
            direction = _frozen_directions(model, readout, ids, states)
        else:
            direction = weight.to(direction.device) * direction
        if weight is not None and isinstance(model.structure.final_steps[0], nn.LayerNorm):
            # A layer norm subtracts the mean, so it ignores what all coordinates have in common.
            direction = direction - direction.mean(-1, keepdim=True)
    for jump in reversed(readout.maps):
        for factor in to_affine(jump).factors:
            direction = direction @ factor.to(direction)
        kind = next((step.kind for step in jump.modules() if isinstance(step, Features)), "raw")
        if kind == "raw":
            continue
        if states is None or jump is not readout.maps[0]:
            raise BadJumps(
                f"the jump from {readout.site} also reads the state divided by its rms, so a token's direction depends "
                f"on the state; pass {argument('states')}, or fit with {argument('features', 'raw')}"
            )
        rms = states.to(direction).square().mean(-1, keepdim=True).sqrt()
        raw, unit = direction.split(states.shape[-1], -1) if kind == "both" else (0, direction)
        direction = raw + unit / rms.clamp_min(torch.finfo(direction.dtype).tiny)
    return direction / direction.norm(dim=-1, keepdim=True)


def _frozen_directions(model: Model, readout: Readout, ids: Tensor, states: Tensor | None) -> Tensor:
    """Gradients (n, d) at level L of the logits less their mean, with scales of norms frozen at each state."""
    if states is None:
        raise BadModel(
            f"{model.name} has more than one norm between level L and the unembedding, so a token's direction depends "
            f"on the state; pass {argument('states')}, or use jumps to `final`, fitted with "
            f"{argument('pairs', '3:final')} for example"
        )
    size = model.structure.vocab_size
    gradients = []
    for state, token in zip(states, ids.expand(len(states)).tolist(), strict=True):
        for jump in readout.maps:
            state = apply_map(jump, state)
        weights = torch.full((size,), -1 / size, device=state.device)
        weights[token] += 1
        gradients.append(linearize_at(model.logits, state, weights)[0].double())
    return torch.stack(gradients)
