"""A folder gives back exactly the jumps that were saved, or says in one line why not."""

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import made
import pytest
import torch
from children import end_of, in_child, start
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from test_files import small_disk  # noqa: F401
from tiny import tiny_model

from layerjump.errors import BadArtifact, NewerFormat, WrongModel
from layerjump.fit import files, store
from layerjump.fit.fingerprint import fingerprint
from layerjump.fit.jumps import Jumps
from layerjump.inputs.models import Model

TENSORS, TEXT = store.TENSORS, store.TEXT
SAVED = made.jumps()


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
    store.save(made.jumps(), tmp_path / "jumps")
    return tmp_path / "jumps"


def complaint(folder: Path, kind: type[BadArtifact] = BadArtifact, **options) -> str:
    """The message of the error that loading must end in."""
    with pytest.raises(BadArtifact) as caught:
        store.load(folder, **options)
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
    held, metadata = files.read_tensors(folder / TENSORS)
    data = json.loads(metadata["description"])
    change(data)
    tensors(held)
    files.write_tensors(folder / TENSORS, held, {"description": json.dumps(data)})
    data["sha256"] = files.file_sha256(folder / TENSORS)
    (folder / TEXT).write_text(json.dumps(data))


# There and back


def test_jumps_come_back_to_the_last_bit(folder):
    assert made.same(store.load(folder), made.jumps())
    assert sorted(path.name for path in folder.iterdir()) == [TEXT, TENSORS]


def test_the_same_jumps_give_the_same_bytes(folder, tmp_path):
    before = [(folder / name).read_bytes() for name in (TENSORS, TEXT)]
    reordered = made.provenance(
        settings=dict(reversed(made.provenance().settings.items()))
    ).settings
    for again in (made.jumps(), store.load(folder), made.jumps(settings=reordered)):
        for place in (folder, tmp_path / "other"):
            store.save(again, place)
            assert [(place / name).read_bytes() for name in (TENSORS, TEXT)] == before


def test_jumps_in_use_do_not_change_with_their_file(folder):
    jumps = store.load(folder)
    (folder / TENSORS).write_bytes(b"")
    assert made.same(jumps, made.jumps())


