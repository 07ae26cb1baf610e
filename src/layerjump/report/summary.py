"""The findings of a run in a few sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from layerjump.studies.charts import (
    Study,
    lenses_of,
    number,
    percent,
    plain_words,
    unique,
    where,
)
from layerjump.studies.early_exit import saved_sentence, targets_of
from layerjump.studies.predictions import half_right
from layerjump.studies.results import Row

Results = dict[str, Any]
"""What `results.json` holds."""


@dataclass(frozen=True)
class Finding:
    """One headline: what was asked, the answer in a word or two, the rest of the sentence."""

    asks: str
    answer: str
    rest: str


def _saved(study: Study) -> Finding:
    rows: list[Row] = study["tables"]["saved"]
    target, blocks = targets_of(rows)[0], study["settings"]["blocks"]
    lenses = lenses_of(rows)
    found = {lens: where(rows, lens=lens, kind="dynamic", target=target)[0] for lens in lenses}
    best = lenses[0]
    ours, plain = found[best], found["identity"]
    return Finding(
        f"Blocks saved at {percent(target)} agreement",
        f"{number(ours['blocks_saved'])} of {blocks}",
        f"with {best} ({_share(ours)}); with the identity {number(plain['blocks_saved'])} ({_share(plain)}).",
    )


def _share(row: Row) -> str:
    return "never reached" if row["share"] is None else percent(row["share"])


def _early(study: Study) -> Finding:
    rows: list[Row] = study["tables"]["levels"]
    last, best = max(row["level"] for row in rows), lenses_of(rows)[0]
    return Finding(
        "Already right half the time from",
        f"level {half_right(rows, best)} of {last}",
        f"through {best}; read as it stands (identity) from level {half_right(rows, 'identity')}.",
    )


def _linear(study: Study) -> Finding:
    head = study["headline"]
    return Finding(
        "Linearity of a block, on average",
        number(head["mean_with_residual"]),
        f"with the residual stream (the identity alone: {number(head['mean_identity'])}); of what a block itself adds "
        f"{number(head['mean_without_residual'])} in sample, "
        f"{number(head['mean_without_residual_held_out_without_position_0'])} on unseen text without position 0.",
    )


def _explained(study: Study) -> Finding:
    head = study["headline"]
    better, pairs = head["pairs_where_map_beats_identity"], head["pairs"]
    of_them = "all" if better == pairs else number(better)
    return Finding(
        "R² of a map between two levels",
        number(head["mean_r2"]),
        f"on average over {number(pairs)} pairs (the identity: {number(head['mean_r2_identity'])}); the map is "
        f"better for {of_them} of them.",
    )


_PARTS = {"attn": "attention", "ffn": "feed-forward", "norms": "the norms"}


def _replaced(study: Study) -> Finding | None:
    head = study["headline"]
    best = head.get("most_tolerant")
    means = {part: head[key] for part in _PARTS if (key := f"mean_p@1_{part}") in head}
    if best not in means:
        return None
    others = ", ".join(
        f"{_PARTS[part]} {number(value)}" for part, value in means.items() if part != best
    )
    return Finding(
        "Most linear sub-module",
        _PARTS[best],
        f"with maps in its place from a level on, precision@1 is {number(means[best])} on average ({others}).",
    )


FINDINGS: dict[str, Callable[[Study], Finding | None]] = {
    "exits": _saved,
    "predictions": _early,
    "submodules": _replaced,
    "linearity": _linear,
    "r2": _explained,
}
"""In the order in which a summary tells them."""


def findings(results: Results) -> list[Finding]:
    """The headlines of the studies that were run."""
    done = {name: study for name, study in results["studies"].items() if not study["skipped"]}
    found = [make(done[name]) for name, make in FINDINGS.items() if name in done]
    return [finding for finding in found if finding]


def skipped(results: Results) -> dict[str, str]:
    """The studies that were not run, with the reason."""
    return {
        name: study["skipped"] for name, study in results["studies"].items() if study["skipped"]
    }


def short_name(results: Results) -> str:
    """The model's name without the folders before it."""
    name = str(results["model"]["name"])
    return name.rstrip("/\\").replace("\\", "/").split("/")[-1] or name


def about_model(results: Results) -> str:
    """The model and the text in a line."""
    model, text = results["model"], results["text"]
    return (
        f"{model['family']}, {model['blocks']} blocks of width {model['width']}, {number(model['vocabulary'])} tokens "
        f"in the vocabulary; read on {text['name']}"
    )


def summary(results: Results) -> str:
    """`summary.md` of one run."""
    lines = [f"# {_flat(short_name(results))}", "", f"{_flat(about_model(results))}.", ""]
    lines += [f"- **{item.asks}: {item.answer}** {item.rest}" for item in findings(results)]
    if "submodules" not in results["studies"]:
        lines.append("- Most linear sub-module: not measured; run the study `submodules`.")
    lines += [f"- {name}: skipped, {_flat(reason)}" for name, reason in skipped(results).items()]
    if "exits" in results["studies"] and not results["studies"]["exits"]["skipped"]:
        lines += ["", saved_sentence(results["studies"]["exits"])]
    lines += ["", *_headlines([results], ["value"])]
    if differs := results.get("differs_from_paper"):
        lines += ["", "What differs from the paper's protocol:", ""]
        lines += [f"- {_flat(sentence)}" for sentence in differs]
    if results["command"]:
        lines += [
            "",
            f"Made by `{_flat(results['command'])}` with layerjump {results['layerjump']}.",
        ]
    return "\n".join(lines) + "\n"


def comparison_summary(results: Sequence[Results], labels: Sequence[str]) -> str:
    """`summary.md` of several runs: their headlines beside each other."""
    lines = ["# " + " · ".join(_flat(label) for label in labels), ""]
    for label, run in zip(labels, results, strict=True):
        lines += [f"**{_flat(label)}**: {_flat(about_model(run))}.", ""]
        lines += [f"- {item.asks}: {item.answer} {item.rest}" for item in findings(run)] + [""]
    return "\n".join([*lines, *_headlines(results, labels)]) + "\n"


def headline_rows(results: Sequence[Results]) -> list[tuple[str, str, list[Any]]]:
    """Every headline number: its study, its name, its value in each run (None where a run has none)."""
    names = unique(
        (study, key)
        for run in results
        for study, found in run["studies"].items()
        for key in found["headline"]
    )
    return [
        (
            study,
            key,
            [run["studies"].get(study, {}).get("headline", {}).get(key) for run in results],
        )
        for study, key in names
    ]


def _headlines(results: Sequence[Results], labels: Sequence[str]) -> list[str]:
    rows = headline_rows(results)
    if not rows:
        return []
    head = ["study", "number", *[_flat(label) for label in labels]]
    lines = [_line(head), _line(["---", "---", *["---:"] * len(labels)])]
    for study, key, values in rows:
        lines.append(_line([study, plain_words(key), *[_flat(number(v, 4)) for v in values]]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _flat(text: str) -> str:
    """One line that neither ends a table's cell nor starts a tag."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")
