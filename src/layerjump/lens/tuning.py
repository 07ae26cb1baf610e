"""The state of a tuning: parameters, their optimiser, the best maps so far, and how far it has come."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from layerjump.errors import BadArtifact, one_line
from layerjump.fit.affine import Affine
from layerjump.fit.files import replace_file, writing
from layerjump.fit.modules import to_affine
from layerjump.fit.pairs import Pair
from layerjump.inputs.sites import Site

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


class Tuned(nn.Module):
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


def _numbers(one: Tuned) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in one.state_dict().items()}


def _has_finite_gradient(one: Tuned) -> bool:
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

    def __init__(self, tuned: Mapping[Pair, Tuned], rate: float, steps: int) -> None:
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