def test_they_are_saved_in_float32_wherever_they_have_been(folder, tmp_path):
    store.save(made.jumps().to(torch.float64), tmp_path)
    assert (tmp_path / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()


def test_maps_that_share_their_tensors_are_saved(tmp_path):
    maps = made.affines()
    one, other = [pair for pair in maps if pair[0].part == "level"][:2]
    maps[other] = maps[one]
    jumps = Jumps.of(maps, made.infos(maps), made.provenance())
    store.save(jumps, tmp_path)
    assert made.same(store.load(tmp_path), jumps)


def test_the_files_are_what_the_documentation_says(folder):
    data = json.loads((folder / TEXT).read_text())
    assert list(data) == ["format_version", "provenance", "jumps", "sha256"]
    assert data["format_version"] == 1
    entry = next(e for e in data["jumps"] if (e["source"], e["target"]) == ("1", "3"))
    assert entry["tensors"] == {"bias": [8], "down": [2, 8], "up": [8, 2]}
    with safe_open(folder / TENSORS, framework="pt") as file:
        assert {"1>3.up", "1>3.down", "1>3.bias", "1.attn.in>1.attn.out.weight"} <= set(file.keys())
        listed = {
            f"{e['source']}>{e['target']}.{part}" for e in data["jumps"] for part in e["tensors"]
        }
        assert listed == set(file.keys())


def test_the_documentation_names_every_key(folder):
    text = (Path(__file__).resolve().parents[1] / "docs" / "formats.md").read_text()
    data = json.loads((folder / TEXT).read_text())
    for key in [*data, *data["provenance"], *data["jumps"][0]]:
        assert f"`{key}`" in text, key


def test_the_names_of_the_hub(folder, tmp_path):
    jumps = Jumps.from_pretrained(folder)
    jumps.save_pretrained(tmp_path / "again")
    assert made.same(Jumps.from_pretrained(str(tmp_path / "again")), made.jumps())


def test_without_the_hub_there_is_one_line(tmp_path):
    for place in ("someone/jumps", "jumps-of-nobody", "bad//id", "a b"):
        with pytest.raises(BadArtifact) as caught:
            Jumps.from_pretrained(place)
        assert "\n" not in str(caught.value)
    with pytest.raises(BadArtifact, match="is not there"):
        Jumps.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(BadArtifact, match=r"cannot be uploaded to someone/jumps \(.+\); check"):
        made.jumps().push_to_hub("someone/jumps")


# With a model


@pytest.fixture(scope="module")
def model():
    return Model.wrap(tiny_model("gpt2"), name="tiny")


@pytest.fixture
def fitted(model, tmp_path):
    """A folder of jumps that say they were fitted on the tiny model."""
    place = tmp_path / "fitted"
    store.save(made.jumps(d=model.width, fingerprint=fingerprint(model.hf)), place)
    return place


def test_the_right_model(model, fitted):
    assert store.load(fitted, model=model).used_on is None


def test_other_weights(model, fitted):
    hf = tiny_model("gpt2")
    hf.transformer.h[1].mlp.c_fc.weight.data *= 1.1
    tuned = Model.wrap(hf, name="tuned")
    message = complaint(fitted, WrongModel, model=tuned)
    for word in (
        "fitted on tiny",
        fingerprint(model.hf)[:8],
        "given is tuned",
        fingerprint(hf)[:8],
    ):
        assert word in message
    assert "--allow-other-weights" in message
    allowed = store.load(fitted, model=tuned, allow_other_weights=True)
    assert allowed.used_on == "tuned"
    assert "used on tuned (other weights)" in repr(allowed)


@pytest.mark.parametrize("changes", [{"hidden_size": 16}, {"num_hidden_layers": 2}])
def test_another_shape_is_never_allowed(fitted, changes):
    other = Model.wrap(tiny_model("gpt2", **changes), name="other")
    assert "blocks, d" in complaint(fitted, WrongModel, model=other, allow_other_weights=True)


# What is not a jumps folder


def test_other_places(folder, tmp_path):
    assert "is not there" in complaint(tmp_path / "nowhere")
    assert "is a file" in complaint(folder / TEXT)
    (tmp_path / "empty").mkdir()
    assert "no jumps folder" in complaint(tmp_path / "empty")
    (folder / TENSORS).unlink()
    assert "has no jumps.safetensors" in complaint(folder)
    (folder / TENSORS).mkdir()
    assert "is a folder" in complaint(folder)


def test_a_place_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BadArtifact, match="is a file"):
        store.save(made.jumps(), tmp_path / "file")
    with pytest.raises(BadArtifact, match="is a file"):
        store.save(made.jumps(), tmp_path / "file" / "jumps")


def test_tensors_of_something_else(folder):
    files.write_tensors(folder / TENSORS, {"a": torch.ones(2)}, {"kind": "moments"})
    assert "holds no jumps" in complaint(folder)


def test_the_tensor_file_is_complete_without_the_json(folder):
    (folder / TEXT).unlink()
    assert made.same(store.load(folder), made.jumps())


def test_two_folders_mixed(folder, tmp_path):
    store.save(made.jumps(seed=1), tmp_path)
    (tmp_path / TEXT).rename(folder / TEXT)
    assert "jumps.json and jumps.safetensors in" in complaint(folder)
    assert "do not belong together" in complaint(folder)


def test_a_newer_format(folder):
    edit(folder, lambda data: data.update(format_version=2, jumps="stored elsewhere"))
    assert "install a newer layerjump" in complaint(folder, NewerFormat)
    (folder / TEXT).unlink()
    assert made.same(store.load(folder), made.jumps())
    reseal(folder, lambda data: data.update(format_version=7))
    (folder / TEXT).unlink()
    assert "version 7" in complaint(folder, NewerFormat)


