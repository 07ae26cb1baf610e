"""The findings of a run in a few sentences: `summary.md`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from layerjump.studies import early_exit
from layerjump.studies.formatting import number, plain_words, unique
from layerjump.studies.results import Finding, Result, Results, Skipped, StudyRunInfo, to_json
from layerjump.studies.runner import STUDIES

_FIRST = ("early_exit", "predictions", "submodules", "linearity", "r2")
"""The order of the findings; those of other studies come after."""


def findings(results: Results) -> list[Finding]:
    """Return the main findings of the studies that ran."""
    names = unique([*_FIRST, *STUDIES])
    ran = [results.studies[name] for name in names if name in results.studies]
    findings = [STUDIES[r.study].finding(r) for r in ran if isinstance(r, Result)]
    return [finding for finding in findings if finding]


def model_name(run: StudyRunInfo) -> str:
    """Return the short name of the model of a run."""
    return short_name(run.model.name)


def short_name(name: str) -> str:
    """Return the name of a model without the folders before it."""
    return name.rstrip("/\\").replace("\\", "/").split("/")[-1] or name


def describe_run(run: StudyRunInfo) -> str:
    """Describe the model and the text in one line."""
    model = run.model
    return (
        f"{model.family}, {model.n_blocks} blocks, d_model {model.d_model}, vocabulary of {number(model.vocab_size)} "
        f"tokens; measured on {run.text.name}"
    )


def summary(results: Results) -> str:
    """Return `summary.md` of one run."""
    run, studies = results.run, results.studies
    lines = [f"# {_one_line(model_name(run))}", "", f"{_one_line(describe_run(run))}.", ""]
    lines += [f"- **{item.title}: {item.answer}** {item.detail}" for item in findings(results)]
    if "submodules" not in studies:
        lines.append("- Most linear sub-module: not measured; run the study `submodules`.")
    lines += [
        f"- {study.study}: skipped, {_one_line(study.reason)}"
        for study in studies.values()
        if isinstance(study, Skipped)
    ]
    exits = studies.get(early_exit.STUDY.name)
    if isinstance(exits, Result):
        lines += ["", early_exit.saved_sentence(exits)]
    lines += ["", *_headline_table([results], ["value"])]
    if run.differs_from_paper:
        lines += ["", "Differences from the protocol of the paper:", ""]
        lines += [f"- {_one_line(sentence)}" for sentence in run.differs_from_paper]
    if run.command:
        lines += ["", f"Made by `{_one_line(run.command)}` with layerjump {run.layerjump}."]
    return "\n".join(lines) + "\n"


def comparison_summary(runs: Sequence[Results], labels: Sequence[str]) -> str:
    """Return `summary.md` of several runs: their headlines side by side."""
    lines = ["# " + " · ".join(_one_line(label) for label in labels), ""]
    for label, results in zip(labels, runs, strict=True):
        lines += [f"**{_one_line(label)}**: {_one_line(describe_run(results.run))}.", ""]
        lines += [f"- {item.title}: {item.answer} {item.detail}" for item in findings(results)]
        lines.append("")
    return "\n".join([*lines, *_headline_table(runs, labels)]) + "\n"


def headline_rows(runs: Sequence[Results]) -> list[tuple[str, str, list[Any]]]:
    """Return every headline number: its study, its name, its value in each run (None where a run has none)."""
    headlines = [
        {
            (name, key): value
            for name, outcome in results.studies.items()
            if isinstance(outcome, Result)
            for key, value in to_json(outcome.headline).items()
        }
        for results in runs
    ]
    keys = unique(key for headline in headlines for key in headline)
    return [(*key, [headline.get(key) for headline in headlines]) for key in keys]


def _headline_table(runs: Sequence[Results], labels: Sequence[str]) -> list[str]:
    rows = headline_rows(runs)
    if not rows:
        return []
    head = ["study", "number", *[_one_line(label) for label in labels]]
    body = [
        [study, plain_words(key), *[_one_line(number(value, 4)) for value in values]] for study, key, values in rows
    ]
    lines = [head, ["---", "---", *["---:"] * len(labels)], *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _one_line(text: object) -> str:
    """Return text that neither ends a table cell nor starts a tag."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
