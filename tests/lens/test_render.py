"""Trajectories as JSON, tables, figures and terminal text, also with markup and control characters in tokens."""

import io
import json
import math
import re
import unicodedata

import pytest
import torch
from helpers import tokenizers
from helpers.tiny_models import tiny_model
from rich.console import Console

import layerjump as lj
from layerjump.data.token_text import escape_token
from layerjump.errors import BadArtifact, BadText
from layerjump.lens.render.terminal import bar, grid, spread, top_table

HOSTILE = ("</script><script>alert(1)</script>", "<img/src=x>", "\x1b[31mred", "\u202eevil", "&amp;")
STORY = "Once upon a time, there was a little girl named Lily."


@pytest.fixture(scope="module")
def model(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def jumps(model):
    return lj.fit(model, lj.load_text("pydoc", limit=80), split="100/0/0")


@pytest.fixture(scope="module")
def trajectory(model, jumps):
    return lj.Lens(model, jumps)(STORY, k=4, tokens=[" girl"])


@pytest.fixture(scope="module")
def hostile():
    """A vocabulary of markup and control characters, all of it among the top tokens."""
    extra = (*HOSTILE, "שלום", "👩‍🚀", "%{x}")
    hf = tiny_model("llama", vocab_size=1007 + len(extra), dtype=torch.float32)
    model = lj.Model.wrap(hf, tokenizers.llama(extra), name="<b>tiny</b>")
    return lj.Lens(model)(" ".join(extra), k=1007 + len(extra), levels=[0, 3])


def printed(shown, **settings) -> str:
    out = io.StringIO()
    Console(file=out, **({"width": 100} | settings)).print(shown)
    return out.getvalue()


def shape(value) -> list[int]:
    return [len(value), *shape(value[0])] if isinstance(value, list) else []


def test_to_dict_has_every_number(trajectory, model):
    content = json.loads(json.dumps(trajectory.to_dict(), allow_nan=False))
    n, levels = len(trajectory.prompt.ids), 5
    assert content["levels"] == ["0", "1", "2", "3", "4"]
    assert (content["lens"], content["task"], content["n_blocks"], content["k"]) == ("mat", "causal", 4, 4)
    assert "".join(token["text"] for token in content["tokens"]) == STORY
    assert content["positions"] == list(range(n))
    assert content["fitted_from"] == 1
    assert shape(content["top"]) == shape(content["probability"]) == [levels, n, 4]
    for name in ("entropy", "kl", "confidence", "cross_entropy"):
        assert shape(content[name]) == [levels, n]
    assert content["js"] is None
    assert content["top"] == trajectory.top.tolist()
    assert [row[-1] for row in content["cross_entropy"]] == [None] * levels
    assert content["decided_at"] == trajectory.settled_level.tolist()
    ids = {str(token) for level in content["top"] for row in level for token in row}
    assert ids | {str(model.tokenization.token_id(" girl"))} == set(content["words"])
    (followed,) = content["followed"]
    assert (followed["text"], shape(followed["rank"])) == (" girl", [levels, n])
    for name in ("entropy", "kl", "probability"):
        actual, expected = torch.tensor(content[name]), getattr(trajectory, name)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-30)
    digits = re.findall(r"\d\.\d+", json.dumps(content["probability"]))
    assert max(len(number.replace(".", "").lstrip("0")) for number in digits) <= 5


def test_to_dict_of_jensen_shannon_and_of_masked_models(model, data_folder):
    assert shape(lj.Lens(model)(STORY, jensen_shannon=True).to_dict()["js"])[0] == 5
    masked = lj.Lens(lj.load(data_folder / "tiny-bert"))("A [MASK] dog.").to_dict()
    assert masked["task"] == "masked"
    assert masked["tokens"][masked["positions"][0]]["text"].strip() == "[MASK]"
    assert masked["cross_entropy"] == [[None]] * 5
    assert masked["fitted_from"] == 0


def test_values_that_are_not_finite_are_null(trajectory):
    from dataclasses import replace

    broken = replace(trajectory, stats=trajectory.stats._replace(kl=torch.full_like(trajectory.kl, math.inf)))
    assert broken.to_dict()["kl"][0][0] is None


def test_to_pandas_has_a_row_for_every_level_and_position(trajectory):
    table = trajectory.to_pandas()
    assert len(table) == 5 * len(trajectory.positions)
    cell = table[(table.level == "3") & (table.position == 7)].iloc[0]
    assert cell.token == trajectory.tokens[7]
    assert [cell.top] == trajectory.decode([int(trajectory.top[3, 7, 0])])
    assert cell.best == trajectory.decode(trajectory.top[3, 7].tolist())
    assert cell.probability == pytest.approx(float(trajectory.probability[3, 7, 0]))
    assert cell.kl == pytest.approx(float(trajectory.kl[3, 7]))
    assert cell["rank(' girl')"] == int(trajectory.tracked[0].rank[3, 7])
    assert cell.settled == (int(trajectory.settled_level[7]) <= 3)
    assert table[~table.fitted].position.unique().tolist() == [0]
    assert table[table.level == "4"].kl.max() < 1e-5


