"""The sheet that a human marks for `plausibility`, its key, and the score of a marked sheet.

The sheet goes through a spreadsheet and back, so every cell of text stands in quotation marks (a token such as `=1` or
`3-4` would become a formula or a date), and reading allows for what spreadsheets do: a byte order mark, semicolons or
tabs between cells, rows in another order. The key knows each item's text by a digest, so that cells that slipped to
another row are noticed.

What a marked `plausibility` sheet says: shares by lens and by level, and who beats whom.

`plausibility`: a blinded sheet for a human to mark, as the authors of `mat` had one marked.

Some sentences, one position each, read at every level through the map and through the identity: the five best tokens
of each reading are an item. Items are shuffled and say neither level nor lens; the key is a file of its own.
`layerjump plausibility score` scores the marked sheet. (bert-large, 50 sentences, 25 levels, one annotator who asked
only whether the tokens fit grammatically: 85.4 % for the map, 52.8 % for the identity.)
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerjump.data.positions import Positions
from layerjump.data.tokenization import token_text
from layerjump.errors import BadArtifact, one_line
from layerjump.io import read_json
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.activations import capture_states
from layerjump.studies.examples import context
from layerjump.studies.results import Result, Row
from layerjump.studies.setup import Setup

SHEET, KEY = "plausibility.csv", "plausibility-key.json"
KIND = "layerjump plausibility key"
BEST = 5
MARKS = {
    **dict.fromkeys(("1", "yes", "y", "true"), True),
    **dict.fromkeys(("0", "no", "n", "false"), False),
}
_TOKENS = tuple(f"best {place}" for place in range(1, BEST + 1))
_COLUMNS = ("item", "context", *_TOKENS, "plausible")


@dataclass(frozen=True)
class Item:
    """Five tokens at a place in a text, and which reading they come from."""

    context: str
    tokens: tuple[str, ...]
    lens: str
    level: int
    sentence: int


@dataclass(frozen=True)
class Mark:
    """What the annotator thought of one reading."""

    lens: str
    level: int
    sentence: int
    plausible: bool


def write_sheet(items: Sequence[Item]) -> str:
    """The sheet, items numbered from 1 in the order given; it starts with a byte order mark, for Excel."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for number, item in enumerate(items, start=1):
        writer.writerow([number, *map(_quoted, (item.context, *item.tokens)), ""])
    return "\ufeff" + out.getvalue()


def write_key(items: Sequence[Item], model: str) -> str:
    """What each item of the sheet is."""
    rows = [
        {
            "item": number,
            "lens": item.lens,
            "level": item.level,
            "sentence": item.sentence,
            "digest": _digest([_quoted(text) for text in (item.context, *item.tokens)]),
        }
        for number, item in enumerate(items, start=1)
    ]
    return json.dumps({"kind": KIND, "model": model, "items": rows}, indent=1) + "\n"


def read_marks(sheet: Path, key: Path | None = None) -> list[Mark]:
    """The marks of a filled sheet (or of the one in a folder), joined with its key; every item once."""
    sheet = sheet / SHEET if sheet.is_dir() else sheet
    items = _read_key(key or sheet.parent / KEY)
    marks: dict[str, Mark] = {}
    for line, row in _read_rows(sheet):
        number = row["item"].strip()
        where = f"line {line} of {sheet}"
        if number not in items:
            raise BadArtifact(
                f"{where} is item {number[:20]!r}, which the key does not know; undo the edit"
            )
        if number in marks:
            raise BadArtifact(f"{where} is item {number} again; keep one row for each item")
        known = items[number]
        if _digest([row["context"], *(row[name] for name in _TOKENS)]) != known["digest"]:
            raise BadArtifact(
                f"{where}: item {number} does not show what it was given out with; only the column `plausible` may be "
                f"edited, and rows sorted as a whole"
            )
        marks[number] = _mark(known, row["plausible"], where)
    missing = [number for number in items if number not in marks]
    if missing:
        raise BadArtifact(
            f"{sheet} lacks {len(missing)} of its {len(items)} items, {missing[0]} among them; put the rows back"
        )
    return list(marks.values())


def _mark(known: dict[str, Any], text: str, where: str) -> Mark:
    said = text.strip().lower()
    if not said:
        raise BadArtifact(f"{where}: item {known['item']} is not marked; write 1 or 0 there")
    if said not in MARKS:
        raise BadArtifact(
            f"{where}: item {known['item']} is marked {text.strip()[:20]!r}; write 1 or 0 (or yes, no, true, false)"
        )
    return Mark(known["lens"], known["level"], known["sentence"], MARKS[said])


