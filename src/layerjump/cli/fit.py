"""The part of `layerjump fit` that tunes: `--refine kl`.

`layerjump fit`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import (
    AsJson,
    Column,
    Device,
    DeviceMap,
    Dtype,
    Force,
    Revision,
    Seed,
    Split,
    Trust,
    progress_bar,
)
from layerjump.cli._output_dir import JUMPS, writes_folder
from layerjump.cli.inspect import print_jumps
from layerjump.errors import BadEstimator, LayerjumpError, TextTooShort

if TYPE_CHECKING:
    from layerjump.data.corpus import Corpus
    from layerjump.jumps.collect import RunPlan, SplitMoments
    from layerjump.jumps.jumps import Jumps
    from layerjump.models.model import Model


def check_refine(
    refine: str | None, steps: int, how: str | None, from_moments: list[Path] | None, world: int
) -> None:
    """Refuse what a tuning cannot do, before any work."""
    from layerjump.jumps.fit import TO_TUNE

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
    from layerjump.lens.tuning import refine

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


BY_GRADIENTS = {"jacobian": (), "n-njtc-trained": ("rank",)}
"""What is not solved from sums, and the options that it shares with what is."""


def _go_on(given: dict[str, Any]) -> str:
    if given["estimator"] in BY_GRADIENTS:
        return "nothing was saved: run the same command to start anew"
    return "run the same command with --resume to go on"


@writes_folder(
    _go_on,
    holds={"unfinished-*": "an unfinished run, which --resume goes on with", **JUMPS},
)
def fit(
    model: Annotated[
        str | None,
        typer.Argument(help="A hub id, a folder, a GGUF file, or the built-in `smollm2`."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")] = Path(
        "jumps"
    ),
    text: Annotated[
        str, typer.Option(help="A file, a hub dataset, `-` for standard input, or `pydoc`.")
    ] = "pydoc",
    column: Column = None,
    pairs: Annotated[
        str | None,
        typer.Option(
            help="to-last, to-final, predictions, adjacent, all, submodules, or a list: 0:6,3:6 (default: to-last; "
            "calibrated: predictions, which is to-final, and from the last levels to the last as well)."
        ),
    ] = None,
    estimator: Annotated[
        str,
        typer.Option(
            help="identity, mean-shift, mat, affine, ridge, orthogonal, low-rank, n-njtc, ojfa, calibrated; or by "
            "gradients: jacobian, n-njtc-trained."
        ),
    ] = "mat",
    strength: Annotated[
        float | None, typer.Option(help="ridge: its strength (default: chosen on select).")
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="low-rank, ojfa, n-njtc-trained: the rank.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="low-rank: `unembedding` weighs errors as logits see them.")
    ] = None,
    how: Annotated[str | None, typer.Option(help="ojfa: pooled or best-level.")] = None,
    features: Annotated[
        str | None,
        typer.Option(
            help="What maps onto `final` read of a state h: raw, rms (h/rms(h)) or both (default: raw; calibrated: "
            "the best of them)."
        ),
    ] = None,
    refine: Annotated[
        str | None, typer.Option(help="kl: tune the maps by KL to the model's output.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of --refine, at most.")] = 200,
    positions: Annotated[
        str | None,
        typer.Option(help="one, all, sample=8, 15% (default: all; all pairs: a sample)."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to run (default: the whole text).")
    ] = None,
    split: Split = "80/10/10",
    seed: Seed = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an unfinished run.")] = False,
    save_every: Annotated[float, typer.Option(help="Seconds between saves of the sums.")] = 60.0,
    save_moments: Annotated[
        bool, typer.Option("--save-moments", help="Keep the sums too.")
    ] = False,
    from_moments: Annotated[
        list[Path] | None,
        typer.Option(help="Solve saved sums instead of running a model; several are merged."),
    ] = None,
    force: Force = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Fit jumps in one pass over some text.

    [bold]layerjump fit smollm2 -o jumps[/]                                   every level to the last
    [bold]layerjump fit gpt2 --text wiki.txt --positions one --estimator mat[/]   the paper's protocol
    [bold]layerjump fit MODEL --pairs all --estimator ridge --save-moments[/]
    [bold]layerjump fit MODEL --estimator calibrated --refine kl --steps 200[/]   the best lens
    [bold]layerjump fit --from-moments a.safetensors --from-moments b.safetensors[/]   no model needed
    [bold]layerjump fit MODEL --estimator jacobian --tokens 4000[/]           by backward passes, d for each batch
    [bold]layerjump fit MODEL --estimator n-njtc-trained[/]                   narrow jumps as published, by descent
    [bold]torchrun --nproc-per-node 2 -m layerjump fit MODEL …[/]             several processes
    """
    from layerjump.jumps.collect import Checkpoint, ProcessGroup, SplitMoments, merge_moments
    from layerjump.jumps.fit import TO_PREDICTIONS, TO_TUNE, plan_settings, solve_jumps

    settings: dict[str, Any] = {"strength": strength, "rank": rank, "metric": metric, "how": how}
    where: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    where |= {"device": device, "dtype": dtype, "device_map": device_map}
    if estimator in BY_GRADIENTS:
        settings |= {"pairs": pairs, "positions": positions, "resume": resume, "features": features}
        sums = {"save-moments": save_moments, "from-moments": from_moments, "refine": refine}
        _refuse(estimator, settings | sums)
        given = {"tokens": tokens, "rank": rank, "split": split, "seed": seed}
        opened = _opened(model, where, text, column)
        _write(_by_gradients(estimator, *opened, given), output, as_json=as_json)
        Checkpoint(output).clear()
        return
    wanted, loaded, group = (
        plan_settings(estimator, strength),
        None,
        ProcessGroup.from_environment(),
    )
    wanted |= {k: v for k, v in {"pairs": pairs, "features": _features(features)}.items() if v}
    check_refine(refine, steps, how, from_moments, group.world)
    if from_moments:
        collected = merge_moments([SplitMoments.load(path) for path in from_moments])
        loaded = None if model is None else _same_model(model, where, collected)
    else:
        from layerjump.jumps.collect import plan_run

        loaded, corpus = _opened(model, where, text, column)
        wanted |= {"select": wanted["select"] or save_moments or refine is not None}
        wanted |= {"positions": positions, "tokens": tokens, "split": split, "seed": seed}
        chosen = plan_run(loaded, corpus, **wanted)
        collected = _run(chosen, Checkpoint(output, save_every, resume, group), estimator, refine)
    group.leave()
    if group.rank != 0:
        return
    if refine is not None and estimator == TO_PREDICTIONS:
        settings["how"] = how or TO_TUNE
    jumps = solve_jumps(collected, estimator, **settings, model=loaded)
    if refine is not None:
        assert loaded is not None
        jumps = tuned(loaded, jumps, corpus, steps, tokens, seed, output, resume)
    _write(jumps, output, as_json=as_json)
    if save_moments:
        collected.save(output / "moments.safetensors")
    Checkpoint(output).clear()


