"""The command line as processes: help without torch, one-line errors, valid JSON."""

import json
import subprocess
import sys
import time

import pytest
import torch
import typer
from helpers.cli import run
from helpers.tiny_models import tiny_model

import layerjump
from layerjump.cli.main import app
from layerjump.models.small_models import list_architectures, small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("gpt2", dtype=torch.float32).save_pretrained(place)
    return place


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["families", "--help"],
        ["families"],
        ["fit", "--help"],
        ["inspect", "-h"],
        ["lens", "--help"],
        ["study", "--help"],
        ["report", "-h"],
        ["serve", "--help"],
        ["generate", "--help"],
        ["calibrate", "--help"],
        ["prune", "-h"],
        ["eval", "--help"],
        ["pretrain", "--help"],
        ["human-eval", "--help"],
    ],
)
def test_help_imports_neither_torch_nor_transformers(arguments):
    code = (
        "import sys; from layerjump.cli.main import app\n"
        f"sys.argv = ['layerjump', *{arguments!r}]\n"
        "try: app()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version():
    assert run("--version").stdout == f"layerjump {layerjump.__version__}\n"


def test_families_lists_the_table():
    rows = json.loads(run("families", "--json").stdout)
    assert {"gpt2", "llama", "bert", "albert", "t5", "bart"} <= {row["model_type"] for row in rows}
    assert len(rows) == 364
    assert sum(row["degree"] == "full" for row in rows) >= 335
    assert "gemma3_text" in run("families", env=_wide()).stdout


def test_families_prints_the_degrees_that_it_lists():
    rows = json.loads(run("families", "--json").stdout)
    printed = run("families", env=_wide()).stdout
    counts = {degree: sum(row["degree"] == degree for row in rows) for degree in ("full", "levels", "refused")}
    assert sum(counts.values()) == len(rows)
    assert f"{counts['full']} full, {counts['levels']} levels, {counts['refused']} refused" in printed
    assert all(row["note"] for row in rows if row["degree"] != "full")
    (reformer,) = [row for row in rows if row["model_type"] == "reformer" and row["task"] == "causal"]
    assert reformer["degree"] == "refused"
    assert reformer["note"] in printed


def test_families_checks_one_model(folder):
    result = json.loads(run("check", str(folder), "--json").stdout)
    assert {row["check"] for row in result["checks"]} >= {"logits", "levels", "body", "blocks", "inputs", "causality"}
    assert all(row["passed"] is True for row in result["checks"])
    assert (result["task"], result["model_type"], result["degree"]) == ("causal", "gpt2", "full")
    assert (result["parts"], result["note"]) == ("attn ffn", "")
    assert {"attn.in", "heads", "attn.out", "mid", "ffn.out"} <= set(result["sites"])
    printed = run("check", str(folder), env=_wide()).stdout
    assert "Self-check" in printed
    assert "attn ffn" in printed
    assert "ln1.in ln1.out attn.in heads attn.out mid" in printed


def test_families_prints_the_note_of_a_model_whose_blocks_read_more_than_the_stream(tmp_path):
    architecture = next(a for a in list_architectures() if str(a) == "causal:gemma4_text")
    small_model(architecture).hf.save_pretrained(tmp_path / "gemma4")
    result = json.loads(run("check", str(tmp_path / "gemma4"), "--json").stdout)
    assert (result["degree"], result["parts"]) == ("full", "attn ffn aside")
    assert result["note"].startswith("blocks read more than the stream")
    assert "aside.out" in result["sites"]


@pytest.mark.parametrize("model", ["nobody/nothing", "./no-such-folder"])
def test_a_bad_model_is_one_line_and_exit_code_1(model):
    done = run("check", model)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert model in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--estimator", "magic"], "unknown estimator 'magic'"),
        (["--pairs", "0-3"], "pairs to-last, to-final, predictions"),
        (["--positions", "some"], "got 'some'"),
        (["--text", "no-such-file.txt"], "no-such-file.txt"),
        (["--fit-val-test", "50/50"], "50/50"),
        (["--tokens", "999999999"], "expected 889,628,923 tokens"),
        (["--estimator", "low-rank"], "rank"),
        (["--estimator", "mat", "--strength", "1"], "strength"),
    ],
)
def test_bad_settings_of_a_fit_are_one_line_and_exit_code_1(arguments, message, data_folder, tmp_path):
    output = tmp_path / "jumps"
    done = run("fit", str(data_folder / "tiny-gpt2"), "-o", str(output), "--tokens", "3000", *arguments)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (output / "jumps.json").exists()


