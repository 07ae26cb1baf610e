"""`layerjump generate`: settings that cannot be had are one line."""

import pytest

from layerjump.cli.generate import _check, _check_room
from layerjump.errors import BadExit


@pytest.mark.parametrize(
    ("given", "said"),
    [((0, 1.0, 1.0), "max-new-tokens"), ((9, 0.0, 1.0), "temperature"), ((9, 1.0, 2.0), "top-p")],
)
def test_a_setting_out_of_range_is_named(given, said):
    with pytest.raises(BadExit, match=f"--{said} given is"):
        _check(*given)


def test_a_table_of_positions_has_an_end(data_folder):
    import layerjump as lj

    model = lj.load(data_folder / "tiny-gpt2")
    _check_room(model, ["a"], model.max_positions - 20)
    with pytest.raises(BadExit, match="128 positions"):
        _check_room(model, ["a"], model.max_positions)