def _opened(
    model: str | None, where: dict[str, Any], text: str, column: str | None
) -> tuple[Model, Corpus]:
    from layerjump.data.corpus import load_text
    from layerjump.models.loading import load

    if model is None:
        raise LayerjumpError("give a model to run, or --from-moments with saved sums to solve")
    return load(model, **where), load_text(text, column=column)


def _same_model(model: str, where: dict[str, Any], collected: SplitMoments) -> Model:
    """The model that sums are of; loaded, since some estimators hold their maps against it."""
    from layerjump.errors import WrongModel
    from layerjump.models.fingerprint import fingerprint
    from layerjump.models.loading import load

    loaded = load(model, **where)
    if fingerprint(loaded.hf) != collected.about["fingerprint"]:
        raise WrongModel(
            f"these sums are of {collected.about['model']}, and {model} has other weights; give the model they are of"
        )
    return loaded


def _write(jumps: Jumps, output: Path, *, as_json: bool) -> None:
    jumps.save_pretrained(output)
    print_jumps(jumps, as_json=as_json)
    print(f"wrote {output}", file=sys.stderr)


def _refuse(estimator: str, closed_form: dict[str, Any]) -> None:
    """What gradients make has none of the options of estimators in closed form."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise BadEstimator(f"{estimator} runs in one process; start it without torchrun")
    allowed = BY_GRADIENTS[estimator]
    for name, value in closed_form.items():
        if name not in allowed and value is not None and value is not False:
            raise BadEstimator(
                f"--{name} was given, but {estimator} has no such option: it leads from every level to the last, at "
                f"all positions but the first or first few; leave it out"
            )


def _by_gradients(estimator: str, model: Model, corpus: Corpus, given: dict[str, Any]) -> Jumps:
    from layerjump.jumps.estimators.gradient import fit_jacobian, train_n_njtc

    makes: Any = {"jacobian": fit_jacobian, "n-njtc-trained": train_n_njtc}[estimator]
    known = {name: value for name, value in given.items() if value is not None}
    with progress_bar("going backwards") as update:
        return makes(model, corpus, **known, progress=update)


def _run(chosen: RunPlan, checkpoint: Any, estimator: str, refine: str | None) -> SplitMoments:
    from layerjump.jumps.fit import check_pairs
    from layerjump.lens.tuning import check_tunable

    pairs, group = chosen.moments["fit"].pairs, checkpoint.group
    check_pairs(estimator, pairs, chosen.model.n_blocks)
    if refine is not None:
        check_tunable(estimator, pairs, chosen.model.n_blocks)
        if not any(part.n_tokens for name, part in chosen.batches.items() if name != "fit"):
            raise TextTooShort(
                "--refine watches documents that are not fitted on, and this text and --split leave it none; give more "
                "text, or --split 80/10/10"
            )
    if group.rank == 0:
        print(chosen.bill, file=sys.stderr)
    with progress_bar("collecting") as update:
        report = update if group.rank == 0 else None
        return chosen.run(progress=report, checkpoint=checkpoint, group=group)


def _features(given: str | None) -> str | None:
    from layerjump.jumps.maps import FEATURES

    if given is not None and given not in FEATURES:
        raise LayerjumpError(f"features given are {given!r}; give {', '.join(FEATURES)}")
    return given
