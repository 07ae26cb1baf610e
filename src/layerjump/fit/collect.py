"""The pass over the text: states in, sums out. It can be cut short at any moment and taken up again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from layerjump.errors import BadMoments, BadText, RunStopped
from layerjump.fit.bill import Bill, bill
from layerjump.fit.checkpoint import Checkpoint, deferred_interrupt
from layerjump.fit.collected import SPLITS, Collected
from layerjump.fit.fingerprint import about_model
from layerjump.fit.group import Group
from layerjump.fit.modules import FeatureKind
from layerjump.fit.moments import Moments
from layerjump.fit.pairs import Pair, parse_pairs
from layerjump.fit.reservoir import keys_of
from layerjump.inputs.batches import Batches, batches
from layerjump.inputs.corpus import Corpus, read, split
from layerjump.inputs.models import Model, require_model
from layerjump.inputs.positions import Positions
from layerjump.inputs.states import States, states

log = logging.getLogger("layerjump")

Progress = Callable[[int, int], None]
"""Called after each batch with the tokens done and the tokens to do."""


@dataclass(frozen=True)
class Plan:
    """A run decided on but not started: its batches by split, and all that its result depends on."""

    model: Model
    moments: dict[str, Moments]
    batches: dict[str, Batches]
    about: dict[str, Any]

    @property
    def bill(self) -> Bill:
        return bill(self.model, self.moments["fit"], self.batches)

    @property
    def in_order(self) -> list[str]:
        """The splits as they are run, the largest last.

        The peak of memory is then in its pass, where all sums are there already, however long the text is.
        """
        return sorted(self.batches, key=lambda name: self.batches[name].n_tokens)

    def run(
        self,
        *,
        progress: Progress | None = None,
        checkpoint: Checkpoint | None = None,
        group: Group | None = None,
    ) -> Collected:
        """Run the text through the model and return the sums (with several processes: the first one's)."""
        self.bill.require_memory()
        group = group or Group()
        done = Collected(self.moments, self.about)
        steps = dict.fromkeys(self.batches, 0)
        if checkpoint is not None:
            done, steps = checkpoint.restore(done, steps)
        for name in self.in_order:
            one_pass = _Pass(self, name, done, steps, progress, checkpoint)
            one_pass.run(self.batches[name].shard(group.rank, group.world), group)
        for moments in done.splits.values():
            group.reduce(moments)
        return done


def plan(
    model: Model,
    text: Corpus | str | Path,
    *,
    pairs: str = "to-last",
    positions: Positions | str | None = None,
    tokens: int | None = None,
    sizes: str = "80/10/10",
    seed: int = 0,
    select: bool = True,
    max_length: int = 512,
    reads: FeatureKind = "raw",
    rough: bool = False,
) -> Plan:
    """Decide on a run: which documents, positions and sums (of which features of the sources' states).

    Without `positions`, all are taken; for `all` pairs a sample (15 %, never fewer than 44 d). Jumps between
    levels skip position 0; maps meant for every position (sub-modules) take it in. `rough` forms the many products
    of both features in float32: enough for an estimator with a penalty.
    """
    require_model(model)
    if tokens is not None and tokens < 1:
        raise BadText(f"tokens given is {tokens}; give 1 or more, or none for the whole text")
    corpus = text if isinstance(text, Corpus) else read(text)
    chosen = parse_pairs(pairs, model.anatomy)
    first = 1 if all(site.between_blocks for pair in chosen for site in pair) else 0
    parts = split(len(corpus.documents), sizes, seed=seed)
    wanted = {name: getattr(parts, name) for name in SPLITS if name != "select" or select}
    cut = partial(_cut, model, corpus, wanted, seed=seed, tokens=tokens, max_length=max_length)
    if positions is None:
        positions = Positions("all", skip_first=first, special=first == 0)
        if pairs == "all":
            positions = sampled(cut(positions)["fit"].n_picks, model.width)
    elif isinstance(positions, str):
        positions = Positions.parse(positions, skip_first=first, special=first == 0)
    made = cut(positions)
    if made["fit"].n_picks < 5 * model.width:
        _warn_few(made["fit"].n_picks, model.width)
    products = products_on(model, rough=rough and reads == "both")
    return Plan(
        model,
        {name: Moments(chosen, products=products, reads=reads) for name in SPLITS},
        made,
        _about(model, corpus, positions, made, sizes, seed, max_length, chosen),
    )


def _cut(
    model: Model,
    corpus: Corpus,
    wanted: Mapping[str, Sequence[int]],
    positions: Positions,
    *,
    seed: int,
    tokens: int | None,
    max_length: int,
) -> dict[str, Batches]:
    """Batches of every split that has documents; tokens are shared out by their number."""
    total = sum(map(len, wanted.values()))
    return {
        name: batches(
            corpus,
            model.tokens,
            positions,
            documents=documents,
            seed=seed,
            tokens_wanted=None if tokens is None else max(1, tokens * len(documents) // total),
            max_length=max_length,
        )
        for name, documents in wanted.items()
        if documents
    }


def collect(model: Model, text: Corpus | str | Path, **settings: Any) -> Collected:
    """Sum a text's states in one pass; the settings are `plan`'s."""
    return plan(model, text, **settings).run()


def products_on(model: Model, *, rough: bool = False) -> torch.dtype:
    """float64 products, but float32 where a device does those many times faster, or where there are many.

    What `calibrated` collects is three times `mat`'s products, and its penalty is far above their rounding. Without
    a penalty it would not be: h and h / rms(h) are nearly the same directions.
    """
    exact = model.device.type == "cpu" and not rough
    return torch.float64 if exact else torch.float32


def sampled(available: int, width: int, *, everywhere: bool = False) -> Positions:
    """All pairs cost more than the model itself, so they sample positions: 15 %, never fewer than 44 d.

    Least squares loses about (1 − R²) · d/n of its R²: at 44 d about a hundredth, and more text lowers it further.
    `everywhere` lets position 0 and special tokens be drawn.
    """
    share = min(1.0, max(0.15, 44 * width / available))
    first = 0 if everywhere else 1
    if share == 1.0:
        return Positions("all", skip_first=first, special=everywhere)
    return Positions("share", round(share + 5e-4, 3), skip_first=first, special=everywhere)


def _warn_few(n: int, width: int) -> None:
    inflation = f"{1 + width / (n - width - 1):.2f}" if n > width + 1 else "unbounded"
    log.warning(
        "only %s positions to fit maps of width %s: expect held-out errors inflated by 1 + d/(n−d−1) = %s; "
        "give more text, or use ridge or low-rank",
        f"{n:,}",
        width,
        inflation,
    )


def _about(
    model: Model,
    corpus: Corpus,
    positions: Positions,
    made: dict[str, Batches],
    sizes: str,
    seed: int,
    max_length: int,
    pairs: list[Pair],
) -> dict[str, Any]:
    return {
        **about_model(model),
        "text": corpus.name,
        "text_sha256": corpus.sha256,
        "tokens": sum(split.n_tokens for split in made.values()),
        "positions": str(positions),
        "skip_first": positions.skip_first,
        "special": positions.special,
        "split": sizes,
        "seed": seed,
        "max_length": max_length,
        "n_pairs": len(pairs),
    }


@dataclass
class _Pass:
    """One split's pass, from wherever it stood."""

    plan: Plan
    split: str
    done: Collected
    steps: dict[str, int]
    progress: Progress | None
    checkpoint: Checkpoint | None

    def run(self, mine: Batches, group: Group) -> None:
        moments, start = self.done.splits[self.split], self.steps[self.split]
        rest = (mine[index] for index in range(start, len(mine)))
        mine_before = sum(mine[index].n_tokens for index in range(start))
        tokens = self._tokens_before() + mine_before * group.world
        with (
            deferred_interrupt() as interrupt,
            closing(states(self.plan.model, rest, moments.sites, room=mine.most_picks)) as stream,
        ):
            found = next(stream, None)
            group.share_shift(moments, found.at if found else None)
            while found is not None:
                self._add(moments, found)
                tokens += found.batch.n_tokens * group.world
                if self.progress:
                    self.progress(tokens, self.plan.about["tokens"])
                if interrupt.asked:
                    raise self._stopped(tokens)
                found = None  # let go of this batch's states before the next are made
                found = next(stream, None)

    def _add(self, moments: Moments, found: States) -> None:
        batch = found.batch
        seed = self.plan.about["seed"]
        keys = keys_of(batch.document, batch.position, batch.sequence, seed=seed)
        try:
            moments.add(found.at, keys=keys)
        except BadMoments as error:
            documents = sorted(set(found.batch.document.tolist()))
            raise BadMoments(
                f"{error} in batch {self.steps[self.split]} of the {self.split} split (documents {documents[0]} to "
                f"{documents[-1]}); load the model in float32, or leave that text out"
            ) from error
        self.steps[self.split] += 1
        if self.checkpoint:
            self.checkpoint.save_now_and_then(self.done, self.steps)

    def _tokens_before(self) -> int:
        earlier = self.plan.in_order[: self.plan.in_order.index(self.split)]
        return sum(self.plan.batches[name].n_tokens for name in earlier)

    def _stopped(self, tokens: int) -> RunStopped:
        if not self.checkpoint:
            return RunStopped(f"stopped after {tokens:,} of {self.plan.about['tokens']:,} tokens")
        self.checkpoint.save(self.done, self.steps)
        return RunStopped(
            f"stopped after {tokens:,} of {self.plan.about['tokens']:,} tokens; the sums are saved: run the same "
            f"command with --resume to go on"
        )
