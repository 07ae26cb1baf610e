"""A file is the old one or the new one, whole; and a broken one is noticed, in one line."""

import contextlib
import json
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers.processes import in_child
from hypothesis import given
from hypothesis import strategies as st

from layerjump.errors import BadArtifact
from layerjump.io import read_json, read_tensors, replace_file, write_json, write_tensors

BIG = {"big": torch.zeros(50_000)}


def complaint(action, *arguments) -> str:
    """The message of the error that an action must end in."""
    with pytest.raises(BadArtifact) as caught:
        action(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Replacing


def test_the_new_file_takes_the_old_ones_place(tmp_path):
    path = tmp_path / "a.txt"
    for text in ("old", "new"):
        replace_file(path, lambda temporary, text=text: temporary.write_text(text) and None)
        assert path.read_text() == text
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("ne")
        raise failure

    with pytest.raises(failure):
        replace_file(path, write)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.txt"]


def test_last_sees_the_old_file_and_may_stop_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def last() -> None:
        assert path.read_text() == "old"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, lambda temporary: temporary.write_text("new") and None, last=last)
    assert path.read_text() == "old"


def test_new_files_have_the_permissions_the_user_gives_new_files(tmp_path):
    (tmp_path / "plain").touch()
    write_tensors(tmp_path / "t", {"a": torch.ones(2)}, {})
    write_json(tmp_path / "j", {})
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_leftovers_of_killed_processes_are_swept_but_not_those_in_use(tmp_path):
    for name, age in ((".a.json.1.tmp", 7200), (".a.json.2.tmp", 60), (".b.json.3.tmp", 7200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
        for path in (tmp_path / name / "part", tmp_path / name):
            os.utime(path, (time.time() - age,) * 2)
    write_json(tmp_path / "a.json", {})
    assert names(tmp_path) == [".a.json.2.tmp", ".b.json.3.tmp", "a.json"]


# Where it cannot be written


def test_no_folder(tmp_path):
    assert "does not exist" in complaint(write_json, tmp_path / "no" / "a.json", {})
    assert "does not exist" in complaint(write_tensors, tmp_path / "no" / "a", BIG, {})


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "file").touch()
    assert "is a file" in complaint(write_json, tmp_path / "file" / "a.json", {})


def test_a_folder_where_the_file_should_be(tmp_path):
    (tmp_path / "a.json").mkdir()
    assert "a folder has that name" in complaint(write_json, tmp_path / "a.json", {})
    assert names(tmp_path) == ["a.json"]


def test_a_full_disk(small_disk):
    path = small_disk / "a.safetensors"
    write_tensors(path, {"small": torch.ones(4)}, {})
    before = path.read_bytes()
    assert "the disk is full" in complaint(write_tensors, path, BIG, {})
    assert "the disk is full" in complaint(write_json, small_disk / "a.json", {"a": "b" * 70_000})
    assert names(small_disk) == ["a.safetensors"]
    assert path.read_bytes() == before


def test_a_read_only_disk(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "read-only" in complaint(write_tensors, small_disk / "a", {"a": torch.ones(2)}, {})


def test_a_folder_of_somebody_else(tmp_path):
    if os.getuid():
        tmp_path.chmod(0o555)

    def write() -> None:
        if not os.getuid():
            os.setuid(65534)
        assert "permission is denied" in complaint(write_json, tmp_path / "a.json", {})

    assert in_child(write) == 0
    tmp_path.chmod(0o755)
    assert names(tmp_path) == []


def test_a_file_larger_than_the_limit(tmp_path):
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"small": torch.ones(4)}, {})
    before = path.read_bytes()

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        assert "ulimit" in complaint(write_tensors, path, BIG, {})
        assert "ulimit" in complaint(write_json, tmp_path / "a.json", {"a": "b" * 20_000})

    assert in_child(write) == 0
    assert names(tmp_path) == ["a.safetensors"]
    assert path.read_bytes() == before


# Tensors


