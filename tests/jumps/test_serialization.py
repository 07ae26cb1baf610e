"""A folder gives back exactly the jumps that were saved, and only to the model they were fitted on."""

import copy
import json
from pathlib import Path

import pytest
import torch
from helpers import jumps_folder, synthetic_jumps
from helpers.jumps_folder import TENSORS, TEXT, complaint
from helpers.tiny_models import tiny_model
from safetensors import safe_open

from layerjump import io
from layerjump.errors import BadArtifact, WrongModel
from layerjump.jumps import serialization
from layerjump.jumps.jumps import Jumps
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model

disk, tmp_path, folder = jumps_folder.disk, jumps_folder.tmp_path, jumps_folder.folder  # fixtures

# There and back


def test_jumps_come_back_to_the_last_bit(folder):
    assert synthetic_jumps.same(serialization.load(folder), synthetic_jumps.jumps())
    assert sorted(path.name for path in folder.iterdir()) == [TEXT, TENSORS]


def test_the_same_jumps_give_the_same_bytes(folder, tmp_path):
    before = [(folder / name).read_bytes() for name in (TENSORS, TEXT)]
    reordered = synthetic_jumps.provenance(
        settings=dict(reversed(synthetic_jumps.provenance().settings.items()))
    ).settings
    for again in (synthetic_jumps.jumps(), serialization.load(folder), synthetic_jumps.jumps(settings=reordered)):
        for place in (folder, tmp_path / "other"):
            serialization.save(again, place)
            assert [(place / name).read_bytes() for name in (TENSORS, TEXT)] == before


def test_jumps_in_use_do_not_change_with_their_file(folder):
    jumps = serialization.load(folder)
    (folder / TENSORS).write_bytes(b"")
    assert synthetic_jumps.same(jumps, synthetic_jumps.jumps())


