"""`layerjump eval`: benchmark tasks through lm-eval, and perplexity."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerjump.cli._options import JSON, MODEL, LoadModel, OptionPanel, loads_model, option, output_option
from layerjump.cli._printing import log, print_json, print_table, progress_bar
from layerjump.errors import BadEvaluation

if TYPE_CHECKING:
    from layerjump.models.model import Model

task_option, perplexity_option, variant_option = (
    OptionPanel("Tasks"),
    OptionPanel("Perplexity"),
    OptionPanel("Model variant"),
)


@loads_model
def evaluate(
    model: str = MODEL,
    tasks: str | None = task_option(
        None, "arc_easy, boolq, cb, copa, lambada, piqa, rte, winograd: a list such as copa,piqa, or all."
    ),
    data: Path | None = task_option(None, "Folder of the tasks' files (see docs/evaluation.md)."),
    batch_size: int = task_option(1, "Requests a batch."),
    perplexity_text: Path | None = perplexity_option(None, "A text file, e.g. wiki.test.raw.", metavar="<file>"),
    window: int | None = perplexity_option(None, "Tokens in a window (default: the model's context)."),
    stride: int | None = perplexity_option(None, "Tokens between windows (default: half a window)."),
    limit: int | None = option(None, "Maximum number of items per task, and of windows."),
    jumps: Path | None = variant_option(None, "Folder of jumps."),
    exit: str | None = variant_option(
        None,
        "Exit rule: fixed:20, gap:0.9, maxprob:0.8, entropy:0.5, agree:3 (default: the calibrated rule in "
        "the jumps folder).",
    ),
    linearize: str | None = variant_option(None, "Replace attn, ffn, norms or block by jumps."),
    linearize_blocks: str | None = variant_option(None, "Blocks of --linearize, e.g. 3-5 or 1,4 (default: all)."),
    output: Path | None = output_option(None, "JSON file to write.", "-o", "--output", metavar="<file>"),
    as_json: bool = JSON,
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

    text = _check_inputs(tasks, data, limit, perplexity_text)
    loaded = load(model)
    options: dict[str, Any] = {"jumps": jumps, "exit": exit, "parts": linearize, "blocks": linearize_blocks}
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
        log(f"wrote {output}")


def _check_inputs(tasks: str | None, data: Path | None, limit: int | None, path: Path | None) -> str | None:
    """Raise what can be known before the model is loaded; return the text for the perplexity."""
    from layerjump.data.corpus import shorten
    from layerjump.evaluation.tasks import load_items, require_lm_eval, select_tasks

    if tasks is None and path is None:
        raise BadEvaluation("nothing to evaluate; give --tasks with --data, or --perplexity-text")
    if tasks is not None:
        if data is None:
            raise BadEvaluation("--tasks needs --data, the folder of the tasks' files")
        for task in select_tasks(tasks):
            load_items(task, data, limit)
        require_lm_eval()
    try:
        return None if path is None else path.expanduser().read_text(encoding="utf-8")
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
    weights = {"fingerprint": fingerprint(model.hf), "blocks": model.n_blocks}
    return {
        "model": {"name": model.name, "revision": model.revision, **weights},
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "layerjump": __version__,
        "lm_eval": lm_eval_version,
        "machine": describe_machine(),
    }


def _print_record(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(record)
        return
    rows = []
    for row in record["scores"]:
        value, error, low, high = (_format(row[name]) for name in ("value", "stderr", "low", "high"))
        interval = {"value": value, "±": error, "95 %": f"{low} to {high}"}
        rows.append({"task": row["task"], "metric": row["metric"], **interval, "items": row["items"]})
    if rows:
        print_table(record["model"]["name"], rows)
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
        log(f"{record['truncated']:,} requests were longer than the model's context and were truncated on the left")


def _format(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if value < 1000 else f"{value:.4g}"
