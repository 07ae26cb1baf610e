"""What stands in for blocks that are cut out, fitted in closed form on the states of the model as it is by then.

Cuts are fitted in order. The source of each is what reaches it in the model that has its earlier cuts already, its
target the untouched model's state on the same tokens: so an earlier cut's error is mended, not passed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerjump.compress.changes import apply
from layerjump.compress.cuts import Span, blocks_in
from layerjump.compress.fold import PAIRS, rows, solve_fold
from layerjump.compress.projections import cannot_fold, cannot_turn, last_of, map_output
from layerjump.compress.surgery import first_of
from layerjump.compress.turn import can_stretch, turn
from layerjump.errors import BadPruning
from layerjump.fit.collect import products_on
from layerjump.fit.collected import Collected
from layerjump.fit.fit import solve_jumps
from layerjump.fit.jumps import Jumps
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import Pair
from layerjump.fit.solve import solve
from layerjump.inputs.batches import Batches
from layerjump.inputs.models import Model
from layerjump.inputs.sites import Site
from layerjump.inputs.states import states

METHODS = {
    "remove": "nothing",
    "linear": "an affine map of the stream, kept beside the model",
    "replaceme": "a map of the feed-forward output before the cut, merged into it (least squares, as ReplaceMe)",
    "fold": "the same map, and a scale of the stream behind it, merged into the later blocks",
    "turn": "map, scale and a rotation of the stream behind it, merged into the later blocks and an untied head",
}


def check_method(model: Model, method: str) -> None:
    """Refuse what the model's family cannot do, with the reason and what to do instead."""
    if method not in METHODS:
        raise BadPruning(f"the method given is {method!r}; give one of {', '.join(METHODS)}")
    if method in ("replaceme", "fold", "turn") and (reason := cannot_fold(model)):
        raise BadPruning(f"{method} is not possible: {reason}; give linear or remove")
    if method == "turn" and (reason := cannot_turn(model)):
        raise BadPruning(f"turn is not possible: {reason}; give fold")


def check_cuts(cuts: Sequence[Span], method: str) -> None:
    """A fold needs a block before each cut."""
    if method in ("replaceme", "fold", "turn") and cuts and cuts[0][0] == 0:
        raise BadPruning(
            f"the first block was to be dropped, and {method} merges a map into the block before; give linear or "
            f"remove, or keep the first block"
        )


@dataclass(frozen=True, eq=False)
class Frame:
    """From this level of the pruned model on, its stream is scale · rotation @ the whole model's."""

    level: int
    scale: float = 1.0
    rotation: Tensor | None = None


class Fitting:
    """A pruned copy whose cuts get their stand-ins, one after another."""

    def __init__(
        self, model: Model, student: Model, batches: Batches, about: dict[str, Any]
    ) -> None:
        self.model = model
        self.student = student
        self.batches = batches
        self.about = about
        self.frames: list[Frame] = []

    def fit(self, cuts: Sequence[Span], method: str) -> Jumps | None:
        """Give every cut its stand-in; `linear` returns its maps, which no weight of the model can hold."""
        found: list[Jumps] = []
        for place, cut in enumerate(cuts):
            level = cut[0] - len([block for block in blocks_in(cuts) if block <= cut[0]])
            if method == "linear":
                found.append(self._linear(cut, level, first=place == 0))
                attach(self.student, {level: found[-1][cut]})
            elif method != "remove":
                self._fold(cut, level, method, first=place == 0)
        return together(found) if found else None

    def _linear(self, cut: Span, level: int, *, first: bool) -> Jumps:
        source, target = Site(cut[0]), Site(cut[1])
        sums = {
            name: Moments([(source, target)], reservoir=0) for name in ("fit", "select", "test")
        }
        for ours, theirs in self._paired([Site(level)], cut, first=first):
            sums["fit"].add({source: ours[Site(level)], target: theirs})
        jumps = solve_jumps(Collected(sums, self.about), "affine")
        if self.student.hf.dtype == torch.float64:
            _sharpen(jumps[cut], sums["fit"], (source, target))
        return jumps

    def _fold(self, cut: Span, level: int, method: str, *, first: bool) -> None:
        added = Site(level, "ffn.out")
        layer, ours_alone = last_of(self.student, level), method != "replaceme"
        intercept = getattr(layer, "bias", None) is not None
        sums = Moments(PAIRS, reservoir=0, products=products_on(self.model))
        for ours, theirs in self._paired([Site(level), added], cut, first=first):
            stream = ours[Site(level)] - ours[added]
            made = rows(ours[added], stream, theirs, intercept=intercept, weighted=ours_alone)
            sums.add(made)
        stretch = ours_alone and can_stretch(self.student)
        found = solve_fold(sums, intercept=intercept, stretch=stretch, turned=method == "turn")
        map_output(layer, found.weight, found.bias)
        # Blocks behind an earlier cut are turned already: only the difference is still to be made.
        before = self.frames[-1] if self.frames else Frame(0)
        turned = found.rotation
        if turned is not None and before.rotation is not None:
            turned = turned @ before.rotation.mT
        if method != "replaceme":
            turn(self.student, level, turned, found.scale / before.scale)
        self.frames.append(Frame(level, found.scale, found.rotation))

    def _paired(
        self, sites: list[Site], cut: Span, *, first: bool
    ) -> Iterator[tuple[Mapping[Site, Tensor], Tensor]]:
        """The pruned model's states at the cut's near end, and the whole model's at its far end."""
        target = Site(cut[1])
        if first:  # up to here the two are the same
            for both in states(self.model, self.batches, [*sites, target]):
                yield both.at, both[target]
            return
        ours = states(self.student, self.batches, sites)
        theirs = states(self.model, self.batches, [target])
        for here, there in zip(ours, theirs, strict=True):
            yield here.at, there[target]


def attach(model: Model, maps: Mapping[int, nn.Module]) -> None:
    """Let the model go on from maps of its levels: they become part of it, and stay.

    A hook does it, so that the model's own code, its cache and its generation are as they were.
    """
    for level, jump in maps.items():
        if level == 0:
            model.anatomy.blocks[0].register_forward_pre_hook(_Before(jump), with_kwargs=True)
        else:
            model.anatomy.blocks[level - 1].register_forward_hook(_After(jump))


class _Before:
    def __init__(self, jump: nn.Module) -> None:
        self.jump = jump

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (apply(self.jump, args[0]), *args[1:]), kwargs


class _After:
    def __init__(self, jump: nn.Module) -> None:
        self.jump = jump

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        made = apply(self.jump, first_of(output))
        return (made, *output[1:]) if isinstance(output, tuple) else made


def _sharpen(jump: nn.Module, sums: Moments, pair: Pair) -> None:
    """Jumps are kept in float32; a float64 model is given the map as it was solved."""
    (exact,) = solve("affine", sums.source(pair[0]), [sums.target(*pair)])
    assert isinstance(jump, nn.Linear)
    assert exact.bias is not None
    jump.double()
    jump.weight.data.copy_(exact.weight)
    jump.bias.data.copy_(exact.bias)


def together(sets: Sequence[Jumps]) -> Jumps:
    """Several sets of jumps of one run as one."""
    maps = {pair: jumps[pair] for jumps in sets for pair in jumps}
    infos = {pair: jumps.info[pair] for jumps in sets for pair in jumps}
    return Jumps(maps, infos, sets[0].provenance)


def parameters(model: nn.Module) -> int:
    """How many numbers a model stores, shared ones once."""
    return sum(tensor.numel() for tensor in {id(p): p for p in model.parameters()}.values())
