"""Write `report.html` and `summary.md` of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerjump.errors import BadArtifact, LayerjumpError, one_line
from layerjump.io import write_text, writing
from layerjump.lens.survey import Survey
from layerjump.report.page import Drawer, Section, cards, command_html, page, slug
from layerjump.report.summary import (
    comparison_summary,
    describe_run,
    findings,
    headline_rows,
    model_name,
    short_name,
    summary,
)
from layerjump.studies import survey as survey_study
from layerjump.studies.charts import Panel
from layerjump.studies.formatting import html_cell, html_table, number, plain_words, safe, unique
from layerjump.studies.results import Outcome, Result, Results, Skipped, StudyRunInfo, from_json, to_json
from layerjump.studies.runner import STUDIES, study_named
from layerjump.studies.training_dynamics import Tables as TrainingTables
from layerjump.studies.training_dynamics import draw_tables
from layerjump.training.pretrain import NO_PENALTY, PretrainingRecord

PAGE, SUMMARY = "report.html", "summary.md"


def write_report(results: Results, folder: Path) -> list[Path]:
    """Write the page and the summary of one run; return their paths, the summary last."""
    drawer = Drawer()
    with _showing("these results"):
        sections = [
            Section(slug(name), plain_words(name), _study_section(outcome, results.run, drawer))
            for name, outcome in results.studies.items()
        ]
        sections.append(_how_made([results.run], ["value"]))
        title, about = model_name(results.run), safe(describe_run(results.run))
        html = page(title, about, cards(findings(results)), sections)
        return _write(folder, html, summary(results))


def write_comparison(runs: Sequence[Results], folder: Path) -> list[Path]:
    """Write one page that shows the same findings of several runs side by side; return the paths."""
    drawer, labels = Drawer(), label_runs([results.run for results in runs])
    with _showing("these results"):
        # The main findings in words, one row each, and then every headline number.
        head = ["", *[safe(label) for label in labels]]
        sentences = [{item.title: f"{item.answer} {item.detail}" for item in findings(results)} for results in runs]
        words = [
            [safe(title), *[safe(of_run.get(title, "–")) for of_run in sentences]]
            for title in unique(title for of_run in sentences for title in of_run)
        ]
        numbers = [
            [f"{safe(study)}: {safe(plain_words(key))}", *[html_cell(value) for value in values]]
            for study, key, values in headline_rows(runs)
        ]
        headlines = (
            '<section class="study" id="headlines"><h2>Headlines</h2>'
            f'{html_table(head, words)}<h3 class="panel">Every headline number</h3>'
            f"{html_table(head, numbers, numeric=range(1, len(head)))}</section>"
        )
        sections = [Section("headlines", "headlines", headlines)]
        for name in unique(name for results in runs for name in results.studies):
            section = _compared_section(name, runs, labels, drawer)
            sections.append(Section(slug(name), plain_words(name), section))
        sections.append(_how_made([results.run for results in runs], labels))
        about = "<br>".join(
            f"<b>{safe(label)}</b>: {safe(describe_run(results.run))}"
            for label, results in zip(labels, runs, strict=True)
        )
        html = page(" and ".join(labels), about, "", sections)
        return _write(folder, html, comparison_summary(runs, labels))


def training_page(record: PretrainingRecord, command: str) -> str:
    """Return the page of one pretraining run, from its record alone."""
    drawer, settings, content = Drawer(), record.settings, record.to_json()
    title = f"{settings.arch}, {settings.layers} blocks, d_model {settings.hidden_size}"
    penalty = settings.penalty
    if penalty != NO_PENALTY:
        penalty = f"{penalty} × {settings.penalty_weight:g}"
    about = (
        f"{number(record.parameters)} parameters; {number(settings.steps)} steps of {settings.batch_size} × "
        f"{settings.length} tokens of {record.text.name}; penalty: {penalty}; seed {settings.seed}"
    )
    html = "".join(
        drawer.article(panel, content["tables"], files="training", command=command)
        for panel in draw_tables(from_json(TrainingTables, content["tables"]))
    )
    return page(title, safe(about), "", [Section("training", "training", html)])


def survey_page(surveyed: Survey, command: str) -> str:
    """Return the page of a survey."""
    drawer, info = Drawer(), surveyed.info
    result = survey_study.summarize(surveyed)
    about = (
        f"{info.n_blocks} blocks, read through {info.lens}; {number(result.settings['positions'])} positions of "
        f"{number(result.settings['documents'])} documents of {info.text}"
    )
    tables = to_json(result.tables)
    html = "".join(
        drawer.article(panel, tables, files=f"{slug(short_name(info.model))}-survey", command=command)
        for panel in survey_study.figures(result)
    )
    section = Section("survey", "survey", _section("survey", html + _notes(result.notes)))
    return page(short_name(info.model), safe(about), cards([survey_study.finding(result)]), [section])


@contextmanager
def _showing(subject: str) -> Iterator[None]:
    """Turn any error of drawing into one line: reading checks types, but not, for example, that a table has rows."""
    try:
        yield
    except LayerjumpError:
        raise
    except Exception as error:
        raise BadArtifact(
            f"{subject} cannot be shown, so results.json was edited, damaged or written by another version "
            f"({type(error).__name__} {one_line(error)}); run the study again"
        ) from error


def _write(folder: Path, html: str, text: str) -> list[Path]:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / PAGE, folder / SUMMARY]
    for path, content in zip(paths, (html, text), strict=True):
        write_text(path, content)
    return paths


def label_runs(runs: Sequence[StudyRunInfo]) -> list[str]:
    """Return a distinct name for each run: the model, where that is not enough its text, then a number."""
    labels = [model_name(run) for run in runs]
    if len(set(labels)) < len(labels):
        texts = [run.text.name.rstrip("/").split("/")[-1] for run in runs]
        labels = [f"{label} on {text}" for label, text in zip(labels, texts, strict=True)]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({index})" for index, label in enumerate(labels, 1)]
    return labels


def panels(outcome: Outcome | None) -> list[Panel]:
    """Return every panel of a study; none where it was skipped."""
    if not isinstance(outcome, Result):
        return []
    return study_named(outcome.study).figures(outcome)


def _study_section(outcome: Outcome, run: StudyRunInfo, drawer: Drawer) -> str:
    """Return the section of a study: the question, its panels, its notes."""
    with _showing(f"the study {outcome.study[:50]}"):
        if isinstance(outcome, Skipped):
            return _section(outcome.study, _skipped(outcome))
        files, tables = f"{slug(model_name(run))}-{slug(outcome.study)}", to_json(outcome.tables)
        articles = "".join(drawer.article(panel, tables, files=files, command=run.command) for panel in panels(outcome))
        facts = [
            f"{safe(_FACTS.get(key, plain_words(key)))}: {_value(value)}" for key, value in outcome.settings.items()
        ]
        facts.append(f"took {number(outcome.seconds)}\u00a0s")
        html = f'<p class="facts">{" · ".join(facts)}</p>{articles}{_notes(outcome.notes)}'
        return _section(outcome.study, html)


def _section(name: str, inner: str) -> str:
    study = STUDIES.get(name)
    title = study.question[:1].upper() + study.question[1:] if study else plain_words(name)
    label = f'<p class="label">{safe(name)}</p>' if study else ""
    return f'<section class="study" id="{slug(name)}">{label}<h2>{safe(title)}</h2>{inner}</section>'


def _skipped(outcome: Skipped) -> str:
    return f'<p class="skipped">Skipped: {safe(outcome.reason)}</p>'


_FACTS = {
    "n_fit": "fit positions",
    "n_test": "test positions",
    "n_examples": "test positions",
    "n_documents": "test documents",
    "width": "d_model",
    "sampled": "sampled positions",
    "budget": "test tokens",
}
"""Labels of facts whose key in results.json is not a plain name."""


def _notes(notes: Sequence[str]) -> str:
    lines = "".join(f"<li>{safe(note)}</li>" for note in notes)
    return f'<ul class="notes">{lines}</ul>' if lines else ""


def _value(value: Any) -> str:
    """Return a setting as HTML; lists and nested objects become one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{safe(plain_words(key))} {_value(item)}" for key, item in value.items())
    return "not set" if value is None else html_cell(value)


