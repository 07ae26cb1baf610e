"""`human_evaluation`: a blinded sheet for a human annotator, and the score of the marked sheet.

Protocol, after the human evaluation of `mat` in "Jump to Conclusions": take 50 test sentences and one position in each.
Read every level through the fitted map and through the identity. The five most likely tokens of one reading are one
item. The sheet lists the items in random order and shows neither level nor lens; the key is a separate file. The
annotator marks each item as plausible or not, and `layerjump human-eval` joins sheet and key. (The paper:
bert-large, 25 levels, one annotator who judged grammatical fit alone; 85.4 % for the map, 52.8 % for the identity.)

The sheet must survive a spreadsheet. Every text cell is quoted, because a token such as `=1` or `3-4` would become a
formula or a date. Reading accepts a byte order mark, commas, semicolons or tabs between cells, and rows in any order.
The key holds a digest of each item's text, which reveals cells that moved to another row.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError

from layerjump.data.positions import Positions
from layerjump.data.token_text import token_text
from layerjump.errors import BadArtifact, argument, one_line
from layerjump.io import read_json
from layerjump.metrics.bootstrap import mean_interval
from layerjump.models.model import capture_states
from layerjump.studies.charts import Panel
from layerjump.studies.examples import context
from layerjump.studies.formatting import html_table, number, safe
from layerjump.studies.results import Column, Record, Result, Study, to_json
from layerjump.studies.setup import Setup

SHEET, KEY = "plausibility.csv", "plausibility-key.json"
SENTENCES = 50
TOP_TOKENS = 5
CONTEXT_CHARACTERS = 200
"""Characters of context on each side of the position."""
GAP = "____"
"""Shown at the position of a masked model."""
MARKS = {**dict.fromkeys(("1", "yes", "y", "true"), True), **dict.fromkeys(("0", "no", "n", "false"), False)}


class Item(Record):
    """The most likely tokens of one reading, and where the reading comes from."""

    context: str
    tokens: tuple[str, ...]
    lens: str
    level: int
    sentence: int


class Mark(Record):
    """The annotator's judgement of one reading."""

    lens: str
    level: int
    sentence: int
    is_plausible: bool


class SheetRow(BaseModel):
    """One row of the sheet, as text; the aliases are its columns."""

    item: str
    context: str
    token_1: str = Field(alias="best 1")
    token_2: str = Field(alias="best 2")
    token_3: str = Field(alias="best 3")
    token_4: str = Field(alias="best 4")
    token_5: str = Field(alias="best 5")
    plausible: str

    @classmethod
    def from_item(cls, number: int, item: Item) -> SheetRow:
        # In quotation marks on one line: a newline becomes \\n.
        texts = [
            text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t") for text in (item.context, *item.tokens)
        ]
        cells = [str(number), *(f"“{text}”" for text in texts), ""]
        return cls.model_validate(dict(zip(COLUMNS, cells, strict=True)))

    @property
    def cells(self) -> list[str]:
        return list(self.model_dump().values())

    @property
    def digest(self) -> str:
        """A digest of the context and the tokens without whitespace, which spreadsheets change."""
        text = "|".join("".join(cell.split()) for cell in self.cells[1:-1])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


COLUMNS = tuple(field.alias or name for name, field in SheetRow.model_fields.items())


class KeyItem(BaseModel):
    """The reading that one item of the sheet shows."""

    item: int
    lens: str
    level: int
    sentence: int
    digest: str


class KeyFile(BaseModel):
    """`plausibility-key.json`."""

    kind: Literal["layerjump plausibility key"] = "layerjump plausibility key"
    model: str
    items: list[KeyItem]


class SheetInfo(Record):
    """The size of a sheet; the key is never part of the results."""

    items: int
    sentences: int
    levels: int
    lenses: list[str]
    top_tokens: Annotated[int, Column("best")]


class Tables(Record):
    """One row on the sheet."""

    sheet: list[SheetInfo]


class Headline(Record):
    """The work of the annotator."""

    items_to_mark: int


