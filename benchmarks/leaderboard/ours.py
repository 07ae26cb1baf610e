"""Our lenses, each with what it cost: CPU seconds of this process, from text to maps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import layerjump as lj
from layerjump.data.positions import MASKED_SHARE
from layerjump.jumps.collect import RunPlan, plan_run
from layerjump.jumps.estimators.low_rank import train_n_njtc
from layerjump.jumps.estimators.registry import KEPT_BOTH_TARGETS
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.maps import FeatureKind

Result = TypeVar("Result")

RANKS = {"low-rank d/16": 16, "low-rank d/4": 4, "low-rank d/2": 2}
"""What the width is divided by."""
ON_SUMS = ("mat", "affine", *RANKS, "n-njtc", "ojfa")
"""Those that are solved from the sums of one pass."""
TO_FINAL: dict[str, FeatureKind] = {"calibrated": "both", "calibrated raw": "raw"}
"""Maps that land after the final norm, and what they read; with "both", whatever of it errs least."""
TUNED = ("refined", "refined long")
"""Within a tenth of the tuned lens' cost, and until it gains no more, within its cost."""
OURS = ("identity", *ON_SUMS, "n-njtc trained", *TO_FINAL, *TUNED, "jacobian")


class Made(NamedTuple):
    """A lens and the CPU seconds it took to fit."""

    lens: lj.Lens
    seconds: float