def _compared_section(name: str, runs: Sequence[Results], labels: Sequence[str], drawer: Drawer) -> str:
    """Return the section of a study with the panels of all runs, matched by their titles."""
    outcomes = [results.studies.get(name) for results in runs]
    drawn = [{panel.title: panel for panel in panels(outcome)} for outcome in outcomes]
    inner = "".join(
        f"<p><b>{safe(label)}</b></p>{_skipped(outcome)}"
        for label, outcome in zip(labels, outcomes, strict=True)
        if isinstance(outcome, Skipped)
    )
    for title in unique(title for of_run in drawn for title in of_run):
        share_y_axes([of_run[title] for of_run in drawn if title in of_run])
        blocks = []
        for label, of_run, outcome, results in zip(labels, drawn, outcomes, runs, strict=True):
            shown = '<p class="quiet">Not measured in this run.</p>'
            if title in of_run and isinstance(outcome, Result):
                files, tables = f"{slug(label)}-{slug(name)}", to_json(outcome.tables)
                shown = drawer.body(of_run[title], tables, files=files, command=results.run.command)
            blocks.append(f'<div class="run"><h4>{safe(label)}</h4>{shown}</div>')
        inner += f'<article class="panel"><h3>{safe(title)}</h3><div class="runs">{"".join(blocks)}</div></article>'
    done = [outcome for outcome in outcomes if isinstance(outcome, Result)]
    return _section(name, inner + _notes(unique(note for result in done for note in result.notes)))


def share_y_axes(compared: Sequence[Panel]) -> None:
    """Give line charts that are shown side by side the same range of y, unless the study set one."""
    for figures in zip(*[panel.figures for panel in compared], strict=False):
        free = all(
            {trace.type for trace in figure.data} == {"scatter"} and figure.layout.yaxis.range is None
            for figure in figures
        )
        values = [y for figure in figures for trace in figure.data for y in trace.y] if free else []
        finite = [y for y in values if y is not None]
        if finite:
            low, high = min(0.0, min(finite)), max(finite)
            for figure in figures:
                figure.update_yaxes(range=[low, high + 0.05 * (high - low or 1)])


def _how_made(runs: Sequence[StudyRunInfo], labels: Sequence[str]) -> Section:
    """Return the section with what another person needs to get the same numbers."""
    facts = [
        {
            "command": command_html(run.command),
            **{f"model: {key}": _value(value) for key, value in to_json(run.model).items()},
            **{f"text: {key}": _value(value) for key, value in to_json(run.text).items()},
            "other texts": _value([text.name for text in run.other_texts] or None),
            "differs from the paper": "<br>".join(map(safe, run.differs_from_paper)) or "another protocol",
            **{f"setting: {key}": _value(value) for key, value in run.settings.items()},
            "machine": safe(run.machine),
            "layerjump": safe(run.layerjump),
        }
        for run in runs
    ]
    rows = [
        [safe(plain_words(key)), *[of_run.get(key, "–") for of_run in facts]]
        for key in unique(key for of_run in facts for key in of_run)
    ]
    table = html_table(["", *[safe(label) for label in labels]], rows)
    html = f'<section class="study made" id="made"><h2>How this was made</h2>{table}</section>'
    return Section("made", "how this was made", html)
