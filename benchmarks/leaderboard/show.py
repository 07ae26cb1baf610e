"""The leaderboard as tables (terminal, Markdown) and as a figure of quality against cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from layerjump.studies.charts import BLUE, GREY, ORANGE, empty_figure
from layerjump.studies.formatting import safe

Board = dict[str, dict[str, Any]]
"""Lens → its measures (mean, low, high), `cost` (multiples of a bare forward pass) and `cpu_seconds`."""
MEASURES = {"kl": "KL", "p1": "P@1", "p5": "P@5", "p10": "P@10", "surprisal": "surprisal"}
MEASURES |= {"ece": "ECE", "marginal_kl": "marginal KL"}
CHEAPEST = 0.05
"""Cost at which a free lens is drawn on the logarithmic axis."""
SIDES = {
    "middle right": (1, 0),
    "middle left": (-1, 0),
    "top right": (1, 1),
    "bottom right": (1, -1),
    "top left": (-1, 1),
    "bottom left": (-1, -1),
    "top center": (0, 1),
    "bottom center": (0, -1),
}
"""Positions of a label relative to its point, in order of preference → their direction."""
WIDTH, HEIGHT, LETTER, LINE = 900, 400, 7.5, 16
"""Approximate sizes in pixels: of the plot area, of a letter and of a line of a label."""
Box = tuple[float, float, float, float]
"""Left, right, bottom, top."""


def ranked(board: Board) -> list[tuple[str, dict[str, Any]]]:
    return sorted(board.items(), key=lambda item: item[1]["kl"][0])


def table(board: Board) -> str:
    """Return a table for the terminal: rows by KL, best first; only the KL has its interval, to save width."""
    lines = [
        f"  {'lens':28}{'KL (95 %)':>24}"
        + "".join(f"{label:>13}" for name, label in MEASURES.items() if name != "kl")
        + f"{'parameters':>12}{'CPU s':>10}{'× forward':>11}"
    ]
    for name, row in ranked(board):
        label = name + (" (recorded)" if row.get("recorded") else "")
        mean, low, high = row["kl"]
        others = "".join(f"{row[measure][0]:13.3f}" for measure in MEASURES if measure != "kl")
        cost = f"{row['parameters']:12,}{row['cpu_seconds']:10.1f}{row['cost']:11.2f}"
        lines.append(f"  {label:28}{f'{mean:.3f} ({low:.3f}–{high:.3f})':>24}{others}{cost}")
    return "\n".join(lines)


def markdown(board: Board) -> str:
    """Return the same table as Markdown."""
    rows = [["lens", *MEASURES.values(), "parameters", "CPU s", "× forward"]]
    rows.append(["---"] * len(rows[0]))
    for name, row in ranked(board):
        mean, low, high = row["kl"]
        others = [f"{row[measure][0]:.3f}" for measure in MEASURES if measure != "kl"]
        cost = [f"{row['parameters']:,}", f"{row['cpu_seconds']:.0f}", f"{row['cost']:.2f}"]
        label = name + (" (recorded)" if row.get("recorded") else "")
        rows.append([label, f"{mean:.3f} ({low:.3f}–{high:.3f})", *others, *cost])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def condensed(boards: dict[str, Board]) -> str:
    """Return one table for all texts of a model: KL and P@1 on each, and the cost; lowest mean KL first."""
    texts = list(boards)
    common = set.intersection(*(set(board) for board in boards.values()))
    kl = {name: sum(boards[text][name]["kl"][0] for text in texts) for name in common}
    rows = [["lens", *(f"{text}: KL, P@1" for text in texts), "parameters", "× forward"]]
    rows.append(["---"] * len(rows[0]))
    for name in sorted(kl, key=kl.__getitem__):
        by_text = [boards[text][name] for text in texts]
        cells = [f"{one['kl'][0]:.3f}, {one['p1'][0]:.3f}" for one in by_text]
        label = name + (" (recorded)" if by_text[0].get("recorded") else "")
        rows.append([label, *cells, f"{by_text[0]['parameters']:,}", f"{by_text[0]['cost']:.2f}"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def compare_lenses(one: str, other: str, board: Board) -> str:
    """Compare two lenses in one line: at how many levels the first is better, and where it is worse beyond noise."""
    differences = board[one]["beside"][other]
    kl = [interval for interval in differences["kl"]["levels"][1:] if interval is not None]
    lower, significant = sum(mean < 0 for mean, _, _ in kl), sum(high < 0 for _, _, high in kl)
    higher_kl = _levels(differences["kl"], lambda interval: interval[1] > 0)
    lower_p1 = _levels(differences["p1"], lambda interval: interval[2] < 0)
    return (
        f"  {one} against {other}: KL lower at {lower} of {len(kl)} levels, beyond noise at {significant}; "
        f"KL higher beyond noise: {higher_kl}; P@1 lower beyond noise: {lower_p1}"
    )


def _levels(differences: dict[str, Any], is_worse: Callable[[list[float]], bool]) -> str:
    levels = [
        level for level, interval in enumerate(differences["levels"]) if level and interval and is_worse(interval)
    ]
    if not levels:
        return "nowhere"
    return ("level " if len(levels) == 1 else "levels ") + ", ".join(map(str, levels))


def figure(model: str, text: str, board: Board, peers: tuple[str, ...]) -> go.Figure:
    """Draw KL against cost, one point a lens, with colours for ours, peers' and recorded results."""
    chart = empty_figure(
        f"{safe(model)} on {safe(text)}: mean over levels, 95 % over documents",
        x="cost of fitting, in bare forward passes over the fit text (CPU seconds)",
        y="KL to the model's own output, nats",
        height=560,
    )
    kinds = {"ours": BLUE, "peers": ORANGE, "recorded": GREY}
    costs = [max(row["cost"], CHEAPEST) for row in board.values()]
    # Space at both ends for the labels next to the points.
    across = (math.log10(min(costs) / 4), math.log10(max(costs) * 4))
    sides = name_sides(board, across)
    for kind, colour in kinds.items():
        rows = [row for row in ranked(board) if kind_of(*row, peers) == kind]
        if rows:
            _add_points(chart, kind, colour, rows, [sides[name] for name, _ in rows])
    chart.update_xaxes(type="log", range=across)
    chart.update_yaxes(type="log")  # the best lenses are close to each other
    return chart


