"""A short tuning of jumps by KL to the model's own output, started from the closed form.

refined = lj.refine(model, jumps, text, steps=200)

One forward pass over a batch serves every level: their states at some of its positions, and the model's own
distribution there, which is made once. Maps are tuned one after another on it, so memory does not grow with their
number, and a vocabulary of any size is gone through in rows that fit. A step looks at the tokens that are likely there
and at some of the others, which stand for all of them. Text held out says, with the whole vocabulary, when to stop and
which of a level's maps to keep: none ends worse there than it began. A level may have two, onto level L and onto
`final`; the one that ends lower is kept.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from layerjump.errors import BadEstimator, BadJumps
from layerjump.fit.fit import TO_TUNE
from layerjump.fit.jumps import Jumps
from layerjump.fit.modules import to_affine
from layerjump.fit.pairs import Pair
from layerjump.fit.store import check_model
from layerjump.inputs.batches import Batches, batches
from layerjump.inputs.corpus import Corpus, read, split
from layerjump.inputs.models import Model
from layerjump.inputs.positions import MASKED_SHARE, Positions
from layerjump.inputs.sites import FINAL, Site
from layerjump.inputs.states import states
from layerjump.lens.lens import rows_at_once
from layerjump.lens.seen import Seen
from layerjump.lens.tuning import Tuned, Tuning, by_level

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
    corpus = text if isinstance(text, Corpus) else read(text)
    work = _Work(model, jumps, tunable(jumps, model))
    fit, held = work.documents(corpus, seed, tokens)
    rows = work.watched(held)
    tuned = {pair: Tuned(jumps[pair], rows.at[pair[0]]) for pair in work.pairs}
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
            "no jump leads to the last level or to `final`, so there is no prediction to tune; fit with --pairs "
            "to-last or to-final"
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
        parts = split(count, known.split, seed=known.seed) if own else split(count, seed=known.seed)
        others = parts.select or parts.test
        where = Positions.parse(MASKED_SHARE) if self.model.masked else Positions("all")

        def cut(documents: tuple[int, ...]) -> Batches:
            # Shared out as in a fit that has a select split.
            most = None if tokens is None else max(1, tokens * len(documents) // count)
            return batches(
                corpus,
                self.model.tokens,
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
            at = next(iter(states(self.model, [batch], sites))).at
            parts.append({site: at[site][picks.to(at[site].device)] for site in sites})
        # A model may be spread over devices: its head's is where levels are mapped and read.
        place = parts[0][FINAL].device
        joined = {site: torch.cat([part[site] for part in parts]).to(place) for site in sites}
        return Rows({site: joined[site] for site in levels}, joined[FINAL])

    def gradients(
        self, rows: Rows, tuned: Mapping[Pair, Tuned], seed: tuple[int, ...]
    ) -> dict[Pair, float]:
        """Leave the gradients of every map's mean KL in its parameters; the KL of each, as far as it is seen."""
        with torch.enable_grad():
            return self._over(rows, tuned, seed)

    def kl(self, rows: Rows, tuned: Mapping[Pair, Tuned]) -> dict[Pair, float]:
        """Every map's mean KL."""
        with torch.no_grad():
            return self._over(rows, tuned, None)

    def _over(
        self, rows: Rows, tuned: Mapping[Pair, Tuned], seed: tuple[int, ...] | None
    ) -> dict[Pair, float]:
        """The model's own distribution at some rows is made once, for all levels; with a seed, gradients are left."""
        totals = dict.fromkeys(tuned, 0.0)
        for start in range(0, len(rows.final), rows_at_once(self.model)):
            part = slice(start, start + rows_at_once(self.model))
            seen = Seen.all(self.model.anatomy, rows.final[part])
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
        "kl_before": _numbers(tuning.history[0], pairs),
        "kl_after": _numbers(tuning.best, pairs),
    }
    settings = known.settings | {"refine": about}
    if "temperature" in settings:
        settings["temperature"] = factors
    provenance = replace(known, estimator=f"{known.estimator}+kl", settings=settings)
    return Jumps.of(maps, infos, provenance)


def _numbers(values: list[float], pairs: list[Pair]) -> list[float | None]:
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