def test_they_are_saved_in_float32_wherever_they_have_been(folder, tmp_path):
    serialization.save(synthetic_jumps.jumps().to(torch.float64), tmp_path)
    assert (tmp_path / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()


def test_maps_that_share_their_tensors_are_saved(tmp_path):
    maps = synthetic_jumps.affines()
    one, other = [pair for pair in maps if pair[0].part == "level"][:2]
    maps[other] = maps[one]
    jumps = Jumps.from_maps(maps, synthetic_jumps.infos(maps), synthetic_jumps.provenance())
    serialization.save(jumps, tmp_path)
    assert synthetic_jumps.same(serialization.load(tmp_path), jumps)


def test_the_files_are_what_the_documentation_says(folder):
    data = json.loads((folder / TEXT).read_text())
    assert list(data) == ["format_version", "provenance", "jumps", "sha256"]
    assert data["format_version"] == 1
    entry = next(e for e in data["jumps"] if (e["source"], e["target"]) == ("1", "3"))
    assert entry["tensors"] == {"bias": [8], "down": [2, 8], "up": [8, 2]}
    with safe_open(folder / TENSORS, framework="pt") as file:
        assert {"1>3.up", "1>3.down", "1>3.bias", "1.attn.in>1.attn.out.weight"} <= set(file.keys())
        listed = {f"{e['source']}>{e['target']}.{part}" for e in data["jumps"] for part in e["tensors"]}
        assert listed == set(file.keys())


def test_the_documentation_names_every_key(folder):
    text = (Path(__file__).resolve().parents[2] / "docs" / "formats.md").read_text()
    data = json.loads((folder / TEXT).read_text())
    for key in [*data, *data["provenance"], *data["jumps"][0]]:
        assert f"`{key}`" in text, key


def test_the_names_of_the_hub(folder, tmp_path):
    jumps = Jumps.from_pretrained(folder)
    jumps.save_pretrained(tmp_path / "again")
    assert synthetic_jumps.same(Jumps.from_pretrained(str(tmp_path / "again")), synthetic_jumps.jumps())


def test_without_the_hub_there_is_one_line(tmp_path):
    for place in ("someone/jumps", "jumps-of-nobody", "bad//id", "a b"):
        with pytest.raises(BadArtifact) as caught:
            Jumps.from_pretrained(place)
        assert "\n" not in str(caught.value)
    with pytest.raises(BadArtifact, match="does not exist"):
        Jumps.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(BadArtifact, match=r"cannot be uploaded to someone/jumps \(.+\); check"):
        synthetic_jumps.jumps().push_to_hub("someone/jumps")


# With a model


@pytest.fixture(scope="module")
def model():
    return Model.wrap(tiny_model("gpt2"), name="tiny")


@pytest.fixture
def fitted(model, tmp_path):
    """A folder of jumps that say they were fitted on the tiny model."""
    place = tmp_path / "fitted"
    serialization.save(synthetic_jumps.jumps(d=model.d_model, fingerprint=fingerprint(model.hf)), place)
    return place


def test_the_right_model(model, fitted):
    assert serialization.load(fitted, model=model).used_on is None


def test_other_weights(model, fitted):
    hf = tiny_model("gpt2")
    hf.transformer.h[1].mlp.c_fc.weight.data *= 1.1
    tuned = Model.wrap(hf, name="tuned")
    message = complaint(fitted, WrongModel, model=tuned)
    for word in ("fitted on tiny", fingerprint(model.hf)[:8], "the model is tuned", fingerprint(hf)[:8]):
        assert word in message
    assert "allow_other_weights=True" in message
    allowed = serialization.load(fitted, model=tuned, allow_other_weights=True)
    assert allowed.used_on == "tuned"
    assert "used on tuned (other weights)" in repr(allowed)


@pytest.mark.parametrize("changes", [{"hidden_size": 16}, {"num_hidden_layers": 2}])
def test_another_shape_is_never_allowed(fitted, changes):
    other = Model.wrap(tiny_model("gpt2", **changes), name="other")
    assert "blocks, d" in complaint(fitted, WrongModel, model=other, allow_other_weights=True)


def test_lazy_jumps_are_read_when_they_are_used(tmp_path):
    jumps = synthetic_jumps.jumps()
    jumps.save_pretrained(tmp_path)
    lazy = Jumps.from_pretrained(tmp_path, lazy=True)
    assert set(lazy) == set(jumps)
    assert lazy.info == jumps.info
    assert lazy.n_parameters == 0
    first, second = [pair for pair in jumps if list(jumps[pair].parameters())][:2]
    assert all(map(torch.equal, lazy[first].parameters(), jumps[first].parameters()))
    assert lazy.n_parameters == sum(parameter.numel() for parameter in jumps[first].parameters())
    # Another set in the same folder does not change this one.
    other = copy.deepcopy(jumps)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.save_pretrained(tmp_path)
    assert all(map(torch.equal, lazy[second].parameters(), jumps[second].parameters()))
    lazy.to(torch.float64)
    assert {parameter.dtype for pair in lazy for parameter in lazy[pair].parameters()} == {torch.float64}
    lazy.save_pretrained(tmp_path / "again")
    assert set(Jumps.from_pretrained(tmp_path / "again")) == set(jumps)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_jumps_are_loaded_in_half_precision(tmp_path, lazy, dtype):
    jumps = synthetic_jumps.jumps()
    jumps.save_pretrained(tmp_path)
    half = Jumps.from_pretrained(tmp_path, lazy=lazy, dtype=dtype)
    for pair in jumps:
        for ours, theirs in zip(half[pair].parameters(), jumps[pair].parameters(), strict=True):
            assert torch.equal(ours, theirs.to(getattr(torch, dtype)))
    assert 2 * half.n_bytes == jumps.n_bytes
    with pytest.raises(BadArtifact, match="expected dtype of float32, bfloat16, float16, got 'int8'"):
        Jumps.from_pretrained(tmp_path, dtype="int8")


def test_lazy_jumps_that_are_damaged_are_refused_when_they_are_used(tmp_path):
    jumps = synthetic_jumps.jumps()
    jumps.save_pretrained(tmp_path)
    tensors, metadata = io.read_tensors(tmp_path / TENSORS)
    name, *_ = tensors
    io.write_tensors(tmp_path / TENSORS, tensors | {name: tensors[name] * torch.nan}, metadata)
    lazy = Jumps.from_pretrained(tmp_path, lazy=True)
    with pytest.raises(BadArtifact, match="holds NaN or infinite values"):
        _ = [lazy[pair] for pair in lazy]
    io.write_tensors(tmp_path / TENSORS, {n: t for n, t in tensors.items() if n != name}, metadata)
    with pytest.raises(BadArtifact, match="lists but lacks the tensor"):
        Jumps.from_pretrained(tmp_path, lazy=True)
