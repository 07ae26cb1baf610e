"""Refine jumps by gradient descent on KL to the model's own predictions.

The model's own distribution at some rows, over all tokens or over few that stand for all.

A vocabulary product is what a step of tuning costs. Nearly all of the model's probability at some rows is on a few
thousand tokens. These are looked at, and of the others a random sample: each of it counts for many, so that what a
step sees is on average nearly what the whole vocabulary would show, unless a map is sure of what the model rules out.

The state of a tuning: parameters, their optimiser, the best maps so far, and how far it has come.

A short tuning of jumps by KL to the model's own output, started from the closed form.

refined = lj.refine(model, jumps, text, steps=200)

One forward pass over a batch serves every level: their states at some of its positions, and the model's own
distribution there, which is made once. Maps are tuned one after another on it, so memory does not grow with their
number, and a vocabulary of any size is gone through in rows that fit. A step looks at the tokens that are likely there
and at some of the others, which stand for all of them. Text held out says, with the whole vocabulary, when to stop and
which of a level's maps to keep: none ends worse there than it began. A level may have two, onto level L and onto
`final`; the one that ends lower is kept.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from layerjump.data.batches import Batches, make_batches
from layerjump.data.corpus import Corpus, load_text, split_documents
from layerjump.data.positions import MASKED_SHARE, Positions
from layerjump.errors import BadArtifact, BadEstimator, BadJumps, argument, one_line
from layerjump.io import replace_file, writing
from layerjump.jumps.fit import TO_TUNE
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine, to_affine
from layerjump.jumps.pairs import Pair
from layerjump.jumps.serialization import check_model
from layerjump.metrics.logits import chunk_rows
from layerjump.models.activations import capture_states
from layerjump.models.model import Model
from layerjump.models.structure import FINAL, Site, Structure
from layerjump.models.unembedding import can_restrict, unembedding_rows, with_unembedding

LIKELY, OTHERS = 4096, 2048
"""Tokens that are always seen, by the model's own probability, and how many of the others."""


@dataclass(frozen=True)
class SampledTarget:
    """What levels are held against."""

    structure: Structure
    """Its head is of the tokens that are seen."""
    own: Tensor
    """(rows, tokens) the model's own probabilities."""
    counts: Tensor | None = None
    """(tokens,) the logarithm of how many tokens each stands for; None if all are there."""

    @classmethod
    @torch.no_grad()
    def all(cls, structure: Structure, final: Tensor) -> SampledTarget:
        """Every token, from the states before the model's own vocabulary product."""
        return cls(structure, structure.decode(final).float().softmax(-1))

    @torch.no_grad()
    def few(
        self, draw: np.random.Generator, likely: int = LIKELY, others: int = OTHERS
    ) -> SampledTarget:
        """Some tokens in the place of all; itself, where that would not be fewer or cannot be."""
        size, head = self.own.shape[1], self.structure.unembedding
        if size <= likely + others or not can_restrict(self.structure):
            return self
        assert isinstance(head, nn.Linear)
        order = self.own.sum(0).argsort(descending=True, stable=True)
        chosen = torch.from_numpy(draw.choice(size - likely, others, replace=False))
        tokens = torch.cat([order[:likely], order[likely:][chosen.to(order.device)]])
        counts = self.own.new_ones(len(tokens))
        counts[likely:] = (size - likely) / others
        own = self.own[:, tokens] * counts
        structure = with_unembedding(self.structure, unembedding_rows(head, tokens))
        return SampledTarget(structure, own / own.sum(-1, keepdim=True), counts.log())

    def logits(self, landed: Tensor, *, to_final: bool) -> Tensor:
        """What a map's landing says of the tokens that are seen."""
        logits = self.structure.decode(landed if to_final else self.structure.to_final(landed))
        return logits if self.counts is None else logits + self.counts.to(logits.dtype)

    @torch.no_grad()
    def kl(self, logits: Tensor) -> tuple[float, Tensor]:
        """KL(own ‖ softmax), summed over rows, and its gradient, in fewer passes over the logits than autograd."""
        guessed = logits.float().log_softmax(-1)
        crossed = torch.linalg.vecdot(self.own, guessed).sum()
        return -float(self._entropy + crossed), guessed.exp_().sub_(self.own)

    @cached_property
    def _entropy(self) -> Tensor:
        return torch.special.entr(self.own).sum()


