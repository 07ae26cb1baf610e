"""Runs of studies that stop, go on, or cannot be done; and the command that starts them."""

import json
import re
import sys
from dataclasses import replace

import pytest
from helpers.story_text import letters, stories
from helpers.study_results import tables_of

import layerjump as lj
from layerjump.cli import main
from layerjump.errors import BadArtifact, BadStudy, NewerFormat
from layerjump.io import read_json
from layerjump.studies.results import Skipped, to_json
from layerjump.studies.runner import FILE, MAIN, STUDIES, load_results, results_to_json, run_studies, select_studies
from layerjump.studies.setup import Setup, StudySettings, make_settings


def without_seconds(results):
    saved = results_to_json(results)
    return saved | {"studies": {k: v | {"seconds": None} for k, v in saved["studies"].items()}}


@pytest.fixture(scope="module")
def whole(study_setup, tmp_path_factory):
    """The results of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    return run_studies(study_setup.with_empty_cache(), select_studies(None), folder), folder


def test_results_are_what_the_file_holds(whole):
    results, folder = whole
    saved = results_to_json(results)
    assert saved == read_json(folder / FILE)
    assert results_to_json(load_results(folder)) == results_to_json(load_results(folder / FILE)) == saved
    assert list(results.studies) == list(MAIN)
    assert all(result.seconds > 0 for result in results.studies.values())


def test_a_run_that_is_cut_short_goes_on_where_it_was(whole, study_setup, tmp_path):
    wanted, _ = whole
    said: list[str] = []

    def die(_):
        raise RuntimeError("the machine is gone")

    studies = select_studies(None)
    cut = [replace(study, run=die) if study.name == "early_exit" else study for study in studies]
    with pytest.raises(RuntimeError, match="gone"):
        run_studies(study_setup.with_empty_cache(), cut, tmp_path)
    before = load_results(tmp_path)
    assert list(before.studies) == ["r2", "predictions"]
    found = run_studies(study_setup.with_empty_cache(), studies, tmp_path, resume=True, log=said.append)
    assert re.fullmatch(r"memory .*B beyond the model, for the sums and maps of all studies", said[0])
    assert said[1:3] == ["r2: done before", "predictions: done before"]
    for name in before.studies:
        assert to_json(found.studies[name]) == to_json(before.studies[name])
    assert without_seconds(found) == without_seconds(wanted)
    assert results_to_json(load_results(tmp_path)) == results_to_json(found)


def test_a_study_added_later_reads_the_jumps_of_the_first_run(whole, study_setup, tmp_path):
    wanted, _ = whole
    run_studies(study_setup.with_empty_cache(), select_studies("r2"), tmp_path)
    found = run_studies(study_setup.with_empty_cache(), select_studies("early_exit"), tmp_path, resume=True)
    assert list(found.studies) == ["r2", "early_exit"]
    assert to_json(found.studies["early_exit"].tables) == to_json(wanted.studies["early_exit"].tables)


def test_resuming_with_other_choices_is_refused(whole, study_setup, tmp_path):
    _, folder = whole
    other = study_setup.with_empty_cache(settings=make_settings("ours", tokens=6_000, n_test_positions=121))
    with pytest.raises(BadArtifact, match="another settings than this run; pass force=True in place of"):
        run_studies(other, select_studies("r2"), folder, resume=True)
    other = study_setup.with_empty_cache(corpus=lj.load_text("pydoc", limit=150))
    with pytest.raises(BadArtifact, match="another text"):
        run_studies(other, select_studies("r2"), folder, resume=True)
    run_studies(study_setup.with_empty_cache(), select_studies("examples"), tmp_path)
    with pytest.raises(BadArtifact, match="another level_pairs"):
        run_studies(study_setup.with_empty_cache(), select_studies("r2"), tmp_path, resume=True)


def test_files_that_are_no_results_are_refused(tmp_path):
    path = tmp_path / FILE
    with pytest.raises(BadArtifact, match="does not exist"):
        load_results(tmp_path)
    path.write_text("{}")
    with pytest.raises(BadArtifact, match="does not hold results"):
        load_results(tmp_path)
    path.write_text(json.dumps({"kind": "layerjump results", "format": 99, "studies": {}}))
    with pytest.raises(NewerFormat, match="format 99"):
        load_results(tmp_path)


def test_a_folder_that_cannot_be_made_is_found_out_at_once(study_setup, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(BadArtifact, match="cannot be written"):
        run_studies(study_setup, select_studies("r2"), tmp_path / "file")


def test_a_model_without_head_does_what_it_can(data_folder, study_text, tmp_path):
    whole_model = lj.load(data_folder / "tiny-bert")
    whole_model.hf.bert.save_pretrained(tmp_path / "body")
    whole_model.tokenizer.save_pretrained(tmp_path / "body")
    model = lj.load(tmp_path / "body")
    setup, said = (Setup(model, study_text, make_settings("ours", tokens=6_000, n_test_positions=120)), [])
    results = run_studies(setup, select_studies(None), tmp_path / "out", log=said.append).studies
    for name in ("predictions", "early_exit", "examples"):
        assert isinstance(results[name], Skipped)
        assert "without its prediction head" in results[name].reason
        assert any(line.startswith(f"{name}: skipped, ") for line in said)
    for name in ("r2", "linearity"):
        assert tables_of(results[name])


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-bert"])
def test_all_studies_run(name, data_folder, tmp_path):
    settings = StudySettings(n_test_positions=60, rerun_tokens=400)
    setup = Setup(lj.load(data_folder / name), stories(200), settings, [letters(60)])
    results = run_studies(setup, select_studies("all"), tmp_path)
    assert list(results.studies) == list(STUDIES)
    for study, outcome in results.studies.items():
        if study in ("training_dynamics", "finetuning", "architecture"):
            assert isinstance(outcome, Skipped), study  # they need more than a model and a text
            continue
        tables = tables_of(outcome)
        assert tables, study
        assert all(tables.values()), study
        shown = {table for panel in STUDIES[study].figures(outcome) for table in panel.tables}
        assert shown == set(tables), study


def test_choosing_studies():
    assert [study.name for study in select_studies("early_exit, r2")] == ["r2", "early_exit"]
    assert [study.name for study in select_studies("all")] == list(STUDIES)
    with pytest.raises(BadStudy, match="unknown study 'magic'; choose one of r2"):
        select_studies("r2,magic")


def test_a_study_has_the_name_of_its_module():
    for name, study in STUDIES.items():
        assert study.run.__module__ == f"layerjump.studies.{name}"


def test_former_names_of_studies_select_them():
    former = "exits,gates,heads,alternation,transfer,data,dynamics,finetune,size,plausibility"
    names = [study.name for study in select_studies(former)]
    assert names == (
        ["early_exit", "exit_probes", "attention_heads", "layer_skipping", "text_transfer", "data_requirements"]
        + ["training_dynamics", "finetuning", "map_size", "human_evaluation"]
    )


# -- the command line


def command(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["layerjump", "study", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["magic"], "unknown study 'magic'"),
        (["--estimators", "mat,magic"], "unknown estimator 'magic'"),
        (["--protocol", "theirs"], "got 'theirs'"),
        (["--positions", "some"], "got 'some'"),
        (["--target", "95"], "at most 1"),
        (["--fit-val-test", "90/10/0"], "leaves no test documents"),
        (["--protocol", "paper"], "10,000 documents for --fit-val-test 9000/0/1000, got 30"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_1(arguments, message, data_folder, tmp_path, monkeypatch, capsys):
    short = tmp_path / "short.txt"
    short.write_text("\n".join(f"Line {i} is a sentence of its own." for i in range(30)))
    place = data_folder / "tiny-gpt2", "--text", short, "-o", tmp_path / "out"
    assert command(monkeypatch, *place, *arguments) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]
    assert said.err.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in said.err
    assert not (tmp_path / "out" / FILE).exists()


def test_a_run_from_the_command_line(data_folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = [
        data_folder / "tiny-gpt2",
        "r2",
        "early_exit",
        "--tokens",
        "4000",
        "--n-test-positions",
        "60",
        "-o",
        out,
    ]
    assert command(monkeypatch, *arguments) == 0
    first = load_results(out)
    assert list(first.studies) == ["r2", "early_exit"]
    assert first.run.command.startswith("layerjump study ")
    capsys.readouterr()
    assert command(monkeypatch, *arguments, "--resume") == 0
    assert "r2: done before" in capsys.readouterr().err
    assert results_to_json(load_results(out)) == results_to_json(first)
    assert command(monkeypatch, *arguments, "--resume", "--seed", "1") == 1
    assert "another settings" in capsys.readouterr().err
