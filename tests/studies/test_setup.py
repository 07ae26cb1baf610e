"""Settings and setup of a run: protocols, positions, how much is scored, what is computed once."""

from __future__ import annotations

import pytest
import torch
from helpers.story_text import stories

import layerjump as lj
from layerjump.data.positions import PAPER, Positions
from layerjump.errors import BadEstimator, BadStudy, BadText, TextTooShort
from layerjump.report.write_report import write_report
from layerjump.studies.runner import run_studies, select_studies
from layerjump.studies.setup import Setup, StudySettings, make_settings, paper_deviations


@pytest.fixture(scope="module")
def causal(data_folder):
    return lj.load(data_folder / "tiny-gpt2")


@pytest.fixture(scope="module")
def masked(data_folder):
    return lj.load(data_folder / "tiny-bert")


@pytest.fixture(scope="module")
def text():
    return lj.load_text("pydoc", limit=200)


@pytest.fixture(scope="module", params=["causal", "masked"])
def story_setup(request):
    model = request.getfixturevalue(request.param)
    return Setup(model, stories(200), StudySettings(n_test_positions=60))


def setup_of(model, text, **settings):
    return Setup(model, text, make_settings("ours", **settings))


# Settings


def test_the_protocol_of_the_paper():
    settings = make_settings("paper", estimators=("mat",), seed=3, tokens=None)
    assert (settings.split, settings.positions) == ("9000/0/1000", "one")
    assert (settings.paper, settings.seed) == (True, 3)
    assert make_settings("ours") == StudySettings()
    assert make_settings("paper", split="90/0/10").split == "90/0/10"


@pytest.mark.parametrize(
    ("error", "message", "protocol", "settings"),
    [
        (BadStudy, "expected protocol='ours' or protocol='paper', got 'theirs'", "theirs", {}),
        (BadEstimator, "unknown estimator 'magic'", "ours", {"estimators": ("mat", "magic")}),
        (BadStudy, "expected n_test_positions of at least 1, got 0", "ours", {"n_test_positions": 0}),
        (BadStudy, "expected tokens of at least 1, got -5", "ours", {"tokens": -5}),
        (BadStudy, "expected exit_position of at least 0, got -1", "ours", {"exit_position": -1}),
        (BadStudy, "above 0 and at most 1", "ours", {"targets": (95.0,)}),
    ],
)
def test_wrong_settings_raise(error, message, protocol, settings):
    with pytest.raises(error, match=message):
        make_settings(protocol, **settings)


def test_another_protocol_has_no_deviations(causal):
    assert paper_deviations(setup_of(causal, stories(60))) == []


def test_deviations_from_the_paper_are_in_results_page_and_summary(causal, tmp_path):
    settings = make_settings("paper", split="50/0/10", estimators=("affine",))
    setup = Setup(causal, stories(60), settings)
    deviations = paper_deviations(setup)
    assert not any("family" in sentence for sentence in deviations)
    for part in ("fitted on 50 sentences", "tested on 10 sentences", "The maps are affine"):
        assert any(part in sentence for sentence in deviations), part
    results = run_studies(setup, select_studies("predictions"), tmp_path)
    assert results.run.differs_from_paper == deviations
    page, summary = (path.read_text(encoding="utf-8") for path in write_report(results, tmp_path))
    assert all(sentence in summary for sentence in deviations)
    assert "fitted on 50 sentences" in page


def test_another_model_family_is_a_deviation(data_folder):
    model = lj.load(data_folder / "tiny-bert")
    model.hf.config.model_type = "roberta"
    deviations = paper_deviations(Setup(model, stories(60), make_settings("paper", split="50/0/10")))
    assert any("family roberta" in sentence for sentence in deviations)


# Positions and batches


def test_where_predictions_are_scored(causal, masked, text):
    def positions(model, protocol="ours", **settings):
        return Setup(model, text, make_settings(protocol, **settings)).test_positions()

    assert positions(causal) == positions(causal, positions="15%") == Positions("all")
    assert positions(causal, positions="one") == Positions("one")
    assert positions(masked) == positions(masked, positions="all") == Positions("share", 0.15)
    assert positions(masked, positions="sample=2") == Positions("sample", 2)
    assert positions(causal, "paper") == positions(masked, "paper") == PAPER
    assert positions(causal, "paper", positions="sample=3").kind == "sample"