NAME = "unfinished-refine.pt"
_LOWER = 1e-3
"""Of the mean KL: what counts as lowering it."""
_SLOWER = 0.4
"""What a map's rate is multiplied by when it has got worse."""
_ROUNDING = 1e-3
"""How far below zero a KL can be computed."""


class _Scaled(nn.Module):
    """A tensor kept in units of its own, so that one rate suits coordinates of any size."""

    def __init__(self, unit: Tensor) -> None:
        super().__init__()
        self.unit = nn.Buffer(unit)

    def forward(self, stored: Tensor) -> Tensor:
        return stored * self.unit

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / self.unit


class TunedMap(nn.Module):
    """A jump whose numbers can be tuned; `rows` are states that it reads, for their sizes."""

    def __init__(self, jump: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.jump = copy.deepcopy(jump).to(rows.device)
        self.jump.requires_grad_(True)
        seen = rows.float()
        for step in self.jump if isinstance(self.jump, nn.Sequential) else [self.jump]:
            with torch.no_grad():
                left = step(seen)
            if isinstance(step, nn.Linear):
                # A step that moves every number by one unit in the worst direction moves the output by about its size.
                size = _spread(left).square().mean().sqrt() / step.in_features
                parametrize.register_parametrization(step, "weight", _Scaled(size / _spread(seen)))
                if step.bias is not None:
                    parametrize.register_parametrization(step, "bias", _Scaled(size))
            seen = left

    def forward(self, states: Tensor) -> Tensor:
        return self.jump(states)

    def affine(self) -> Affine:
        """The map as it stands."""
        made = to_affine(self.jump)
        return Affine(
            made.shape,
            tuple(factor.detach().cpu().clone() for factor in made.factors),
            None if made.bias is None else made.bias.detach().cpu().clone(),
        )


def _spread(rows: Tensor) -> Tensor:
    """Standard deviation of each coordinate; those that hardly vary count as varying a little."""
    found = rows.std(0) if len(rows) > 1 else rows.new_ones(rows.shape[-1])
    return found.clamp_min(max(1e-3 * float(found.mean()), 1e-8))


def _numbers(one: TunedMap) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in one.state_dict().items()}


def _has_finite_gradient(one: TunedMap) -> bool:
    """Squares too: the optimiser would keep what is infinite for good, whatever the map goes back to."""
    found = [each.grad for each in one.parameters() if each.grad is not None]
    return all(bool(grad.square().sum().isfinite()) for grad in found)


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.inf


def by_level(values: Sequence[float], pairs: Sequence[Pair]) -> list[float]:
    """The lowest KL of each level's maps."""
    found: dict[Site, list[float]] = {}
    for (source, _), value in zip(pairs, values, strict=True):
        found.setdefault(source, []).append(value)
    return [_lowest(of_level) for of_level in found.values()]


def _lowest(values: Sequence[float]) -> float:
    """Of those that are numbers."""
    return min((value for value in values if math.isfinite(value)), default=math.inf)