@torch.no_grad()
def run(setup: Setup) -> Result[Tables, Headline]:
    """Read every sentence at every level through the map and the identity; write the sheet and its key."""
    model = setup.model
    lenses = {name: setup.lenses()[name] for name in (setup.settings.estimators[0], "identity")}
    items: list[Item] = []
    sentence = 0
    batches = setup.batches(positions=Positions("one"), picks=SENTENCES)
    for states in capture_states(model, batches, range(model.n_blocks + 1)):
        for pick in range(min(states.batch.n_picks, SENTENCES - sentence)):
            text = context(model, states.batch, pick, characters=CONTEXT_CHARACTERS, gap=GAP)
            for level in range(model.n_blocks + 1):
                state = states[level][pick : pick + 1]
                for name, lens in lenses.items():
                    top = lens.logits(level, state)[0].topk(TOP_TOKENS).indices.tolist()
                    tokens = tuple(token_text(model.tokenization.tokenizer, token) for token in top)
                    items.append(Item(text, tokens, name, level, sentence))
            sentence += 1
    # Sorting by random() is the one shuffle that Python promises to repeat in every version.
    generator = random.Random(setup.settings.seed)
    items.sort(key=lambda _: generator.random())
    info = SheetInfo(
        items=len(items),
        sentences=len({item.sentence for item in items}),
        levels=model.n_blocks + 1,
        lenses=sorted({item.lens for item in items}),
        top_tokens=TOP_TOKENS,
    )
    position = f"{GAP} marks the position" if model.masked else "right after the context"
    notes = [
        f"{SHEET} is for an annotator who has not seen {KEY}: write 1 in the column `plausible` if the tokens could "
        f"stand at the position ({position}), else 0. Then run `layerjump human-eval FOLDER`. The paper's "
        f"annotator marked 85.4 % of the map's and 52.8 % of the identity's readings as plausible (bert-large)."
    ]
    files = {SHEET: write_sheet(items), KEY: write_key(items, model.name)}
    return Result("human_evaluation", Tables([info]), Headline(len(items)), notes, to_json(info), files=files)


