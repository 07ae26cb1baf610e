"""What is not a jumps folder, or says what cannot be, is refused in one line."""

import pytest
import torch
from helpers import jumps_folder, synthetic_jumps
from helpers.jumps_folder import TENSORS, TEXT, complaint, edit, reseal

from layerjump import io
from layerjump.errors import BadArtifact, NewerFormat
from layerjump.jumps import serialization

disk, tmp_path, folder = jumps_folder.disk, jumps_folder.tmp_path, jumps_folder.folder  # fixtures


def test_other_places(folder, tmp_path):
    assert "does not exist" in complaint(tmp_path / "nowhere")
    assert "is a file" in complaint(folder / TEXT)
    (tmp_path / "empty").mkdir()
    assert "is not a jumps folder" in complaint(tmp_path / "empty")
    (folder / TENSORS).unlink()
    assert "has no jumps.safetensors" in complaint(folder)
    (folder / TENSORS).mkdir()
    assert "is a folder" in complaint(folder)


def test_a_place_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadArtifact, match="is a file"):
        serialization.save(synthetic_jumps.jumps(), tmp_path / "file")
    with pytest.raises(BadArtifact, match="is a file"):
        serialization.save(synthetic_jumps.jumps(), tmp_path / "file" / "jumps")


def test_tensors_of_something_else(folder):
    io.write_tensors(folder / TENSORS, {"a": torch.ones(2)}, {"kind": "moments"})
    assert "holds no jumps" in complaint(folder)


def test_the_tensor_file_is_complete_without_the_json(folder):
    (folder / TEXT).unlink()
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())


def test_two_folders_mixed(folder, tmp_path):
    serialization.save(synthetic_jumps.jumps(seed=1), tmp_path)
    (tmp_path / TEXT).rename(folder / TEXT)
    assert "jumps.json and jumps.safetensors in" in complaint(folder)
    assert "do not belong together" in complaint(folder)


def test_a_newer_format(folder):
    edit(folder, lambda data: data.update(format_version=4, jumps="stored elsewhere"))
    assert "install a newer layerjump" in complaint(folder, NewerFormat)
    (folder / TEXT).unlink()
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())
    reseal(folder, lambda data: data.update(format_version=7))
    (folder / TEXT).unlink()
    assert "version 7" in complaint(folder, NewerFormat)


def test_keys_that_a_later_library_adds_are_left_alone(folder):
    def add(data):
        data["licence"] = "free"
        data["provenance"]["machine"] = ["any"]
        data["jumps"][0]["colour"] = {"red": 1}

    edit(folder, add)
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())
    reseal(folder, add)
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())


EDITS = {
    "no version": (lambda d: d.pop("format_version"), "lacks 'format_version'"),
    "version as text": (
        lambda d: d.update(format_version="1"),
        "format_version is '1': Input should be a valid integer",
    ),
    "version true": (lambda d: d.update(format_version=True), "format_version is True"),
    "version zero": (lambda d: d.update(format_version=0), "version 0"),
    "no provenance": (lambda d: d.pop("provenance"), "lacks 'provenance'"),
    "provenance null": (lambda d: d.update(provenance=None), "provenance is None"),
    "no seed": (lambda d: d["provenance"].pop("seed"), "lacks 'provenance.seed'"),
    "seed a float": (lambda d: d["provenance"].update(seed=0.5), "seed is 0.5: Input should be a valid integer"),
    "width true": (lambda d: d["provenance"].update(width=True), "width is True"),
    "revision a list": (lambda d: d["provenance"].update(revision=[]), "provenance.revision is []"),
    "settings a list": (lambda d: d["provenance"].update(settings=[]), "settings is []"),
    "jumps an object": (lambda d: d.update(jumps={}), "jumps is {}"),
    "a jump is a number": (lambda d: d["jumps"].append(3), "jumps.9 is 3"),
    "no r2": (lambda d: d["jumps"][0].pop("r2"), "lacks 'jumps.0.r2'"),
    "r2 of three": (lambda d: d["jumps"][0].update(r2=[1, 2, 3]), "r2 is [1, 2, 3]"),
    "r2 infinite": (lambda d: d["jumps"][0].update(r2=[1e999, 1]), "is not a JSON number"),
    "nowhere": (lambda d: d["jumps"][0].update(source="north"), "source is 'north'"),
    "site with zeros": (lambda d: d["jumps"][0].update(source="00"), "source is '00'"),
    "site of 5000 digits": (lambda d: d["jumps"][0].update(source="9" * 5000), "source is '9"),
    "features": (lambda d: d["jumps"][0].update(features="cube"), "features is 'cube'"),
    "lands": (lambda d: d["jumps"][0].update(lands="final"), "lands is 'final' for the jump 0 → 1, expected 'level'"),
    "lands a list": (lambda d: d["jumps"][0].update(lands=["level"]), "lands is ['level']"),
    "twice": (lambda d: d["jumps"].append(d["jumps"][0]), "0 → 1 twice"),
    "shape of one": (lambda d: d["jumps"][0].update(shape=[8]), "lacks 'jumps.0.shape.1'"),
    "no such tensor": (lambda d: d["jumps"][2].update(tensors={"w": [8, 8]}), "tensors is {'w'"),
    "only up": (lambda d: d["jumps"][2].update(tensors={"up": [8, 8]}), "tensors is {'up'"),
    "shapes as text": (lambda d: d["jumps"][2].update(tensors={"weight": "8"}), "tensors.weight is '8'"),
}


