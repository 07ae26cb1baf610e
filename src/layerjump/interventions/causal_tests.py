"""Causal tests of a lens: does the model use what the lens reads?

    measure_ablation(lens, " Paris", 20, text).correlation       # does a logit fall as the lens foresees?
    rerun = Rerun(model, batch)                                  # one changed position in each row of the batch
    measure_swaps(lens, rerun, 20, tokens).success               # does the model say the other token?
    measure_alignment(lens, measure_response(rerun, 20))         # does the lens foresee what a change does?

A lens can predict the output well from directions that the model does not use, and read directions that it uses
without predicting the output. Agreement with the model's output measures the one. These tests change hidden states, run
the rest of the model, and measure the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from layerjump.data.batches import Batch
from layerjump.errors import BadIntervention, argument
from layerjump.interventions.lens_interventions import exchange_coordinates
from layerjump.interventions.rerun_from_level import Rerun
from layerjump.lens.lens import Lens
from layerjump.lens.prepare_prompt import BATCH_TOKENS, Prompt, tokenize_prompts
from layerjump.lens.readout import Readout
from layerjump.lens.token_direction import token_direction, token_directions
from layerjump.metrics.logits import chunks, upcast
from layerjump.models.hooks import Patch
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import Site

PRINCIPAL = 32
"""Principal directions of the states from which the changed one is drawn."""


@dataclass(frozen=True)
class AblationEffect:
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


@dataclass(frozen=True, eq=False)
class SwapEffect:
    """What the model says after two tokens' directions are exchanged, for each position."""

    level: int
    first: Tensor
    """(positions,) the model's most probable token before the swap."""
    second: Tensor
    """(positions,) the token whose direction it is exchanged with."""
    success: Tensor
    """(positions,) whether the second token is the most probable one after the swap."""
    disturbance: Tensor
    """(positions,) KL of the distributions over all other tokens, before and after the swap, in nats."""


@dataclass(frozen=True, eq=False)
class Response:
    """What the model makes of a change of its states, for each position."""

    level: int
    states: Tensor
    """(positions, d) the states before the change."""
    changed: Tensor
    """(positions, d) the states after it."""
    probabilities: Tensor
    """(positions, vocabulary) the model's own before the change."""
    response: Tensor
    """(positions, vocabulary) the change of the model's log-probabilities."""


