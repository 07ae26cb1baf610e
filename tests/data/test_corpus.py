"""Documents are what the file says they are."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from helpers.text_files import ROWS, TEXTS, complaint, write
from pyarrow import parquet

from layerjump.data.corpus import Corpus, load_text

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


# Text files


def test_one_document_a_line(tmp_path):
    corpus = load_text(write(tmp_path, "a.txt", "one\n  two \nthree\n"))
    assert corpus == Corpus("a.txt", ("one", "two", "three"), "3 documents, one a line")


def test_leipzig_loses_its_numbers(tmp_path):
    corpus = load_text(write(tmp_path, "a.txt", "1\tThe cat.\n\n2\t10 dogs\tbark.\n"))
    assert corpus.documents == ("The cat.", "10 dogs\tbark.")
    assert corpus.note == "2 documents, one a line (Leipzig: id<TAB>sentence)"


def test_numbers_in_some_lines_do_not_make_it_leipzig(tmp_path):
    assert load_text(write(tmp_path, "a.txt", "1\tcat\ndog\n")).documents == ("1\tcat", "dog")


def test_a_leipzig_file_that_breaks_off_names_the_line(tmp_path):
    lines = [f"{i}\tsentence {i}" for i in range(1, 150)]
    lines[119] = "a stray line"
    message = complaint(write(tmp_path, "a.txt", "\n".join(lines)))
    assert "line 120 of a.txt" in message
    assert "a stray line" in message


def test_paragraphs_keep_their_inner_newlines(tmp_path):
    corpus = load_text(write(tmp_path, "a.txt", "one\ntwo\n\nthree\n \n\nfour\n"))
    assert corpus.documents == ("one\ntwo", "three", "four")
    assert corpus.note == "3 documents, paragraphs between blank lines"


@pytest.mark.parametrize(("blanks", "documents"), [(1, 100), (19, 100), (20, 21), (99, 100)])
def test_the_share_of_blank_lines_decides(tmp_path, blanks, documents):
    lines = [f"line {i}" + ("\n" if i < blanks else "") for i in range(100)]
    corpus = load_text(write(tmp_path, "a.txt", "\n".join(lines)))
    assert len(corpus.documents) == documents
    assert ("paragraphs" in corpus.note) == (blanks >= 20)


def test_blank_lines_around_the_text_separate_nothing(tmp_path):
    assert load_text(write(tmp_path, "a.txt", "\n\n\none\ntwo\n\n\n")).documents == ("one", "two")


def test_byte_order_mark_and_carriage_returns_go(tmp_path):
    data = b"\xef\xbb\xbf1\tone\r\n2\ttwo\r\n"
    assert load_text(write(tmp_path, "a.txt", data)).documents == ("one", "two")
    data = b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n"
    assert load_text(write(tmp_path, "a.txt", data)).documents == ("one\ntwo", "three")


def test_only_newlines_end_a_line(tmp_path):
    lines = ("a\u2028b", "c\x0cd", "e\x85f")
    assert load_text(write(tmp_path, "a.txt", "\n".join(lines))).documents == lines


def test_a_file_of_any_other_name_is_text(tmp_path):
    assert load_text(str(write(tmp_path, "wiki.test.raw", "one\ntwo"))).documents == ("one", "two")


def test_limit_takes_the_first(tmp_path):
    corpus = load_text(write(tmp_path, "a.txt", "one\ntwo\nthree"), limit=2)
    assert corpus.documents == ("one", "two")
    assert corpus.note.startswith("the first 2 documents")


# Tables


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "array.json", "a.csv", "a.tsv", "a.parquet"])
@pytest.mark.parametrize("column", ["text", None])
def test_every_kind_of_table_gives_the_same_documents(tmp_path, name, column):
    path = tmp_path / name
    separator = "\t" if name.endswith("tsv") else ","
    if name == "array.json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif "json" in name:
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif name == "a.parquet":
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        rows = [f"{row['id']}{separator}{row['text']}" for row in ROWS]
        path.write_text("\n".join([f"id{separator}text", *rows]))
    corpus = load_text(path, column=column)
    assert corpus == Corpus(name, TEXTS, "5 documents, column 'text'")


def test_a_usual_name_settles_which_column(tmp_path):
    rows = [{"title": "t", "content": "c", "sentence": "s"}]
    assert load_text(write(tmp_path, "a.jsonl", json.dumps(rows[0]))).documents == ("s",)


def test_csv_quotes_newlines_and_long_cells(tmp_path):
    long = "word " * 400_000  # longer than the megabyte that Arrow reads at a time
    path = write(tmp_path, "a.csv", f'id,text\n1,"a, ""b""\nc"\n2,{long}\n3,{long}\n')
    assert load_text(path).documents == ('a, "b"\nc', long.strip(), long.strip())


def test_tsv_has_no_quotes(tmp_path):
    path = write(tmp_path, "a.tsv", 'id\ttext\n1\t"Go, he said\n2\tand went"\n')
    assert load_text(path).documents == ('"Go, he said', 'and went"')


def test_empty_cells_are_dropped(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a", None, "  ", "b"], "tags": [["x"]] * 4}), path)
    assert load_text(path).documents == ("a", "b")


def test_a_table_leaves_nothing_behind_and_says_nothing(tmp_path, capfd):
    path = write(tmp_path, "a.jsonl", '{"text": "a"}')
    load_text(path)
    assert list(tmp_path.iterdir()) == [path]
    assert capfd.readouterr() == ("", "")


# Real text


@pytest.mark.skipif(not (SHARED / "text").exists(), reason=f"no real text in {SHARED}/text")
@pytest.mark.parametrize(
    ("path", "documents", "note"),
    [
        ("leipzig/eng_wikipedia_2016_10K-sentences.txt", 10_000, "Leipzig"),
        ("leipzig/ara_wikipedia_2016_10K-sentences.txt", 10_000, "Leipzig"),
        ("domains/biomedical.txt", 1_000, "one a line"),
        ("reactions.txt", 12_000, "one a line"),
        ("tinystories/tinystories_sampled.txt", 2_208, "one a line"),
        ("tinystories/tinystories_train_sample.txt", 4_667, "paragraphs"),
        ("wikitext-2/wiki.test.raw", 1_320, "paragraphs"),
        ("eval/lambada_test.jsonl", 5_153, "column 'text'"),
    ],
)
def test_real_files(path, documents, note):
    corpus = load_text(SHARED / "text" / path)
    assert len(corpus.documents) == documents
    assert note in corpus.note