def write_sheet(items: Sequence[Item]) -> str:
    """Return the sheet as CSV text with the items numbered from 1; Excel needs its byte order mark."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(SheetRow.from_item(n, item).cells for n, item in enumerate(items, start=1))
    return "\ufeff" + out.getvalue()


def write_key(items: Sequence[Item], model: str) -> str:
    """Return the key of a sheet as JSON text."""
    rows = []
    for index, item in enumerate(items, start=1):
        digest = SheetRow.from_item(index, item).digest
        rows.append(KeyItem(item=index, lens=item.lens, level=item.level, sentence=item.sentence, digest=digest))
    return json.dumps(KeyFile(model=model, items=rows).model_dump(), indent=1) + "\n"


def read_marks(sheet: Path, key: Path | None = None) -> list[Mark]:
    """Read a marked sheet (or the one in a folder) and join it with its key; every item must be marked once."""
    sheet = sheet / SHEET if sheet.is_dir() else sheet
    items = _load_key(key or sheet.parent / KEY)
    marks: dict[str, Mark] = {}
    for line, row in _load_sheet(sheet):
        number, where = row.item.strip(), f"line {line} of {sheet}"
        item = items.get(number)
        if item is None:
            raise BadArtifact(f"{where}: the key has no item {number[:20]!r}; undo the edit")
        if number in marks:
            raise BadArtifact(f"{where}: item {number} occurs twice; keep one row for each item")
        if row.digest != item.digest:
            raise BadArtifact(
                f"{where}: the text of item {number} does not match the key; edit only the column `plausible`, and "
                f"sort whole rows"
            )
        mark = row.plausible.strip()
        if mark.lower() not in MARKS:
            problem = f"has the mark {mark[:20]!r}" if mark else "is not marked"
            raise BadArtifact(f"{where}: item {number} {problem}; write 1 or 0 (or yes, no, true, false)")
        marks[number] = Mark(item.lens, item.level, item.sentence, MARKS[mark.lower()])
    missing = [number for number in items if number not in marks]
    if missing:
        raise BadArtifact(
            f"{sheet} lacks {len(missing)} of {len(items)} items, for example {missing[0]}; restore these rows"
        )
    return list(marks.values())


def _load_sheet(sheet: Path) -> list[tuple[int, SheetRow]]:
    """Return the rows with their line numbers."""
    try:
        text = sheet.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadArtifact(f"{sheet} is not UTF-8; save it as `CSV UTF-8`") from None
    except OSError as error:
        raise BadArtifact(f"{sheet} cannot be read: {one_line(error)}") from error
    header = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count), restval="")
    try:
        columns = reader.fieldnames or ()
        lines = [(reader.line_num, cells) for cells in reader]
    except csv.Error as error:
        raise BadArtifact(
            f"line {reader.line_num} of {sheet} is not a row of a sheet ({one_line(error)}); undo the edit"
        ) from error
    absent = [name for name in COLUMNS if name not in columns]
    if absent:
        raise BadArtifact(
            f"{sheet} has no column {absent[0]!r}; expected the sheet that the study `human_evaluation` wrote"
        )
    rows = [(line, SheetRow.model_validate(cells)) for line, cells in lines]
    # Spreadsheets leave empty rows at the end.
    return [(line, row) for line, row in rows if any(cell.strip() for cell in row.cells)]


def _load_key(path: Path) -> dict[str, KeyItem]:
    """Return the items of a key by their number on the sheet."""
    content = read_json(path)
    if content.get("kind") != KeyFile.model_fields["kind"].default:
        raise BadArtifact(f"{path} is not the key of a plausibility sheet; pass {argument('key')}")
    try:
        items = KeyFile.model_validate(content).items
    except ValidationError as error:
        problem = error.errors()[0]
        location = ".".join(map(str, problem["loc"]))
        raise BadArtifact(f"{path} is damaged: {location}: {problem['msg']}; run the study again") from error
    # Lenses are compared case by case, so every lens must have read every sentence at every level once.
    cases = {(item.sentence, item.level) for item in items}
    readings = {(item.sentence, item.level, item.lens) for item in items}
    n_readings = len(cases) * len({item.lens for item in items})
    if not items or not len(readings) == len(items) == n_readings:
        raise BadArtifact(
            f"{path} is damaged: expected every sentence and level once through each lens; run the study again"
        )
    return {str(item.item): item for item in items}


class Share(Record):
    """A share of readings or cases with its 95 % interval; sentences are resampled."""

    n: int
    share: float
    low: float
    high: float

    @classmethod
    def of(cls, hits: Sequence[bool], sentences: Sequence[int]) -> Share:
        mean, low, high = mean_interval(np.array(hits, dtype=float), sentences)
        return cls(len(hits), float(mean), float(low), float(high))


def shares(marks: Sequence[Mark]) -> dict[str, Share]:
    """Return the share of plausible readings by lens."""
    return {
        lens: Share.of([mark.is_plausible for mark in group], [mark.sentence for mark in group])
        for lens, group in _by_lens(marks).items()
    }


def shares_by_level(marks: Sequence[Mark]) -> dict[tuple[str, int], Share]:
    """Return the share of plausible readings by lens and level."""
    by_level = {
        level: shares([mark for mark in marks if mark.level == level])
        for level in sorted({mark.level for mark in marks})
    }
    return {(lens, level): of[lens] for lens in _by_lens(marks) for level, of in by_level.items() if lens in of}


def comparison(marks: Sequence[Mark]) -> dict[str, Share]:
    """Return the share of cases (a sentence at a level) in which one lens alone, both or neither are plausible."""
    cases: dict[tuple[int, int], dict[str, bool]] = {}
    for mark in marks:
        cases.setdefault((mark.sentence, mark.level), {})[mark.lens] = mark.is_plausible
    outcomes = {
        f"{lens} only": [case[lens] and sum(case.values()) == 1 for case in cases.values()] for lens in _by_lens(marks)
    }
    outcomes["both"] = [all(case.values()) for case in cases.values()]
    outcomes["neither"] = [not any(case.values()) for case in cases.values()]
    sentences = [sentence for sentence, _ in cases]
    return {name: Share.of(hits, sentences) for name, hits in outcomes.items()}


def _by_lens(marks: Sequence[Mark]) -> dict[str, list[Mark]]:
    """Group the marks by lens, the identity last."""
    lenses = sorted({mark.lens for mark in marks}, key=lambda lens: (lens == "identity", lens))
    return {lens: [mark for mark in marks if mark.lens == lens] for lens in lenses}


def figures(result: Result[Tables, Headline]) -> list[Panel]:
    """Return the size of the sheet as a table."""
    (info,) = result.tables.sheet
    reading = f"The sheet has {number(info.items)} items to mark."
    head = ["items", "sentences", "levels", "lenses", "tokens an item"]
    counts = [info.items, info.sentences, info.levels, ", ".join(info.lenses), info.top_tokens]
    html = html_table(head, [[safe(number(value)) for value in counts]], numeric=(0, 1, 2, 4))
    return [Panel("The sheet", reading, ("sheet",), html=html)]


STUDY = Study("human_evaluation", "are the readings plausible to a human? (a blinded sheet)", run, figures)