def name_sides(board: Board, across: tuple[float, float]) -> dict[str, str]:
    """Return, for each lens, the side where its label overlaps least with points, intervals and earlier labels."""
    low = min(math.log10(row["kl"][1]) for row in board.values())
    high = max(math.log10(row["kl"][2]) for row in board.values())
    unit_x, unit_y = WIDTH / (across[1] - across[0]), HEIGHT / (high - low or 1)
    points: dict[str, tuple[float, float]] = {}
    taken: list[Box] = []
    for name, row in ranked(board):
        x = math.log10(max(row["cost"], CHEAPEST)) * unit_x
        middle, bottom, top = (math.log10(value) * unit_y for value in row["kl"])
        points[name] = x, middle
        taken += [(x - 6, x + 6, middle - 6, middle + 6), (x - 3, x + 3, bottom, top)]
    sides: dict[str, str] = {}
    for name, (x, y) in points.items():
        boxes = {side: _name_box(name, x, y, direction) for side, direction in SIDES.items()}
        sides[name] = min(boxes, key=lambda side: sum(_overlap(boxes[side], other) for other in taken))
        taken.append(boxes[sides[name]])
    return sides


def _name_box(name: str, x: float, y: float, direction: tuple[int, int]) -> Box:
    width = LETTER * len(name)
    middle, height = x + direction[0] * (width / 2 + 8), y + direction[1] * LINE * 0.8
    return middle - width / 2, middle + width / 2, height - LINE / 2, height + LINE / 2


def _overlap(one: Box, other: Box) -> float:
    """Return the area that two boxes share."""
    wide = min(one[1], other[1]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[2], other[2])
    return max(0.0, wide) * max(0.0, high)


def kind_of(name: str, row: dict[str, Any], peers: tuple[str, ...]) -> str:
    if row.get("recorded"):
        return "recorded"
    return "peers" if name in peers else "ours"


def _add_points(
    chart: go.Figure, kind: str, colour: str, rows: list[tuple[str, dict[str, Any]]], sides: list[str]
) -> None:
    kl = [row["kl"] for _, row in rows]
    chart.add_scatter(
        x=[max(row["cost"], CHEAPEST) for _, row in rows],
        y=[mean for mean, _, _ in kl],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high - mean for mean, _, high in kl],
            "arrayminus": [mean - low for mean, low, _ in kl],
            "thickness": 1.2,
        },
        mode="markers+text",
        text=[safe(name) for name, _ in rows],
        textposition=sides,
        name=kind,
        marker={"color": colour, "size": 9},
        customdata=[[row["cost"], row["cpu_seconds"]] for _, row in rows],
        hovertemplate="<b>%{text}</b><br>KL %{y:.3f}<br>%{customdata[0]:.2f} × forward, "
        "%{customdata[1]:.1f} CPU s<extra></extra>",
    )


def write_page(figures: list[go.Figure], path: Path) -> None:
    """Write all figures into one page that needs no network."""
    parts = [chart.to_html(include_plotlyjs=index == 0, full_html=False) for index, chart in enumerate(figures)]
    head = "<!doctype html><html lang='en'><meta charset='utf-8'><title>Lenses: quality and cost</title><body>"
    path.write_text(head + "\n".join(parts) + "</body></html>\n", encoding="utf-8")
