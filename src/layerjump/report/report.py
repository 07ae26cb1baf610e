"""Write `report.html` and `summary.md` of one run, or of several side by side.

Which figures each study is shown with. They are made from the tables of `results.json` and nothing else.

`report.html` and `summary.md` of one run, or of several side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerjump.errors import BadArtifact, LayerjumpError, one_line
from layerjump.io import write_text, writing
from layerjump.report.auto_chart import fallback, same_axes
from layerjump.report.page import Drawer, Section, cards, page, slug
from layerjump.report.summary import (
    Results,
    about_model,
    comparison_summary,
    findings,
    headline_rows,
    short_name,
    summary,
)
from layerjump.studies import (
    architecture,
    early_exit,
    examples,
    finetuning,
    layer_skipping,
    linearity,
    predictions,
    pruning,
    training_dynamics,
)
from layerjump.studies.charts import Maker, Panel, Study, number, plain_words, safe, unique
from layerjump.studies.registry import STUDIES
from layerjump.studies.tables import cell, html_table

MAKERS: dict[str, list[Maker]] = {
    "r2": [predictions.r2_pairs, predictions.r2_composed],
    "predictions": [predictions.predictions],
    "exits": [early_exit.curves, early_exit.savings],
    "linearity": [linearity.scores, linearity.steps, linearity.angles, linearity.shape],
    "examples": [examples.examples],
    "alternation": [layer_skipping.schedules],
    "pruning": [pruning.pruned, pruning.tasks],
    "dynamics": [training_dynamics.over_steps, training_dynamics.by_block],
    "finetune": [finetuning.blocks],
    "architecture": [architecture.variants],
}
"""To show a study in its own way, add a row; what no maker draws is drawn by `fallback`."""


def panels(name: str, study: Study) -> list[Panel]:
    """Every panel of a study: those of its makers, then one for each table that none of them used."""
    found = [panel for maker in MAKERS.get(name, []) for panel in maker(study)]
    used = {table for panel in found for table in panel.tables}
    rest = {table: rows for table, rows in study["tables"].items() if table not in used and rows}
    return found + [fallback(table, rows) for table, rows in rest.items()]


PAGE, SUMMARY = "report.html", "summary.md"
_NO_COMMAND = "run_studies(…), from Python"


@contextmanager
def showing(what: str) -> Iterator[None]:
    """Turn results that do not hold what a page is made of into one line.

    Any error: tables are drawn by whatever code suits them, and each needs something else of them.
    """
    try:
        yield
    except LayerjumpError:
        raise
    except Exception as error:
        raise BadArtifact(
            f"{what} cannot be shown, so results.json was edited, damaged or written by another version "
            f"({type(error).__name__} {one_line(error)}); run the study again"
        ) from error


@showing("these results")
def write_report(results: Results, folder: Path) -> list[Path]:
    """Write the page and the summary of one run; returns their paths, the summary's last."""
    drawer = Drawer()
    sections = [
        Section(slug(name), plain_words(name), _study(name, study, results, drawer))
        for name, study in results["studies"].items()
    ]
    sections.append(Section("made", "how this was made", _made([results], ["value"])))
    html = page(short_name(results), safe(about_model(results)), cards(findings(results)), sections)
    return _write(folder, html, summary(results))


@showing("these results")
def write_comparison(results: Sequence[Results], folder: Path) -> list[Path]:
    """Write one page that shows the same findings of several runs beside each other."""
    names, drawer = labels(results), Drawer()
    sections = [Section("headlines", "headlines", _headlines(results, names))]
    for study in unique(name for run in results for name in run["studies"]):
        sections.append(
            Section(slug(study), plain_words(study), _beside(study, results, names, drawer))
        )
    sections.append(Section("made", "how these were made", _made(results, names)))
    about = "<br>".join(
        f"<b>{safe(name)}</b>: {safe(about_model(run))}"
        for name, run in zip(names, results, strict=True)
    )
    html = page(" and ".join(names), about, "", sections)
    return _write(folder, html, comparison_summary(results, names))


def _write(folder: Path, html: str, text: str) -> list[Path]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / PAGE, folder / SUMMARY]
    for path, content in zip(paths, (html, text), strict=True):
        write_text(path, content)
    return paths


