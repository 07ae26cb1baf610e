"""`layerjump fit`: fit jumps, and refine them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from layerjump.cli._options import (
    AsJson,
    Column,
    Force,
    LoadModel,
    OutputFolder,
    Seed,
    Split,
    TextSource,
    Tokens,
    loads_model,
    option_group,
    progress_bar,
    text_option,
)
from layerjump.cli._output_dir import JUMPS, Options, locks_output
from layerjump.cli.inspect import print_jumps
from layerjump.errors import BadEstimator, LayerjumpError, TextTooShort
from layerjump.jumps.estimators.registry import BY_GRADIENTS, CLOSED_FORM, ESTIMATORS, Settings, find_estimator

if TYPE_CHECKING:
    from layerjump.data.corpus import Corpus
    from layerjump.jumps.collect_moments import Checkpoint, RunPlan
    from layerjump.jumps.jumps import Jumps
    from layerjump.jumps.maps import FeatureKind
    from layerjump.jumps.moments import SplitMoments
    from layerjump.models.model import Model

estimator_option = option_group("Estimator settings")
moments_option = option_group("Moments and checkpoints")


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
    model: Annotated[
        str | None, typer.Argument(help="A hub id, a folder, a GGUF file, or the bundled `smollm2`.")
    ] = None,
    estimator: Annotated[
        str, typer.Option(help=f"{', '.join(CLOSED_FORM)}; by gradients: {', '.join(BY_GRADIENTS)}.")
    ] = "mat",
    pairs: Annotated[
        str | None,
        typer.Option(
            help="to-last, to-final, predictions, adjacent, all, submodules, or a list: 0:6,3:6 (default: to-last; "
            "calibrated: predictions, which is to-final, and from the last levels to the last as well)."
        ),
    ] = None,
    refine: Annotated[
        bool, typer.Option("--refine", help="Then tune the maps by KL divergence from the model's output.")
    ] = False,
    refine_steps: Annotated[int, typer.Option(help="Largest number of steps of --refine.")] = 200,
    text: TextSource = "pydoc",
    column: Column = None,
    tokens: Tokens = None,
    split: Split = "80/10/10",
    positions: Annotated[
        str | None,
        text_option(help="Positions to fit on: one, all, sample=8 or 15% (default: all; --pairs all: a sample)."),
    ] = None,
    seed: Seed = 0,
    strength: Annotated[
        float | None,
        estimator_option(help=f"{_takers('strength')}: regularisation (default: chosen on the validation split)."),
    ] = None,
    rank: Annotated[int | None, estimator_option(help=f"{_takers('rank')}: rank of the map.")] = None,
    ojfa_pooling: Annotated[
        str | None, estimator_option(help=f"{_takers('ojfa_pooling')}: pooled or best-level.")
    ] = None,
    features: Annotated[
        str | None,
        estimator_option(
            help="What maps to `final` read of a state h: raw, rms (h/rms(h)) or both (default: raw; calibrated: the "
            "best of them)."
        ),
    ] = None,
    output: OutputFolder = Path("jumps"),
    force: Force = False,
    as_json: AsJson = False,
    resume: Annotated[bool, moments_option("--resume", help="Continue an unfinished run.")] = False,
    checkpoint_seconds: Annotated[float, moments_option(help="Seconds between checkpoints.")] = 60.0,
    save_moments: Annotated[bool, moments_option("--save-moments", help="Save the second moments too.")] = False,
    from_moments: Annotated[
        list[Path] | None,
        moments_option(help="Solve saved moments instead of running the model; repeat to merge several."),
    ] = None,
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

    settings: dict[str, Any] = {"strength": strength, "rank": rank, "ojfa_pooling": ojfa_pooling}
    if estimator in BY_GRADIENTS:
        closed_form = settings | {"pairs": pairs, "positions": positions}
        closed_form |= {"features": features, "resume": resume, "refine": refine}
        closed_form |= {"save_moments": save_moments, "from_moments": from_moments}
        _refuse_closed_form_options(estimator, closed_form)
        loaded, corpus = _load(load, model, text, column)
        jumps = _fit_by_gradients(estimator, loaded, corpus, tokens=tokens, rank=rank, split=split, seed=seed)
        _write(jumps, output, as_json=as_json)
        Checkpoint(output).clear()
        return
    row = find_estimator(estimator)
    row.check_settings(Settings(**settings))
    group = ProcessGroup.from_environment()
    if refine:
        _check_refine(refine_steps, from_moments, group.world)
    model_or_none: Model | None = None
    if from_moments:
        moments = merge_moments([SplitMoments.load(path) for path in from_moments])
        if model is not None:
            model_or_none = _load_fitted_model(load, model, moments)
    else:
        model_or_none, corpus = _load(load, model, text, column)
        run = plan_run(
            model_or_none,
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
        moments = _collect(run, Checkpoint(output, checkpoint_seconds, resume, group), estimator, refine)
    group.leave()
    if group.rank != 0:
        return
    if refine and "keep_both_targets" in row.settings:
        settings["keep_both_targets"] = True
    jumps = solve_jumps(moments, estimator, Settings(**settings), model=model_or_none)
    if refine:
        assert model_or_none is not None
        jumps = _refine(model_or_none, jumps, corpus, refine_steps, tokens, seed, output, resume=resume)
    _write(jumps, output, as_json=as_json)
    if save_moments:
        moments.save(output / "moments.safetensors")
    Checkpoint(output).clear()


def _load(load: LoadModel, model: str | None, text: str, column: str | None) -> tuple[Model, Corpus]:
    from layerjump.data.corpus import load_text

    if model is None:
        raise LayerjumpError("give a model to run, or --from-moments with saved moments to solve")
    return load(model), load_text(text, column=column)


def _load_fitted_model(load: LoadModel, model: str, moments: SplitMoments) -> Model:
    """Load the model of saved moments: some estimators compare their maps with it."""
    from layerjump.errors import WrongModel
    from layerjump.models.fingerprint import fingerprint

    loaded = load(model)
    if fingerprint(loaded.hf) != moments.info.fingerprint:
        raise WrongModel(
            f"these moments are of {moments.info.model}, but {model} has other weights; give the model that they are of"
        )
    return loaded


def _write(jumps: Jumps, output: Path, *, as_json: bool) -> None:
    jumps.save_pretrained(output)
    print_jumps(jumps, as_json=as_json)
    print(f"wrote {output}", file=sys.stderr)


def _refuse_closed_form_options(estimator: str, options: dict[str, Any]) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise BadEstimator(f"{estimator} runs in one process; start it without torchrun")
    for name, value in options.items():
        if name not in ESTIMATORS[estimator].settings and value not in (None, False):
            option = f"--{name.replace('_', '-')}"
            raise BadEstimator(
                f"{estimator} has no option {option}: it maps every level to the last, at all positions but the first "
                f"ones; leave {option} out"
            )


def _fit_by_gradients(
    estimator: str, model: Model, corpus: Corpus, *, tokens: int | None, rank: int | None, split: str, seed: int
) -> Jumps:
    settings: dict[str, Any] = {"split": split, "seed": seed}
    settings |= {name: value for name, value in (("tokens", tokens), ("rank", rank)) if value}
    fit_maps = find_estimator(estimator).load()
    with progress_bar("backward passes") as update:
        return fit_maps(model, corpus, **settings, progress=update)  # type: ignore[no-any-return]


def _collect(run: RunPlan, checkpoint: Checkpoint, estimator: str, refine: bool) -> SplitMoments:
    """Check what the estimator and `--refine` need, then collect the second moments."""
    from layerjump.lens.refine import check_tunable

    pairs, group = run.moments["fit"].pairs, checkpoint.group
    if refine:
        check_tunable(estimator, pairs, run.model.n_blocks)
        if not any(part.n_tokens for name, part in run.batches.items() if name != "fit"):
            raise TextTooShort(
                "--refine needs held-out documents, and this text and --split leave none; give more text, or --split "
                "80/10/10"
            )
    is_first = group.rank == 0
    if is_first:
        print(run.cost, file=sys.stderr)
    with progress_bar("collecting") as update:
        progress = update if is_first else None
        return run.run(progress=progress, checkpoint=checkpoint)


def _check_refine(steps: int, from_moments: list[Path] | None, world: int) -> None:
    if from_moments or world > 1:
        raise LayerjumpError(
            "--refine runs the model in one process; give a model, without --from-moments and torchrun"
        )
    if steps < 1:
        raise LayerjumpError(f"expected --refine-steps of 1 or more, got {steps}")


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
            line = f"step {done}: held-out KL {_mean(kl):.4f} (mean); by level {levels}"
            print(line, file=sys.stderr)

        refined = refine(
            model, jumps, corpus, steps=steps, tokens=tokens, seed=seed, progress=report, checkpoint_folder=output
        )
    record = refined.provenance.settings["refine"]
    before, after = (_mean(record[name]) for name in ("kl_before", "kl_after"))
    print(f"held-out KL {before:.4f} → {after:.4f}, mean over levels", file=sys.stderr)
    return refined


def _mean(values: list[float | None] | list[float]) -> float:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite else float("nan")
