"""A folder of saved jumps on a quick disk, and ways to change what its files say."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from helpers import synthetic_jumps
from layerjump import io
from layerjump.errors import BadArtifact
from layerjump.jumps import serialization

TENSORS, TEXT = serialization.TENSORS, serialization.TEXT


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Memory where there is such a disk: here are hundreds of saves, and each waits for its disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path_factory.mktemp("store")
        return
    with tempfile.TemporaryDirectory(dir=memory) as place:
        yield Path(place)


@pytest.fixture
def tmp_path(disk):
    with tempfile.TemporaryDirectory(dir=disk) as place:
        yield Path(place)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with jumps in it."""
    serialization.save(synthetic_jumps.jumps(), tmp_path / "jumps")
    return tmp_path / "jumps"


def complaint(folder: Path, kind: type[BadArtifact] = BadArtifact, **options) -> str:
    """The message of the error that loading must end in."""
    with pytest.raises(BadArtifact) as caught:
        serialization.load(folder, **options)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(folder: Path, change) -> None:
    """Change what jumps.json says."""
    data = json.loads((folder / TEXT).read_text())
    change(data)
    (folder / TEXT).write_text(json.dumps(data))


def reseal(folder: Path, change=lambda data: None, tensors=lambda tensors: None) -> None:
    """Change what both files say, with every checksum right: what a faulty writer would make."""
    held, metadata = io.read_tensors(folder / TENSORS)
    data = json.loads(metadata["description"])
    change(data)
    tensors(held)
    io.write_tensors(folder / TENSORS, held, {"description": json.dumps(data)})
    data["sha256"] = io.file_sha256(folder / TENSORS)
    (folder / TEXT).write_text(json.dumps(data))