def labels(results: Sequence[Results]) -> list[str]:
    """A name for each run, no two alike: the model, where that is not enough its text, then a number."""
    names = [short_name(run) for run in results]
    if len(set(names)) < len(names):
        texts = [str(run["text"]["name"]).rstrip("/").split("/")[-1] for run in results]
        names = [f"{name} on {text}" for name, text in zip(names, texts, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return names


def _study(name: str, study: Study, results: Results, drawer: Drawer) -> str:
    """A study's chapter: the question, its panels, what one must know."""
    with showing(f"the study {name[:50]}"):
        return _whole_chapter(name, study, results, drawer)


def _whole_chapter(name: str, study: Study, results: Results, drawer: Drawer) -> str:
    if study["skipped"]:
        return _chapter(name, _skipped(study))
    files, command = f"{slug(short_name(results))}-{slug(name)}", results["command"] or _NO_COMMAND
    drawn = [
        drawer.panel(panel, study, files=files, command=command) for panel in panels(name, study)
    ]
    return _chapter(name, _facts(study) + "".join(drawn) + _notes(study))


def _chapter(name: str, inner: str) -> str:
    known = STUDIES.get(name)
    title = known.asks[:1].upper() + known.asks[1:] if known else plain_words(name)
    label = f'<p class="label">{safe(name)}</p>' if known else ""
    return (
        f'<section class="study" id="{slug(name)}">{label}<h2>{safe(title)}</h2>{inner}</section>'
    )


def _skipped(study: Study) -> str:
    return f'<p class="skipped">Skipped: {safe(study["skipped"])}</p>'


def _facts(study: Study) -> str:
    said = [
        f"{safe(plain_words(key))}: {_value(value)}" for key, value in study["settings"].items()
    ]
    said.append(f"took {number(study['seconds'])}\u00a0s")
    return f'<p class="facts">{" · ".join(said)}</p>'


def _notes(study: Study) -> str:
    lines = "".join(f"<li>{safe(note)}</li>" for note in study["notes"])
    return f'<ul class="notes">{lines}</ul>' if lines else ""


def _value(value: Any) -> str:
    """A setting as HTML: lists and what is nested in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{safe(plain_words(key))} {_value(item)}" for key, item in value.items())
    return "not set" if value is None else cell(value)


def _beside(study: str, results: Sequence[Results], names: Sequence[str], drawer: Drawer) -> str:
    """A study's chapter with the panels of all runs, matched by their titles."""
    runs = [run["studies"].get(study) for run in results]
    drawn = [panels(study, run) if run and not run["skipped"] else [] for run in runs]
    inner = "".join(
        f"<p><b>{safe(name)}</b></p>{_skipped(run)}"
        for name, run in zip(names, runs, strict=True)
        if run and run["skipped"]
    )
    for title in unique(panel.title for found in drawn for panel in found):
        matched = [
            next((panel for panel in found if panel.title == title), None) for found in drawn
        ]
        same_axes([panel for panel in matched if panel])
        blocks = [
            _run_block(name, panel, run, study, drawer)
            for name, panel, run in zip(names, matched, results, strict=True)
        ]
        inner += f'<article class="panel"><h3>{safe(title)}</h3><div class="runs">{"".join(blocks)}</div></article>'
    notes = unique(note for run in runs if run for note in run["notes"])
    return _chapter(study, inner + _notes({"notes": notes}))


def _run_block(name: str, panel: Panel | None, run: Results, study: str, drawer: Drawer) -> str:
    if panel is None:
        inner = '<p class="quiet">Not measured in this run.</p>'
    else:
        files, command = f"{slug(name)}-{slug(study)}", run["command"] or _NO_COMMAND
        inner = drawer.block(panel, run["studies"][study], files=files, command=command)
    return f'<div class="run"><h4>{safe(name)}</h4>{inner}</div>'


def _headlines(results: Sequence[Results], names: Sequence[str]) -> str:
    """First the findings in words, a row each; then every headline number."""
    head = ["", *[safe(name) for name in names]]
    told = [{item.asks: f"{item.answer} {item.rest}" for item in findings(run)} for run in results]
    words = [
        [safe(asks), *[safe(found.get(asks, "–")) for found in told]]
        for asks in unique(asks for found in told for asks in found)
    ]
    rows = [
        [f"{safe(study)}: {safe(plain_words(key))}", *[cell(value) for value in values]]
        for study, key, values in headline_rows(results)
    ]
    numbers = html_table(head, rows, numeric=range(1, len(head)))
    return (
        '<section class="study" id="headlines"><h2>Headlines</h2>'
        f"{html_table(head, words)}<h3 class=panel>Every headline number</h3>{numbers}</section>"
    )


def _differences(run: Results) -> str:
    """What `--protocol paper` could not do as the authors did."""
    said = run.get("differs_from_paper") or []
    return "<br>".join(safe(sentence) for sentence in said) or "another protocol"


def _made(results: Sequence[Results], names: Sequence[str]) -> str:
    """What another person needs to get the same numbers."""
    told = [
        {
            "command": f"<code>{safe(run['command'] or _NO_COMMAND)}</code>",
            **{f"model: {key}": _value(value) for key, value in run["model"].items()},
            **{f"text: {key}": _value(value) for key, value in run["text"].items()},
            "other texts": _value([text["name"] for text in run["other_texts"]] or None),
            "differs from the paper": _differences(run),
            **{f"setting: {key}": _value(value) for key, value in run["settings"].items()},
            "machine": safe(run["machine"]),
            "layerjump": safe(run["layerjump"]),
        }
        for run in results
    ]
    rows = [
        [safe(plain_words(key)), *[found.get(key, "–") for found in told]]
        for key in unique(key for found in told for key in found)
    ]
    table = html_table(["", *[safe(name) for name in names]], rows)
    return f'<section class="study made" id="made"><h2>How this was made</h2>{table}</section>'
