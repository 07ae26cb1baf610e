"""`layerjump fit`: fit jumps, and refine them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from layerjump.cli._options import (
    COLUMN,
    FORCE,
    JSON,
    SEED,
    SPLIT,
    TEXT,
    TOKENS,
    LoadModel,
    OptionPanel,
    loading_option,
    loads_model,
    option,
    output_folder,
    output_option,
    text_option,
)
from layerjump.cli._output_folder import JUMPS, Options, locks_output
from layerjump.cli._printing import log, progress_bar
from layerjump.cli.inspect import print_jumps
from layerjump.errors import BadEstimator, LayerjumpError, TextTooShort, WrongModel, argument
from layerjump.jumps.estimators.registry import CLOSED_FORM, ESTIMATORS, FROM_TEXT, EstimatorSettings, find_estimator

if TYPE_CHECKING:
    from layerjump.data.corpus import Corpus
    from layerjump.jumps.collect_moments import RunPlan
    from layerjump.jumps.jumps import Jumps
    from layerjump.jumps.maps import FeatureKind
    from layerjump.jumps.moments_of_splits import SplitMoments
    from layerjump.jumps.serialization import Storage
    from layerjump.models.model import Model

estimator_option = OptionPanel("Estimator settings")
moments_option = OptionPanel("Moments and checkpoints")
memory_option = OptionPanel("Memory")


def _takers(setting: str) -> str:
    """The names of the estimators that take a setting."""
    return ", ".join(name for name, row in ESTIMATORS.items() if setting in row.settings)


def _resume_hint(options: Options) -> str:
    if options["estimator"] in FROM_TEXT:
        return "nothing was saved: run the same command to start again"
    return "run the same command with --resume to continue"


@locks_output(_resume_hint, refuses={"unfinished-*": "an unfinished run, which --resume continues", **JUMPS})
@loads_model
def fit(
    model: str | None = typer.Argument(None, help="A hub id, a folder, a GGUF file, or the bundled `smollm2`."),
    estimator: str = option("mat", f"{', '.join(CLOSED_FORM)}; in passes of their own: {', '.join(FROM_TEXT)}."),
    pairs: str | None = option(
        None,
        "to-last (every level to the last), to-final (to the state after the final norm), adjacent, all, submodules, "
        "or a list: 0:6,3:6. Default: to-last; for `calibrated`: predictions, which is to-final, plus to-last for "
        "the last few levels. Sources may be joint: final@-1+10:final, or to-final+final@-1.",
    ),
    sources: str | None = option(
        None,
        "Fit one jump that reads several sites side by side, at earlier positions too: final@-1+1 is the previous "
        "position's final state and level 1. Sites: levels, parts such as 5.attn.out, final, embedding.",
    ),
    target: str | None = option(None, "The site that this jump leads to."),
    refine: bool = option(
        False,
        "After fitting, fine-tune the maps by gradient descent to minimise the KL divergence from the model's output.",
        "--refine",
    ),
    refine_steps: int = option(200, "Maximum number of --refine steps."),
    text: str = TEXT,
    column: str | None = COLUMN,
    limit: int | None = text_option(
        None, "Number of documents to read (default: all; of a hub dataset the first 10,000)."
    ),
    tokens: int | None = TOKENS,
    split: str = SPLIT,
    positions: str | None = text_option(
        None,
        "Positions to fit on: one, all, sample=8, 15%, first or last (default: all; --pairs all: a sample; text "
        "classifiers: the position the head reads).",
    ),
    seed: int = SEED,
    strength: float | None = estimator_option(
        None, f"{_takers('strength')}: regularisation (default: chosen on the validation split)."
    ),
    rank: int | None = estimator_option(None, f"{_takers('rank')}: rank of the map."),
    metric: str | None = estimator_option(
        None,
        f"{_takers('metric')}: unembedding weighs errors by their effect on the logits (default: all coordinates "
        "alike).",
        metavar="<unembedding>",
    ),
    noise: float | None = estimator_option(
        None, f"{_takers('noise')}: size of the noise, in units of the spread of the states (default: 0.1)."
    ),
    ojfa_pooling: str | None = estimator_option(
        None,
        f"{_takers('ojfa_pooling')}: fit the shared map on all levels together (pooled, the default) or on the single "
        "best level (best-level).",
    ),
    features: str | None = estimator_option(
        None,
        "Input of maps onto the post-norm state (`final`): raw (h), rms (h/rms(h)), or both concatenated (default: "
        "raw; calibrated: the best of them).",
        "--source-scaling",
        metavar="<raw|rms|both>",
    ),
    output: Path = output_folder("jumps"),
    force: bool = FORCE,
    storage: str = output_option(
        "float32", "Numbers in the file: float32, or int8 for a quarter of the size.", metavar="<float32|int8>"
    ),
    write_card: bool = output_option(
        False,
        "Score the jumps as a lens on held-out documents, and write a model card, README.md, with the scores.",
        "--model-card",
    ),
    push_to_hub: str | None = output_option(
        None,
        "Write a model card, and upload it with the jumps to this hub repository; `layerjump/<model>` is where `lens` "
        "looks for those of a model.",
        "--push-to-hub",
        metavar="<owner/name>",
    ),
    as_json: bool = JSON,
    resume: bool = moments_option(False, "Continue an unfinished run.", "--resume"),
    checkpoint_seconds: float = moments_option(60.0, "Seconds between checkpoints."),
    save_moments: bool = moments_option(False, "Save the second moments too.", "--save-moments"),
    from_moments: list[Path] | None = moments_option(
        None, "Solve saved moments instead of running the model; repeat to merge several."
    ),
    shard: str | None = moments_option(
        None, "Collect moments of one part of the text: 0/8 … 7/8 in eight jobs; --from-moments merges them."
    ),
    memory: str | None = memory_option(
        None, "Memory the fit may use besides the model, such as 48GB (default: what is free)."
    ),
    spill: Path | None = memory_option(
        None,
        "Folder for hidden states: moments are then summed one source at a time, which gives the same jumps in less "
        "memory (default: `spill` in the output folder, used only if the moments do not fit in memory).",
    ),
    tensor_parallel: int = loading_option(1, "Number of torchrun processes that share one copy of the model."),
    fully_shard: bool = loading_option(
        False, "Share the weights of the blocks among the torchrun processes (FSDP2).", "--fully-shard"
    ),
    *,
    load: LoadModel,
) -> None:
    """Fit jumps in one pass over a text.

    [bold]layerjump fit smollm2 --text wiki.txt -o jumps[/]                      every level to the last
    [bold]layerjump fit MODEL --estimator calibrated --refine[/]                 the most accurate lens
    [bold]layerjump fit gpt2 --text wiki.txt --positions one[/]                  the protocol of the mat paper
    [bold]layerjump fit --from-moments a.safetensors --from-moments b.safetensors[/]   merged, without a model
    [bold]layerjump fit MODEL --sources final@-1+1 --target 26[/]                one source at the previous position
    [bold]torchrun --nproc-per-node 2 -m layerjump fit MODEL …[/]                several processes
    [bold]layerjump fit MODEL --pairs all --memory 48GB[/]                       within this much memory
    [bold]layerjump fit gpt2 --estimator calibrated --push-to-hub layerjump/gpt2[/]  share the lens of a model
    """
    from layerjump.jumps.collect_moments import plan_run
    from layerjump.jumps.cost_estimate import parse_memory, plan_memory
    from layerjump.jumps.fit import fit_planned, solve_jumps
    from layerjump.jumps.moments_checkpoint import Checkpoint
    from layerjump.jumps.moments_of_splits import merge_moments_files
    from layerjump.jumps.process_group import ProcessGroup
    from layerjump.jumps.serialization import check_storage
    from layerjump.lens.score_jumps import with_held_out_scores
    from layerjump.models.fingerprint import fingerprint
    from layerjump.models.sites import join_pairs

    settings: dict[str, Any] = {"strength": strength, "rank": rank, "ojfa_pooling": ojfa_pooling, "noise": noise}
    settings["metric"] = metric
    row = find_estimator(estimator)
    check_storage(storage)
    loaded: Model | None = None
    jumps: Jumps | None = None
    if estimator in FROM_TEXT:
        closed_form = settings | {"pairs": pairs, "positions": positions, "features": features, "resume": resume}
        closed_form |= {"refine": refine, "save_moments": save_moments, "from_moments": from_moments, "shard": shard}
        closed_form |= {"memory": memory, "spill": spill, "sources": sources, "target": target}
        _refuse_closed_form_options(estimator, closed_form)
        loaded, corpus = _load(load, model, text, column, limit)
        passed = {"tokens": tokens, "rank": rank, "noise": noise}
        sizes = {name: value for name, value in passed.items() if value is not None}
        with progress_bar("running the model") as update:
            trained = row.load()(loaded, corpus, **sizes, split=split, seed=seed, progress=update)
        if write_card or push_to_hub is not None:
            trained = with_held_out_scores(loaded, trained, corpus)
        _write(trained, output, None, storage=storage, as_json=as_json)
        _publish(trained, output, write_card, push_to_hub, storage)
        return
    row.check_settings(EstimatorSettings(**settings))
    group = ProcessGroup.from_environment(model_ranks=tensor_parallel)
    if refine and (from_moments or group.world > 1):
        raise LayerjumpError(
            "--refine runs the model in one process; give a model, without --from-moments and torchrun"
        )
    if tensor_parallel > 1 and row.needs_model and shard is None:
        raise LayerjumpError(
            f"{estimator} compares its maps with the model in one process; collect moments with --tensor-parallel and "
            f"--shard 0/1, then solve them with fit MODEL --from-moments"
        )
    if (write_card or push_to_hub is not None) and (from_moments or shard):
        raise LayerjumpError("a model card needs jumps scored on text; leave out --from-moments and --shard")
    if shard is not None and (refine or from_moments):
        raise LayerjumpError("--shard collects moments; give it without --refine and --from-moments")
    if refine and refine_steps < 1:
        raise LayerjumpError(f"expected --refine-steps of 1 or more, got {refine_steps}")
    if (memory or spill) and (from_moments or save_moments or shard or group.world > 1):
        raise LayerjumpError(
            "--memory and --spill plan the run of one process that saves no sums; leave them out, or --from-moments, "
            "--save-moments, --shard and torchrun"
        )
    if refine and "keep_both_targets" in row.settings:
        settings["keep_both_targets"] = True
    if from_moments:
        moments = merge_moments_files(from_moments)
        loaded = None if model is None else load(model)  # some estimators compare their maps with the model
        if loaded is not None and fingerprint(loaded.hf) != moments.info.fingerprint:
            raise WrongModel(
                f"these moments are of {moments.info.model}, but {model} has other weights; give the model that they "
                "are of"
            )
    else:
        loaded, corpus = _load(
            load, model, text, column, limit, tensor_parallel=tensor_parallel, fully_shard=fully_shard
        )
        run = plan_run(
            loaded,
            corpus,
            estimator=estimator,
            strength=strength,
            pairs=join_pairs(pairs, sources, target),
            positions=positions,
            tokens=tokens,
            split=split,
            seed=seed,
            use_validation=True if save_moments or refine or shard else None,
            features=cast("FeatureKind | None", features),
            shard=shard,
        )
        if refine:
            _check_refinable(run, estimator)
        plan = None
        if group.world == 1 and not save_moments and shard is None:
            plan = plan_memory(
                loaded,
                run.moments["fit"],
                run.batches,
                estimator,
                memory=parse_memory(memory),
                spill=spill,
                spill_if_needed=output / "spill",
            )
        if group.rank == 0:
            log(plan or run.cost)
        with progress_bar("collecting") as update:
            if plan is not None and plan.storage != "sums":
                jumps = fit_planned(run, plan, estimator, EstimatorSettings(**settings), progress=update)
            else:
                checkpoint = Checkpoint(output, checkpoint_seconds, resume, group)
                moments = run.run(progress=update if group.rank == 0 else None, checkpoint=checkpoint)
    group.leave()
    if group.rank != 0:
        return
    if shard is not None:
        save_shard(moments, output)
        return
    if jumps is None:
        jumps = solve_jumps(moments, estimator, EstimatorSettings(**settings), model=loaded)
    if refine:
        assert loaded is not None
        jumps = _refine(loaded, jumps, corpus, refine_steps, tokens, seed, output, resume=resume)
    if write_card or push_to_hub is not None:
        assert loaded is not None
        jumps = with_held_out_scores(loaded, jumps, corpus)
    _write(jumps, output, moments if save_moments else None, storage=storage, as_json=as_json)
    _publish(jumps, output, write_card, push_to_hub, storage)


def _load(
    load: LoadModel, model: str | None, text: str, column: str | None, limit: int | None, **loading: Any
) -> tuple[Model, Corpus]:
    from layerjump.data.corpus import load_text

    if model is None:
        raise LayerjumpError("give a model to run, or --from-moments with saved moments to solve")
    return load(model, **loading), load_text(text, column=column, limit=limit)


def _write(jumps: Jumps, output: Path, moments: SplitMoments | None, *, storage: str, as_json: bool) -> None:
    from layerjump.jumps.moments_checkpoint import Checkpoint

    jumps.save_pretrained(output, storage=cast("Storage", storage))
    print_jumps(jumps, as_json=as_json)
    log(f"wrote {output}")
    if moments is not None:
        moments.save(output / "moments.safetensors")
    Checkpoint(output).clear()


def _publish(jumps: Jumps, output: Path, write_card: bool, repository: str | None, storage: str) -> None:
    """Write the model card, with the command, into the output folder; upload the jumps."""
    from layerjump.io import write_text
    from layerjump.jumps.model_card import model_card

    if write_card or repository is not None:
        command = shlex.join(["layerjump", *sys.argv[1:]])
        write_text(output / "README.md", model_card(jumps, repository or output.name, command=command))
    if repository is not None:
        log(f"uploaded to {jumps.push_to_hub(repository, storage=cast('Storage', storage))}")


def save_shard(moments: SplitMoments, output: Path) -> None:
    """Save moments that are to be merged with others before they are solved."""
    from layerjump.jumps.moments_checkpoint import Checkpoint

    path = output / "moments.safetensors"
    moments.save(path)
    Checkpoint(output).clear()
    log(f"wrote {path}; solve all shards with layerjump fit --from-moments A --from-moments B …")


def _refuse_closed_form_options(estimator: str, options: Options) -> None:
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise BadEstimator(f"{estimator} runs in one process; start it without torchrun")
    for name, value in options.items():
        if name not in ESTIMATORS[estimator].settings and value not in (None, False):
            option = argument(name)
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
            "--refine needs held-out documents, and this text and --fit-val-test leave none; give more text, or "
            "--fit-val-test 80/10/10"
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
