"""Refine jumps by gradient descent on the KL divergence from the model's own predictions.

    refined = lj.refine(model, jumps, text, steps=200)

The closed-form maps are the starting point. One forward pass over a batch serves all levels, and the model's own
distribution is computed once for all of them. Maps are updated one after another, so memory does not grow with their
number, and logits are computed in chunks of rows that fit a memory budget. A step estimates the KL with a sampled
softmax: the likely tokens and an importance-weighted sample of the others. Validation text, with the full softmax,
decides when to stop and which parameters of each map are the best: no map ends worse there than it began. A level may
have two maps, to level L and to `final`; the one with the lower KL is kept.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from torch.nn.utils import parametrize

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_indices
from layerjump.errors import BadArtifact, BadEstimator, BadJumps, argument, one_line
from layerjump.io import replace_file, writing
from layerjump.jumps.estimators.registry import KEPT_BOTH_TARGETS
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.serialization import check_model
from layerjump.metrics.logits import chunk_rows, chunks
from layerjump.models.model import Model, capture_states
from layerjump.models.sites import FINAL, Pair, Site
from layerjump.models.structure import Structure, can_restrict, unembedding_rows, with_unembedding

CHECKPOINT_NAME = "unfinished-refine.pt"
_FORMAT = "layerjump refine 3"
LIKELY_TOKENS, SAMPLED_TOKENS = 4096, 2048
"""Tokens of the sampled softmax: the most probable ones by the model, and a sample of the others."""
VALIDATION_POSITIONS = 256
_POSITIONS_PER_BATCH = 16  # validation positions from one batch
_VALIDATION_INTERVAL = 25  # steps between validations
_BATCH_TOKENS = 256  # tokens of a batch, padding included
_MIN_IMPROVEMENT = 1e-3  # relative decrease of the mean validation KL that counts as one
_RATE_DECAY = 0.4  # factor of a map's learning rate after a validation without improvement
_ROUNDING = 1e-3  # a KL of zero can be computed as a number this far below zero

Progress = Callable[[int, int, list[float]], None]
"""Called after each validation with the steps done, all steps, and the validation KL of every level."""


def refine(
    model: Model,
    jumps: Jumps,
    text: Corpus | str | Path,
    *,
    steps: int = 200,
    tokens: int | None = None,
    positions_per_step: int = 256,
    learning_rate: float = 0.2,
    seed: int = 0,
    patience: int = 8,
    progress: Progress | None = None,
    checkpoint_folder: Path | None = None,
) -> Jumps:
    """Return jumps tuned to minimise KL(model ‖ lens); documents that the jumps were not fitted on validate them.

    Args:
        steps: the number of steps; each uses one batch of the documents that the jumps were fitted on.
        tokens: the amount of text, as in `fit`: the same number selects the same documents.
        positions_per_step: the number of positions of the batch at which a step computes the KL.
        learning_rate: Adam's learning rate. It decays linearly to zero in the second half of the steps, and drops for
            a map whose validation KL rises.
        patience: stop after this many validations without a lower mean KL.
        checkpoint_folder: where to save checkpoints, and to resume from one; a resumed run ends with identical bits.
    """
    settings = {"steps": steps, "positions_per_step": positions_per_step, "patience": patience}
    for name, value in settings.items():
        if value < 1:
            raise BadEstimator(f"expected {argument(name)} of 1 or more, got {value}")
    if not 0 < learning_rate <= 100:
        raise BadEstimator(
            f"expected {argument('learning_rate')} above 0 and at most 100, such as 0.2, got {learning_rate}"
        )
    check_model(jumps, model, allow_other_weights=jumps.used_on is not None)
    corpus = text if isinstance(text, Corpus) else load_text(text)
    objective = KLObjective(model, jumps, tunable_pairs(jumps, model))
    batches, validation_batches = objective.make_batches(corpus, seed, tokens)
    validation_rows = objective.validation_rows(validation_batches)
    maps = {pair: TrainableMap(jumps[pair], validation_rows.states[pair[0]]) for pair in objective.pairs}
    tuner = Tuner(maps, learning_rate, steps)
    # The starting maps belong to the identity of a run: those of other estimators have the same shapes.
    digest = hashlib.sha256(jumps.provenance.fingerprint.encode())
    for parameter in jumps.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    start = digest.hexdigest()
    run_id = f"{_FORMAT} {start} {corpus.sha256} {steps} {tokens} {positions_per_step} {learning_rate} {seed}"

    def validate() -> None:
        tuner.record_validation(objective.mean_kl(validation_rows, maps))
        if progress:
            progress(tuner.step, steps, kl_by_level(tuner.history[-1], objective.pairs))

    if checkpoint_folder is not None:
        tuner.restore(checkpoint_folder, run_id)
    if tuner.step == 0:
        validate()
    while not tuner.is_finished(patience):
        rows = objective.sample_rows(batches, tuner.step, positions_per_step)
        tuner.update(objective.mean_kl(rows, maps, (seed, tuner.step)))
        if tuner.step % _VALIDATION_INTERVAL == 0 or tuner.step == steps:
            validate()
            if checkpoint_folder is not None:
                tuner.save(checkpoint_folder, run_id)
    return select_refined(jumps, tuner, corpus)


def check_tunable(estimator: str, pairs: Sequence[Pair], n_blocks: int) -> None:
    """Raise for jumps that cannot be refined; callers check this before they pass over the text."""
    if not any(target in (FINAL, Site(n_blocks)) for _, target in pairs):
        raise BadJumps(
            f"no jump leads to the last level or to `final`, so there is no prediction to refine; fit with "
            f"{argument('pairs', 'to-last')} or {argument('pairs', 'to-final')}"
        )
    if estimator == "ojfa":
        raise BadEstimator(
            "expected an estimator with one map for each level, got ojfa, which shares one map between all levels; "
            "refine jumps of another estimator"
        )


def tunable_pairs(jumps: Jumps, model: Model) -> list[Pair]:
    """The jumps that a lens decodes levels with; if both targets of a level are still open, the jumps to both."""
    last = Site(model.n_blocks)
    check_tunable(jumps.provenance.estimator, list(jumps), model.n_blocks)
    pairs = [pair for pair in jumps if pair[1] in (FINAL, last)]
    if jumps.provenance.settings.get("how") != KEPT_BOTH_TARGETS:
        pairs = [pair for pair in pairs if pair[1] == last or (pair[0], last) not in jumps]
    if not any(to_affine(jumps[pair]).n_parameters for pair in pairs):
        raise BadEstimator(
            f"{jumps.provenance.estimator} has no parameters to refine; refine affine or calibrated jumps"
        )
    return pairs


def kl_by_level(values: Sequence[float], pairs: Sequence[Pair]) -> list[float]:
    """The lowest KL among the maps of each level."""
    by_source: dict[Site, list[float]] = {}
    for (source, _), value in zip(pairs, values, strict=True):
        by_source.setdefault(source, []).append(value)
    return [min(filter(math.isfinite, level), default=math.inf) for level in by_source.values()]


def select_refined(jumps: Jumps, tuner: Tuner, corpus: Corpus) -> Jumps:
    """Jumps with the best map of each level, and the course of the refinement in their provenance."""
    pairs, provenance = list(tuner.maps), jumps.provenance
    lowest_kl, best_maps = dict(zip(pairs, tuner.best_kl, strict=True)), tuner.best_maps()
    best = {min((pair for pair in pairs if pair[0] == source), key=lowest_kl.__getitem__) for source, _ in pairs}
    worse = set(pairs) - best
    maps = {pair: best_maps[pair] if pair in best else to_affine(jumps[pair]) for pair in jumps if pair not in worse}
    infos = {
        # R² and strength describe the closed form.
        pair: replace(jumps.info[pair], r2=None, strength=None) if pair in best else jumps.info[pair]
        for pair in maps
    }
    kl_before, kl_after = (
        [value if math.isfinite(value) else None for value in kl_by_level(values, pairs)]
        for values in (tuner.history[0], tuner.best_kl)
    )
    course = {
        "steps": tuner.step,
        "rate": tuner.learning_rate,
        "text": corpus.name,
        "text_sha256": corpus.sha256,
        "kl_before": kl_before,
        "kl_after": kl_after,
    }
    settings = provenance.settings | {"refine": course}
    if "temperature" in settings:
        dropped = {str(source) for source, target in worse if target == FINAL}
        temperatures = settings["temperature"].items()
        settings["temperature"] = {level: value for level, value in temperatures if level not in dropped}
    estimator = f"{provenance.estimator}+kl"
    return Jumps.from_maps(maps, infos, replace(provenance, estimator=estimator, settings=settings))


# The objective: rows of hidden states, and the KL of every map at them


@dataclass(frozen=True)
class TrainingRows:
    """Hidden states at some positions."""

    states: dict[Site, Tensor]
    """(rows, d_model) at the source of each map."""
    final: Tensor
    """(rows, d) the model's own input of the unembedding."""


