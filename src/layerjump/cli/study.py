"""`layerjump study`, `layerjump report` and `layerjump human-eval`: experiments, their report, a human's marks."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from layerjump.cli._options import (
    AsJson,
    Column,
    Force,
    LoadModel,
    ModelName,
    OutputFolder,
    Seed,
    TextSources,
    Tokens,
    loads_model,
    option_group,
    output_option,
    print_table,
    progress_bar,
    text_option,
)
from layerjump.cli._output_dir import locks_output

study_option = option_group("Options of single studies")


@locks_output(
    "finished studies are saved: run the same command with --resume to continue",
    refuses={"results.json": "results, which --resume adds to"},
)
@loads_model(device_map=True)
def study(
    model: ModelName,
    studies: Annotated[
        list[str] | None,
        typer.Argument(metavar="STUDY", help="Studies to run, e.g. r2 exits, or all (default: five main ones)."),
    ] = None,
    protocol: Annotated[
        str, typer.Option(help="ours, or paper: 9,000 sentences to fit on, one position a sentence.")
    ] = "ours",
    estimators: Annotated[
        str, typer.Option(help="Estimators to compare, e.g. mat,affine; all studies use the first.")
    ] = "mat",
    test_positions: Annotated[
        int | None, typer.Option(help="Test positions at which the logits of every level are scored.")
    ] = None,
    variant_tokens: Annotated[
        int, typer.Option(help="Test tokens of the expensive studies (submodules, alternation).")
    ] = 2_000,
    text: TextSources = None,
    column: Column = None,
    tokens: Tokens = None,
    split: Annotated[str | None, text_option(help="Fit/validation/test split, in percent or in documents.")] = None,
    positions: Annotated[str | None, text_option(help="Positions to fit on: one, all, sample=8 or 15%.")] = None,
    seed: Seed = 0,
    target: Annotated[
        list[float] | None, study_option(help="exits: agreement with the full model (default: 0.95); repeatable.")
    ] = None,
    exit_position: Annotated[
        int | None, study_option(help="exits: one position for all examples (the paper's BERT code: 3).")
    ] = None,
    eval_tasks: Annotated[
        str | None, study_option(help="pruning: benchmark tasks, e.g. copa,piqa (see `layerjump eval`).")
    ] = None,
    eval_data: Annotated[Path | None, study_option(help="pruning: folder of the tasks' files.")] = None,
    eval_limit: Annotated[int | None, study_option(help="pruning: largest number of items of a task.")] = None,
    checkpoint: Annotated[
        list[str] | None,
        study_option(help="dynamics: a folder, a folder of checkpoint-*, or a hub revision; repeatable."),
    ] = None,
    finetune_task: Annotated[
        str | None, study_option(help="finetune: JSON lines with query, choices and gold.")
    ] = None,
    training_steps: Annotated[
        int | None, study_option(help="finetune, architecture: optimiser steps of a training.")
    ] = None,
    training_runs: Annotated[int, study_option(help="finetune, architecture: trainings, with different seeds.")] = 3,
    output: OutputFolder = Path("study"),
    resume: Annotated[bool, output_option("--resume", help="Keep studies that an earlier run finished.")] = False,
    force: Force = False,
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
            setup,
            selected,
            output,
            command=shlex.join(["layerjump", *sys.argv[1:]]),
            resume=resume,
            log=lambda line: print(line, file=sys.stderr),
        )
    paths = write_report(results, output)
    print("\n".join(f"wrote {path}" for path in paths), file=sys.stderr)
    print(paths[-1].read_text(encoding="utf-8"))


@locks_output("run the same command again")
def report(
    results: Annotated[list[Path], typer.Argument(help="Folders that `layerjump study` wrote.")],
    output: OutputFolder = Path("report"),
) -> None:
    """Write the report of a study again, or compare several studies on one page.

    [bold]layerjump report study -o study[/]             the page of one study, written again
    [bold]layerjump report smollm2 stories -o both[/]    two studies compared
    """
    from layerjump.report.write_report import write_comparison, write_report
    from layerjump.studies.runner import load_results

    loaded = [load_results(path) for path in results]
    paths = write_report(loaded[0], output) if len(loaded) == 1 else write_comparison(loaded, output)
    print("\n".join(f"wrote {path}" for path in paths), file=sys.stderr)


human_eval = typer.Typer(help="Score the human evaluation of the study `plausibility`.", no_args_is_help=True)


@human_eval.callback()
def _group() -> None:
    """Keeps `score` a sub-command: typer would merge a single command into its group."""


@human_eval.command()
def score(
    sheet: Annotated[Path, typer.Argument(help="The folder that the study wrote, or the marked sheet.")],
    key: Annotated[Path | None, typer.Option(help="Key file (default: plausibility-key.json next to it).")] = None,
    as_json: AsJson = False,
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
        print(json.dumps(tables, indent=2, ensure_ascii=False))
        return
    titles = (
        "Plausible (the paper, bert-large: 0.854 for mat, 0.528 for the identity)",
        "Cases: one sentence at one level",
        "Plausible by level",
    )
    for title, rows in zip(titles, tables.values(), strict=True):
        print_table(title, rows, as_json=False)
