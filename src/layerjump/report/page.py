"""The report page: sections and panels as one self-contained HTML file.

Everything that comes from data is escaped where it is inserted. As a second safeguard, the content security policy of
the page names its two scripts by their hashes and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from layerjump import __version__
from layerjump.studies.charts import Panel
from layerjump.studies.formatting import csv_link, safe, unique
from layerjump.studies.results import Finding

_DASHES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3"}
_NO_COMMAND = "run_studies(…), from Python"

Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""Tables as results.json holds them."""


@dataclass(frozen=True)
class Section:
    """One section of a page and its entry in the contents."""

    anchor: str
    label: str
    html: str


@dataclass(frozen=True)
class Drawer:
    """Turns panels into HTML and gives every figure of a page its own id."""

    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def article(self, panel: Panel, tables: Records, *, files: str, command: str) -> str:
        """Return a panel with its title."""
        body = self.body(panel, tables, files=files, command=command)
        return f'<article class="panel"><h3>{safe(panel.title)}</h3>{body}</article>'

    def body(self, panel: Panel, tables: Records, *, files: str, command: str) -> str:
        """Return the sentence, the legend, the figures, the CSV files (`files` starts their names) and the command."""
        columns = {1: "single", 2: "pairs", 4: "pairs"}.get(len(panel.figures), "")
        figures = "".join(self._figure(figure, panel) for figure in panel.figures)
        links = "".join(csv_link(tables[table], f"{files}-{slug(table)}.csv") for table in panel.tables)
        return (
            f'<div class="block"><p class="reading">{safe(panel.reading)}</p>{_legend(panel.figures)}'
            + (f'<div class="figures {columns}">{figures}</div>' if figures else "")
            + f'{panel.html}<div class="source"><p>Data: {links}</p>'
            + f"<p>Command: {command_html(command)}</p></div></div>"
        )

    def _figure(self, figure: go.Figure, panel: Panel) -> str:
        # The legend above the figures is the legend of all of them.
        drawn = go.Figure(figure).update_layout(showlegend=False)
        name = f"figure-{next(self.ids)}"
        label = safe(f"{panel.title}. {panel.reading}")
        height = figure.layout.height
        # Escaped so that no text ends the script element.
        data = drawn.to_json()
        for character in "&<>":
            data = data.replace(character, f"\\u{ord(character):04x}")
        return (
            f'<div class="figure" id="{name}" role="img" aria-label="{label}" style="height:{height}px"></div>'
            f'<script type="application/json" id="{name}-data">{data}</script>'
        )


def command_html(command: str) -> str:
    """Return the command of a run as HTML."""
    return f"<code>{safe(command or _NO_COMMAND)}</code>"


def slug(text: str) -> str:
    """Return a name for files and anchors: letters, digits, underscores and hyphens."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-") or "x"


def _legend(figures: Sequence[go.Figure]) -> str:
    """Return one legend for all lines and bars of a panel; none where there is only one."""
    traces = [
        trace
        for figure in figures
        for trace in figure.data
        if trace.type in ("scatter", "bar") and trace.name and trace.showlegend is not False
    ]
    first = {trace.name: trace for trace in reversed(traces)}
    names = unique(trace.name for trace in traces)
    if len(names) < 2:
        return ""
    buttons = ""
    for name in names:
        trace = first[name]
        if trace.type == "bar":
            shape = f'<rect width="26" height="10" rx="2" fill="{trace.marker.color}"/>'
        else:
            line = f'<line x1="0" x2="26" y1="5" y2="5" stroke="{trace.line.color}" stroke-width="3" '
            shape = f'{line}stroke-dasharray="{_DASHES.get(trace.line.dash or "solid", "")}"/>'
        buttons += (
            f'<button class="key" type="button" aria-pressed="true" data-name="{safe(name)}">'
            f'<svg width="26" height="10" aria-hidden="true">{shape}</svg>{name}</button>'
        )
    return f'<div class="keys" role="group" aria-label="Legend: press to hide or show">{buttons}</div>'


def cards(findings: Sequence[Finding]) -> str:
    """Return the main findings, one card each."""
    inner = "".join(
        f'<div class="card"><h3>{safe(item.title)}</h3><p class="answer">{safe(item.answer)}</p>'
        f"<p>{safe(item.detail)}</p></div>"
        for item in findings
    )
    return f'<div class="cards">{inner}</div>' if inner else ""


def page(title: str, about: str, findings: str, sections: Sequence[Section]) -> str:
    """Return the page; `about` and `findings` are HTML already."""
    plotly, script = get_plotlyjs(), _template("report.js")
    # Only these two scripts may run, and nothing may be fetched. Plotly writes styles and data: pictures.
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    contents = "".join(f'<li><a href="#{section.anchor}">{safe(section.label)}</a></li>' for section in sections)
    return Template(_template("report.html")).substitute(
        policy=policy,
        version=__version__,
        title=safe(title),
        style=_template("colours.css") + _template("report.css"),
        contents=contents,
        about=about,
        findings=findings,
        sections="\n".join(section.html for section in sections),
        plotly=plotly,
        script=script,
    )


def _template(name: str) -> str:
    return (resources.files("layerjump.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
