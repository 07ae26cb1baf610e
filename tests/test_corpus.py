"""Documents are what the file says they are, and a file that says nothing clear is an error."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from layerjump.errors import BadText, TextTooShort
from layerjump.inputs import sources
from layerjump.inputs.corpus import Corpus, read, split

SHARED = Path(__file__).resolve().parents[1].parent / "shared"
ROWS = [{"id": i, "text": f"row number {i}"} for i in range(5)]
TEXTS = tuple(row["text"] for row in ROWS)


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def complaint(source, *, kind: type[BadText] = BadText, **options) -> str:
    """The message of the error that reading must end in."""
    with pytest.raises(BadText) as caught:
        read(source, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    return message


# Text files


def test_one_document_a_line(tmp_path):
    corpus = read(write(tmp_path, "a.txt", "one\n  two \nthree\n"))
    assert corpus == Corpus("a.txt", ("one", "two", "three"), "3 documents, one a line")


def test_leipzig_loses_its_numbers(tmp_path):
    corpus = read(write(tmp_path, "a.txt", "1\tThe cat.\n\n2\t10 dogs\tbark.\n"))
    assert corpus.documents == ("The cat.", "10 dogs\tbark.")
    assert corpus.note == "2 documents, one a line (Leipzig: id<TAB>sentence)"


def test_numbers_in_some_lines_do_not_make_it_leipzig(tmp_path):
    assert read(write(tmp_path, "a.txt", "1\tcat\ndog\n")).documents == ("1\tcat", "dog")


def test_a_leipzig_file_that_breaks_off_names_the_line(tmp_path):
    lines = [f"{i}\tsentence {i}" for i in range(1, 150)]
    lines[119] = "a stray line"
    message = complaint(write(tmp_path, "a.txt", "\n".join(lines)))
    assert "line 120 of a.txt" in message
    assert "a stray line" in message


def test_paragraphs_keep_their_inner_newlines(tmp_path):
    corpus = read(write(tmp_path, "a.txt", "one\ntwo\n\nthree\n \n\nfour\n"))
    assert corpus.documents == ("one\ntwo", "three", "four")
    assert corpus.note == "3 documents, paragraphs between blank lines"


@pytest.mark.parametrize(("blanks", "documents"), [(1, 100), (19, 100), (20, 21), (99, 100)])
def test_the_share_of_blank_lines_decides(tmp_path, blanks, documents):
    lines = [f"line {i}" + ("\n" if i < blanks else "") for i in range(100)]
    corpus = read(write(tmp_path, "a.txt", "\n".join(lines)))
    assert len(corpus.documents) == documents
    assert ("paragraphs" in corpus.note) == (blanks >= 20)


def test_blank_lines_around_the_text_separate_nothing(tmp_path):
    assert read(write(tmp_path, "a.txt", "\n\n\none\ntwo\n\n\n")).documents == ("one", "two")


def test_byte_order_mark_and_carriage_returns_go(tmp_path):
    data = b"\xef\xbb\xbf1\tone\r\n2\ttwo\r\n"
    assert read(write(tmp_path, "a.txt", data)).documents == ("one", "two")
    data = b"\xef\xbb\xbfone\r\ntwo\r\n\r\nthree\r\n"
    assert read(write(tmp_path, "a.txt", data)).documents == ("one\ntwo", "three")


def test_only_newlines_end_a_line(tmp_path):
    lines = ("a\u2028b", "c\x0cd", "e\x85f")
    assert read(write(tmp_path, "a.txt", "\n".join(lines))).documents == lines


def test_a_file_of_any_other_name_is_text(tmp_path):
    assert read(str(write(tmp_path, "wiki.test.raw", "one\ntwo"))).documents == ("one", "two")


def test_limit_takes_the_first(tmp_path):
    corpus = read(write(tmp_path, "a.txt", "one\ntwo\nthree"), limit=2)
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
    corpus = read(path, column=column)
    assert corpus == Corpus(name, TEXTS, "5 documents, column 'text'")


def test_a_usual_name_settles_which_column(tmp_path):
    rows = [{"title": "t", "content": "c", "sentence": "s"}]
    assert read(write(tmp_path, "a.jsonl", json.dumps(rows[0]))).documents == ("s",)


def test_csv_quotes_newlines_and_long_cells(tmp_path):
    long = "word " * 400_000  # longer than the megabyte that Arrow reads at a time
    path = write(tmp_path, "a.csv", f'id,text\n1,"a, ""b""\nc"\n2,{long}\n3,{long}\n')
    assert read(path).documents == ('a, "b"\nc', long.strip(), long.strip())


def test_tsv_has_no_quotes(tmp_path):
    path = write(tmp_path, "a.tsv", 'id\ttext\n1\t"Go, he said\n2\tand went"\n')
    assert read(path).documents == ('"Go, he said', 'and went"')


def test_empty_cells_are_dropped(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": ["a", None, "  ", "b"], "tags": [["x"]] * 4}), path)
    assert read(path).documents == ("a", "b")


def test_a_table_leaves_nothing_behind_and_says_nothing(tmp_path, capfd):
    path = write(tmp_path, "a.jsonl", '{"text": "a"}')
    read(path)
    assert list(tmp_path.iterdir()) == [path]
    assert capfd.readouterr() == ("", "")


# Other sources


def test_a_list_is_read_as_it_is():
    corpus = read(["one\n\ntwo", " ", "three "])
    assert corpus.documents == ("one\n\ntwo", "three")


def test_an_endless_iterable_is_read_up_to_the_limit():
    assert read((f"{i}" for i in itertools.count()), limit=3).documents == ("0", "1", "2")


def test_pydoc_is_english_prose_without_repeats():
    corpus = read("pydoc")
    assert corpus == read("pydoc")
    assert len(corpus.documents) > 800
    assert len(set(corpus.documents)) == len(corpus.documents)
    assert all(len(d) >= 40 and "\n" not in d and "::=" not in d for d in corpus.documents)
    assert sum(" the " in d for d in corpus.documents) > len(corpus.documents) / 2


def run(code: str, *, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    source = str(Path(__file__).resolve().parents[1] / "src")
    environment = {**os.environ, "PYTHONPATH": source, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, input=stdin, capture_output=True, env=environment, check=False)


def test_standard_input_without_anything_heavy():
    code = """if True:
        import sys
        from layerjump.inputs.corpus import read
        print(read("-"))
        print({"torch", "transformers", "datasets"} & set(sys.modules))
    """
    done = run(code, stdin=b"1\tone\n2\ttwo\n")
    corpus = Corpus(
        "standard input", ("one", "two"), "2 documents, one a line (Leipzig: id<TAB>sentence)"
    )
    assert done.stdout.decode().splitlines() == [str(corpus), "set()"]


def test_an_unreachable_hub_is_one_line():
    code = """if True:
        from layerjump.errors import BadText
        from layerjump.inputs.corpus import read
        try:
            read("owner/name:config@test")
        except BadText as error:
            print(error)
    """
    done = run(code, HF_HUB_OFFLINE="1")
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 1
    assert "'owner/name:config@test'" in lines[0]
    assert "offline" in lines[0]
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b", ("a/b", None, None)),
        ("a/b:c-1.0", ("a/b", "c-1.0", None)),
        ("a/b@test", ("a/b", None, "test")),
        ("a/b:c@test", ("a/b", "c", "test")),
    ],
)
def test_hub_names_are_taken_apart(name, parts):
    match = sources._HUB_ID.fullmatch(name)
    assert (match["id"], match["config"], match["split"]) == parts


def test_a_stream_of_rows_is_a_column_of_texts(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = write(tmp_path, "a.jsonl", "\n".join(json.dumps(row) for row in ROWS))
    stream = datasets.load_dataset(
        "json",
        data_files=str(path),
        split="train",
        streaming=True,
        cache_dir=str(tmp_path / "cache"),
    )
    found = sources._stream("owner/name", stream, None)
    assert (found.how, found.at_most) == ("column 'text'", 10_000)
    assert tuple(found.documents) == TEXTS


def test_a_stream_that_breaks_off_is_one_line():
    def rows():
        yield {"text": "a"}
        raise ConnectionError("gone\naway")

    with pytest.raises(BadText, match=r"^hub dataset owner/name broke off \(gone away\)"):
        list(sources._stream("owner/name", rows(), None).documents)


# Bad input


@pytest.mark.parametrize("content", ["", " \n\n", "1\t\n2\t \n"])
def test_nothing_in_it(tmp_path, content):
    assert "a.txt has no documents" in complaint(write(tmp_path, "a.txt", content))


def test_an_empty_list_and_an_empty_table(tmp_path):
    assert "no documents" in complaint([])
    assert "a.csv has no documents" in complaint(write(tmp_path, "a.csv", ""))


def test_fewer_documents_than_the_limit(tmp_path):
    message = complaint(write(tmp_path, "a.txt", "1\n2\n3"), limit=4000, kind=TextTooShort)
    assert "4,000 documents of a.txt" in message
    assert "at most 3" in message
    assert "limit given is 0" in complaint(["a"], limit=0)


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
    assert "no one column of text" in complaint(path)


def test_columns_of_numbers(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": 7}')
    assert "row 2 of column 'text' of a.jsonl is int 7" in complaint(path, column="text")
    path = write(tmp_path, "a.csv", "text,n\na,5\nb,6\n")
    assert "row 1 of column 'n' of a.csv is int 5" in complaint(path, column="n")


@pytest.mark.parametrize("source", ["pydoc", ["a"]])
def test_a_column_of_what_has_none(source):
    assert "'text'" in complaint(source, column="text")


def test_items_that_are_no_text():
    assert "item 1 of the list is int 5" in complaint(["a", 5])


def test_half_a_character(tmp_path):
    message = complaint(write(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "b\\ud800"}'))
    assert "document 2 of a.jsonl" in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": ', "line 3 of a.jsonl is not JSON"),
        ("a.json", '[{"text": "a"},\n{"text" "b"}]', "line 2 of a.json is not JSON"),
        ("a.jsonl", '{"text": "a"}\n["b"]', 'row 2 of a.jsonl is ["b"]'),
        ("a.csv", "id,text\n1,a,b\n", "a.csv is not a table"),
        ("a.parquet", "PAR1 not really PAR1", "a.parquet cannot be read as Parquet"),
    ],
)
def test_broken_tables(tmp_path, name, content, said):
    assert said in complaint(write(tmp_path, name, content))


# Hash and split


def test_the_hash_is_of_the_documents_alone_and_knows_where_they_end():
    corpus = Corpus("a", ("ab", "c"), "")
    by_hand = hashlib.sha256(bytes(7) + b"\x02ab" + bytes(7) + b"\x01c").hexdigest()
    assert corpus.sha256 == by_hand == Corpus("b", ("ab", "c"), "other").sha256
    others = [("a", "bc"), ("abc",), ("c", "ab"), ("ab", "c", "")]
    assert by_hand not in [Corpus("a", documents, "").sha256 for documents in others]


def parts(splits):
    return splits.fit, splits.select, splits.test


@given(st.integers(3, 300), st.integers(0, 5), st.sampled_from(["80/10/10", "98/1/1", "34/33/33"]))
def test_percentages_deal_every_document_once(n, seed, sizes):
    dealt = parts(split(n, sizes, seed=seed))
    assert sorted(itertools.chain(*dealt)) == list(range(n))
    assert all(dealt)
    shares = [float(size) / 100 for size in sizes.split("/")]
    off = [abs(len(part) - share * n) for part, share in zip(dealt, shares, strict=True)]
    assert max(off) <= 2


def test_split_sizes():
    def lengths(*arguments):
        return [len(part) for part in parts(split(*arguments))]

    assert lengths(1000) == [800, 100, 100]
    assert lengths(10_000, "9000/500/500") == [9000, 500, 500]
    assert lengths(10_000, (9000, 0, 1000)) == [9000, 0, 1000]
    assert lengths(3000, (99.8, 0.1, 0.1)) == [2994, 3, 3]
    assert lengths(11, "0/50/50") == [0, 6, 5]
    assert lengths(100, "7/5/3") == [7, 5, 3]


def test_a_split_is_the_same_for_ever():
    # If this fails, numbers published with seed 0 can no longer be reproduced.
    assert parts(split(8, "4/2/2")) == ((3, 2, 1, 6), (0, 7), (4, 5))
    assert split(100, seed=1) != split(100) == split(100, seed=0)


@pytest.mark.parametrize(
    ("n", "sizes", "kind", "said"),
    [
        (2, "80/10/10", TextTooShort, "2 documents"),
        (9, "8/1/1", TextTooShort, "8/1/1"),
        (9, "80/20", BadText, "'80/20'"),
        (9, "a/b/c", BadText, "'a/b/c'"),
        (9, "-10/100/10", BadText, "-10/100/10"),
        (9, "0/0/0", BadText, "0/0/0"),
        (9, "nan/1/1", BadText, "nan/1/1"),
        (9, (0.8, 0.1, 0.1), BadText, "0.8/0.1/0.1"),
    ],
)
def test_splits_that_cannot_be(n, sizes, kind, said):
    with pytest.raises(BadText) as caught:
        split(n, sizes)
    assert type(caught.value) is kind
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_negative_seed():
    with pytest.raises(BadText, match="seed given is -1"):
        split(10, seed=-1)


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
    corpus = read(SHARED / "text" / path)
    assert len(corpus.documents) == documents
    assert note in corpus.note