def test_keys_that_a_later_library_adds_are_left_alone(folder):
    def add(data):
        data["licence"] = "free"
        data["provenance"]["machine"] = ["any"]
        data["jumps"][0]["colour"] = {"red": 1}

    edit(folder, add)
    assert made.same(store.load(folder), made.jumps())
    reseal(folder, add)
    assert made.same(store.load(folder), made.jumps())


EDITS = {
    "no version": (lambda d: d.pop("format_version"), "lacks 'format_version'"),
    "version as text": (lambda d: d.update(format_version="1"), "format_version is '1', but int"),
    "version true": (lambda d: d.update(format_version=True), "format_version is True"),
    "version zero": (lambda d: d.update(format_version=0), "version 0"),
    "no provenance": (lambda d: d.pop("provenance"), "lacks 'provenance'"),
    "provenance null": (lambda d: d.update(provenance=None), "provenance is None"),
    "no seed": (lambda d: d["provenance"].pop("seed"), "lacks 'seed'"),
    "seed a float": (lambda d: d["provenance"].update(seed=0.5), "seed is 0.5, but int"),
    "width true": (lambda d: d["provenance"].update(width=True), "width is True"),
    "revision a list": (lambda d: d["provenance"].update(revision=[]), "but str | None was wanted"),
    "settings a list": (lambda d: d["provenance"].update(settings=[]), "settings is []"),
    "jumps an object": (lambda d: d.update(jumps={}), "jumps is {}"),
    "a jump is a number": (lambda d: d["jumps"].append(3), "one of the jumps is 3"),
    "no r2": (lambda d: d["jumps"][0].pop("r2"), "lacks 'r2'"),
    "r2 of three": (lambda d: d["jumps"][0].update(r2=[1, 2, 3]), "r2 is [1, 2, 3]"),
    "r2 infinite": (lambda d: d["jumps"][0].update(r2=[1e999, 1]), "is no number"),
    "nowhere": (lambda d: d["jumps"][0].update(source="north"), "source is 'north'"),
    "site with zeros": (lambda d: d["jumps"][0].update(source="00"), "source is '00'"),
    "site of 5000 digits": (lambda d: d["jumps"][0].update(source="9" * 5000), "source is '9"),
    "features": (lambda d: d["jumps"][0].update(features="cube"), "features is 'cube'"),
    "lands": (lambda d: d["jumps"][0].update(lands="final"), "lands is 'final', but 'level'"),
    "lands a list": (lambda d: d["jumps"][0].update(lands=["level"]), "lands is ['level']"),
    "twice": (lambda d: d["jumps"].append(d["jumps"][0]), "0 → 1 twice"),
    "shape of one": (lambda d: d["jumps"][0].update(shape=[8]), "shape is [8]"),
    "no such tensor": (lambda d: d["jumps"][2].update(tensors={"w": [8, 8]}), "tensors is {'w'"),
    "only up": (lambda d: d["jumps"][2].update(tensors={"up": [8, 8]}), "tensors is {'up'"),
    "shapes as text": (lambda d: d["jumps"][2].update(tensors={"weight": "8"}), "a shape for each"),
}


@pytest.mark.parametrize(("change", "words"), EDITS.values(), ids=EDITS)
def test_nonsense_in_the_json(folder, change, words):
    edit(folder, change)
    assert words in complaint(folder)
    if "1e999" in words or "is no number" in words:
        return  # json.dumps cannot put this into the tensor file
    store.save(made.jumps(), folder)
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
    assert made.same(store.load(folder), made.jumps())


