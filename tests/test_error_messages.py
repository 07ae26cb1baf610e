"""Errors that no other test file covers: each states what was expected, what it got and what to do, in one line."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
from faults import records
from helpers import fitted_gpt2, foreign_lenses
from helpers.cli import refused
from helpers.tiny_models import tiny_model

import layerjump as lj
from layerjump import io
from layerjump.errors import LayerjumpError
from layerjump.evaluation.tasks import load_items, select_tasks
from layerjump.generation.calibration import calibration_file
from layerjump.generation.calibration.dataset import split_documents_by_role
from layerjump.generation.probes import log_odds
from layerjump.jumps.collect_moments import collect_moments
from layerjump.jumps.estimators.registry import EstimatorSettings
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import JumpInfo, Jumps
from layerjump.jumps.maps import Affine
from layerjump.jumps.moments_of_splits import SplitMoments
from layerjump.jumps.serialization import check_model
from layerjump.models.loading import LINEAR
from layerjump.models.sites import FINAL, Site
from layerjump.studies import human_evaluation
from layerjump.studies.setup import make_settings
from layerjump.training.finetune_on_task import load_task
from layerjump.training.linearity_profile import load_measurements
from layerjump.training.pretrain import Recipe, training_arguments

model, text, jumps = fitted_gpt2.model, fitted_gpt2.text, fitted_gpt2.jumps  # fixtures


@contextmanager
def refusal(*words: str):
    """Expect a one-line error with these words."""
    with pytest.raises(LayerjumpError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.fixture(scope="module")
def sums(model, text):
    """Moments of a text without a validation split."""
    return collect_moments(model, text, tokens=2_000, split="90/0/10")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit"], "give a model to run, or --from-moments"),
        (["fit", "MODEL", "--refine", "--refine-steps", "0"], "--refine-steps of 1 or more, got 0"),
        (["fit", "MODEL", "--refine", "--from-moments", "x"], "--refine runs the model"),
        (["generate", "MODEL", "a", "b", "--stream"], "expects one prompt, got 2"),
        (["fit", "MODEL", "--estimator", "calibrated", "--pairs", "to-last"], "use --pairs pred"),
        (["fit", "MODEL", "--estimator", "ojfa", "--refine"], "ojfa, which shares one map"),
        (["fit", "MODEL", "--refine", "--pairs", "1:2"], "there is no prediction to refine"),
        (["fit", "MODEL", "--refine", "--fit-val-test", "100/0/0"], "leave none; give more text"),
        (["lens", "MODEL", "a", "--lenses", "matt"], "unknown estimator 'matt'"),
        (["lens", "smolm2", "a"], "did you mean the bundled smollm2?"),
        (["study", "MODEL", "--estimators", "calibrated"], "put another first, such as mat"),
    ],
    ids=lambda given: " ".join(given[:5]) if isinstance(given, list) else "",
)
def test_commands_refuse_bad_options(monkeypatch, capsys, tmp_path, data_folder, arguments, said):
    given = [str(data_folder / "tiny-gpt2") if word == "MODEL" else word for word in arguments]
    monkeypatch.chdir(tmp_path)
    error = refused(monkeypatch, capsys, *given)
    assert said in error
    # Before anything is run or said to be done.
    assert "memory for sums" not in error
    assert "fitting" not in error


def test_estimators_refuse_settings_they_do_not_have(model, text, sums, jumps):
    with refusal("ridge", "none", "validation split"):
        solve_jumps(sums, "ridge")
    with refusal("mat has no setting ojfa_pooling"):
        solve_jumps(sums, "mat", EstimatorSettings(ojfa_pooling="pooled"))
    with refusal("'sideways'", "'best-level' or 'pooled'"):
        solve_jumps(
            collect_moments(model, text, tokens=2_000, use_validation=True),
            "ojfa",
            EstimatorSettings(ojfa_pooling="sideways"),
        )
    with refusal("learning_rate above 0", "0.2", "got 0"):
        lj.refine(model, jumps, lj.load_text("pydoc", limit=20), learning_rate=0)


def test_files_of_another_kind(tmp_path, sums):
    path = tmp_path / "moments.safetensors"
    sums.save(path, progress={"fit": 3})
    with refusal("unfinished", "resume=True"):
        SplitMoments.load(path)
    tensors, metadata = io.read_tensors(path)
    head = json.loads(metadata["head"])
    io.write_tensors(path, tensors, metadata | {"head": json.dumps(head | {"format": 99})})
    with refusal("format 99", "upgrade"):
        SplitMoments.load(path)
    io.write_tensors(path, tensors, metadata | {"kind": "jumps"})
    with refusal("not a moments file", "save_moments=True"):
        SplitMoments.load(path)
    path.rename(tmp_path / calibration_file.FILE_NAME)
    with refusal("holds no exit rule"):
        calibration_file.load_calibration(tmp_path)


def test_invalid_exit_rules():
    with refusal("7 documents", "give another text"):
        split_documents_by_role(range(7), seed=0)
    with refusal("1.5", "from 0 to 1"):
        log_odds(1.5)
    assert log_odds(0) == -float("inf")
    assert log_odds(1) == float("inf")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": -1}, "seed of 0 or more, got -1"),
        ({"learning_rate": float("nan")}, "learning_rate above 0, got nan"),
        ({"penalty_weight": -0.5}, "penalty_weight of 0 or more, got -0.5"),
    ],
)
def test_invalid_recipes(changes, said):
    with refusal(said):
        Recipe(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu(tmp_path):
    with refusal("no GPU", "cpu"):
        training_arguments(Recipe(), tmp_path, device="cuda")


def test_jumps_that_a_foreign_format_cannot_hold(tmp_path):
    tiny = lj.Model.wrap(tiny_model("gpt2", dtype=torch.float32), name="tiny")
    pair, known = (Site(1), FINAL), foreign_lenses.drawn(tiny, [(0, 3)]).provenance
    weight = torch.eye(foreign_lenses.D)
    to_final = Jumps.from_maps({pair: Affine.of(weight)}, {pair: JumpInfo(*pair, "mat")}, known)
    with refusal("no jump between levels", "pairs='all'"):
        lj.export_lens(to_final, tiny, tmp_path / "a", format="mat")
    with refusal("no jump from a level above 0 to the last", "to-last"):
        lj.export_lens(foreign_lenses.drawn(tiny, [(0, 3)]), tiny, tmp_path / "b.pt", format="jacobian")
    with refusal("which has none"):
        lj.import_lens(tmp_path, tiny, format="mat")
    with refusal("expected a file", "is a folder"):
        lj.import_lens(tmp_path, tiny, format="jacobian")
    foreign_lenses.tuned_folder(tmp_path / "tuned", tiny)
    torch.save([torch.ones(2)], tmp_path / "tuned" / "params.pt")
    with refusal("holds a list", "dictionary of tensors"):
        lj.import_lens(tmp_path / "tuned", tiny)


def test_a_bare_hugging_face_model_must_be_wrapped(model, text, jumps):
    bare = model.hf
    asked = {
        "fit": lambda: lj.fit(bare, text),
        "lens": lambda: lj.Lens(bare, jumps),
        "generate": lambda: lj.generate(bare, jumps, "a"),
        "calibrate": lambda: lj.calibrate(bare, jumps, text),
        "prune": lambda: lj.prune(bare, text, drop=1),
        "refine": lambda: lj.refine(bare, jumps, text),
        "jacobian": lambda: lj.fit_jacobian(bare, text),
        "truncate": lambda: lj.make_draft_model(bare, text, 1),
        "export": lambda: lj.export_lens(jumps, bare, "x", "mat"),
        "splice": lambda: lj.skip_blocks(bare, jumps, 0, 4).__enter__(),
        "states": lambda: next(lj.capture_states(bare, [], [0])),
        "check": lambda: lj.self_check(bare),
        "load": lambda: check_model(jumps, bare, False),
    }
    for ask in asked.values():
        with refusal("got a GPT2LMHeadModel", "lj.Model.wrap(hf, tokenizer)"):
            ask()


def test_a_linear_model_whose_cuts_are_not_numbers(tmp_path):
    for cuts in ("1e999", '"ab"', "[1]", '{"a": 1}'):
        (tmp_path / LINEAR).write_text(f'{{"cuts": [[{cuts}, 2]]}}')
        with refusal("damaged", "prune again"):
            lj.load(tmp_path)


def test_a_config_with_too_many_blocks(tmp_path):
    tiny_model("gpt2", dtype=torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for many in (2**31, 10**400):
        (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": many}))
        with refusal(f"n_layer: {str(many)[:20]}", "at most 10,000"):
            lj.load(tmp_path)


def test_a_linear_model_without_its_map(tmp_path):
    records.make_linear(tmp_path)
    head = json.loads((tmp_path / LINEAR).read_text())
    for cut in ([0, 10**12], [0, 10**400], [-1, 2], [2, 3]):
        (tmp_path / LINEAR).write_text(json.dumps(head | {"cuts": [cut]}))
        with refusal("names a map", "prune again"):
            lj.load(tmp_path)


def test_blocks_that_share_weights_cannot_be_dropped():
    grouped = lj.Model.wrap(tiny_model("albert", dtype=torch.float32), name="albert")
    with refusal("groups that share weights"):
        lj.make_draft_model(grouped, "pydoc", 1)


def test_invalid_task_items(tmp_path):
    (boolq,) = select_tasks(["boolq"])
    (tmp_path / boolq.file).write_bytes(b"\xff\xfe{")
    with refusal("cannot be read", "correct the file"):
        load_items(boolq, tmp_path)
    for choices in ('"ab"', '{"a": 1, "b": 2}', "[1, 2]", "[" * 100_000):
        (tmp_path / "task.jsonl").write_text(f'{{"query": "q", "gold": 0, "choices": {choices}}}')
        with refusal("line 1", "is not an item", "`choices`"):
            load_task(tmp_path / "task.jsonl")


def test_a_missing_training_record(tmp_path):
    good = {name: [{"step": 0, "loss": 1.5}, {"step": 9, "loss": None}] for name in _TABLES}
    path = tmp_path / "track.json"
    path.write_text(json.dumps(good))
    assert load_measurements(path, 5).steps == [{"step": 0, "loss": 1.5}]
    for bad in ({}, {"steps": 3}, {"levels": [3]}, {"blocks": [{"loss": 1}]}, {"steps": [{"step": "0"}]}):
        path.write_text(json.dumps(good | bad if bad else bad))
        with refusal("track.json", "remove"):
            load_measurements(path, 5)


_TABLES = ("steps", "blocks", "levels")


def _items(*lenses: str):
    return [human_evaluation.Item("context", ("a",) * 5, lens, 0, 0) for lens in lenses]


@pytest.mark.parametrize("read", [("mat", "mat"), ("mat", "identity", "mat"), ()], ids=["twice", "thrice", "never"])
def test_a_key_without_complete_cases(tmp_path, read):
    (tmp_path / human_evaluation.KEY).write_text(human_evaluation.write_key(_items(*read), "model"))
    (tmp_path / human_evaluation.SHEET).write_text(human_evaluation.write_sheet(_items(*read)), "utf-8")
    with refusal("damaged", "once through each lens"):
        human_evaluation.read_marks(tmp_path)


def test_a_sheet_with_an_unbounded_cell(tmp_path):
    (tmp_path / human_evaluation.KEY).write_text(human_evaluation.write_key(_items("mat", "identity"), "model"))
    whole = human_evaluation.write_sheet(_items("mat", "identity"))
    (tmp_path / human_evaluation.SHEET).write_text(whole + '"' + "x" * 200_000, "utf-8")
    with refusal("not a row of a sheet", "undo the edit"):
        human_evaluation.read_marks(tmp_path)


def test_calibrated_cannot_be_the_first_estimator_of_a_study():
    with refusal("mat,calibrated"):
        make_settings("ours", estimators=("calibrated", "mat"))
