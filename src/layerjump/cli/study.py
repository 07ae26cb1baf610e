"""`layerjump study`: run experiments and write their report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from layerjump.cli._options import (
    COLUMN,
    FORCE,
    MODEL,
    SEED,
    TOKENS,
    LoadModel,
    OptionPanel,
    loads_model,
    option,
    output_folder,
    output_option,
    text_option,
)
from layerjump.cli._output_folder import locks_output
from layerjump.cli._printing import log, progress_bar

study_option = OptionPanel("Options of single studies")


@locks_output(
    "finished studies are saved: run the same command with --resume to continue",
    refuses={"results.json": "results, which --resume adds to"},
)
@loads_model
def study(
    model: str = MODEL,
    studies: list[str] | None = typer.Argument(
        None, metavar="STUDY", help="Studies to run, e.g. r2 early_exit, or all (default: five main ones)."
    ),
    protocol: str = option("ours", "ours, or paper: 9,000 sentences to fit on, one position per sentence."),
    estimators: str = option("mat", "Estimators to compare, e.g. mat,affine; all studies use the first."),
    n_test_positions: int | None = option(None, "Test positions at which the logits of every level are scored."),
    rerun_tokens: int = option(
        2_000, "Test tokens of the expensive studies (submodules, attention_heads, layer_skipping)."
    ),
    text: list[str] | None = text_option(
        None, "A file, a hub dataset, `-` for standard input, or `pydoc`; may be repeated."
    ),
    column: str | None = COLUMN,
    tokens: int | None = TOKENS,
    split: str | None = text_option(None, "Fit/validation/test split, in percent or in documents.", "--fit-val-test"),
    positions: str | None = text_option(None, "Positions to fit on: one, all, sample=8 or 15%."),
    seed: int = SEED,
    target: list[float] | None = study_option(
        None, "early_exit: agreement with the full model (default: 0.95); repeatable."
    ),
    exit_position: int | None = study_option(
        None, "early_exit: one position for all examples (the paper's BERT code: 3)."
    ),
    eval_tasks: str | None = study_option(None, "pruning: benchmark tasks, e.g. copa,piqa (see `layerjump eval`)."),
    eval_data: Path | None = study_option(None, "pruning: folder of the tasks' files."),
    eval_limit: int | None = study_option(None, "pruning: maximum number of items per task."),
    checkpoint: list[str] | None = study_option(
        None, "training_dynamics: a folder, a folder of checkpoint-*, or a hub revision; repeatable."
    ),
    finetune_data: str | None = study_option(None, "finetuning: JSON lines with query, choices and gold."),
    training_steps: int | None = study_option(None, "finetuning, architecture: optimiser steps of a training."),
    training_runs: int = study_option(3, "finetuning, architecture: trainings, with different seeds."),
    output: Path = output_folder("study"),
    resume: bool = output_option(False, "Keep studies that an earlier run finished.", "--resume"),
    force: bool = FORCE,
    *,
    load: LoadModel,
) -> None:
    """Fit jumps, run studies, and write report.html, results.json and summary.md.

    [bold]layerjump study smollm2[/]                                  the five main studies
    [bold]layerjump study gpt2 --text wiki.txt --protocol paper[/]    the authors' protocol
    [bold]layerjump study MODEL r2 early_exit --estimators mat,affine[/]
    [bold]layerjump study MODEL training_dynamics --checkpoint step1000 --checkpoint step8000[/]
    """
    from layerjump.data.corpus import load_text
    from layerjump.evaluation.tasks import select_tasks
    from layerjump.report.write_report import write_report
    from layerjump.studies.runner import run_studies, select_studies
    from layerjump.studies.setup import Setup, make_settings

    selected = select_studies(",".join(studies) if studies else None)
    settings = make_settings(
        protocol,
        tokens=tokens,
        positions=positions,
        split=split,
        seed=seed,
        estimators=tuple(name.strip() for name in estimators.split(",")),
        n_test_positions=n_test_positions,
        rerun_tokens=rerun_tokens,
        targets=tuple(target or (0.95,)),
        exit_position=exit_position,
        eval_tasks=None if eval_tasks is None else tuple(task.name for task in select_tasks(eval_tasks)),
        eval_data=None if eval_data is None else str(eval_data),
        eval_limit=eval_limit,
        checkpoints=tuple(checkpoint or ()),
        finetune_data=finetune_data,
        training_steps=training_steps,
        training_runs=training_runs,
    )
    loaded = load(model)
    corpus, *other_corpora = [load_text(source, column=column) for source in text or ["pydoc"]]
    with progress_bar("running") as update:
        setup = Setup(loaded, corpus, settings, other_corpora, progress=update)
        results = run_studies(
            setup, selected, output, command=shlex.join(["layerjump", *sys.argv[1:]]), resume=resume, log=log
        )
    paths = write_report(results, output)
    log("\n".join(f"wrote {path}" for path in paths))
    print(paths[-1].read_text(encoding="utf-8"))
