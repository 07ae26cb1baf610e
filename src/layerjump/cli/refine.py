"""The part of `layerjump fit` that tunes: `--refine kl`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from layerjump.cli.options import progress_bar
from layerjump.errors import LayerjumpError

if TYPE_CHECKING:
    from layerjump.fit.jumps import Jumps
    from layerjump.inputs.corpus import Corpus
    from layerjump.inputs.models import Model


def check_refine(
    refine: str | None, steps: int, how: str | None, from_moments: list[Path] | None, world: int
) -> None:
    """Refuse what a tuning cannot do, before any work."""
    from layerjump.fit.fit import TO_TUNE

    if how == TO_TUNE:
        raise LayerjumpError(
            f"--how {TO_TUNE} was given; --refine kl takes it by itself, leave it out"
        )
    if refine is None:
        return
    if refine != "kl":
        raise LayerjumpError(f"--refine was given {refine!r}; the one way there is is kl")
    if from_moments or world > 1:
        raise LayerjumpError(
            "--refine runs the model in one process; give a model, without torchrun"
        )
    if steps < 1:
        raise LayerjumpError(f"--steps given is {steps}; give 1 or more")


def tuned(
    model: Model,
    jumps: Jumps,
    corpus: Corpus,
    steps: int,
    tokens: int | None,
    seed: int,
    output: Path,
    resume: bool,
) -> Jumps:
    """Tune jumps, and say how each level's KL falls."""
    from layerjump.lens.refine import refine

    if not resume:
        forget_tuning(output)
    with progress_bar("tuning", unit="steps") as update:

        def told(done: int, whole: int, kl: list[float]) -> None:
            update(done, whole)
            levels = " ".join(f"{one:.3f}" for one in kl)
            mean = sum(kl) / len(kl)
            print(f"step {done}: held-out KL {mean:.4f} (mean); by level {levels}", file=sys.stderr)

        found = refine(
            model,
            jumps,
            corpus,
            steps=steps,
            tokens=tokens,
            seed=seed,
            progress=told,
            folder=output,
        )
    said = found.provenance.settings["refine"]
    before, after = (_mean(said[name]) for name in ("kl_before", "kl_after"))
    print(f"held-out KL {before:.4f} → {after:.4f}, mean over levels", file=sys.stderr)
    return found


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else float("nan")


def forget_tuning(output: Path) -> None:
    """Remove what an earlier tuning has left to be taken up."""
    from layerjump.lens.tuning import NAME

    (output / NAME).unlink(missing_ok=True)