class Tuning:
    """All maps' parameters and what is known about them."""

    def __init__(self, tuned: Mapping[Pair, TunedMap], rate: float, steps: int) -> None:
        self.tuned, self.rate, self.steps = dict(tuned), rate, steps
        self.step = 0
        self.history: list[list[float]] = []
        """Held-out KL of every map at each look."""
        self.best: list[float] = [math.inf] * len(self.tuned)
        # The start, not what it becomes: a map whose KL is no number at any look keeps it.
        self._best = {pair: _numbers(one) for pair, one in self.tuned.items()}
        self._pace = [1.0] * len(self.tuned)
        """By what each map's rate is multiplied: less, once it has got worse."""
        groups = [{"params": list(one.parameters())} for one in self.tuned.values()]
        self._optimiser = torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.99))

    def take(self, losses: Mapping[Pair, float]) -> None:
        """One step along the gradients that are there; a map whose loss or gradient is no number is left alone."""
        for pair, one in self.tuned.items():
            if not math.isfinite(losses[pair]) or not _has_finite_gradient(one):
                one.zero_grad(set_to_none=True)
        now = self.rate * min(1.0, 2 * (1 - self.step / self.steps))
        for group, pace in zip(self._optimiser.param_groups, self._pace, strict=True):
            group["lr"] = now * pace
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1

    def look(self, found: Mapping[Pair, float]) -> None:
        """Note the held-out KL of every map, and keep its numbers if that was never lower.

        A map that got worse goes back to its best numbers, and on from there more slowly: what rate suits a map
        depends on the model and the text.
        """
        values = [found[pair] for pair in self.tuned]
        self.history.append(values)
        for place, (pair, one) in enumerate(self.tuned.items()):
            if values[place] < self.best[place]:
                self.best[place] = values[place]
                self._best[pair] = _numbers(one)
            else:
                one.load_state_dict(self._best[pair])
                self._pace[place] *= _SLOWER

    def over(self, patience: int) -> bool:
        """Whether all steps are done, or the last looks have not lowered the mean of the levels' best."""
        if self.step >= self.steps or len(self.history) <= patience:
            return self.step >= self.steps
        # Maps are judged apart, as they are kept apart: one that got worse has gone back to its best.
        earlier = [_lowest(values) for values in zip(*self.history[:-patience], strict=True)]
        now, then = (_mean(by_level(values, list(self.tuned))) for values in (self.best, earlier))
        return now > (1 - _LOWER) * then

    def best_maps(self) -> dict[Pair, Affine]:
        """Every map as it was best on held-out text."""
        maps = {}
        for pair, one in self.tuned.items():
            one.load_state_dict(self._best[pair])
            maps[pair] = one.affine()
        return maps

    # -- saved and taken up again

    def save(self, folder: Path, settings: str) -> None:
        """Write all of it, under one name, whole or not at all."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "settings": settings,
            "step": self.step,
            "history": self.history,
            "best": self.best,
            "pace": self._pace,
            "now": {_name(pair): one.state_dict() for pair, one in self.tuned.items()},
            "kept": {_name(pair): kept for pair, kept in self._best.items()},
            "optimiser": self._optimiser.state_dict(),
        }
        replace_file(folder / NAME, lambda path: torch.save(state, path))

    def restore(self, folder: Path, settings: str) -> None:
        """Take up what was saved by a run of the same settings, if there is any."""
        path = folder / NAME
        if not path.is_file():
            return
        try:
            state = torch.load(path, weights_only=True)
            if state["settings"] != settings:
                raise BadArtifact(
                    f"{path} is of a tuning with other settings, model or text; give the same, or remove it"
                )
            _check_course(state, len(self.tuned), self.steps)
            self.step, self.history, self.best = state["step"], state["history"], state["best"]
            self._pace = state["pace"]
            for pair, one in self.tuned.items():
                one.load_state_dict(state["kept"][_name(pair)])
                self._best[pair] = _numbers(one)
                one.load_state_dict(state["now"][_name(pair)])
            settings_now = [
                {name: value for name, value in group.items() if name != "params"}
                for group in self._optimiser.param_groups
            ]
            self._optimiser.load_state_dict(state["optimiser"])
            # What was learnt is the file's; how to go on is not.
            for group, own in zip(self._optimiser.param_groups, settings_now, strict=True):
                group.update(own)
            _check_optimiser(self._optimiser)
            _check_kept(self._best)
        except BadArtifact:
            raise
        except Exception as error:  # torch's readers raise whatever the bytes lead them to
            raise BadArtifact(
                f"{path} is damaged ({one_line(error)}); remove it to start anew"
            ) from error


def _name(pair: Pair) -> str:
    return f"{pair[0]}>{pair[1]}"


def _check_course(state: Mapping[str, Any], n_maps: int, steps: int) -> None:
    """What is known of a tuning's course is what `over` and `look` will read."""
    step, looks, best = state["step"], state["history"], state["best"]
    if type(step) is not int or not 0 <= step <= steps:
        raise ValueError(f"it says step {str(step)[:50]} of {steps}")
    if not isinstance(looks, list) or not looks:
        raise ValueError("it has no look at held-out text")
    for row in [*looks, best, state["pace"]]:
        known = row if isinstance(row, list) else []
        if len(known) != n_maps or not all(isinstance(value, float) for value in known):
            raise ValueError(f"a KL for each of {n_maps} maps was wanted at every look")
    if not all(value > -_ROUNDING for value in best):
        raise ValueError("a map's lowest KL is below 0")
    if not all(0 < value <= 1 for value in state["pace"]):
        raise ValueError("a map's pace is no number from 0 to 1")


