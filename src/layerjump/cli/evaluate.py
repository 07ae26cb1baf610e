"""`layerjump eval`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import (
    AsJson,
    Device,
    Dtype,
    ModelName,
    Revision,
    Trust,
    print_table,
    progress_bar,
)

if TYPE_CHECKING:
    from layerjump.models.model import Model

Folder = Annotated[Path | None, typer.Option("--jumps", help="Folder of jumps.")]


def evaluate(
    model: ModelName,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="arc_easy, boolq, cb, copa, lambada, piqa, rte, winograd: some, e.g. copa,piqa, or all."
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder with the tasks' files (see docs/evaluation.md).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Items of each task, and windows of --wikitext, at most.")
    ] = None,
    wikitext: Annotated[
        Path | None,
        typer.Option(help="A text, e.g. wiki.test.raw: perplexity with a sliding window."),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="--wikitext: tokens (default: the model's context).")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="--wikitext: tokens between windows (default: half of one).")
    ] = None,
    jumps: Folder = None,
    exit: Annotated[
        str | None,
        typer.Option(
            help="Read each position where this rule stops: fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3 "
            "(default: what `calibrate` left in the folder of jumps)."
        ),
    ] = None,
    parts: Annotated[
        str | None, typer.Option(help="Put jumps in the place of attn, ffn, norms or block.")
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help="--parts: which blocks, e.g. 3-5 or 1,4 (default: all).")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Requests that are run at once.")] = 1,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSON file: scores, settings, items.")
    ] = None,
    revision: Revision = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Score a model on benchmark tasks, through lm-eval, from local files; perplexity with a sliding window.

    [bold]layerjump eval smollm2 --tasks arc_easy,copa --data eval --limit 100[/]          the whole model
    [bold]layerjump eval smaller --tasks all --data eval -o smaller.json[/]                one that `prune` wrote
    [bold]layerjump eval smollm2 --tasks piqa --data eval --jumps jumps --exit gap:0.9[/]  stopping early
    [bold]layerjump eval smollm2 --wikitext wiki.test.raw --window 1024 --stride 512[/]    perplexity
    """
    from layerjump.evaluation.early_exit import make_variant
    from layerjump.models.loading import load
    from layerjump.studies.results import plain

    _check(tasks, data, limit, wikitext)
    text = None if wikitext is None else _read(wikitext)
    loaded = load(
        model, revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    given: dict[str, Any] = {"jumps": jumps, "exit": exit, "parts": parts, "blocks": blocks}
    asked = make_variant(loaded, **given)
    settings = given | {"tasks": tasks, "data": data, "limit": limit, "batch_size": batch_size}
    settings |= {"wikitext": wikitext, "rule": str(asked.rule)}
    record: dict[str, Any] = {"scores": [], **_about(loaded, settings)}
    if tasks is not None and data is not None:
        from layerjump.evaluation.lm_eval import evaluate as score

        with progress_bar("scoring", "requests") as update:
            found = score(
                loaded, tasks, data, limit=limit, batch_size=batch_size, progress=update, **given
            )
        record |= asdict(found)
    if text is not None:
        from layerjump.evaluation.perplexity import perplexity

        with progress_bar("reading") as update:
            measured = perplexity(
                loaded,
                text,
                window=window,
                stride=stride,
                limit=limit,
                variant=asked,
                progress=update,
            )
        record["wikitext"] = asdict(measured)
    record = plain(record)
    _print(record, as_json=as_json)
    if output is not None:
        from layerjump.io import write_json

        write_json(output, record)
        print(f"wrote {output}", file=sys.stderr)


def _check(tasks: str | None, data: Path | None, limit: int | None, wikitext: Path | None) -> None:
    """What can be said before a model is loaded."""
    from layerjump.errors import BadEvaluation
    from layerjump.evaluation.lm_eval import require_lm_eval
    from layerjump.evaluation.tasks import load_items, select_tasks

    if tasks is None and wikitext is None:
        raise BadEvaluation("nothing was asked for; give --tasks with --data, or --wikitext")
    if tasks is None:
        return
    if data is None:
        raise BadEvaluation("--tasks were given, but not --data; give the folder with their files")
    for task in select_tasks(tasks):
        load_items(task, data, limit)
    require_lm_eval()


def _read(path: Path) -> str:
    from layerjump.data.corpus import shorten
    from layerjump.errors import BadEvaluation

    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadEvaluation(
            f"{path} cannot be read as text ({shorten(error)}); give another"
        ) from error


def _about(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """What was run, so that a result can be made again."""
    from importlib.metadata import PackageNotFoundError, version

    from layerjump import __version__
    from layerjump.metrics.timing import describe_machine
    from layerjump.models.fingerprint import fingerprint

    try:
        harness = version("lm_eval")
    except PackageNotFoundError:
        harness = None
    return {
        "model": {
            "name": model.name,
            "revision": model.revision,
            "fingerprint": fingerprint(model.hf),
            "blocks": model.n_blocks,
        },
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in settings.items()
        },
        "layerjump": __version__,
        "lm_eval": harness,
        "machine": describe_machine(),
    }


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 1000 else f"{value:.4g}"


def _print(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return
    rows = [
        {
            "task": row["task"],
            "metric": row["metric"],
            "value": _number(row["value"]),
            "±": _number(row["stderr"]),
            "95 %": f"{_number(row['low'])} to {_number(row['high'])}",
            "items": row["items"],
        }
        for row in record["scores"]
    ]
    if rows:
        print_table(record["model"]["name"], rows, as_json=False)
    found = record.get("wikitext")
    if found:
        print(
            f"perplexity {found['value']:.3f} (95 % interval {found['low']:.3f} to {found['high']:.3f}): "
            f"{found['tokens']:,} tokens in {found['windows']:,} windows of {found['window']:,}, stride "
            f"{found['stride']:,}"
        )
    level = record.get("mean_level") or (found or {}).get("mean_level")
    if level is not None:
        print(f"read at level {level:.1f} of {record['model']['blocks']} on average")
    if record.get("truncated"):
        print(
            f"{record['truncated']:,} requests were longer than the model's context and lost their beginning",
            file=sys.stderr,
        )
