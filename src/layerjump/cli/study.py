"""`layerjump study`, `layerjump report` and `layerjump human-eval`: experiments, their report, a human's marks."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from layerjump.cli._options import COLUMN, MODEL, SEED, TOKENS, LoadModel, Panel, loads_model, option, text_option
from layerjump.cli._output import (
    FORCE,
    JSON,
    locks_output,
    log,
    output_folder,
    output_option,
    print_json,
    print_table,
    progress_bar,
)

study_option = Panel("Options of single studies")


@locks_output(
    "finished studies are saved: run the same command with --resume to continue",
    refuses={"results.json": "results, which --resume adds to"},
)
@loads_model(device_map=True)
def study(
    model: str = MODEL,
    studies: list[str] | None = typer.Argument(
        None, metavar="STUDY", help="Studies to run, e.g. r2 exits, or all (default: five main ones)."
    ),
    protocol: str = option("ours", "ours, or paper: 9,000 sentences to fit on, one position a sentence."),
    estimators: str = option("mat", "Estimators to compare, e.g. mat,affine; all studies use the first."),
    test_positions: int | None = option(None, "Test positions at which the logits of every level are scored."),
    variant_tokens: int = option(2_000, "Test tokens of the expensive studies (submodules, alternation)."),
    text: list[str] | None = text_option(
        None, "A file, a hub dataset, `-` for standard input, or `pydoc`; may be repeated."
    ),
    column: str | None = COLUMN,
    tokens: int | None = TOKENS,
    split: str | None = text_option(None, "Fit/validation/test split, in percent or in documents."),
    positions: str | None = text_option(None, "Positions to fit on: one, all, sample=8 or 15%."),
    seed: int = SEED,
    target: list[float] | None = study_option(
        None, "exits: agreement with the full model (default: 0.95); repeatable."
    ),
    exit_position: int | None = study_option(None, "exits: one position for all examples (the paper's BERT code: 3)."),
    eval_tasks: str | None = study_option(None, "pruning: benchmark tasks, e.g. copa,piqa (see `layerjump eval`)."),
    eval_data: Path | None = study_option(None, "pruning: folder of the tasks' files."),
    eval_limit: int | None = study_option(None, "pruning: largest number of items of a task."),
    checkpoint: list[str] | None = study_option(
        None, "dynamics: a folder, a folder of checkpoint-*, or a hub revision; repeatable."
    ),
    finetune_task: str | None = study_option(None, "finetune: JSON lines with query, choices and gold."),
    training_steps: int | None = study_option(None, "finetune, architecture: optimiser steps of a training."),
    training_runs: int = study_option(3, "finetune, architecture: trainings, with different seeds."),
    output: Path = output_folder("study"),
    resume: bool = output_option(False, "Keep studies that an earlier run finished.", "--resume"),
    force: bool = FORCE,
    *,
    load: LoadModel,
) -> None:
    """Fit jumps, run studies, and write report.html, results.json and summary.md.

    [bold]layerjump study smollm2[/]                                  the five main studies
    [bold]layerjump study gpt2 --text wiki.txt --protocol paper[/]    the authors' protocol
    [bold]layerjump study MODEL r2 exits --estimators mat,affine[/]
    [bold]layerjump study MODEL dynamics --checkpoint step1000 --checkpoint step8000[/]
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
        test_positions=test_positions,
        variant_tokens=variant_tokens,
        targets=tuple(target or (0.95,)),
        exit_position=exit_position,
        eval_tasks=None if eval_tasks is None else tuple(task.name for task in select_tasks(eval_tasks)),
        eval_data=None if eval_data is None else str(eval_data),
        eval_limit=eval_limit,
        checkpoints=tuple(checkpoint or ()),
        finetune_task=finetune_task,
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


@locks_output("run the same command again")
def report(
    results: list[Path] = typer.Argument(help="Folders that `layerjump study` wrote."),
    output: Path = output_folder("report"),
) -> None:
    """Write the report of a study again, or compare several studies on one page.

    [bold]layerjump report study -o study[/]             the page of one study, written again
    [bold]layerjump report smollm2 stories -o both[/]    two studies compared
    """
    from layerjump.report.write_report import write_comparison, write_report
    from layerjump.studies.runner import load_results

    loaded = [load_results(path) for path in results]
    paths = write_report(loaded[0], output) if len(loaded) == 1 else write_comparison(loaded, output)
    log("\n".join(f"wrote {path}" for path in paths))


human_eval = typer.Typer(help="Score the human evaluation of the study `plausibility`.", no_args_is_help=True)


@human_eval.callback()
def _group() -> None:
    """Keeps `score` a sub-command: typer would merge a single command into its group."""


@human_eval.command()
def score(
    sheet: Path = typer.Argument(help="The folder that the study wrote, or the marked sheet."),
    key: Path | None = option(None, "Key file (default: plausibility-key.json next to it)."),
    as_json: bool = JSON,
) -> None:
    """Print the share of predictions that the annotator marked plausible, for each lens.

    [bold]layerjump study bert-large-cased plausibility -o study[/]   writes study/plausibility.csv to mark
    [bold]layerjump human-eval score study[/]
    [bold]layerjump human-eval score marked.csv --key study/plausibility-key.json --json[/]
    """
    from layerjump.studies.human_evaluation import comparison, read_marks, shares, shares_by_level

    marks = read_marks(sheet, key)
    tables = {
        "lenses": [{"lens": lens, **asdict(share)} for lens, share in shares(marks).items()],
        "cases": [{"plausible": case, **asdict(share)} for case, share in comparison(marks).items()],
        "levels": [
            {"lens": lens, "level": level, **asdict(share)} for (lens, level), share in shares_by_level(marks).items()
        ],
    }
    if as_json:
        print_json(tables)
        return
    titles = (
        "Plausible (the paper, bert-large: 0.854 for mat, 0.528 for the identity)",
        "Cases: one sentence at one level",
        "Plausible by level",
    )
    for title, rows in zip(titles, tables.values(), strict=True):
        print_table(title, rows)
