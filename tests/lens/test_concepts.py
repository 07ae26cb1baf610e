"""Concepts: sets of tokens in all spellings, and their race over the levels."""

import pytest
import torch
from helpers.cli import refused

import layerjump as lj
from layerjump.errors import BadText
from layerjump.lens.concepts import concept_ids

TEXT = "Once upon a time, there was a little girl named"


@pytest.fixture(scope="module")
def trajectory(data_folder):
    return lj.Lens(lj.load(data_folder / "tiny-gpt2"))(TEXT)


def test_a_concept_has_every_spelling_that_is_one_token(trajectory):
    model = trajectory.model
    texts = set(model.prediction_texts(concept_ids(model, ["the"])))
    assert texts == {" the", "The", " The"}
    assert all(text.strip().lower() == "the" for text in texts)


def test_its_probability_is_the_sum_over_its_tokens(trajectory):
    track = trajectory.concept(["dog", "girl"])
    expected = sum(trajectory.track(token).probability for token in track.ids)
    torch.testing.assert_close(track.probability, expected)
    assert trajectory.distribution(2, 3)[list(track.ids)].sum() == pytest.approx(
        float(track.probability[2, 3]), rel=1e-4
    )


def test_the_crossing_level_is_the_first_from_which_the_winner_leads(trajectory):
    race = trajectory.race({"dogs": ["dog"], "girls": ["girl"]}, position=4)
    assert race.probability.shape == (5, 2)
    first = race.levels.index(race.crossing_level)
    assert set(race.leaders[first:]) == {race.leaders[-1]}
    assert first == 0 or race.leaders[first - 1] != race.leaders[-1]
    frame = race.to_pandas()
    assert frame.loc["2", "dogs"] == pytest.approx(float(trajectory.concept(["dog"]).probability[2, 4]))


@pytest.mark.parametrize(
    ("concepts", "message"),
    [
        ({}, "expected concepts by name"),
        ({"a": ["dog"], "b": []}, "list of words"),
        ({"a": ["dog"], "b": "girl"}, "list of words"),
        ({"a": ["dog"], "b": ["unbelievably"]}, "one token"),
        ({"a": ["dog", "girl"], "b": ["girl"]}, "without a common token"),
    ],
)
def test_bad_concepts_are_refused(trajectory, concepts, message):
    with pytest.raises(BadText, match=message):
        trajectory.race(concepts)


def test_a_position_that_was_not_read_is_refused(trajectory):
    with pytest.raises(BadText, match="position 99 was not read"):
        trajectory.race({"a": ["dog"], "b": ["girl"]}, position=99)


def test_the_command_line_refuses_a_concept_without_words(monkeypatch, capsys, data_folder):
    folder = str(data_folder / "tiny-gpt2")
    message = refused(monkeypatch, capsys, "lens", folder, TEXT, "--lenses", "identity", "--concept", "dogs")
    assert "expected a concept such as" in message
