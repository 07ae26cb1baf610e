"""Text that cannot be read as documents is refused in one line that says where and why."""

import json
from pathlib import Path

import pytest
from helpers.text_files import complaint, write

from layerjump.errors import TextTooShort


@pytest.mark.parametrize("content", ["", " \n\n", "1\t\n2\t \n"])
def test_nothing_in_it(tmp_path, content):
    assert "a.txt has no documents" in complaint(write(tmp_path, "a.txt", content))


def test_an_empty_list_and_an_empty_table(tmp_path):
    assert "no documents" in complaint([])
    assert "a.csv has no documents" in complaint(write(tmp_path, "a.csv", ""))


def test_fewer_documents_than_the_limit(tmp_path):
    message = complaint(write(tmp_path, "a.txt", "1\n2\n3"), limit=4000, kind=TextTooShort)
    assert "expected 4,000 documents in a.txt, got 3" in message
    assert "limit=3" in message
    assert "limit of 1 or more documents, got 0" in complaint(["a"], limit=0)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"abc\xff\xfe", "byte 0xff at offset 3"),
        (b"abc\n\x00d\xff", "byte 0x00 at offset 4"),
        ("a".encode("utf-16"), "byte 0xff at offset 0"),
    ],
)
def test_bytes_that_are_no_text(tmp_path, data, said):
    for name in ("a.bin", "a.csv", "a.jsonl"):
        message = complaint(write(tmp_path, name, data))
        assert name in message
        assert said in message
        assert "UTF-8" in message


def test_a_missing_file_and_a_folder(tmp_path):
    assert "nowhere/to/be.found" in complaint("nowhere/to/be.found")
    assert "'data/missing.txt'" in complaint("data/missing.txt")
    assert "'owner/name'" in complaint(Path("owner/name"))
    assert f"{tmp_path} is a folder" in complaint(tmp_path)
    assert "once upon a time" in complaint("once upon a time\n" * 500)


def test_columns_that_are_not_there(tmp_path):
    row = {"premise": "a", "hypothesis": "b", "label": 1}
    path = write(tmp_path, "a.jsonl", json.dumps(row))
    assert "premise, hypothesis, label" in complaint(path)
    message = complaint(path, column="text")
    assert "no column 'text'" in message
    assert "premise, hypothesis, label" in message
    path = write(tmp_path, "a.csv", "x,y\n1,2\n")
    assert "no single column of text" in complaint(path)


def test_columns_of_numbers(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": 7}')
    assert "row 2 of column 'text' of a.jsonl, got int 7" in complaint(path, column="text")
    path = write(tmp_path, "a.csv", "text,n\na,5\nb,6\n")
    assert "row 1 of column 'n' of a.csv, got int 5" in complaint(path, column="n")


@pytest.mark.parametrize("source", ["pydoc", ["a"]])
def test_a_column_of_what_has_none(source):
    assert "'text'" in complaint(source, column="text")


def test_items_that_are_no_text():
    assert "got int 5 as item 1" in complaint(["a", 5])


def test_half_a_character(tmp_path):
    message = complaint(write(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "b\\ud800"}'))
    assert "document 2 of a.jsonl" in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": ', "line 3 of a.jsonl is not JSON"),
        ("a.json", '[{"text": "a"},\n{"text" "b"}]', "line 2 of a.json is not JSON"),
        ("a.jsonl", '{"text": "a"}\n["b"]', 'row 2 of a.jsonl, got ["b"]'),
        ("a.csv", "id,text\n1,a,b\n", "a.csv is not a table"),
        ("a.parquet", "PAR1 not really PAR1", "a.parquet cannot be read as Parquet"),
    ],
)
def test_broken_tables(tmp_path, name, content, said):
    assert said in complaint(write(tmp_path, name, content))