@dataclass(frozen=True)
class KLObjective:
    """KL(model ‖ lens) of the maps between some pairs."""

    model: Model
    jumps: Jumps
    pairs: list[Pair]

    def make_batches(self, corpus: Corpus, seed: int, tokens: int | None) -> tuple[Batches, Batches]:
        """Batches to train on and to validate on: the documents that the jumps were fitted on, and others.

        A text other than the one of the fit is split in the default ratio.
        """
        provenance, n_documents = self.jumps.provenance, len(corpus.documents)
        ratio = {"split": provenance.split} if provenance.text_sha256 == corpus.sha256 else {}
        split = split_indices(n_documents, **ratio, seed=provenance.seed)
        positions = self.model.prediction_positions

        tokenization = self.model.tokenization

        def cut(part: tuple[int, ...]) -> Batches:
            # The same share of the tokens as in a fit with a validation split.
            limit = None if tokens is None else max(1, tokens * len(part) // n_documents)
            return make_batches(
                corpus, tokenization, positions, documents=part, tokens=limit, seed=seed, max_batch_tokens=_BATCH_TOKENS
            )

        return cut(split.fit), cut(split.validation or split.test)

    def sample_rows(self, batches: Batches, step: int, count: int) -> TrainingRows:
        """`count` positions of one batch; those of a step are the same in every run."""
        epoch, index = divmod(step, len(batches))
        return self._capture(batches, [_permutation(len(batches), batches.seed, epoch)[index]], count, step)

    def validation_rows(self, batches: Batches) -> TrainingRows:
        """A few positions of each of many batches."""
        n_batches = VALIDATION_POSITIONS // _POSITIONS_PER_BATCH
        indices = _permutation(len(batches), batches.seed, 0)[:n_batches]
        return self._capture(batches, indices, _POSITIONS_PER_BATCH, 0)

    def _capture(self, batches: Batches, indices: list[int], count: int, step: int) -> TrainingRows:
        sites = [*dict.fromkeys(source for source, _ in self.pairs), FINAL]
        parts: dict[Site, list[Tensor]] = {site: [] for site in sites}
        for index in indices:
            batch = batches[index]
            picks = torch.tensor(_permutation(batch.n_picks, batches.seed, step, index)[:count])
            (captured,) = capture_states(self.model, [batch], sites)
            for site in sites:
                parts[site].append(captured[site][picks.to(captured[site].device)])
        # A model can be spread over devices: maps run on the device of the unembedding.
        device = parts[FINAL][0].device
        rows = {site: torch.cat(parts[site]).to(device) for site in sites}
        return TrainingRows(rows, rows.pop(FINAL))

    def mean_kl(
        self, rows: TrainingRows, maps: Mapping[Pair, TrainableMap], seed: tuple[int, ...] | None = None
    ) -> dict[Pair, float]:
        """Every map's mean KL by the full softmax.

        With a seed it is the KL by a sampled softmax, and its gradient is added to the parameters of each map.
        """
        totals = dict.fromkeys(maps, 0.0)
        n_rows = len(rows.final)
        for chunk in chunks(n_rows, chunk_rows(self.model)):
            target = SampledTarget.full(self.model.structure, rows.final[chunk])
            if seed is not None:
                target = target.sample(np.random.default_rng((*seed, chunk.start)))
            for pair, trainable in maps.items():
                with torch.set_grad_enabled(seed is not None):
                    mapped = trainable(rows.states[pair[0]][chunk].float()).to(rows.final.dtype)
                    logits = target.logits(mapped, needs_final_norm=pair[1] != FINAL)
                kl, gradient = target.kl(logits.detach())
                if seed is not None:
                    logits.backward(gradient.div_(n_rows).to(logits.dtype))
                totals[pair] += kl / n_rows
        return totals


@dataclass(frozen=True)
class SampledTarget:
    """The model's own distribution at some rows, over all tokens or over a sample of them.

    The product with the unembedding is most of the cost of a step, and nearly all of the model's probability at some
    rows is on a few thousand tokens. So a step uses these, and an importance-weighted random sample of the others. The
    loss is nearly unbiased unless a map is confident in tokens that the model rules out.
    """

    structure: Structure
    """A structure whose unembedding has the rows of the sampled tokens."""
    probabilities: Tensor
    """(rows, tokens) by the model."""
    log_weights: Tensor | None = None
    """(tokens,) log importance weights; None if all tokens are there."""

    @classmethod
    @torch.no_grad()
    def full(cls, structure: Structure, final: Tensor) -> SampledTarget:
        """The distribution over all tokens, from the model's own input of the unembedding."""
        return cls(structure, structure.decode(final).float().softmax(-1))

    @torch.no_grad()
    def sample(
        self, generator: np.random.Generator, n_likely: int = LIKELY_TOKENS, n_sampled: int = SAMPLED_TOKENS
    ) -> SampledTarget:
        """The distribution over a sample of tokens; itself if that is not smaller or not possible."""
        vocab_size, unembedding = self.probabilities.shape[1], self.structure.unembedding
        if vocab_size <= n_likely + n_sampled or not can_restrict(self.structure):
            return self
        assert isinstance(unembedding, nn.Linear)
        order = self.probabilities.sum(0).argsort(descending=True, stable=True)
        n_others = vocab_size - n_likely
        sampled = torch.from_numpy(generator.choice(n_others, n_sampled, replace=False))
        tokens = torch.cat([order[:n_likely], order[n_likely:][sampled.to(order.device)]])
        weights = self.probabilities.new_ones(len(tokens))
        weights[n_likely:] = n_others / n_sampled
        probabilities = self.probabilities[:, tokens] * weights
        return SampledTarget(
            with_unembedding(self.structure, unembedding_rows(unembedding, tokens)),
            probabilities / probabilities.sum(-1, keepdim=True),
            weights.log(),
        )

    def logits(self, mapped: Tensor, *, needs_final_norm: bool) -> Tensor:
        """Logits of the sampled tokens, with their log weights, for the output of a map."""
        final = self.structure.to_final(mapped) if needs_final_norm else mapped
        logits = self.structure.decode(final)
        return logits if self.log_weights is None else logits + self.log_weights.to(logits.dtype)

    @torch.no_grad()
    def kl(self, logits: Tensor) -> tuple[float, Tensor]:
        """KL(model ‖ softmax(logits)), summed over rows, and its gradient, with fewer passes than autograd."""
        log_probabilities = logits.float().log_softmax(-1)
        expected = torch.linalg.vecdot(self.probabilities, log_probabilities).sum()
        return -float(self._entropy + expected), log_probabilities.exp_().sub_(self.probabilities)

    @cached_property
    def _entropy(self) -> Tensor:
        return torch.special.entr(self.probabilities).sum()


# The optimisation: trainable maps, their learning rates and best parameters, and the checkpoint


class TrainableMap(nn.Module):
    """A copy of a jump with trainable parameters; `rows` are inputs that set the scale of each parameter."""

    def __init__(self, jump: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.jump = copy.deepcopy(jump).to(rows.device)
        self.jump.requires_grad_(True)
        inputs = rows.float()
        for step in self.jump if isinstance(self.jump, nn.Sequential) else [self.jump]:
            with torch.no_grad():
                outputs = step(inputs)
            if isinstance(step, nn.Linear):
                # A step of one unit in every parameter, in the worst direction, moves the output by about its size.
                unit = _deviation(outputs).square().mean().sqrt() / step.in_features
                scale = _Scale(unit / _deviation(inputs))
                parametrize.register_parametrization(step, "weight", scale)
                if step.bias is not None:
                    parametrize.register_parametrization(step, "bias", _Scale(unit))
            inputs = outputs

    def forward(self, states: Tensor) -> Tensor:
        return self.jump(states)

    def to_affine(self) -> Affine:
        """The current map, detached and on the CPU."""
        return to_affine(copy.deepcopy(self.jump).cpu())

    def parameters_copy(self) -> dict[str, Tensor]:
        """A copy of the state dict."""
        return {name: value.detach().clone() for name, value in self.state_dict().items()}


class _Scale(nn.Module):
    """A parametrization in units of the parameter's own size, so that one learning rate suits all."""

    def __init__(self, unit: Tensor) -> None:
        super().__init__()
        self.unit = nn.Buffer(unit)

    def forward(self, stored: Tensor) -> Tensor:
        return stored * self.unit

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / self.unit


class _Checkpoint(BaseModel):
    """The checkpoint file; aliases are its keys."""

    model_config = ConfigDict(strict=True, arbitrary_types_allowed=True)

    run_id: str = Field(validation_alias="settings")
    """The format, the jumps, the text and the settings; another run cannot resume from the file."""
    step: int = Field(ge=0)
    history: list[list[float]] = Field(min_length=1)
    best_kl: list[float] = Field(validation_alias="best")
    rate_factors: list[Annotated[float, Field(gt=0, le=1)]] = Field(validation_alias="pace")
    parameters: dict[str, dict[str, Tensor]] = Field(validation_alias="now")
    best_parameters: dict[str, dict[str, Tensor]] = Field(validation_alias="kept")
    optimizer: dict[str, Any] = Field(validation_alias="optimiser")


class Tuner:
    """Adam on the parameters of all maps, with a learning rate and the best parameters for each map."""

    def __init__(self, maps: Mapping[Pair, TrainableMap], learning_rate: float, steps: int) -> None:
        self.maps, self.learning_rate, self.steps = dict(maps), learning_rate, steps
        self.step = 0
        self.history: list[list[float]] = []
        """Validation KL of every map at each validation."""
        self.best_kl: list[float] = [math.inf] * len(self.maps)
        # Copies of the start: a map whose KL is NaN at every validation keeps it.
        self._best_parameters = {pair: m.parameters_copy() for pair, m in self.maps.items()}
        self._rate_factors = [1.0] * len(self.maps)
        groups = [{"params": list(m.parameters())} for m in self.maps.values()]
        self._optimizer = torch.optim.Adam(groups, lr=learning_rate, betas=(0.9, 0.99))

    def update(self, losses: Mapping[Pair, float]) -> None:
        """Take one step along the gradients; skip a map whose loss or gradient is not finite."""
        for pair, trainable in self.maps.items():
            gradients = [p.grad for p in trainable.parameters() if p.grad is not None]
            # Squares too: Adam would never forget an infinite second moment.
            squares = [float(gradient.square().sum()) for gradient in gradients]
            if not all(map(math.isfinite, (losses[pair], *squares))):
                trainable.zero_grad(set_to_none=True)
        rate = self.learning_rate * min(1.0, 2 * (1 - self.step / self.steps))
        for group, factor in zip(self._optimizer.param_groups, self._rate_factors, strict=True):
            group["lr"] = rate * factor
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def record_validation(self, kl: Mapping[Pair, float]) -> None:
        """Record the validation KL of every map, and its parameters if the KL was never lower.

        Otherwise the map returns to its best parameters and continues with a lower learning rate: the rate that suits
        a map depends on the model and the text.
        """
        self.history.append([kl[pair] for pair in self.maps])
        for index, (pair, trainable) in enumerate(self.maps.items()):
            if kl[pair] < self.best_kl[index]:
                self.best_kl[index] = kl[pair]
                self._best_parameters[pair] = trainable.parameters_copy()
            else:
                trainable.load_state_dict(self._best_parameters[pair])
                self._rate_factors[index] *= _RATE_DECAY

    def is_finished(self, patience: int) -> bool:
        """Whether all steps are done, or the last `patience` validations did not lower the mean over levels."""
        if self.step >= self.steps or len(self.history) <= patience:
            return self.step >= self.steps
        # The best KL of each map, because a map whose KL rose has returned to its best parameters.
        columns = zip(*self.history[:-patience], strict=True)
        earlier_best = [min(filter(math.isfinite, values), default=math.inf) for values in columns]
        means = []
        for values in (self.best_kl, earlier_best):
            finite = [value for value in kl_by_level(values, list(self.maps)) if math.isfinite(value)]
            means.append(sum(finite) / len(finite) if finite else math.inf)
        return means[0] > (1 - _MIN_IMPROVEMENT) * means[1]

    def best_maps(self) -> dict[Pair, Affine]:
        """Every map with its best parameters."""
        maps = {}
        for pair, trainable in self.maps.items():
            trainable.load_state_dict(self._best_parameters[pair])
            maps[pair] = trainable.to_affine()
        return maps

    def save(self, folder: Path, run_id: str) -> None:
        """Write a checkpoint to the folder, atomically."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": run_id,
            "step": self.step,
            "history": self.history,
            "best": self.best_kl,
            "pace": self._rate_factors,
            "now": {_key(pair): m.parameters_copy() for pair, m in self.maps.items()},
            "kept": {_key(pair): best for pair, best in self._best_parameters.items()},
            "optimiser": self._optimizer.state_dict(),
        }
        replace_file(folder / CHECKPOINT_NAME, lambda path: torch.save(state, path))

    def restore(self, folder: Path, run_id: str) -> None:
        """Resume from the checkpoint in the folder, if there is one; it must be of the same run."""
        path = folder / CHECKPOINT_NAME
        if not path.is_file():
            return
        try:
            checkpoint = _Checkpoint.model_validate(torch.load(path, weights_only=True))
            if checkpoint.run_id == run_id:
                self._load(checkpoint)
                return
        except Exception as error:  # torch's readers raise all kinds of errors for damaged bytes
            raise BadArtifact(f"{path} is damaged ({one_line(error)}); remove it to start anew") from error
        raise BadArtifact(
            f"{path} is a checkpoint of a run with other settings, model or text; use the same, or remove it"
        )

    def _load(self, checkpoint: _Checkpoint) -> None:
        """Take over a checkpoint; raise any error for values with which a run could not go on."""
        if checkpoint.step > self.steps:
            raise ValueError(f"expected a step of at most {self.steps}, got {checkpoint.step}")
        rows, n_maps = (*checkpoint.history, checkpoint.best_kl, checkpoint.rate_factors), len(self.maps)
        if any(len(row) != n_maps for row in rows):
            raise ValueError(f"expected a KL for each of {n_maps} maps at every validation")
        if not all(value > -_ROUNDING for value in checkpoint.best_kl):
            raise ValueError("the lowest KL of a map is below 0")
        for name, parameters in checkpoint.best_parameters.items():
            if not all(bool(value.isfinite().all()) for value in parameters.values()):
                raise ValueError(f"the best map {name} has NaN or infinite values")
        self.step, self.history = checkpoint.step, checkpoint.history
        self.best_kl, self._rate_factors = checkpoint.best_kl, checkpoint.rate_factors
        for pair, trainable in self.maps.items():
            trainable.load_state_dict(checkpoint.best_parameters[_key(pair)])
            self._best_parameters[pair] = trainable.parameters_copy()
            trainable.load_state_dict(checkpoint.parameters[_key(pair)])
        # The moments are the file's, the hyperparameters this run's.
        own_groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": checkpoint.optimizer["state"], "param_groups": own_groups})
        # Adam loads any state, also one with which its next step would fail.
        for parameter, state in self._optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                if not isinstance(state[name], Tensor) or state[name].shape != parameter.shape:
                    raise ValueError(f"the optimizer's {name} does not have its parameter's shape")
            step = state["step"]
            if not isinstance(step, Tensor) or step.numel() != 1 or not step.is_floating_point():
                raise ValueError("the optimizer's step is not a number")
            if not 0 < float(step) < math.inf:
                raise ValueError("the optimizer's step is not a count")


def _key(pair: Pair) -> str:
    return f"{pair[0]}>{pair[1]}"


def _deviation(rows: Tensor) -> Tensor:
    """Standard deviation of each coordinate, with a small lower bound."""
    deviation = rows.std(0) if len(rows) > 1 else rows.new_ones(rows.shape[-1])
    return deviation.clamp_min(max(1e-3 * float(deviation.mean()), 1e-8))


def _permutation(n: int, *seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(n).tolist()
