"""`layerjump eval`: benchmark tasks through lm-eval, and perplexity."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layerjump.cli._options import (
    AsJson,
    LoadModel,
    ModelName,
    loads_model,
    option_group,
    output_option,
    print_table,
    progress_bar,
)

if TYPE_CHECKING:
    from layerjump.models.model import Model

task_option, perplexity_option = option_group("Tasks"), option_group("Perplexity")
variant_option = option_group("Model variant")


@loads_model()
def evaluate(
    model: ModelName,
    tasks: Annotated[
        str | None,
        task_option(help="arc_easy, boolq, cb, copa, lambada, piqa, rte, winograd: a list such as copa,piqa, or all."),
    ] = None,
    data: Annotated[Path | None, task_option(help="Folder of the tasks' files (see docs/evaluation.md).")] = None,
    batch_size: Annotated[int, task_option(help="Requests a batch.")] = 1,
    perplexity_text: Annotated[
        Path | None, perplexity_option(metavar="<file>", help="A text file, e.g. wiki.test.raw.")
    ] = None,
    window: Annotated[int | None, perplexity_option(help="Tokens in a window (default: the model's context).")] = None,
    stride: Annotated[int | None, perplexity_option(help="Tokens between windows (default: half a window).")] = None,
    limit: Annotated[int | None, typer.Option(help="Largest number of items of a task, and of windows.")] = None,
    jumps: Annotated[Path | None, variant_option(help="Folder of jumps.")] = None,
    exit: Annotated[
        str | None,
        variant_option(
            help="Exit rule: fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3 (default: the calibrated rule in "
            "the jumps folder)."
        ),
    ] = None,
    parts: Annotated[str | None, variant_option(help="Replace attn, ffn, norms or block by jumps.")] = None,
    blocks: Annotated[str | None, variant_option(help="Blocks of --parts, e.g. 3-5 or 1,4 (default: all).")] = None,
    output: Annotated[
        Path | None, output_option("-o", "--output", metavar="<file>", help="JSON file to write.")
    ] = None,
    as_json: AsJson = False,
    *,
    load: LoadModel,
) -> None:
    """Score a model on benchmark tasks (lm-eval, local files), or measure its perplexity with a sliding window.

    [bold]layerjump eval smollm2 --tasks arc_easy,copa --data eval --limit 100[/]
    [bold]layerjump eval smollm2 --tasks piqa --data eval --jumps jumps --exit gap:0.9[/]   with early exit
    [bold]layerjump eval smollm2 --perplexity-text wiki.test.raw --window 1024 --stride 512[/]     perplexity
    """
    from layerjump.evaluation.model_variants import make_variant
    from layerjump.studies.results import to_json

    _check(tasks, data, limit, perplexity_text)
    text = None if perplexity_text is None else _read_text(perplexity_text)
    loaded = load(model)
    options: dict[str, Any] = {"jumps": jumps, "exit": exit, "parts": parts, "blocks": blocks}
    variant = make_variant(loaded, **options)
    settings = options | {"tasks": tasks, "data": data, "limit": limit, "batch_size": batch_size}
    settings |= {"wikitext": perplexity_text, "rule": str(variant.rule)}
    record: dict[str, Any] = {"scores": [], **_describe_run(loaded, settings)}
    if tasks is not None and data is not None:
        from layerjump.evaluation.tasks import evaluate as score_tasks

        with progress_bar("scoring", "requests") as update:
            scores = score_tasks(
                loaded, tasks, data, limit=limit, variant=variant, batch_size=batch_size, progress=update
            )
        record |= asdict(scores)
    if text is not None:
        from layerjump.evaluation.perplexity import perplexity

        with progress_bar("reading") as update:
            measured = perplexity(
                loaded, text, window=window, stride=stride, limit=limit, variant=variant, progress=update
            )
        record["wikitext"] = asdict(measured)
    record = to_json(record)
    _print_record(record, as_json=as_json)
    if output is not None:
        from layerjump.io import write_json

        write_json(output, record)
        print(f"wrote {output}", file=sys.stderr)


def _check(tasks: str | None, data: Path | None, limit: int | None, perplexity_text: Path | None) -> None:
    """Raise what can be known before the model is loaded."""
    from layerjump.errors import BadEvaluation
    from layerjump.evaluation.tasks import load_items, require_lm_eval, select_tasks

    if tasks is None and perplexity_text is None:
        raise BadEvaluation("nothing to evaluate; give --tasks with --data, or --perplexity-text")
    if tasks is None:
        return
    if data is None:
        raise BadEvaluation("--tasks needs --data, the folder of the tasks' files")
    for task in select_tasks(tasks):
        load_items(task, data, limit)
    require_lm_eval()


def _read_text(path: Path) -> str:
    from layerjump.data.corpus import shorten
    from layerjump.errors import BadEvaluation

    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadEvaluation(f"{path} cannot be read as UTF-8 text ({shorten(error)}); give another file") from error


def _describe_run(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """Model, settings, versions and machine, so that a result can be reproduced."""
    from importlib.metadata import PackageNotFoundError, version

    from layerjump import __version__
    from layerjump.metrics.timing import describe_machine
    from layerjump.models.fingerprint import fingerprint

    try:
        lm_eval_version = version("lm_eval")
    except PackageNotFoundError:
        lm_eval_version = None
    return {
        "model": {
            "name": model.name,
            "revision": model.revision,
            "fingerprint": fingerprint(model.hf),
            "blocks": model.n_blocks,
        },
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "layerjump": __version__,
        "lm_eval": lm_eval_version,
        "machine": describe_machine(),
    }


def _print_record(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(record, indent=2, ensure_ascii=False))
        return
    rows = [
        {
            "task": row["task"],
            "metric": row["metric"],
            "value": _format(row["value"]),
            "±": _format(row["stderr"]),
            "95 %": f"{_format(row['low'])} to {_format(row['high'])}",
            "items": row["items"],
        }
        for row in record["scores"]
    ]
    if rows:
        print_table(record["model"]["name"], rows, as_json=False)
    measured = record.get("wikitext")
    if measured:
        print(
            f"perplexity {measured['value']:.3f} (95 % interval {measured['low']:.3f} to {measured['high']:.3f}): "
            f"{measured['tokens']:,} tokens in {measured['windows']:,} windows of {measured['window']:,}, stride "
            f"{measured['stride']:,}"
        )
    level = record.get("mean_level") or (measured or {}).get("mean_level")
    if level is not None:
        print(f"mean exit level {level:.1f} of {record['model']['blocks']}")
    if record.get("truncated"):
        print(
            f"{record['truncated']:,} requests were longer than the model's context and were truncated on the left",
            file=sys.stderr,
        )


def _format(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 1000 else f"{value:.4g}"
