"""`--protocol paper` says what it does otherwise than the authors."""

from helpers.story_text import stories

from layerjump.models.loading import load
from layerjump.report.report import write_report
from layerjump.studies.runner import run_studies, select_studies
from layerjump.studies.setup import Setup, make_settings, paper_deviations


def test_nothing_is_said_of_another_protocol(data_folder):
    model = load(data_folder / "tiny-gpt2")
    assert paper_deviations(Setup(model, stories(60), make_settings("ours"))) == []


def test_differences_are_named_in_results_page_and_summary(data_folder, tmp_path):
    model = load(data_folder / "tiny-gpt2")
    setup = Setup(
        model, stories(60), make_settings("paper", split="50/0/10", estimators=("affine",))
    )
    said = paper_deviations(setup)
    assert not any("family" in sentence for sentence in said)
    for part in (
        "fitted on 50 sentences",
        "tested on 10 sentences",
        "The maps are affine",
    ):
        assert any(part in sentence for sentence in said), part
    results = run_studies(setup, select_studies("predictions"), tmp_path)
    assert results.run.differs_from_paper == said
    page, summary = (path.read_text(encoding="utf-8") for path in write_report(results, tmp_path))
    for sentence in said:
        assert sentence in summary
    assert "fitted on 50 sentences" in page


def test_another_family_is_named(data_folder):
    model = load(data_folder / "tiny-bert")
    model.hf.config.model_type = "roberta"
    said = paper_deviations(Setup(model, stories(60), make_settings("paper", split="50/0/10")))
    assert any("family roberta" in sentence for sentence in said)