def test_tensors_of_every_kind_come_back(tmp_path):
    shared = torch.arange(6.0)
    tensors = {
        "transposed": torch.arange(6.0).reshape(2, 3).mT,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 4),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "float64": torch.full((2,), 0.1, dtype=torch.float64),
        "shared": shared,
        "shared too": shared[2:],
        "with grad": torch.ones(2, requires_grad=True),
    }
    write_tensors(tmp_path / "a", tensors, {"b": "2", "a": "é"})
    found, metadata = read_tensors(tmp_path / "a")
    assert metadata == {"a": "é", "b": "2"}
    assert list(found) == sorted(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_same_content_gives_the_same_bytes(tmp_path):
    tensors = {name: torch.full((3,), float(i)) for i, name in enumerate("cab")}
    metadata = {name: name for name in "qwertyuiop"}
    for i in range(5):  # safetensors alone orders metadata anew each time
        write_tensors(tmp_path / f"{i}", tensors, metadata)
        tensors = dict(reversed(tensors.items()))
        metadata = dict(sorted(metadata.items()))
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_what_was_read_outlives_its_file(tmp_path):
    write_tensors(tmp_path / "a", {"a": torch.arange(1000.0)}, {})
    found, _ = read_tensors(tmp_path / "a")
    write_tensors(tmp_path / "a", {"a": torch.zeros(3)}, {})
    assert torch.equal(found["a"], torch.arange(1000.0))


def test_other_files_are_not_tensors_of_ours(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "a"
    assert "does not exist" in complaint(read_tensors, path)
    assert "is a folder" in complaint(read_tensors, tmp_path)
    for content in (b"", b"abc", b"\xff" * 50, b'{"a": 1}', b"\0" * 64):
        path.write_bytes(content)
        assert "truncated, damaged or of another format" in complaint(read_tensors, path)
    save_file({"a": torch.ones(2)}, path)
    assert "expected a file written by layerjump" in complaint(read_tensors, path)
    save_file({"a": torch.ones(2)}, path, metadata={"layerjump": "[1"})
    assert "is not JSON" in complaint(read_tensors, path)
    save_file({"a": torch.ones(2)}, path, metadata={"layerjump": '{"metadata": {"a": 1}}'})
    assert "was changed" in complaint(read_tensors, path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "a"
    write_tensors(path, {"a": torch.arange(4.0), "b": torch.ones(1, 2)}, {"k": "v"})
    return path.read_bytes()


def test_every_cut_and_every_flipped_bit_is_noticed(tmp_path, whole):
    path = tmp_path / "a"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        complaint(read_tensors, path)
    header = 8 + int.from_bytes(whole[:8], "little")
    for position in range(header, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert "was changed" in complaint(read_tensors, path)


# JSON


def test_objects_come_back(tmp_path):
    data = {"z": 1, "a": [1.5, None, True], "é\ud800": {"b": "\n"}}
    write_json(tmp_path / "a", data)
    assert read_json(tmp_path / "a") == data
    assert list(read_json(tmp_path / "a")) == list(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.ones(1), {1, 2}, {(1, 2): 3}, b"bytes"], ids=str)
def test_what_json_cannot_hold(tmp_path, value):
    assert "as JSON holds" in complaint(write_json, tmp_path / "a", {"key": value})
    assert names(tmp_path) == []


def test_an_object_that_holds_itself(tmp_path):
    data: dict = {}
    data["self"] = data
    assert "as JSON holds" in complaint(write_json, tmp_path / "a", data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b'{"a": 1', "is not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "is not a JSON number"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[1, 2]", "got list"),
        (b'"text"', "got str"),
        (b"null", "got NoneType"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_files_are_not_objects_of_ours(tmp_path, content, words):
    (tmp_path / "a").write_bytes(content)
    assert words in complaint(read_json, tmp_path / "a")


def test_no_json_file(tmp_path):
    assert "does not exist" in complaint(read_json, tmp_path / "a")
    assert "is a folder" in complaint(read_json, tmp_path)


@given(content=st.binary(max_size=60) | st.text(max_size=60).map(json.dumps).map(str.encode))
def test_any_bytes_are_an_object_or_an_error(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with contextlib.suppress(BadArtifact):
        assert isinstance(read_json(path), dict)