def test_a_binary_file_as_text_is_one_line(data_folder, tmp_path):
    binary = tmp_path / "text.txt"
    binary.write_bytes(bytes(range(256)))
    done = run("fit", str(data_folder / "tiny-gpt2"), "--text", str(binary), "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "UTF-8" in done.stderr.splitlines()[-1]


def test_fit_then_inspect_then_solve_again_without_the_model(data_folder, tmp_path):
    folder = str(tmp_path / "a")
    fitted = run("fit", str(data_folder / "tiny-gpt2"), "-o", folder, "--tokens", "9000", "--save-moments", "--json")
    rows = json.loads(fitted.stdout)
    assert [row["jump"] for row in rows] == [f"{level} → 4" for level in range(4)]
    shown = json.loads(run("inspect", folder, "--json").stdout)
    assert shown[0]["R²"] == rows[0]["R²"]
    assert shown[0]["effective rank"] > 1
    moments = f"{folder}/moments.safetensors"
    assert {"what": "family", "value": "gpt2"} in json.loads(run("inspect", moments, "--json").stdout)
    again = run("fit", "--from-moments", moments, "-o", str(tmp_path / "b"), "--estimator", "mat")
    assert again.returncode == 0, again.stderr
    one, other = ((tmp_path / name / "jumps.safetensors").read_bytes() for name in "ab")
    assert one == other


def test_debug_shows_the_traceback():
    done = run("--debug", "check", "./no-such-folder")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ModelNotFound" in done.stderr


def test_wrong_usage_is_exit_code_2():
    assert run("families", "--no-such-option").returncode == 2
    assert run("no-such-command").returncode == 2


def _wide():
    import os

    return os.environ | {"COLUMNS": "200"}


def test_progress_in_a_log_is_a_line_per_interval(capsys, monkeypatch):
    from layerjump.cli import _printing

    monkeypatch.setattr(_printing, "LOG_INTERVAL", 0.0)
    with _printing.progress_bar("collecting") as update:
        update(900, 1000)  # a resumed run: these were done before
        time.sleep(0.2)
        update(910, 1000)
        update(1, 10)  # another pass
    said = capsys.readouterr().err
    left = float(said.removeprefix("collecting: 910 of 1,000 tokens, about ").split()[0])
    assert left >= 1.8  # 90 more, at fifty a second
    assert said.count("\n") == 1
    monkeypatch.undo()
    with _printing.progress_bar("collecting") as update:
        update(50, 200)
    assert capsys.readouterr().err == ""


def test_refined_jumps_are_printed_with_their_kl_and_no_number_is_cut(capsys, monkeypatch, data_folder):
    from layerjump.cli.inspect import print_jumps

    model = layerjump.load(data_folder / "tiny-gpt2")
    text = layerjump.load_text("pydoc", limit=100)
    monkeypatch.setenv("COLUMNS", "80")
    ridge = layerjump.fit(model, text, estimator="ridge", tokens=2_000)
    print_jumps(ridge, as_json=False, spectrum=True)
    plain = capsys.readouterr().out
    assert "…" not in plain.split(")", 1)[1]
    assert "3 → 4" in plain
    some = layerjump.fit(model, text, estimator="affine", pairs="3:4,0:4,0:1", tokens=2_000)
    tuned = layerjump.refine(model, some, text, steps=5)
    print_jumps(tuned, as_json=True)
    rows = {row["jump"]: row for row in json.loads(capsys.readouterr().out)}
    said = tuned.provenance.settings["refine"]
    sources = dict.fromkeys(source for source, target in some if target.index == 4)
    for source, before, after in zip(sources, said["kl_before"], said["kl_after"], strict=True):
        row = rows[f"{source} → 4"]
        assert (row["KL before"], row["KL tuned"]) == (before, after)
    assert rows["0 → 1"]["KL tuned"] is None
    assert rows["0 → 1"]["R²"] == some.info[0, 1].r2[0]


def test_every_command_that_loads_a_model_takes_all_loading_options():
    loading = {"--revision", "--device", "--dtype", "--device-map", "--quantization", "--trust-remote-code"}
    commands = typer.main.get_command(app).commands
    options = {name: {flag for option in command.params for flag in option.opts} for name, command in commands.items()}
    takes_model = {
        name
        for name, command in commands.items()
        if any(option.name in ("model", "models") for option in command.params)
    }
    assert takes_model >= {"fit", "lens", "study", "generate", "calibrate", "prune", "eval", "serve", "check"}
    assert {name: loading - options[name] for name in takes_model - {"pretrain"} if loading - options[name]} == {}


def test_a_device_and_a_device_map_exclude_each_other(folder):
    done = run("generate", folder, "a", "--device-map", "auto", "--device", "cpu")
    assert (done.returncode, len(done.stderr.strip().splitlines())) == (1, 1)
    assert "--device or --device-map, got both" in done.stderr