def test_the_heat_map_shows_top_tokens_and_hover_texts(trajectory):
    figure = trajectory.plot("kl")
    (heat,) = figure.data
    assert torch.tensor(heat.z).shape == (5, len(trajectory.positions))
    torch.testing.assert_close(torch.tensor(heat.z), trajectory.kl)
    assert heat.text[4][3] == escape_token(trajectory.decode([int(trajectory.model_top[3])])[0])
    assert heat.hovertext[2][3].count("<br>") == 1 + trajectory.query.k
    assert "not fitted" in figure.layout.title.text
    assert figure.layout.xaxis.ticktext[0] == "Once*"
    assert list(figure.layout.yaxis.ticktext) == ["0", "1", "2", "3", "4"]
    assert torch.tensor(trajectory.plot("jensen_shannon").data[0].z).max() <= math.log(2)
    with pytest.raises(BadText, match="a value to plot of probability"):
        trajectory.plot("colour")


def test_the_page_needs_no_network(trajectory, tmp_path):
    page = trajectory.to_html(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert not re.search(r'<(script|link|img)[^>]*\b(src|href)="', page)
    assert "Plotly.newPlot" in page


def test_a_page_that_cannot_be_written_is_an_error(trajectory, tmp_path):
    with pytest.raises(BadArtifact, match="its folder does not exist"):
        trajectory.to_html(tmp_path / "nowhere" / "page.html")


def test_long_texts_are_truncated_with_a_note(model):
    long = lj.Lens(model)("ball " * 60, k=2)
    assert len(long.positions) > 40
    assert len(re.findall("<th>", long._repr_html_())) == 1 + 16 + 5
    assert "the last 16 positions" in long._repr_html_()
    assert f"{len(long.positions) - 40} before" in printed(long)


def test_markup_in_tokens_is_escaped(hostile):
    table, page, figure = hostile._repr_html_(), hostile.to_html(), hostile.plot()
    script = HOSTILE[0]
    assert script not in table
    assert script not in page
    assert "&lt;img/src=x&gt;" in table
    assert "<b>tiny" not in table + figure.layout.title.text
    texts = [*figure.data[0].text[0], *figure.layout.xaxis.ticktext, figure.layout.title.text]
    hovers = [re.sub("<br>", "", hover) for hover in figure.data[0].hovertext[0]]
    assert not [text for text in [*texts, *hovers] if "<" in text]
    assert any("alert(1)" in hover for hover in hovers)


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_are_escaped_in_the_terminal(hostile, terminal):
    text = printed(hostile, force_terminal=terminal, width=200)
    own = re.sub(r"\x1b\[[\d;]*m", "", text) if terminal else text
    assert "\x1b" not in own
    hidden = [c for c in own if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"]
    assert hidden == []
    assert r"\x1b[31mred" in own
    assert r"\u202eevil" in own
    assert "שלום" in own


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_grid_fits_the_terminal(trajectory, width):
    text = printed(trajectory, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "settled at" in text or width < 80
    assert "*" in text
    assert "\x1b" not in text


def test_the_grid_and_the_top_table_show_the_predictions(trajectory):
    rows = [list(column.cells) for column in grid(trajectory, 160).columns]
    assert [str(cell) for cell in rows[-2]] == [
        escape_token(word) for word in trajectory.decode(trajectory.model_top.tolist())
    ]
    assert rows[-1] == [trajectory.levels[level] for level in trajectory.settled_level.tolist()]
    last = printed(top_table(trajectory), width=200)
    for level in range(5):
        (line,) = [line for line in last.splitlines() if re.match(rf" {level} ", line)]
        for word in trajectory.decode(trajectory.top[level, -1].tolist()):
            assert escape_token(word) in line
        assert f"#{int(trajectory.tracked[0].rank[level, -1]) + 1} " in line


def test_escaped_tokens():
    assert escape_token(" a\n\t\r") == "␣a↵⇥␍"
    assert escape_token("\x00\x1b\x7f\xa0\u200b\u2028") == r"\x00\x1b\x7f\xa0\u200b\u2028"
    assert escape_token("") == "∅"
    assert escape_token("\u0301x") == "◌\u0301x"
    assert escape_token("é שלום 🙂") == "é␣שלום␣🙂"


def test_levels_are_spread_evenly_with_both_ends():
    assert spread(5, 9) == [0, 1, 2, 3, 4]
    assert spread(31, 4) == [0, 10, 20, 30]
    assert spread(31, 2) == [0, 30]


def test_bars_are_as_long_as_the_probability():
    assert bar(0).strip() == ""
    assert bar(1) == "█" * 8
    assert bar(0.5).strip() == "█" * 4
    assert bar(math.nan).strip() == ""