@pytest.mark.parametrize("picks", [40, 300])
def test_about_as_many_positions_are_scored_as_asked_for(picks, causal, masked, text):
    for model in (causal, masked):
        batches = setup_of(model, text, n_test_positions=picks).batches(picks=picks)
        assert 0.6 * picks <= batches.n_picks <= 1.6 * picks


def test_test_batches_have_about_score_positions(story_setup):
    assert story_setup.test_batches().n_picks == pytest.approx(60, rel=0.25)


def test_one_position_a_document_is_exact(story_setup):
    assert story_setup.batches(positions=Positions("one"), picks=7).n_picks == 7


def test_picks_of_nearly_all_test_tokens(story_setup):
    """Sequences end at their last pick, so the same number of tokens cannot be asked for again."""
    all_positions = Positions("all")
    tokens = story_setup.batches(positions=all_positions).n_tokens - 1
    batches = story_setup.batches(positions=all_positions, tokens=tokens, picks=30)
    # A masked model would mask a share, so it reads all positions of fewer documents.
    assert 20 <= batches.n_picks <= (100 if story_setup.model.masked else 45)


def test_many_short_documents_do_not_take_more(causal):
    words = lj.load_text("pydoc", limit=300).documents[0].split()[:60] * 20
    short = lj.load_text([f"the {word} sat on a mat" for word in words])
    assert setup_of(causal, short).batches(picks=30).n_picks <= 40


def test_positions_are_taken_from_all_documents_where_possible(causal, text):
    setup = setup_of(causal, text)
    documents = {d for batch in setup.batches(picks=200) for d in batch.document.tolist()}
    assert documents == set(setup.documents("test"))


@pytest.mark.parametrize("positions", [Positions("all"), Positions("one"), Positions("share", 0.3)])
def test_a_short_text_gives_all_it_has(positions, causal, text):
    setup = setup_of(causal, text)
    everything = setup.batches(positions=positions)
    for limits in ({"tokens": 10**9}, {"picks": 10**9, "tokens": 10**9}):
        assert setup.batches(positions=positions, **limits).n_picks == everything.n_picks
    # All its tokens, of which a share is then drawn, must not count as too few.
    some = setup.batches(positions=positions, picks=20, tokens=everything.n_tokens)
    assert 0 < some.n_picks <= 100  # a share is of full documents, and one may have dozens


def test_masking_stays_as_dense_when_less_is_scored(masked, text):
    assert setup_of(masked, text).batches(picks=30).positions == Positions("share", 0.15)


def test_a_split_without_test_documents_raises(causal, text):
    with pytest.raises(BadText, match="leaves no test documents"):
        setup_of(causal, text, split="90/10/0").batches()
    with pytest.raises(TextTooShort, match="got 200"):
        Setup(causal, text, make_settings("paper")).documents("fit")


# Jumps and lenses


def test_lenses_are_scored_on_the_same_text_as_the_test_scores_of_a_fit(causal, text):
    for estimators in (("mat",), ("mat", "ridge")):
        setup = setup_of(causal, text, tokens=4_000, estimators=estimators, n_test_positions=10**9)
        assert setup.lens_scores().n_examples == setup.moments().test.n


def test_fits_and_scores_are_computed_once(causal, text):
    setup = setup_of(causal, text, tokens=3_000)
    assert setup.lens_scores() is setup.lens_scores()
    assert setup.jumps("mat") is setup.jumps("mat")
    fresh = setup.with_empty_cache(settings=make_settings("ours", tokens=2_000))
    assert fresh.moments() is not setup.moments()
    assert fresh.settings.tokens == 2_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_lens_scores_a_model_in_any_precision(data_folder, dtype):
    model = lj.load(data_folder / "tiny-gpt2", dtype=dtype)
    setup = Setup(model, stories(60), StudySettings(n_test_positions=30))
    scores = setup.lens_scores()
    assert scores.n_levels == 5
    assert isinstance(setup.lenses()["mat"], lj.Lens)
    assert bool(scores.hits(1)[:, -1].all())


def test_a_jump_from_a_level_to_itself_is_the_identity(causal, text):
    jumps = setup_of(causal, text, tokens=3_000).jumps("mat")
    state = torch.randn(3, causal.d_model)
    for level in range(causal.n_blocks + 1):
        assert torch.equal(jumps[level, level](state), state)