def _read_rows(sheet: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows with their line numbers, whatever a spreadsheet puts between cells."""
    try:
        text = sheet.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadArtifact(f"{sheet} is not UTF-8; save it as `CSV UTF-8`") from None
    except OSError as error:
        raise BadArtifact(f"{sheet} cannot be read: {one_line(error)}") from error
    head = text.partition("\n")[0]
    reader = csv.DictReader(
        io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count), restval=""
    )
    try:
        columns = reader.fieldnames or ()
        rows = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise BadArtifact(
            f"line {reader.line_num} of {sheet} is no row of a sheet ({one_line(error)}); undo the edit"
        ) from error
    absent = [name for name in _COLUMNS if name not in columns]
    if absent:
        raise BadArtifact(
            f"{sheet} has no column {absent[0]!r}; give the sheet that `layerjump study --study plausibility` wrote"
        )
    # Spreadsheets leave empty rows at the end.
    return [(line, row) for line, row in rows if any(row[name].strip() for name in _COLUMNS)]


def _read_key(path: Path) -> dict[str, dict[str, Any]]:
    saved = read_json(path)
    if saved.get("kind") != KIND:
        raise BadArtifact(f"{path} is no key of a plausibility sheet; give --key")
    try:
        items = {
            str(row["item"]): {
                "item": row["item"],
                "lens": str(row["lens"]),
                "level": int(row["level"]),
                "sentence": int(row["sentence"]),
                "digest": row["digest"],
            }
            for row in saved["items"]
        }
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadArtifact(f"{path} is damaged: {one_line(error)}; make the sheet again") from error
    _require_cases(items.values(), path)
    return items


def _require_cases(items: Collection[dict[str, Any]], path: Path) -> None:
    """Every sentence was read at every level through the same lenses, once: or no two lenses can be compared."""
    cases = {(item["sentence"], item["level"]) for item in items}
    lenses = {item["lens"] for item in items}
    readings = {(item["sentence"], item["level"], item["lens"]) for item in items}
    if not items or not len(readings) == len(items) == len(cases) * len(lenses):
        raise BadArtifact(
            f"{path} is damaged: some sentence was not read once through each lens; make the sheet again"
        )


def _quoted(text: str) -> str:
    """In quotation marks, on one line: a new line is shown as \\n."""
    shown = text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")
    return f"“{shown}”"


def _digest(cells: Sequence[str]) -> str:
    """Of the text without its blanks, which spreadsheets change."""
    said = "|".join("".join(cell.split()) for cell in cells)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def shares(marks: Sequence[Mark]) -> list[Row]:
    """The share of readings found plausible for each lens, with 95 % intervals (sentences resampled)."""
    return [{"lens": lens, **_share(mine)} for lens, mine in _by_lens(marks).items()]


def shares_by_level(marks: Sequence[Mark]) -> list[Row]:
    """The same for each level."""
    rows: list[Row] = []
    for lens, mine in _by_lens(marks).items():
        for level in sorted({mark.level for mark in mine}):
            here = [mark for mark in mine if mark.level == level]
            rows.append({"lens": lens, "level": level, **_share(here)})
    return rows


def comparison(marks: Sequence[Mark]) -> list[Row]:
    """How often each lens is plausible where the other is not, at the same sentence and level."""
    lenses = list(_by_lens(marks))
    cases: dict[tuple[int, int], dict[str, bool]] = {}
    for mark in marks:
        cases.setdefault((mark.sentence, mark.level), {})[mark.lens] = mark.plausible
    sentences = [sentence for sentence, _ in cases]
    found = {
        f"{lens} only": [case[lens] and sum(case.values()) == 1 for case in cases.values()]
        for lens in lenses
    }
    found["both"] = [all(case.values()) for case in cases.values()]
    found["neither"] = [not any(case.values()) for case in cases.values()]
    return [{"plausible": name, **_row(values, sentences)} for name, values in found.items()]


def _by_lens(marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    """The maps' marks, then the identity's."""
    lenses = sorted({mark.lens for mark in marks}, key=lambda lens: (lens == "identity", lens))
    return {lens: [mark for mark in marks if mark.lens == lens] for lens in lenses}


def _share(marks: Sequence[Mark]) -> Row:
    return _row([mark.plausible for mark in marks], [mark.sentence for mark in marks])


def _row(values: Sequence[bool], sentences: Sequence[int]) -> Row:
    mean, low, high = mean_interval(np.array(values, dtype=float), sentences)
    return {"n": len(values), "share": float(mean), "low": float(low), "high": float(high)}


SENTENCES = 50
CHARACTERS = 200
"""Shown on each side of the position."""
GAP = "____"


def run(setup: Setup) -> Result:
    """Make the sheet and its key."""
    items = _items(setup)
    # Sorted by random(): the only draw that Python promises to repeat in any version.
    draw = random.Random(setup.settings.seed)
    items.sort(key=lambda _: draw.random())
    result = Result("plausibility")
    result.settings = {
        "items": len(items),
        "sentences": len({item.sentence for item in items}),
        "levels": setup.model.n_blocks + 1,
        "lenses": sorted({item.lens for item in items}),
        "best": BEST,
    }
    result.tables["sheet"] = [dict(result.settings)]
    result.headline = {"items_to_mark": len(items)}
    result.files = {SHEET: write_sheet(items), KEY: write_key(items, setup.model.name)}
    where = f"{GAP} marks the place" if setup.model.masked else "the place is right after the text"
    result.notes.append(
        f"{SHEET} is to be marked by someone who has not seen {KEY}: 1 in the column `plausible` where the tokens "
        f"could stand at the place ({where}), else 0. Then: layerjump plausibility score FOLDER. The paper's annotator "
        f"found 85.4 % of the map's and 52.8 % of the identity's plausible (bert-large)."
    )
    return result


@torch.no_grad()
def _items(setup: Setup) -> list[Item]:
    """Every sentence at every level through both lenses, in that order."""
    model = setup.model
    every, name = setup.lenses(), setup.settings.estimators[0]
    lenses = {name: every[name], "identity": every["identity"]}
    tokenizer = model.tokenization.tokenizer
    items: list[Item] = []
    batches = setup.batches(positions=Positions("one"), picks=SENTENCES)
    sentence = 0
    for found in capture_states(model, batches, range(model.n_blocks + 1)):
        for pick in range(min(found.batch.n_picks, SENTENCES - sentence)):
            where = context(model, found.batch, pick, characters=CHARACTERS, gap=GAP)
            for level in range(model.n_blocks + 1):
                state = found[level][pick : pick + 1]
                for lens, read in lenses.items():
                    best = read.logits(level, state)[0].topk(BEST).indices.tolist()
                    tokens = tuple(token_text(tokenizer, token) for token in best)
                    items.append(Item(where, tokens, lens, level, sentence))
            sentence += 1
    return items