@torch.no_grad()
def measure_ablation(
    lens: Lens, tokens: str | int | Sequence[str | int], level: int, texts: str | Sequence[str]
) -> AblationEffect:
    """Ablate each token's direction at a level, at the last position read of each text, and measure the effect.

    The predicted change is the lens' logit for the ablated state, less its logit for the original state.
    """
    model, readout = lens.model, lens.readout(level)
    ids = [model.prediction_id(token) for token in ([tokens] if isinstance(tokens, str | int) else tokens)]
    directions = torch.stack([token_direction(model, readout, token) for token in ids])
    predicted, actual = [], []
    for prompt in tokenize_prompts(model, [texts] if isinstance(texts, str) else texts):
        at_once = max(1, BATCH_TOKENS // len(prompt.ids) - 1)
        parts = [
            _logit_changes(model, readout, prompt, directions[rows], ids[rows]) for rows in chunks(len(ids), at_once)
        ]
        predicted.append(torch.cat([by_lens for by_lens, _ in parts]))
        actual.append(torch.cat([by_model for _, by_model in parts]))
    return AblationEffect(level, tuple(ids), torch.stack(predicted), torch.stack(actual))


@torch.no_grad()
def measure_swaps(lens: Lens, rerun: Rerun, level: int, tokens: Tensor) -> SwapEffect:
    """Exchange the directions of the model's top token and of another one in each row, and run the model on.

    Args:
        lens: Tells the directions.
        rerun: A recorded pass over a batch with one position in each row, at which the state is changed.
        level: The level that is changed.
        tokens: The other token of each row (rows,).
    """
    model, states = lens.model, _picked_states(rerun, level)
    if tokens.shape != (len(states),):
        raise BadIntervention(f"expected {argument('tokens')} for {len(states)} positions, got {tuple(tokens.shape)}")
    before = model.logits(rerun.pick(rerun.levels[-1])).float()
    first, second = before.argmax(-1), tokens.to(before.device)
    readout = lens.readout(level)
    both = torch.stack([token_directions(model, readout, ids, states) for ids in (first, second)], 1)
    after = model.logits(_run_on(rerun, level, exchange_coordinates(states, both.to(states.device)))).float()
    others = torch.ones_like(before, dtype=torch.bool)
    others.scatter_(1, torch.stack([first, second], 1), False)
    rest_before, rest_after = (logits.masked_fill(~others, -torch.inf).log_softmax(-1) for logits in (before, after))
    terms = torch.where(others, rest_before.exp() * (rest_before - rest_after), 0)
    return SwapEffect(level, first, second, after.argmax(-1) == second, terms.sum(-1))


@torch.no_grad()
def measure_response(rerun: Rerun, level: int, *, seed: int = 0) -> Response:
    """Change the states of a level and run the model on: the response that a lens is compared with.

    In each row, the state's coordinate along one of the leading principal directions of all rows' states is replaced
    by that of another row (resample ablation). Unlike in the paper of the tuned lens, the directions do not depend on a
    lens, so that lenses are compared by the same changes.

    Args:
        rerun: A recorded pass over a batch with one position in each row, at which the state is changed.
        level: The level that is changed.
        seed: Seed of the directions and of the rows that coordinates are taken from.
    """
    model, states = rerun.model, _picked_states(rerun, level)
    if len(states) < 3:
        raise BadIntervention(f"expected 3 rows or more to exchange coordinates between, got {len(states)}")
    changed = resample_coordinates(states, seed)
    before = model.logits(rerun.pick(rerun.levels[-1])).float().log_softmax(-1)
    after = model.logits(_run_on(rerun, level, changed)).float().log_softmax(-1)
    return Response(level, states, changed, before.exp(), after - before)


@torch.no_grad()
def measure_alignment(lens: Lens, response: Response) -> Tensor:
    """Stimulus–response alignment (positions,): the change of the lens' output with a state against the model's.

    The stimulus is the change of the lens' log-probabilities, the response that of the model's. Their similarity, from
    −1 to 1, is the cosine in Aitchison's geometry, weighted by the model's own probabilities, as in "Eliciting Latent
    Predictions from Transformers with the Tuned Lens".
    """
    readout = lens.readout(response.level)
    before, after = (readout.logits(rows).float().log_softmax(-1) for rows in (response.states, response.changed))
    return _aitchison_cosine(after - before, response.response, response.probabilities)


def resample_coordinates(states: Tensor, seed: int) -> Tensor:
    """States (n, d) with one principal coordinate of each replaced by that of the row a random shift away."""
    generator = torch.Generator().manual_seed(seed)
    centred = states.double() - states.double().mean(0)
    directions = torch.linalg.svd(centred, full_matrices=False).Vh[: min(PRINCIPAL, len(states) - 1)]
    chosen = directions[torch.randint(len(directions), (len(states),), generator=generator).to(directions.device)]
    shift = int(torch.randint(1, len(states), (), generator=generator))
    difference = ((states.roll(shift, 0) - states).double() * chosen).sum(-1, keepdim=True)
    return states + (difference * chosen).to(states)


def _aitchison_cosine(stimulus: Tensor, response: Tensor, weights: Tensor) -> Tensor:
    """Cosine of changes of log-probabilities (n, vocabulary), centred and weighted by probabilities."""
    one, other = (change - (weights * change).sum(-1, keepdim=True) for change in (stimulus, response))
    product = (weights * one * other).sum(-1)
    lengths = ((weights * one.square()).sum(-1) * (weights * other.square()).sum(-1)).sqrt()
    return product / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)


def _picked_states(rerun: Rerun, level: int) -> Tensor:
    """The states (rows, d) that a test changes: one position in each row, so that no change meets another."""
    if not 0 <= level < rerun.model.n_blocks:
        raise BadIntervention(
            f"expected {argument('level')} from 0 to {rerun.model.n_blocks - 1}, after which blocks run, got {level}"
        )
    rows = rerun.batch.row
    if len(rows.unique()) != len(rows):
        raise BadIntervention("expected a batch with one picked position in each row, got several in one row")
    return rerun.pick(rerun.levels[level])


def _run_on(rerun: Rerun, level: int, changed: Tensor) -> Tensor:
    """States (rows, d) at the last level after the picked states of a level are replaced."""
    states = rerun.levels[level].clone()
    row, position = rerun.batch.row.to(states.device), rerun.batch.position.to(states.device)
    states[row, position] = changed.to(states)
    return rerun.pick(rerun.from_level(level, states))


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