def _check_kept(best: Mapping[Pair, Mapping[str, Tensor]]) -> None:
    for pair, numbers in best.items():
        if not all(bool(value.isfinite().all()) for value in numbers.values()):
            raise ValueError(f"the best map {_name(pair)} holds NaN or infinite values")


def _check_optimiser(optimiser: torch.optim.Optimizer) -> None:
    """Adam takes any state that has its keys, and fails at the next step."""
    for group in optimiser.param_groups:
        for parameter in group["params"]:
            known = optimiser.state.get(parameter)
            if not known:
                continue
            for name in ("exp_avg", "exp_avg_sq"):
                if not isinstance(known[name], Tensor) or known[name].shape != parameter.shape:
                    raise ValueError(f"the optimiser's {name} is not of its parameter's shape")
            step = known["step"]
            if not isinstance(step, Tensor) or step.numel() != 1 or not step.is_floating_point():
                raise ValueError("the optimiser's step is no number")
            if not 0 < float(step) < math.inf:
                raise ValueError("the optimiser's step is no count")


HELD = 256
"""Positions of the select split on which KL is watched."""
OF_ONE = 16
"""How many of them come from one batch."""
EVERY = 25
"""Steps between looks at them."""
CELLS = 256
"""Tokens of a batch, padding included."""
_FORMAT = "layerjump refine 3"

Progress = Callable[[int, int, list[float]], None]
"""Called after each look with the steps done, the steps to do, and the held-out KL of every level."""


@dataclass(frozen=True)
class Rows:
    """Some positions: each level's states, and the states before the model's own vocabulary product."""

    at: dict[Site, Tensor]
    final: Tensor


def refine(
    model: Model,
    jumps: Jumps,
    text: Corpus | str | Path,
    *,
    steps: int = 200,
    tokens: int | None = None,
    positions: int = 256,
    rate: float = 0.2,
    seed: int = 0,
    patience: int = 8,
    progress: Progress | None = None,
    folder: Path | None = None,
) -> Jumps:
    """Tune jumps by KL to the model's output; documents that the jumps were not fitted on are held out.

    A step is one batch, at `positions` of its positions, with Adam at a `rate` that falls to nothing, and sooner for
    a level that gets worse on held-out text. It ends early when `patience` looks have not lowered the mean of the
    held-out KL. `tokens` bounds the text as it does for `fit`: the same number gives the same documents. With a
    `folder` an interrupted run is taken up where it was saved there, and ends in the same bits.
    """
    _check(steps, positions, patience, rate)
    check_model(jumps, model, allow_other_weights=jumps.used_on is not None)
    corpus = text if isinstance(text, Corpus) else load_text(text)
    work = _Work(model, jumps, tunable(jumps, model))
    fit, held = work.documents(corpus, seed, tokens)
    rows = work.watched(held)
    tuned = {pair: TunedMap(jumps[pair], rows.at[pair[0]]) for pair in work.pairs}
    tuning = Tuning(tuned, rate, steps)
    settings = f"{_digest(jumps)} {corpus.sha256} {steps} {tokens} {positions} {rate} {seed}"
    if folder is not None:
        tuning.restore(folder, f"{_FORMAT} {settings}")
    if tuning.step == 0:
        tuning.look(work.kl(rows, tuned))
        if progress:
            progress(0, steps, by_level(tuning.history[-1], work.pairs))
    while not tuning.over(patience):
        batch = work.step(fit, tuning.step, positions)
        tuning.take(work.gradients(batch, tuned, (seed, tuning.step)))
        if tuning.step % EVERY == 0 or tuning.step == steps:
            tuning.look(work.kl(rows, tuned))
            if progress:
                progress(tuning.step, steps, by_level(tuning.history[-1], work.pairs))
            if folder is not None:
                tuning.save(folder, f"{_FORMAT} {settings}")
    return _refined(jumps, work.pairs, tuning, corpus)


