"""The report page: sections and panels as one self-contained HTML file.

Whatever comes from data is escaped where it is put in. As a second lock, the page's security policy names the two
scripts it may run by their hashes and forbids every request.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from layerjump import __version__
from layerjump.report.summary import Finding
from layerjump.studies.charts import Panel, Study, safe, unique
from layerjump.studies.tables import csv_link

_DASHES = {"solid": "", "dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3"}


@dataclass(frozen=True)
class Section:
    """One chapter of a page and its line in the contents."""

    anchor: str
    short: str
    html: str


@dataclass(frozen=True)
class Drawer:
    """Turns panels into HTML; gives every figure of a page an id of its own."""

    ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def panel(self, panel: Panel, study: Study, *, files: str, command: str) -> str:
        """A panel with its title: see `block`."""
        block = self.block(panel, study, files=files, command=command)
        return f'<article class="panel"><h3>{safe(panel.title)}</h3>{block}</article>'

    def block(self, panel: Panel, study: Study, *, files: str, command: str) -> str:
        """The sentence, the keys, the figures, then the data and the command that made them."""
        # Two and four figures stand in two columns, three in three.
        many = {1: "single", 2: "pairs", 4: "pairs"}.get(len(panel.figures), "")
        figures = "".join(self._figure(figure, panel) for figure in panel.figures)
        links = "".join(
            csv_link(study["tables"][table], f"{files}-{slug(table)}.csv") for table in panel.tables
        )
        made = f"<p>Command: <code>{safe(command)}</code></p>"
        return (
            f'<div class="block"><p class="reading">{safe(panel.reading)}</p>{_keys(panel.figures)}'
            + (f'<div class="figures {many}">{figures}</div>' if figures else "")
            + f'{panel.html}<div class="source"><p>Data: {links}</p>{made}</div></div>'
        )

    def _figure(self, figure: go.Figure, panel: Panel) -> str:
        # The keys above the figures are the legend of all of them.
        drawn = go.Figure(figure).update_layout(showlegend=False)
        name = f"figure-{next(self.ids)}"
        label = safe(f"{panel.title}. {panel.reading}")
        height = figure.layout.height
        return (
            f'<div class="figure" id="{name}" role="img" aria-label="{label}" style="height:{height}px"></div>'
            f'<script type="application/json" id="{name}-data">{json_in_html(drawn.to_json())}</script>'
        )


def json_in_html(text: str) -> str:
    """JSON that cannot end the element it stands in."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def slug(text: str) -> str:
    """A name for files and anchors: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def _keys(figures: Sequence[go.Figure]) -> str:
    """One legend for all lines and bars of a panel; none where there is nothing to tell apart."""
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
    buttons = "".join(
        f'<button class="key" type="button" aria-pressed="true" data-name="{safe(name)}">'
        f"{_swatch(first[name])}{name}</button>"
        for name in names
    )
    return (
        f'<div class="keys" role="group" aria-label="Legend: press to hide or show">{buttons}</div>'
    )


def _swatch(trace: go.Scatter | go.Bar) -> str:
    if trace.type == "bar":
        shape = f'<rect width="26" height="10" rx="2" fill="{trace.marker.color}"/>'
    else:
        dash = _DASHES.get(trace.line.dash or "solid", "")
        shape = (
            f'<line x1="0" x2="26" y1="5" y2="5" stroke="{trace.line.color}" stroke-width="3" '
            f'stroke-dasharray="{dash}"/>'
        )
    return f'<svg width="26" height="10" aria-hidden="true">{shape}</svg>'


def cards(found: Sequence[Finding]) -> str:
    """The headlines, one card each."""
    inner = "".join(
        f'<div class="card"><h3>{safe(item.asks)}</h3><p class="answer">{safe(item.answer)}</p>'
        f"<p>{safe(item.rest)}</p></div>"
        for item in found
    )
    return f'<div class="cards">{inner}</div>' if inner else ""


def page(title: str, about: str, findings: str, sections: Sequence[Section]) -> str:
    """The whole file. `about` and `findings` are HTML already."""
    plotly, script = get_plotlyjs(), _part("report.js")
    # Only these two scripts may run, and nothing may be fetched. Plotly writes styles and data: pictures.
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    contents = "".join(
        f'<li><a href="#{section.anchor}">{safe(section.short)}</a></li>' for section in sections
    )
    return Template(_part("report.html")).substitute(
        policy=policy,
        version=__version__,
        title=safe(title),
        style=_part("colours.css") + _part("report.css"),
        contents=contents,
        about=about,
        findings=findings,
        sections="\n".join(section.html for section in sections),
        plotly=plotly,
        script=script,
    )


def _part(name: str) -> str:
    return (resources.files("layerjump.report") / "templates" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