TENSOR_FAULTS = {
    "missing": (lambda t: t.pop("0>3.weight"), "lists but lacks the tensor '0>3.weight'"),
    "extra": (lambda t: t.update(x=torch.ones(1)), "holds but does not list the tensor 'x'"),
    "shape": (lambda t: t.update({"0>3.weight": torch.ones(8, 9)}), "shape (8, 9), but"),
    "type": (lambda t: t.update({"0>3.weight": torch.ones(8, 8).half()}), "is torch.float16"),
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
        (lambda d: d["provenance"].update(width=9), "reads 8 features, but 9"),
        (lambda d: d["provenance"].update(n_blocks=2), "has no site 3"),
        (lambda d: d["jumps"].clear(), "holds but does not list"),
        (lambda d: d["jumps"][0].update(target="0"), "is the identity by definition"),
        (lambda d: d["jumps"][0].update(shape=[8, 9]), "reads 9 features"),
    ],
)
def test_descriptions_that_do_not_hold_together(folder, change, words):
    reseal(folder, change)
    assert words in complaint(folder)


@pytest.mark.parametrize(
    "changes", [{"settings": {"a": torch.ones(1)}}, {"settings": {"a": float("nan")}}]
)
def test_what_cannot_be_described_is_not_saved(folder, changes):
    with pytest.raises(BadArtifact, match="JSON does not hold"):
        store.save(made.jumps(**changes), folder)
    assert made.same(store.load(folder), made.jumps())


def test_jumps_with_nan_are_not_saved(folder):
    jumps = made.jumps()
    jumps[0, 3].weight.data[3, 4] = float("nan")
    with pytest.raises(BadArtifact, match=r"0>3\.weight holds NaN"):
        store.save(jumps, folder)
    assert made.same(store.load(folder), made.jumps())


# Any damage


@pytest.fixture(scope="module")
def whole(disk):
    """A place to break things in, and the two files as they should be."""
    place = disk / "whole"
    store.save(made.jumps(), place)
    return place, {name: (place / name).read_bytes() for name in (TENSORS, TEXT)}


@st.composite
def damage(draw, size: int = 12_000):
    """A function of bytes: cut, overwrite, insert, remove or repeat somewhere."""
    where, length = draw(st.integers(0, size)), draw(st.integers(0, 300))
    kind = draw(st.sampled_from(["cut", "flip", "overwrite", "insert", "remove", "repeat"]))
    noise = draw(st.binary(min_size=1, max_size=12))

    def apply(content: bytes) -> bytes:
        at = where % len(content)
        before, after = content[:at], content[at:]
        return {
            "cut": before,
            "flip": before + bytes([after[0] ^ (noise[0] or 1)]) + after[1:],
            "overwrite": before + noise + after[len(noise) :],
            "insert": before + noise + after,
            "remove": before + after[length:],
            "repeat": before + after[:length] + after,
        }[kind]

    return apply


def outcome(place: Path) -> Jumps | str:
    """The jumps of a folder, or the message of the error."""
    try:
        return store.load(place)
    except BadArtifact as error:
        return str(error)


def is_right(found: Jumps | str) -> bool:
    """Whether this is what was saved, or one line that says why not."""
    return "\n" not in found if isinstance(found, str) else made.same(found, SAVED)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from([TENSORS, TEXT]), broken=damage(), alone=st.booleans())
def test_no_damage_gives_a_wrong_number(whole, name, broken, alone):
    place, content = whole
    for other in content:
        (place / other).write_bytes(content[other])
    (place / name).write_bytes(broken(content[name]))
    if alone and name == TENSORS:
        (place / TEXT).unlink()
    assert is_right(outcome(place))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


def places_in(data) -> list:
    """Every (container, key) of a JSON value."""
    if not isinstance(data, dict | list):
        return []
    keys = list(data) if isinstance(data, dict) else list(range(len(data)))
    return [(data, key) for key in keys] + [p for key in keys for p in places_in(data[key])]


