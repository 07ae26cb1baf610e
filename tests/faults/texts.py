"""Good texts in every form that is read as documents."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
from pyarrow import parquet

import layerjump as lj

WORDS = ("A tree fell.", "Two birds sang, and a dog slept.", "It rained — on Ålesund.", "Nobody came.")


def make(folder: Path) -> None:
    rows = [{"text": words, "id": number, "tags": ["a"]} for number, words in enumerate(WORDS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    table = "id,text\n" + "".join(f'{row["id"]},"{row["text"]}"\n' for row in rows)
    content = {
        "plain.txt": "\n".join(WORDS),
        "paragraphs.txt": "\n\n".join(WORDS),
        "leipzig.txt": "".join(f"{number}\t{words}\n" for number, words in enumerate(WORDS)),
        "table.csv": table,
        "table.tsv": "id\ttext\n" + "".join(f"{row['id']}\t{row['text']}\n" for row in rows),
        "rows.json": json.dumps(rows),
        "rows.jsonl": lines,
    }
    for name, text in content.items():
        (folder / name).write_text(text, encoding="utf-8")
    columns = pyarrow.table({"text": list(WORDS) * 3, "id": list(range(12))})
    parquet.write_table(columns, folder / "plain.parquet")
    parquet.write_table(columns, folder / "packed.parquet", compression="zstd", row_group_size=5)


def read(path: Path) -> None:
    len(lj.load_text(path).sha256)
