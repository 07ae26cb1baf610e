"""A real small run of every main study, and results bent to be hostile: what the report's tests are about."""

from __future__ import annotations

import copy
import re
from pathlib import Path

from layerjump.data.corpus import load_text
from layerjump.io import read_json
from layerjump.models.loading import load
from layerjump.studies.results import to_json
from layerjump.studies.runner import FILE, run_studies, select_studies
from layerjump.studies.setup import Setup, make_settings

HOSTILE = '</script></td><img src=x onerror="alert(1)"><svg onload=alert(2)>&amp;{{7*7}}|`$title'


def tables_of(result) -> dict[str, list[dict]]:
    """The tables of a study's result as results.json holds them."""
    return to_json(result.tables)


def small_run(model_folder: Path, folder: Path) -> dict:
    """results.json of the five main studies of a tiny trained model on a short text."""
    settings = make_settings("ours", tokens=6_000, n_test_positions=100, estimators=("mat", "affine"))
    setup = Setup(load(str(model_folder)), load_text("pydoc"), settings)
    studies = select_studies(None)
    run_studies(setup, studies, folder, command="layerjump study tiny --tokens 6000")
    return read_json(folder / FILE)


def with_more(results: dict) -> dict:
    """The same results, a study that was skipped, studies nobody has figures for, and hostile text everywhere."""
    bent = copy.deepcopy(results)
    bent["model"]["name"] = f"models/{HOSTILE}"
    bent["text"]["name"] = bent["text"]["note"] = bent["command"] = HOSTILE
    for row in bent["studies"]["examples"]["tables"]["examples"]:
        row["context"] = HOSTILE
        row["mat"] = [HOSTILE, *row["mat"][1:]]
    bent["studies"]["early_exit"]["notes"].append(HOSTILE)
    bent["studies"]["early_exit"]["settings"][HOSTILE] = HOSTILE
    empty = dict.fromkeys(("tables", "headline", "settings"), {}) | {"notes": [], "seconds": 0.0}
    bent["studies"]["attention_heads"] = empty | {"study": "attention_heads", "skipped": f"no heads {HOSTILE}"}
    bent["studies"]["unknown"] = empty | {"study": "unknown", "skipped": None, "tables": ANY_TABLES}
    bent["studies"]["unknown"]["headline"] = {"best": HOSTILE, "score": 0.5}
    return bent


_NAMES = ("wiki", "news", HOSTILE[:30])
ANY_TABLES = {
    "matrix": [
        {"fit": a, "test": b, "r2": 0.1 * i + 0.2 * j, "p@1": 0.5}
        for i, a in enumerate(_NAMES)
        for j, b in enumerate(_NAMES)
    ],
    "lines": [
        {"part": part, "block": block, "score": block / 3, "score low": block / 4, "score high": 1.0}
        for part in ("attn", "ffn")
        for block in range(1, 4)
    ],
    "grid": [{"block": b, "head": h, "score": b * h / 9} for b in range(1, 4) for h in range(3)],
    "amounts": [{"tokens": 10**k, "few": k < 4, "r2": k / 8, "rank": k} for k in range(2, 7)],
    "bars": [{"kind": kind, "value": len(kind), "low": 1.0, "high": 9.0} for kind in ("a", "bcd")],
    "words": [{"context": HOSTILE * 2, "tokens given": ["a", HOSTILE], "right": True, "share": None}],
    "empty": [],
}


def check_figures(study, saved):
    """Draw a saved result: every table is linked, every figure has data; return the panels."""
    panels = study.figures(study.from_json(saved))
    tables = {name for name, rows in saved["tables"].items() if rows}
    assert {table for panel in panels for table in panel.tables} == tables
    for panel in panels:
        assert panel.reading.endswith(".")
        assert not re.search(r"\bnan\b|None", panel.reading)
        assert panel.figures or panel.html
        assert all(figure.data for figure in panel.figures)
    return panels