@pytest.mark.parametrize(("change", "words"), EDITS.values(), ids=EDITS)
def test_nonsense_in_the_json(folder, change, words):
    edit(folder, change)
    assert words in complaint(folder)
    if "is not a JSON number" in words:
        return  # json.dumps cannot put this into the tensor file
    serialization.save(synthetic_jumps.jumps(), folder)
    reseal(folder, change)
    assert words in complaint(folder)
    (folder / TEXT).unlink()
    assert words in complaint(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["provenance"].update(seed=1),
        lambda d: d["provenance"]["settings"].update(strength=0.25),
        lambda d: d["jumps"][0].update(r2=[0.9, 0.9]),
        lambda d: d["jumps"].pop(),
        lambda d: d["jumps"][2].update(shape=[8, 16], tensors={"weight": [8, 16]}),
    ],
)
def test_a_plausible_edit_is_noticed_too(folder, change):
    edit(folder, change)
    message = complaint(folder)
    assert "was edited" in message
    assert "complete without it" in message


def test_the_order_of_jumps_in_the_json_says_nothing(folder):
    edit(folder, lambda data: data["jumps"].reverse())
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())


TENSOR_FAULTS = {
    "missing": (lambda t: t.pop("0>3.weight"), "lists but lacks the tensor '0>3.weight'"),
    "extra": (lambda t: t.update(x=torch.ones(1)), "holds but does not list the tensor 'x'"),
    "shape": (lambda t: t.update({"0>3.weight": torch.ones(8, 9)}), "got torch.float32 of shape (8, 9)"),
    "type": (lambda t: t.update({"0>3.weight": torch.ones(8, 8).half()}), "got torch.float16"),
    "NaN": (lambda t: t["2>3.bias"].fill_(float("nan")), "2>3.bias holds NaN"),
    "infinite": (lambda t: t["2>3.bias"].fill_(float("inf")), "2>3.bias holds NaN or infinite"),
}


@pytest.mark.parametrize(("change", "words"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS)
def test_tensors_that_are_not_as_listed(folder, change, words):
    reseal(folder, tensors=change)
    assert words in complaint(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["provenance"].update(width=9), "reads 8 features, expected 9"),
        (lambda d: d["provenance"].update(n_blocks=2), "has no site 3"),
        (lambda d: d["jumps"].clear(), "holds but does not list"),
        (lambda d: d["jumps"][0].update(target="0"), "is the identity by definition"),
        (lambda d: d["jumps"][0].update(shape=[8, 9]), "reads 9 features"),
    ],
)
def test_descriptions_that_do_not_hold_together(folder, change, words):
    reseal(folder, change)
    assert words in complaint(folder)


@pytest.mark.parametrize("changes", [{"settings": {"a": torch.ones(1)}}, {"settings": {"a": float("nan")}}])
def test_what_cannot_be_described_is_not_saved(folder, changes):
    with pytest.raises(BadArtifact, match="as JSON holds"):
        serialization.save(synthetic_jumps.jumps(**changes), folder)
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())


def test_jumps_with_nan_are_not_saved(folder):
    jumps = synthetic_jumps.jumps()
    jumps[0, 3].weight.data[3, 4] = float("nan")
    with pytest.raises(BadArtifact, match=r"0>3\.weight holds NaN"):
        serialization.save(jumps, folder)
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())
