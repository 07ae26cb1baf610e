"""Documents that come from no file: lists, streams, standard input, the hub, Python's own documentation."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.text_files import ROWS, TEXTS, write

from layerjump.data import corpus
from layerjump.data.corpus import Corpus, load_text
from layerjump.errors import BadText


def test_a_list_is_read_as_it_is():
    corpus = load_text(["one\n\ntwo", " ", "three "])
    assert corpus.documents == ("one\n\ntwo", "three")


def test_an_endless_iterable_is_read_up_to_the_limit():
    assert load_text((f"{i}" for i in itertools.count()), limit=3).documents == ("0", "1", "2")


def test_pydoc_is_english_prose_without_repeats():
    corpus = load_text("pydoc")
    assert corpus == load_text("pydoc")
    assert len(corpus.documents) > 800
    assert len(set(corpus.documents)) == len(corpus.documents)
    assert all(len(d) >= 40 and "\n" not in d and "::=" not in d for d in corpus.documents)
    assert sum(" the " in d for d in corpus.documents) > len(corpus.documents) / 2


def run(code: str, *, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    source = str(Path(__file__).resolve().parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, **environment}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, input=stdin, capture_output=True, env=environment, check=False)


def test_standard_input_without_anything_heavy():
    code = """if True:
        import sys
        from layerjump.data.corpus import load_text
        print(load_text("-"))
        print({"torch", "transformers", "datasets"} & set(sys.modules))
    """
    done = run(code, stdin=b"1\tone\n2\ttwo\n")
    corpus = Corpus("standard input", ("one", "two"), "2 documents, one a line (Leipzig: id<TAB>sentence)")
    assert done.stdout.decode().splitlines() == [str(corpus), "set()"]


def test_an_unreachable_hub_is_one_line():
    code = """if True:
        from layerjump.errors import BadText
        from layerjump.data.corpus import load_text
        try:
            load_text("owner/name:config@test")
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
    match = corpus._HUB_ID.fullmatch(name)
    assert (match["id"], match["config"], match["split"]) == parts


def test_a_stream_of_rows_is_a_column_of_texts(tmp_path):
    datasets = pytest.importorskip("datasets")
    path = write(tmp_path, "a.jsonl", "\n".join(json.dumps(row) for row in ROWS))
    stream = datasets.load_dataset(
        "json", data_files=str(path), split="train", streaming=True, cache_dir=str(tmp_path / "cache")
    )
    found = corpus._stream("owner/name", stream, None)
    assert (found.format, found.at_most) == ("column 'text'", 10_000)
    assert tuple(found.documents) == TEXTS


def test_a_stream_that_breaks_off_is_one_line():
    def rows():
        yield {"text": "a"}
        raise ConnectionError("gone\naway")

    with pytest.raises(BadText, match=r"^hub dataset owner/name broke off \(gone away\)"):
        list(corpus._stream("owner/name", rows(), None).documents)


def test_a_generator_is_read_no_further_than_the_limit():
    read = []

    def documents():
        for number in range(10**9):
            read.append(number)
            yield f"document {number}"

    corpus = load_text(documents(), limit=3)
    assert corpus.documents == ("document 0", "document 1", "document 2")
    assert read == [0, 1, 2]


def test_a_ray_dataset_is_read_through_its_iterator(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        dataset = ray.data.from_items([{"text": f"document {number}"} for number in range(20)])
        corpus = load_text((row["text"] for row in dataset.iter_rows()), limit=5)
    finally:
        ray.shutdown()
    assert len(corpus.documents) == 5
    assert set(corpus.documents) <= {f"document {number}" for number in range(20)}
