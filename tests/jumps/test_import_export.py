"""Lenses of other tools come and go without loss."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import foreign_lenses
from helpers.foreign_lenses import ALL_PAIRS, TO_LAST, D, L, drawn, jacobian_content, same_maps, tuned_folder
from helpers.story_text import stories
from typer.testing import CliRunner

import layerjump as lj
from layerjump.cli.main import app
from layerjump.errors import BadEstimator, BadJumps
from layerjump.lens.lens import read_trajectories
from layerjump.models.fingerprint import fingerprint
from layerjump.models.sites import Site

TEXT = "Once upon a time"
model = foreign_lenses.model  # a fixture

# What is read


def test_a_tuned_lens_adds_its_translators_to_the_state(model, tmp_path, caplog):
    state, config = tuned_folder(tmp_path / "lens", model)
    jumps = lj.import_lens(tmp_path / "lens", model)
    assert list(jumps) == [(Site(level), Site(L)) for level in range(L)]
    h = torch.randn(5, D, generator=torch.Generator().manual_seed(0))
    for level in range(L):
        theirs = h + h @ state[f"{level}.weight"].mT + state[f"{level}.bias"]
        torch.testing.assert_close(jumps[level, L](h), theirs)
        torch.testing.assert_close(
            lj.Lens(model, jumps).logits(level, h), model.hf.lm_head(model.hf.transformer.ln_f(theirs))
        )
    assert caplog.text == ""
    known = jumps.provenance
    assert (known.estimator, known.text, known.tokens, known.n_fit) == ("tuned-lens", "unknown", 0, 0)
    assert known.settings == {"imported_from": "lens", "said": config}
    assert known.fingerprint == fingerprint(model.hf)
    assert "unknown text" in repr(jumps)


def test_another_unembedding_is_warned_of(model, tmp_path, caplog):
    tuned_folder(tmp_path / "lens", model, unembed_hash="0" * 64)
    lj.import_lens(tmp_path / "lens", model)
    assert "another unembedding" in caplog.text


def test_mat_matrices_multiply_from_the_left(model, tmp_path):
    """As written by the paper's scripts: sklearn's coef_ as a tensor, or a list of it and the intercept."""
    weight, bias = torch.randn(D, D), torch.randn(D)
    (tmp_path / "1_3.pickle").write_bytes(pickle.dumps(weight))
    (tmp_path / "0_2.pickle").write_bytes(pickle.dumps([weight, bias]))
    (tmp_path / "p0_1_2.pickle").write_bytes(b"of a part of a block, and not read")
    jumps = lj.import_lens(tmp_path, model)
    assert list(jumps) == [(Site(0), Site(2)), (Site(1), Site(3))]
    h = torch.randn(D)
    torch.testing.assert_close(jumps[1, 3](h), weight @ h)
    torch.testing.assert_close(jumps[0, 2](h), weight @ h + bias)
    assert jumps.provenance.estimator == "mat"
    assert torch.equal(lj.import_lens(tmp_path / "1_3.pickle", model)[1, 3].weight, weight)


def test_a_jacobian_files_layer_is_what_leaves_that_block(model, tmp_path):
    content = jacobian_content(metadata={"corpus": "wiki", "skip_first_positions": 16, "x": [1]})
    torch.save(content, tmp_path / "lens.pt")
    jumps = lj.import_lens(tmp_path / "lens.pt", model)
    assert list(jumps) == [(Site(1), Site(3)), (Site(2), Site(3))]
    for layer, matrix in content["J"].items():
        assert torch.equal(jumps[layer + 1, L].weight, matrix.float())
    known = jumps.provenance
    assert (known.estimator, known.text, known.skip_first) == ("jacobian", "wiki", 16)
    assert known.settings["said"]["n_prompts"] == 12
    assert "x" not in known.settings


def test_a_running_sum_is_divided_by_its_prompts(model, tmp_path):
    matrices = {0: torch.randn(D, D), 1: torch.randn(D, D)}
    content = {"jacobian_sum": matrices, "n_done": 4, "target_layer": L - 1, "skip_first": 16}
    torch.save(content, tmp_path / "fit.pt")
    jumps = lj.import_lens(tmp_path / "fit.pt", model)
    assert torch.equal(jumps[2, L].weight, matrices[1] / 4)
    assert jumps.provenance.skip_first == 16


# There and back


@pytest.mark.parametrize("bias", [False, True])
def test_a_tuned_lens_comes_back_to_the_bit(model, tmp_path, bias):
    jumps = drawn(model, TO_LAST, bias=bias)
    assert lj.export_lens(jumps, model, tmp_path / "lens", "tuned-lens") == []
    again = lj.import_lens(tmp_path / "lens", model)
    assert same_maps(again, jumps)
    lj.export_lens(again, model, tmp_path / "second", "tuned-lens")
    first, second = (torch.load(tmp_path / name / "params.pt") for name in ("lens", "second"))
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    config = json.loads((tmp_path / "lens" / "config.json").read_text())
    assert config == json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["unembed_hash"] == tuned_folder(tmp_path / "theirs", model)[1]["unembed_hash"]


def test_what_is_exported_loads_into_the_packages_modules(model, tmp_path):
    """Its lens is a ModuleList of Linears with biases, loaded strictly; h + translator(h) is then ours."""
    jumps = drawn(model, TO_LAST)
    lj.export_lens(jumps, model, tmp_path / "lens", "tuned-lens")
    translators = torch.nn.ModuleList([torch.nn.Linear(D, D) for _ in range(L)])
    translators.load_state_dict(torch.load(tmp_path / "lens" / "params.pt"))
    h = torch.randn(4, D)
    for level, translator in enumerate(translators):
        torch.testing.assert_close(h + translator(h), jumps[level, L](h), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
def test_mat_pickles_come_back_to_the_bit(model, tmp_path, bias):
    jumps = drawn(model, ALL_PAIRS, bias=bias)
    assert lj.export_lens(jumps, model, tmp_path / "linreg", "mat") == []
    assert same_maps(lj.import_lens(tmp_path / "linreg", model), jumps)
    plain = pickle.loads((tmp_path / "linreg" / "0_3.pickle").read_bytes())
    assert torch.equal(plain[0] if bias else plain, jumps[0, 3].weight)


def test_a_jacobian_file_comes_back_to_the_bit_but_for_level_0(model, tmp_path, caplog):
    jumps = drawn(model, TO_LAST)
    left_out = lj.export_lens(jumps, model, tmp_path / "lens.pt", "jacobian")
    assert left_out == [(Site(0), Site(L))]
    assert "1 of 3 jumps left out" in caplog.text
    again = lj.import_lens(tmp_path / "lens.pt", model)
    assert all(torch.equal(again[pair].weight, jumps[pair].weight) for pair in again)
    assert len(again) == 2
    assert (again.provenance.estimator, again.provenance.text) == ("mat", "pydoc")
    lj.export_lens(again, model, tmp_path / "second.pt", "jacobian")
    assert same_maps(lj.import_lens(tmp_path / "second.pt", model), again)


def test_thin_factors_are_multiplied_out(model, tmp_path):
    jumps = drawn(model, TO_LAST, rank=4)
    lj.export_lens(jumps, model, tmp_path / "linreg", "mat")
    h = torch.randn(3, D)
    found = lj.import_lens(tmp_path / "linreg", model)
    torch.testing.assert_close(found[1, L](h), jumps[1, L](h), rtol=1e-4, atol=1e-4)


def test_an_imported_lens_works_from_a_saved_folder(data_folder, tmp_path):
    """Read, generated with: as any fitted one."""
    model = lj.load(data_folder / "tiny-gpt2")
    fitted = lj.fit(model, "pydoc", tokens=3000, split="100/0/0")
    lj.export_lens(fitted, model, tmp_path / "lens", "tuned-lens")
    lj.import_lens(tmp_path / "lens", model).save_pretrained(tmp_path / "jumps")
    jumps = lj.Jumps.from_pretrained(tmp_path / "jumps", model=model)
    ours, theirs = lj.Lens(model, fitted)(TEXT), lj.Lens(model, jumps)(TEXT)
    assert (ours.top == theirs.top).all()
    written = [lj.generate(model, each, TEXT, exit="gap:0.2", max_new_tokens=8).ids for each in (fitted, jumps)]
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("format", "path", "pairs", "levels"),
    [
        ("jacobian", "lens.pt", "to-last", (1, 2, 3, 4)),  # such files have no level 0
        ("mat", "linreg", "0:4,3:4", (0, 3, 4)),
    ],
)
def test_a_lens_that_reads_some_levels_alone_works_too(data_folder, tmp_path, format, path, pairs, levels):
    """Read with, beside another, calibrated and generated with: at the levels that it has."""
    model = lj.load(data_folder / "tiny-gpt2")
    fitted = lj.fit(model, "pydoc", tokens=3000, pairs=pairs, split="100/0/0")
    lj.export_lens(fitted, model, tmp_path / path, format)
    jumps = lj.import_lens(tmp_path / path, model)
    lens, names = lj.Lens(model, jumps), tuple(map(str, levels))
    assert lens.levels == levels
    ours = lj.Lens(model, fitted)(TEXT, levels=levels)
    theirs = lens(TEXT)
    assert theirs.levels == names
    assert (ours.top == theirs.top).all()
    (both,) = read_trajectories({"identity": lj.Lens(model), "theirs": lens}, [TEXT])
    assert both["identity"].levels == both["theirs"].levels == names
    found = lj.calibrate(model, jumps, stories(300, seed=1), target=0.8, draft_documents=0)
    assert set(found.exit.rule.levels or ()) <= set(levels)
    made = lj.generate(model, jumps, TEXT, exit=found.exit, max_new_tokens=8)
    assert {level for level in made.exit_levels[0] if level is not None} <= set(levels)
    jumps.save_pretrained(tmp_path / "jumps")
    done = CliRunner().invoke(app, ["lens", str(data_folder / "tiny-gpt2"), TEXT, "--jumps", str(tmp_path / "jumps")])
    assert done.exit_code == 0, done.stderr


def test_jumps_that_read_no_level_say_so(data_folder):
    model = lj.load(data_folder / "tiny-gpt2")
    jumps = lj.fit(model, "pydoc", tokens=1000, pairs="0:2", split="100/0/0")
    with pytest.raises(BadJumps, match="no level can be decoded; fit with pairs='to-last'"):
        lj.Lens(model, jumps)(TEXT)


def test_what_a_file_says_of_itself_is_not_taken_for_a_setting(data_folder, tmp_path):
    model = lj.load(data_folder / "tiny-gpt2")
    fitted = lj.fit(model, "pydoc", tokens=3000, split="100/0/0")
    lj.export_lens(fitted, model, tmp_path / "lens.pt", "jacobian")
    content = torch.load(tmp_path / "lens.pt")
    content["metadata"] |= {"temperature": 0.7, "how": "to-tune", "imported_from": "elsewhere"}
    torch.save(content, tmp_path / "lens.pt")
    jumps = lj.import_lens(tmp_path / "lens.pt", model)
    assert jumps.provenance.settings["imported_from"] == "lens.pt"
    assert jumps.provenance.settings["said"]["temperature"] == 0.7
    lj.refine(model, jumps, stories(60), steps=2)


# The command line


def test_export_and_import_as_commands(data_folder, tmp_path):
    folder, lens = str(data_folder / "tiny-gpt2"), str(tmp_path / "lens.pt")
    model = lj.load(folder)
    fitted = lj.fit(model, "pydoc", tokens=1000, split="100/0/0")
    fitted.save_pretrained(tmp_path / "jumps")
    run = CliRunner()
    where = ["--model", folder, "-o"]
    done = run.invoke(app, ["export", str(tmp_path / "jumps"), "--format", "jacobian", *where, lens])
    assert done.exit_code == 0, done.stderr
    done = run.invoke(app, ["import", lens, *where, str(tmp_path / "again"), "--json"])
    assert done.exit_code == 0, done.stderr
    assert [row["jump"] for row in json.loads(done.stdout)] == ["1 → 4", "2 → 4", "3 → 4"]
    again = lj.Jumps.from_pretrained(tmp_path / "again", model=model)
    assert all(torch.equal(again[pair].weight, fitted[pair].weight) for pair in again)


def test_a_refused_file_is_one_line(data_folder, tmp_path):
    (tmp_path / "lens.pt").write_bytes(b"no")
    command = [sys.executable, "-m", "layerjump", "import", str(tmp_path / "lens.pt")]
    command += ["--model", str(data_folder / "tiny-gpt2"), "-o", str(tmp_path / "jumps")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "jumps").exists()


def test_the_jacobian_lens_is_fitted_by_command(data_folder, tmp_path):
    command = ["fit", str(data_folder / "tiny-gpt2"), "--estimator", "jacobian", "--tokens", "100"]
    run = CliRunner()
    done = run.invoke(app, [*command, "-o", str(tmp_path), "--seed", "2", "--json"])
    assert done.exit_code == 0, done.stderr
    model = lj.load(data_folder / "tiny-gpt2")
    wanted = lj.fit_jacobian(model, "pydoc", tokens=100, seed=2)
    assert same_maps(lj.Jumps.from_pretrained(tmp_path, model=model), wanted)
    refused = run.invoke(app, ["--debug", *command, "-o", str(tmp_path / "other"), "--rank", "3"])
    assert isinstance(refused.exception, BadEstimator)
    assert "jacobian has no option --rank" in str(refused.exception)
