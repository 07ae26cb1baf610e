"""Any damage to a folder of jumps ends in what was saved or in one line, never in a wrong number."""

from pathlib import Path

import pytest
from helpers import jumps_folder, synthetic_jumps
from helpers.jumps_folder import TENSORS, TEXT, edit, reseal
from hypothesis import given, settings
from hypothesis import strategies as st

from layerjump.errors import BadArtifact
from layerjump.jumps import serialization
from layerjump.jumps.jumps import Jumps

disk = jumps_folder.disk  # a fixture

SAVED = synthetic_jumps.jumps()


@pytest.fixture(scope="module")
def whole(disk):
    """A place to break things in, and the two files as they should be."""
    place = disk / "whole"
    serialization.save(synthetic_jumps.jumps(), place)
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
        return serialization.load(place)
    except BadArtifact as error:
        return str(error)


def is_right(found: Jumps | str) -> bool:
    """Whether this is what was saved, or one line that says why not."""
    return "\n" not in found if isinstance(found, str) else synthetic_jumps.same(found, SAVED)


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