@dataclass
class Workshop:
    """Makes lenses of one model from one text."""

    model: lj.Model
    corpus: lj.Corpus
    tokens: int
    seed: int = 0
    refine_steps: dict[str, int] = field(default_factory=lambda: {"refined": 200})
    """Of each tuned lens; one that is not named is not made."""
    jacobian: dict[str, Any] = field(default_factory=dict)
    """Settings of the Jacobian lens, whose cost grows with tokens times width."""
    folder: Path | None = None
    """Where lenses are kept: the dearest take hours, and whoever stops the run need not make them again."""
    _made_once: dict[str, Made] = field(default_factory=dict, repr=False)
    _summed: dict[str, tuple[Any, float]] = field(default_factory=dict, repr=False)

    def make(self, names: list[str]) -> Iterator[tuple[str, Made]]:
        """Every lens asked for, one after another."""
        for name in names:
            if name == "jacobian" and not self.model.causal:
                continue  # it is of states that no later token reaches
            if name in TUNED and name not in self.refine_steps:
                continue
            yield name, self._one(name)

    @property
    def settings(self) -> dict[str, Any]:
        positions = MASKED_SHARE if self.model.masked else None
        return {"tokens": self.tokens, "positions": positions, "seed": self.seed}

    @cached_property
    def plan(self) -> RunPlan:
        """The run over the fit, select and test documents that every lens is fitted on."""
        return self._plan()

    def _plan(self, **wanted: Any) -> RunPlan:
        return plan_run(self.model, self.corpus, **self.settings, **wanted)

    @cached_property
    def forward_seconds(self) -> float:
        """CPU seconds of the bare model over the fit documents: the unit of cost."""
        note = None if self.folder is None else self.folder / "forward.json"
        if note is not None and note.exists():
            about, seconds = json.loads(note.read_text())
            if about == self._about("forward"):
                return seconds
        seconds = timed(lambda: bare_forward(self.model, self.plan.batches["fit"]))[1]
        if note is not None:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps([self._about("forward"), seconds]))
        return seconds

    @cached_property
    def _to_tune(self) -> Made:
        """Where a tuning starts: `calibrated`, its last levels' landings left open."""
        collected, pass_seconds = self._sums_to_final("both")
        made = self._made(lambda: solve_jumps(collected, "calibrated", keep_both_targets=True, model=self.model))
        return made._replace(seconds=made.seconds + pass_seconds)

    def _sums_to_final(self, reads: FeatureKind) -> tuple[Any, float]:
        if reads not in self._summed:
            plan = self._plan(estimator="calibrated", features=reads)
            self._summed[reads] = timed(plan.run)
        return self._summed[reads]

    @cached_property
    def _pass(self) -> tuple[Any, float]:
        return timed(self.plan.run)

    def _one(self, name: str) -> Made:
        """A lens of this run, of an earlier one with the same settings, or a new one."""
        if name == "identity":
            return Made(lj.Lens(self.model), 0.0)
        if name not in self._made_once:
            self._made_once[name] = self._earlier(name) or self._kept(name, self._new(name))
        return self._made_once[name]

    def _earlier(self, name: str) -> Made | None:
        if self.folder is None or not (note := self._note(name)).exists():
            return None
        known = json.loads(note.read_text())
        if known.pop("about") != self._about(name):
            return None
        jumps = lj.Jumps.from_pretrained(note.with_suffix(""))
        return Made(lj.Lens(self.model, jumps), known["seconds"])

    def _kept(self, name: str, made: Made) -> Made:
        if self.folder is not None and made.lens.jumps is not None:
            note = self._note(name)
            made.lens.jumps.save_pretrained(note.with_suffix(""))
            note.write_text(json.dumps({"about": self._about(name), "seconds": made.seconds}))
        return made

    def _note(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name.replace(' ', '-').replace('/', '-')}.json"

    def _about(self, name: str) -> list[Any]:
        own: Any = self.jacobian if name == "jacobian" else None
        if name in TUNED:
            own = [KEPT_BOTH_TARGETS, self.refine_steps.get(name)]
        return [self.corpus.sha256, self.settings, own]

    def _new(self, name: str) -> Made:
        if name in ON_SUMS:
            return self._from_sums(name)
        if name in TO_FINAL:
            return self._to_final(name)
        if name in TUNED:
            return self._refined(name)
        if name == "n-njtc trained":
            fit = self.plan.batches["fit"].n_tokens
            return self._made(lambda: train_n_njtc(self.model, self.corpus, tokens=fit, seed=self.seed))
        return self._made(lambda: lj.fit_jacobian(self.model, self.corpus, seed=self.seed, **self.jacobian))

    def _from_sums(self, name: str) -> Made:
        """The pass is shared, but each pays for it: that is what fitting one alone would cost."""
        collected, pass_seconds = self._pass
        settings: dict[str, Any] = {"estimator": name}
        if name in RANKS:
            rank = max(1, self.model.d_model // RANKS[name])
            settings = {"estimator": "low-rank", "rank": rank}
            if not self.model.masked:  # whose heads are more than a norm and a product
                settings["metric"] = "unembedding"
        made = self._made(lambda: solve_jumps(collected, model=self.model, **settings))
        return made._replace(seconds=made.seconds + pass_seconds)

    def _to_final(self, name: str) -> Made:
        """Charged as those on the shared sums are: the pass and the solution."""
        collected, pass_seconds = self._sums_to_final(TO_FINAL[name])
        made = self._made(lambda: solve_jumps(collected, "calibrated", model=self.model))
        assert made.lens.jumps is not None
        factors = made.lens.jumps.provenance.settings["temperature"].values()
        print(
            f"  {name}: a pass of {pass_seconds / self._pass[1]:.2f} times mat's; temperature factors "
            f"{min(factors):.2f} to {max(factors):.2f}",
            flush=True,
        )
        return made._replace(seconds=made.seconds + pass_seconds)

    def _refined(self, name: str) -> Made:
        start = self._to_tune
        assert start.lens.jumps is not None
        given = self.model, start.lens.jumps, self.corpus
        steps, tokens, seed = self.refine_steps[name], self.tokens, self.seed
        made = self._made(lambda: lj.refine(*given, steps=steps, tokens=tokens, seed=seed))
        return made._replace(seconds=made.seconds + start.seconds)

    def _made(self, fit: Callable[[], lj.Jumps]) -> Made:
        jumps, seconds = timed(fit)
        return Made(lj.Lens(self.model, jumps), seconds)


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What some work gives, and its CPU seconds, which do not depend on what else the machine does."""
    start = time.process_time()
    return work(), time.process_time() - start


@torch.no_grad()
def bare_forward(model: lj.Model, batches: lj.Batches) -> None:
    for batch in batches:
        model.hf(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