def tunable(jumps: Jumps, model: Model) -> list[Pair]:
    """The jumps by which a lens reads levels; where it is left open how it does, all by which it could."""
    last = Site(model.n_blocks)
    check_tunable(jumps.provenance.estimator, list(jumps), model.n_blocks)
    found = [pair for pair in jumps if pair[1] in (FINAL, last)]
    if jumps.provenance.settings.get("how") != TO_TUNE:
        found = [pair for pair in found if pair[1] == last or (pair[0], last) not in jumps]
    if not any(to_affine(jumps[pair]).n_parameters for pair in found):
        raise BadEstimator(
            f"{jumps.provenance.estimator} has no numbers to tune; refine affine or calibrated jumps"
        )
    return found


def check_tunable(estimator: str, pairs: Sequence[Pair], n_blocks: int) -> None:
    """Refuse what cannot be tuned; before a pass over the text, where one is still to be made."""
    if not any(target in (FINAL, Site(n_blocks)) for _, target in pairs):
        raise BadJumps(
            f"no jump leads to the last level or to `final`, so there is no prediction to tune; fit with "
            f"{argument('pairs', 'to-last')} or {argument('pairs', 'to-final')}"
        )
    if estimator == "ojfa":
        raise BadEstimator(
            "ojfa is one map for all levels, and tuning would make it many; refine another estimator"
        )


