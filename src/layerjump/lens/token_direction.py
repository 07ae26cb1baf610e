"""The direction at a site that a lens reads as a token, and the effect of removing it.

A lens reads token t at a site as ⟨u_t, norm(W h)⟩, with u_t the head's row. Up to the norm's division by the length
this is linear in h, along Wᵀ (w ⊙ (u_t − ū)): w is the norm's weight, ū the mean row, because a change of all logits
alike changes no prediction. That the lens reads a direction does not mean that the model uses it. So the check takes it
out of the state and runs the rest of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from layerjump.data.batches import Batch
from layerjump.errors import BadJumps, BadModel, argument
from layerjump.jumps.maps import to_affine
from layerjump.lens.lens import Lens, SiteName
from layerjump.lens.trajectory import CELLS, Prompt, prompts, token_id
from layerjump.metrics.logits import upcast
from layerjump.models.activations import capture_states
from layerjump.models.hooks import Patch
from layerjump.models.structure import FINAL, Site
from layerjump.models.unembedding import norm_weight


@dataclass(frozen=True)
class DirectionAblation:
    """How the logit of each token (beside the mean of all) changed when its direction was taken out of a level."""

    level: int
    tokens: tuple[int, ...]
    predicted: Tensor
    """(texts, tokens) by the lens, from the changed state alone."""
    actual: Tensor
    """(texts, tokens) by the model, run on from the changed state."""

    @property
    def correlation(self) -> float:
        """Pearson's, over all texts and tokens; NaN where there are too few, or nothing changed."""
        both = torch.stack([self.predicted.flatten(), self.actual.flatten()]).double()
        return float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 1 else float("nan")


@torch.no_grad()
def direction(lens: Lens, token: str | int, site: SiteName) -> Tensor:
    """The direction at a site, of unit length, along which the lens reads more of a token."""
    model, site = lens.model, Site.parse(site)
    lens.route(site)  # an error if it cannot be read at all
    embedding = model.structure.unembedding.get_parameter("weight").double()
    found = embedding[token_id(model, token)] - embedding.mean(0)
    target = _target(lens, site)
    if target != FINAL:
        found = _before_norm(lens, found)
    if lens.jumps is not None and site != target:
        if lens.jumps.info[site, target].features != "raw":
            raise BadJumps(
                f"the jump {site} → {target} reads more than the raw state, so no one direction is a token; fit it on "
                f"raw states"
            )
        for factor in to_affine(lens.jumps[site, target]).factors:
            found = factor.to(found).mT @ found
    return found / found.norm()


def _target(lens: Lens, site: Site) -> Site:
    """Where the lens lands that reads this site."""
    last = Site(lens.model.n_blocks)
    if site == FINAL:
        return FINAL
    lands_last = site == last or lens.jumps is None or (site, last) in lens.jumps
    return last if lands_last else FINAL


def _before_norm(lens: Lens, found: Tensor) -> Tensor:
    weight = norm_weight(lens.model)
    if weight is None:
        raise BadModel(
            f"{lens.model.name} has more than one norm between level L and the vocabulary product, so no one direction "
            f"there is a token; fit jumps to `final` ({argument('pairs', '3:final')}) and give those"
        )
    found = weight * found
    # A layer norm takes the mean off, so what is common to all coordinates is not read.
    centres = isinstance(lens.model.structure.final_steps[0], nn.LayerNorm)
    return found - found.mean() if centres else found


@torch.no_grad()
def remove(
    lens: Lens, tokens: Sequence[str | int], level: int, texts: Sequence[str]
) -> DirectionAblation:
    """Take each token's direction out of a level, at the last position read of each text, and run the model on.

    The prediction is what the lens reads of the changed state, less what it reads of the state as it was.
    """
    model = lens.model
    if not 0 <= level <= model.n_blocks:
        raise BadModel(f"level {level} was given; give one from 0 to {model.n_blocks}")
    ids = [token_id(model, token) for token in tokens]
    directions = torch.stack([direction(lens, token, level) for token in ids])
    predicted, real = [], []
    for prompt in prompts(model, texts):
        at_once = max(1, CELLS // len(prompt.ids) - 1)
        starts = range(0, len(ids), at_once)
        parts = [
            _changes(lens, level, prompt, directions[i : i + at_once], ids[i : i + at_once])
            for i in starts
        ]
        predicted.append(torch.cat([part[0] for part in parts]))
        real.append(torch.cat([part[1] for part in parts]))
    return DirectionAblation(level, tuple(ids), torch.stack(predicted), torch.stack(real))


def _changes(
    lens: Lens, level: int, prompt: Prompt, directions: Tensor, ids: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Predicted and real changes of one text: its first row is run as it is, the others each with a change."""
    model, site, last = lens.model, Site(level), Site(lens.model.n_blocks)
    position = prompt.positions[-1]
    rows = torch.arange(len(ids) + 1)
    inputs = torch.tensor(prompt.ids).repeat(len(rows), 1)
    where = torch.full_like(rows, position)
    batch = Batch(inputs, torch.ones_like(inputs), rows, where, rows, inputs[rows, where])
    # Entered first, so that what is recorded is the state after the change.
    change = partial(_without, position=position, directions=directions)
    with Patch({model.structure.tap(site): change}):
        (found,) = capture_states(model, [batch], [site, last])
    return (
        _change(upcast(lens.logits(site, found[site])), ids),
        _change(upcast(model.logits(found[last])), ids),
    )


def _change(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Row i + 1's change from row 0 of token i's logit, beside the mean of all logits."""
    centred = (logits - logits.mean(-1, keepdim=True)).cpu()
    picked = torch.tensor(list(ids))
    after = centred[1:].gather(1, picked[:, None])[:, 0]
    return after - centred[0, picked]


def _without(hidden: Tensor, position: int, directions: Tensor) -> Tensor:
    """Hidden states with direction i projected out of row i + 1, at one position."""
    hidden = hidden.clone()
    state = hidden[1:, position].double()
    along = directions.to(state)
    share = (state * along).sum(-1, keepdim=True)
    hidden[1:, position] = (state - share * along).to(hidden.dtype)
    return hidden