@settings(max_examples=150, deadline=None)
@given(where=st.integers(0, 10_000), value=VALUES, remove=st.booleans(), sealed=st.booleans())
def test_no_edit_of_the_description_ends_in_a_traceback(whole, where, value, remove, sealed):
    place, content = whole
    for name in content:
        (place / name).write_bytes(content[name])

    def change(data):
        places = places_in(data)
        container, key = places[where % len(places)]
        if remove:
            del container[key]
        else:
            container[key] = value

    (reseal if sealed else edit)(place, change)
    found = outcome(place)
    # What was sealed may differ, where it makes sense.
    assert is_right(found) or (sealed and isinstance(found, Jumps))


# Full disks and killed processes


def test_a_full_disk_leaves_the_old_jumps_or_the_new(small_disk):  # noqa: F811
    old, new = made.jumps(), made.jumps(seed=1)
    ends = []
    for pages in range(12):
        store.save(old, small_disk)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError):
            filler.write_bytes(b"x" * 4096 * pages)
        ends.append(attempt(new, small_disk))
        filler.unlink()
        assert state_of(small_disk, old, new) in ("old", "new")
        assert {path.name for path in small_disk.iterdir()} <= {TENSORS, TEXT}
    assert ends[0] == "saved"
    assert "the disk is full" in ends[-1]
    assert [end for end in ends if end != "saved"] == ends[ends.index(ends[-1]) :]


def attempt(jumps: Jumps, place: Path) -> str:
    try:
        store.save(jumps, place)
    except BadArtifact as error:
        return str(error).removeprefix(str(place))
    return "saved"


def die_at(step: int) -> None:
    """Kill this process, as no handler can notice, just before its n-th change of the file system."""
    steps = itertools.count(1)
    changes = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}

    def watch(event: str, arguments: object) -> None:
        if event in changes and next(steps) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


@pytest.mark.parametrize("before", [None, "old"])
def test_death_before_any_step_of_saving(tmp_path, before):
    old, new = made.jumps(), made.jumps(seed=1)
    seen = []
    for step in itertools.count(1):
        place = tmp_path / str(step)
        if before:
            store.save(old, place)
        end = in_child(lambda: (die_at(step), store.save(new, place)))  # noqa: B023
        seen.append(state_of(place, old, new))
        if end == 0:
            break
        assert end == -signal.SIGKILL
    # Old (or nothing) up to some step, new from then on, and the last steps were all seen.
    first = before or "absent"
    assert seen == [first] * seen.count(first) + ["new"] * seen.count("new")
    assert seen.count(first) >= 4
    assert seen.count("new") >= 4


def state_of(place: Path, old: Jumps, new: Jumps) -> str:
    if not (place / TENSORS).exists():
        assert not (place / TEXT).exists()
        return "absent"
    found = store.load(place)
    return "old" if made.same(found, old) else "new" if made.same(found, new) else "neither"


def test_death_at_any_moment(tmp_path):
    """A child saves one set and the other in turn, until it is killed; again and again."""
    place = tmp_path / "jumps"
    sets = [made.jumps(d=96), made.jumps(seed=1, d=96)]
    began = time.perf_counter()
    store.save(sets[0], place)
    duration = time.perf_counter() - began

    def save_for_ever() -> None:
        while True:
            for jumps in reversed(sets):
                store.save(jumps, place)

    wait = random.Random(0)
    for _ in range(60):
        child = start(save_for_ever)
        time.sleep(wait.uniform(0, 4 * duration))
        os.kill(child, signal.SIGKILL)
        assert end_of(child) == -signal.SIGKILL
        assert state_of(place, *sets) in ("old", "new")


def test_who_reads_while_another_saves_gets_the_old_or_the_new(folder):
    saved = [made.jumps(), made.jumps(seed=1)]
    ends = time.monotonic() + 3

    def save_by_turns():
        for one in itertools.cycle(saved):
            store.save(one, folder)
            if time.monotonic() > ends:
                return

    child = start(save_by_turns)
    reads = 0
    while time.monotonic() < ends:
        found = store.load(folder)  # an error here is a mixture of two
        assert any(made.same(found, one) for one in saved)
        reads += 1
    assert end_of(child) == 0
    assert reads > 5
