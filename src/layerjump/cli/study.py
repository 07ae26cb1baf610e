"""`layerjump study` and `layerjump report`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from layerjump.cli._options import (
    Column,
    Device,
    DeviceMap,
    Dtype,
    Force,
    ModelName,
    Revision,
    Seed,
    Trust,
    progress_bar,
)
from layerjump.cli._output_dir import writes_folder

Folder = Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")]

_GO_ON = "the studies that were finished are saved: run the same command with --resume to go on"


@writes_folder(lambda given: _GO_ON, holds={"results.json": "results, which --resume adds to"})
def study(
    model: ModelName,
    output: Folder = Path("study"),
    names: Annotated[
        str | None,
        typer.Option("--study", help="Which, e.g. r2,exits, or all (default: the five main ones)."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(help="A file, a hub dataset, `-`, or `pydoc`; more than one: see transfer."),
    ] = None,
    column: Column = None,
    protocol: Annotated[
        str, typer.Option(help="ours, or paper: 9,000 fit sentences, one position each.")
    ] = "ours",
    estimators: Annotated[str, typer.Option(help="Maps to compare, e.g. mat,affine.")] = "mat",
    positions: Annotated[
        str | None, typer.Option(help="Positions to fit on: one, all, sample=8, 15%.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens to run (default: the whole text).")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="fit/select/test: percentages or documents.")
    ] = None,
    score: Annotated[
        int | None, typer.Option(help="Test positions read through the vocabulary.")
    ] = None,
    budget: Annotated[int, typer.Option(help="Test tokens for the costly studies.")] = 2_000,
    target: Annotated[
        list[float] | None, typer.Option(help="exits: agreement to keep (default 0.95).")
    ] = None,
    exit_position: Annotated[
        int | None, typer.Option(help="exits: t of every example (the paper's BERT: 3).")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="pruning: tasks to score as well, e.g. copa,piqa (see eval).")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="pruning: folder of the tasks' files.")] = None,
    limit: Annotated[int | None, typer.Option(help="pruning: items of each task.")] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(help="dynamics: a folder, one that holds checkpoint-*, or a hub revision."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(help="finetune: items to learn, lines of JSON (query, choices, gold)."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="finetune, architecture: steps of each training.")
    ] = None,
    runs: Annotated[int, typer.Option(help="finetune, architecture: trainings (seeds).")] = 3,
    seed: Seed = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the studies an earlier run finished.")
    ] = False,
    force: Force = False,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    device_map: DeviceMap = None,
    trust_remote_code: Trust = False,
) -> None:
    """The main job: fit, run the studies, write report.html, results.json and summary.md.

    [bold]layerjump study smollm2[/]                                       the five main studies
    [bold]layerjump study gpt2 --text wiki.txt --protocol paper[/]         the authors' protocol
    [bold]layerjump study MODEL --study r2,exits --estimators mat,affine[/]
    [bold]layerjump study MODEL --study transfer --text wiki.txt --text news.txt[/]
    [bold]layerjump study MODEL --study dynamics --checkpoint step1000 --checkpoint step8000[/]
    [bold]layerjump study MODEL --study finetune --task boolq.jsonl --text wiki.txt[/]
    """
    from layerjump.data.corpus import load_text
    from layerjump.evaluation.tasks import select_tasks as chosen_tasks
    from layerjump.models.loading import load
    from layerjump.report.report import write_report
    from layerjump.studies.registry import select_studies
    from layerjump.studies.runner import run_studies
    from layerjump.studies.setup import Setup, settings_of

    studies = select_studies(names)
    settings = settings_of(
        protocol,
        tokens=tokens,
        positions=positions,
        split=split,
        seed=seed,
        estimators=tuple(name.strip() for name in estimators.split(",")),
        score=score,
        budget=budget,
        targets=tuple(target or (0.95,)),
        exit_position=exit_position,
        tasks=None if tasks is None else tuple(task.name for task in chosen_tasks(tasks)),
        task_data=None if data is None else str(data),
        task_limit=limit,
        checkpoints=tuple(checkpoint or ()),
        task=task,
        steps=steps,
        runs=runs,
    )
    loaded = load(
        model,
        revision=revision,
        device=device,
        dtype=dtype,
        device_map=device_map,
        trust_remote_code=trust_remote_code,
    )
    first, *others = [load_text(source, column=column) for source in text or ["pydoc"]]
    with progress_bar("running") as update:
        setup = Setup(loaded, first, settings, others, progress=update)
        results = run_studies(setup, studies, output, command=_command(), resume=resume, say=_say)
    paths = write_report(results, output)
    print("\n".join(f"wrote {path}" for path in paths), file=sys.stderr)
    print(paths[-1].read_text(encoding="utf-8"))


@writes_folder(lambda given: "run the same command again")
def report(
    results: Annotated[list[Path], typer.Argument(help="Folders that `layerjump study` wrote.")],
    output: Folder = Path("report"),
) -> None:
    """Make a report again from its results, or put several side by side.

    [bold]layerjump report study -o study[/]             the page of one run, made anew
    [bold]layerjump report smollm2 stories -o both[/]    two runs side by side
    """
    from layerjump.report.report import write_comparison, write_report
    from layerjump.studies.runner import load_results

    loaded = [load_results(path) for path in results]
    one = len(loaded) == 1
    paths = write_report(loaded[0], output) if one else write_comparison(loaded, output)
    print("\n".join(f"wrote {path}" for path in paths), file=sys.stderr)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _command() -> str:
    return shlex.join(["layerjump", *sys.argv[1:]])
