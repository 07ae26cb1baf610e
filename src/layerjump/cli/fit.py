"""`layerjump fit`: fit jumps, and refine them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from layerjump.cli._options import COLUMN, SEED, SPLIT, TEXT, TOKENS, LoadModel, Panel, loads_model, option, text_option
from layerjump.cli._output import FORCE, JSON, JUMPS, Options, locks_output, log, output_folder, progress_bar
from layerjump.cli.inspect import print_jumps
from layerjump.errors import BadEstimator, LayerjumpError, TextTooShort, WrongModel
from layerjump.jumps.estimators.registry import BY_GRADIENTS, CLOSED_FORM, ESTIMATORS, Settings, find_estimator

if TYPE_CHECKING:
    from layerjump.data.corpus import Corpus
    from layerjump.jumps.collect_moments import RunPlan
    from layerjump.jumps.jumps import Jumps
    from layerjump.jumps.maps import FeatureKind
    from layerjump.jumps.moments import SplitMoments
    from layerjump.models.model import Model

estimator_option = Panel("Estimator settings")
moments_option = Panel("Moments and checkpoints")


def _takers(setting: str) -> str:
    """The names of the estimators that take a setting."""
    return ", ".join(name for name, row in ESTIMATORS.items() if setting in row.settings)


def _resume_hint(options: Options) -> str:
    if options["estimator"] in BY_GRADIENTS:
        return "nothing was saved: run the same command to start again"
    return "run the same command with --resume to continue"


@locks_output(_resume_hint, refuses={"unfinished-*": "an unfinished run, which --resume continues", **JUMPS})
@loads_model(device_map=True)
def fit(
    model: str | None = typer.Argument(None, help="A hub id, a folder, a GGUF file, or the bundled `smollm2`."),
    estimator: str = option("mat", f"{', '.join(CLOSED_FORM)}; by gradients: {', '.join(BY_GRADIENTS)}."),
    pairs: str | None = option(
        None,
        "to-last, to-final, predictions, adjacent, all, submodules, or a list: 0:6,3:6 (default: to-last; "
        "calibrated: predictions, which is to-final, and from the last levels to the last as well).",
    ),
    refine: bool = option(False, "Then tune the maps by KL divergence from the model's output.", "--refine"),
    refine_steps: int = option(200, "Largest number of steps of --refine."),
    text: str = TEXT,
    column: str | None = COLUMN,
    tokens: int | None = TOKENS,
    split: str = SPLIT,
    positions: str | None = text_option(
        None,
        "Positions to fit on: one, all, sample=8, 15%, first or last (default: all; --pairs all: a sample; for a "
        "classifier of texts: the one that it reads).",
    ),
    seed: int = SEED,
    strength: float | None = estimator_option(
        None, f"{_takers('strength')}: regularisation (default: chosen on the validation split)."
    ),
    rank: int | None = estimator_option(None, f"{_takers('rank')}: rank of the map."),
    ojfa_pooling: str | None = estimator_option(None, f"{_takers('ojfa_pooling')}: pooled or best-level."),
    features: str | None = estimator_option(
        None,
        "What maps to `final` read of a state h: raw, rms (h/rms(h)) or both (default: raw; calibrated: the "
        "best of them).",
    ),
    output: Path = output_folder("jumps"),
    force: bool = FORCE,
    as_json: bool = JSON,
    resume: bool = moments_option(False, "Continue an unfinished run.", "--resume"),
    checkpoint_seconds: float = moments_option(60.0, "Seconds between checkpoints."),
    save_moments: bool = moments_option(False, "Save the second moments too.", "--save-moments"),
    from_moments: list[Path] | None = moments_option(
        None, "Solve saved moments instead of running the model; repeat to merge several."
    ),
    *,
    load: LoadModel,
) -> None:
    """Fit jumps in one pass over a text.

    [bold]layerjump fit smollm2 --text wiki.txt -o jumps[/]                      every level to the last
    [bold]layerjump fit MODEL --estimator calibrated --refine[/]                 the most accurate lens
    [bold]layerjump fit gpt2 --text wiki.txt --positions one[/]                  the protocol of the mat paper
    [bold]layerjump fit --from-moments a.safetensors --from-moments b.safetensors[/]   merged, without a model
    [bold]torchrun --nproc-per-node 2 -m layerjump fit MODEL …[/]                several processes
    """
    from layerjump.jumps.collect_moments import Checkpoint, ProcessGroup, plan_run
    from layerjump.jumps.fit import solve_jumps
    from layerjump.jumps.moments import SplitMoments, merge_moments
    from layerjump.models.fingerprint import fingerprint

    settings: dict[str, Any] = {"strength": strength, "rank": rank, "ojfa_pooling": ojfa_pooling}
    row = find_estimator(estimator)
    loaded: Model | None = None
    if estimator in BY_GRADIENTS:
        closed_form = settings | {"pairs": pairs, "positions": positions, "features": features, "resume": resume}
        closed_form |= {"refine": refine, "save_moments": save_moments, "from_moments": from_moments}
        _refuse_closed_form_options(estimator, closed_form)
        loaded, corpus = _load(load, model, text, column)
        sizes = {name: value for name, value in (("tokens", tokens), ("rank", rank)) if value}
        with progress_bar("backward passes") as update:
            jumps = row.load()(loaded, corpus, **sizes, split=split, seed=seed, progress=update)
        _write(jumps, output, None, as_json=as_json)
        return
    row.check_settings(Settings(**settings))
    group = ProcessGroup.from_environment()
    if refine and (from_moments or group.world > 1):
        raise LayerjumpError(
            "--refine runs the model in one process; give a model, without --from-moments and torchrun"
        )
    if refine and refine_steps < 1:
        raise LayerjumpError(f"expected --refine-steps of 1 or more, got {refine_steps}")
    if from_moments:
        moments = merge_moments([SplitMoments.load(path) for path in from_moments])
        loaded = None if model is None else load(model)  # some estimators compare their maps with the model
        if loaded is not None and fingerprint(loaded.hf) != moments.info.fingerprint:
            raise WrongModel(
                f"these moments are of {moments.info.model}, but {model} has other weights; give the model that they "
                "are of"
            )
    else:
        loaded, corpus = _load(load, model, text, column)
        run = plan_run(
            loaded,
            corpus,
            estimator=estimator,
            strength=strength,
            pairs=pairs,
            positions=positions,
            tokens=tokens,
            split=split,
            seed=seed,
            use_validation=True if save_moments or refine else None,
            features=cast("FeatureKind | None", features),
        )
        if refine:
            _check_refinable(run, estimator)
        if group.rank == 0:
            log(run.cost)
        checkpoint = Checkpoint(output, checkpoint_seconds, resume, group)
        with progress_bar("collecting") as update:
            moments = run.run(progress=update if group.rank == 0 else None, checkpoint=checkpoint)
    group.leave()
    if group.rank != 0:
        return
    if refine and "keep_both_targets" in row.settings:
        settings["keep_both_targets"] = True
    jumps = solve_jumps(moments, estimator, Settings(**settings), model=loaded)
    if refine:
        assert loaded is not None
        jumps = _refine(loaded, jumps, corpus, refine_steps, tokens, seed, output, resume=resume)
    _write(jumps, output, moments if save_moments else None, as_json=as_json)


def _load(load: LoadModel, model: str | None, text: str, column: str | None) -> tuple[Model, Corpus]:
    from layerjump.data.corpus import load_text

    if model is None:
        raise LayerjumpError("give a model to run, or --from-moments with saved moments to solve")
    return load(model), load_text(text, column=column)


def _write(jumps: Jumps, output: Path, moments: SplitMoments | None, *, as_json: bool) -> None:
    from layerjump.jumps.collect_moments import Checkpoint

    jumps.save_pretrained(output)
    print_jumps(jumps, as_json=as_json)
    log(f"wrote {output}")
    if moments is not None:
        moments.save(output / "moments.safetensors")
    Checkpoint(output).clear()


def _refuse_closed_form_options(estimator: str, options: Options) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise BadEstimator(f"{estimator} runs in one process; start it without torchrun")
    for name, value in options.items():
        if name not in ESTIMATORS[estimator].settings and value not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise BadEstimator(
                f"{estimator} has no option {option}: it maps every level to the last, at all positions but the first "
                f"ones; leave {option} out"
            )


def _check_refinable(run: RunPlan, estimator: str) -> None:
    """Raise what `--refine` would raise after the moments are collected."""
    from layerjump.lens.refine import check_tunable

    check_tunable(estimator, run.moments["fit"].pairs, run.model.n_blocks)
    if not any(part.n_tokens for name, part in run.batches.items() if name != "fit"):
        raise TextTooShort(
            "--refine needs held-out documents, and this text and --split leave none; give more text, or --split "
            "80/10/10"
        )


def _refine(
    model: Model, jumps: Jumps, corpus: Corpus, steps: int, tokens: int | None, seed: int, output: Path, *, resume: bool
) -> Jumps:
    """Refine the jumps, and print the held-out KL of every level as it falls."""
    from layerjump.lens.refine import CHECKPOINT_NAME, refine

    if not resume:
        (output / CHECKPOINT_NAME).unlink(missing_ok=True)
    with progress_bar("refining", unit="steps") as update:

        def report(done: int, total: int, kl: list[float]) -> None:
            update(done, total)
            levels = " ".join(f"{value:.3f}" for value in kl)
            log(f"step {done}: held-out KL {_mean(kl):.4f} (mean); by level {levels}")

        refined = refine(
            model, jumps, corpus, steps=steps, tokens=tokens, seed=seed, progress=report, checkpoint_folder=output
        )
    record = refined.provenance.settings["refine"]
    before, after = (_mean(record[name]) for name in ("kl_before", "kl_after"))
    log(f"held-out KL {before:.4f} → {after:.4f}, mean over levels")
    return refined


def _mean(values: list[float | None] | list[float]) -> float:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite else float("nan")