@dataclass(frozen=True)
class _Work:
    """What a step computes."""

    model: Model
    jumps: Jumps
    pairs: list[Pair]

    def documents(self, corpus: Corpus, seed: int, tokens: int | None) -> tuple[Batches, Batches]:
        """Batches to tune on and to watch: the jumps' own fit documents and others.

        Another text than theirs is split by the usual shares.
        """
        known = self.jumps.provenance
        count, own = len(corpus.documents), known.text_sha256 == corpus.sha256
        parts = (
            split_documents(count, known.split, seed=known.seed)
            if own
            else split_documents(count, seed=known.seed)
        )
        others = parts.select or parts.test
        where = Positions.parse(MASKED_SHARE) if self.model.masked else Positions("all")

        def cut(documents: tuple[int, ...]) -> Batches:
            # Shared out as in a fit that has a select split.
            most = None if tokens is None else max(1, tokens * len(documents) // count)
            return make_batches(
                corpus,
                self.model.tokenization,
                where,
                documents=documents,
                tokens_wanted=most,
                seed=seed,
                budget=CELLS,
            )

        return cut(parts.fit), cut(others)

    def step(self, found: Batches, number: int, most: int) -> Rows:
        """So many positions of one batch; a step's are the same in every run."""
        turn, place = divmod(number, len(found))
        return self._rows(found, [_shuffled(len(found), found.seed, turn)[place]], most, number)

    def watched(self, found: Batches) -> Rows:
        """Positions of many batches."""
        chosen = _shuffled(len(found), found.seed, 0)[: HELD // OF_ONE]
        return self._rows(found, chosen, OF_ONE, 0)

    def _rows(self, found: Batches, chosen: list[int], each: int, number: int) -> Rows:
        levels = list(dict.fromkeys(source for source, _ in self.pairs))
        sites = [*levels, FINAL]
        parts: list[dict[Site, Tensor]] = []
        for index in chosen:
            batch = found[index]
            picks = torch.tensor(_shuffled(batch.n_picks, found.seed, number, index)[:each])
            at = next(iter(capture_states(self.model, [batch], sites))).at
            parts.append({site: at[site][picks.to(at[site].device)] for site in sites})
        # A model may be spread over devices: its head's is where levels are mapped and read.
        place = parts[0][FINAL].device
        joined = {site: torch.cat([part[site] for part in parts]).to(place) for site in sites}
        return Rows({site: joined[site] for site in levels}, joined[FINAL])

    def gradients(
        self, rows: Rows, tuned: Mapping[Pair, TunedMap], seed: tuple[int, ...]
    ) -> dict[Pair, float]:
        """Leave the gradients of every map's mean KL in its parameters; the KL of each, as far as it is seen."""
        with torch.enable_grad():
            return self._over(rows, tuned, seed)

    def kl(self, rows: Rows, tuned: Mapping[Pair, TunedMap]) -> dict[Pair, float]:
        """Every map's mean KL."""
        with torch.no_grad():
            return self._over(rows, tuned, None)

    def _over(
        self, rows: Rows, tuned: Mapping[Pair, TunedMap], seed: tuple[int, ...] | None
    ) -> dict[Pair, float]:
        """The model's own distribution at some rows is made once, for all levels; with a seed, gradients are left."""
        totals = dict.fromkeys(tuned, 0.0)
        for start in range(0, len(rows.final), chunk_rows(self.model)):
            part = slice(start, start + chunk_rows(self.model))
            seen = SampledTarget.all(self.model.structure, rows.final[part])
            if seed is not None:
                seen = seen.few(np.random.default_rng((*seed, start)))
            for (source, target), one in tuned.items():
                landed = one(rows.at[source][part].float()).to(rows.final.dtype)
                guess = seen.logits(landed, to_final=target == FINAL)
                kl, gradient = seen.kl(guess.detach())
                if seed is not None:
                    guess.backward(gradient.div_(len(rows.final)).to(guess.dtype))
                totals[source, target] += kl / len(rows.final)
        return totals


def _refined(jumps: Jumps, pairs: list[Pair], tuning: Tuning, corpus: Corpus) -> Jumps:
    maps = {pair: to_affine(jumps[pair]) for pair in jumps}
    infos = dict(jumps.info)
    factors = dict(jumps.provenance.settings.get("temperature", {}))
    ended, best = dict(zip(pairs, tuning.best, strict=True)), tuning.best_maps()
    for pair in pairs:
        others = [other for other in pairs if other[0] == pair[0] and other in maps]
        if min(others, key=lambda each: ended[each]) != pair:
            del maps[pair], infos[pair]
            if pair[1] == FINAL:
                factors.pop(str(pair[0]), None)
            continue
        maps[pair] = best[pair]
        # R² was the closed form's; KL is what was tuned.
        infos[pair] = replace(infos[pair], r2=None, strength=None)
    known = jumps.provenance
    about = {
        "steps": tuning.step,
        "rate": tuning.rate,
        "text": corpus.name,
        "text_sha256": corpus.sha256,
        "kl_before": _check_numbers(tuning.history[0], pairs),
        "kl_after": _check_numbers(tuning.best, pairs),
    }
    settings = known.settings | {"refine": about}
    if "temperature" in settings:
        settings["temperature"] = factors
    provenance = replace(known, estimator=f"{known.estimator}+kl", settings=settings)
    return Jumps.of(maps, infos, provenance)


def _check_numbers(values: list[float], pairs: list[Pair]) -> list[float | None]:
    """Each level's KL as a file can hold it."""
    return [kl if math.isfinite(kl) else None for kl in by_level(values, pairs)]


def _digest(jumps: Jumps) -> str:
    """The model and the maps that a tuning starts from: another estimator's are as wide, and other ones."""
    digest = hashlib.sha256(jumps.provenance.fingerprint.encode())
    for parameter in jumps.parameters():
        digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _shuffled(n: int, *seed: int) -> list[int]:
    return np.random.default_rng(seed).permutation(n).tolist()


def _check(steps: int, positions: int, patience: int, rate: float) -> None:
    for name, value in (("steps", steps), ("positions", positions), ("patience", patience)):
        if value < 1:
            raise BadEstimator(f"{name} given is {value}; give 1 or more")
    if not 0 < rate <= 100:
        raise BadEstimator(
            f"the rate given is {rate}; give a number above 0, such as 0.2, and at most 100"
        )
