"""What a run's choices mean: protocols, positions, how much is scored."""

import pytest
import torch

import layerjump as lj
from layerjump.data.positions import PAPER, Positions
from layerjump.errors import BadEstimator, BadStudy, BadText, TextTooShort
from layerjump.studies.setup import Settings, Setup, make_settings


@pytest.fixture(scope="module")
def causal(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def masked(data_folder):
    return lj.load(data_folder / "tiny-bert")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=200)


def setup(model, text, **settings):
    return Setup(model, text, make_settings("ours", **settings))


def test_the_papers_protocol():
    found = make_settings("paper", estimators=("mat",), seed=3, tokens=None)
    assert (found.split, found.positions, found.paper, found.seed) == (
        "9000/0/1000",
        "one",
        True,
        3,
    )
    assert make_settings("ours") == Settings()
    assert make_settings("paper", split="90/0/10").split == "90/0/10"


@pytest.mark.parametrize(
    ("error", "message", "protocol", "given"),
    [
        (BadStudy, "give ours or paper", "theirs", {}),
        (BadEstimator, "no estimator 'magic'", "ours", {"estimators": ("mat", "magic")}),
        (BadStudy, "score given is 0; give 1 or more", "ours", {"score": 0}),
        (BadStudy, "tokens given is -5", "ours", {"tokens": -5}),
        (BadStudy, "exit_position given is -1; give 0 or more", "ours", {"exit_position": -1}),
        (BadStudy, "above 0 and at most 1", "ours", {"targets": (95.0,)}),
    ],
)
def test_senseless_settings_are_refused(error, message, protocol, given):
    with pytest.raises(error, match=message):
        make_settings(protocol, **given)


def test_where_predictions_are_scored(causal, masked, text):
    def positions(model, protocol="ours", **given):
        return Setup(model, text, make_settings(protocol, **given)).test_positions()

    assert positions(causal) == positions(causal, positions="15%") == Positions("all")
    assert positions(causal, positions="one") == Positions("one")
    assert positions(masked) == positions(masked, positions="all") == Positions("share", 0.15)
    assert positions(masked, positions="sample=2") == Positions("sample", 2)
    assert positions(causal, "paper") == positions(masked, "paper") == PAPER
    assert positions(causal, "paper", positions="sample=3").kind == "sample"


@pytest.mark.parametrize("wanted", [40, 300])
def test_about_as_many_positions_are_scored_as_asked_for(wanted, causal, masked, text):
    for model in (causal, masked):
        found = setup(model, text, score=wanted).batches(picks=wanted)
        assert 0.6 * wanted <= found.n_picks <= 1.6 * wanted


def test_many_short_documents_do_not_take_more(causal):
    short = lj.load_text(
        [
            f"the {word} sat on a mat"
            for word in lj.load_text("pydoc", limit=300).documents[0].split()[:60] * 20
        ]
    )
    found = setup(causal, short).batches(picks=30)
    assert found.n_picks <= 40


def test_positions_are_taken_from_all_documents_where_that_can_be(causal, text):
    one = setup(causal, text)
    assert {b for batch in one.batches(picks=200) for b in batch.document.tolist()} == set(
        one.documents("test")
    )


@pytest.mark.parametrize("positions", [Positions("all"), Positions("one"), Positions("share", 0.3)])
def test_a_text_that_has_fewer_gives_all_it_has(positions, causal, text):
    one = setup(causal, text)
    whole = one.batches(positions=positions)
    assert one.batches(positions=positions, tokens=10**9).n_picks == whole.n_picks
    assert one.batches(positions=positions, picks=10**9, tokens=10**9).n_picks == whole.n_picks
    # As many tokens as there are, of which a share is then drawn, must not be found too few.
    some = one.batches(positions=positions, picks=20, tokens=whole.n_tokens)
    assert 0 < some.n_picks <= 100  # a share is of whole documents, so that one may bring dozens


def test_masking_stays_as_dense_when_less_is_scored(masked, text):
    found = setup(masked, text).batches(picks=30)
    assert found.positions == Positions("share", 0.15)


def test_a_split_without_test_documents_is_named(causal, text):
    with pytest.raises(BadText, match="leaves no test documents"):
        setup(causal, text, split="90/10/0").batches()
    with pytest.raises(TextTooShort, match="there are 200"):
        Setup(causal, text, make_settings("paper")).documents("fit")


def test_the_same_text_is_scored_as_by_the_fits_own_test(causal, text):
    for estimators in (("mat",), ("mat", "ridge")):
        one = setup(causal, text, tokens=4_000, estimators=estimators, score=10**9)
        assert one.readings().n_examples == one.collected().test.n


def test_what_is_made_is_kept(causal, text):
    one = setup(causal, text, tokens=3_000)
    assert one.readings() is one.readings()
    assert one.jumps("mat") is one.jumps("mat")
    fresh = one.with_empty_cache(settings=make_settings("ours", tokens=2_000))
    assert fresh.collected() is not one.collected()
    assert fresh.settings.tokens == 2_000


def test_a_jump_from_a_level_to_itself_is_the_identity(causal, text):
    jumps = setup(causal, text, tokens=3_000).jumps("mat")
    state = torch.randn(3, causal.d_model)
    for level in range(causal.n_blocks + 1):
        assert torch.equal(jumps[level, level](state), state)
