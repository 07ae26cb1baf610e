"""`layerjump eval`: scores and settings in a file, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
from helpers import task_data
from helpers.story_text import stories

import layerjump as lj
from layerjump.cli import main
from layerjump.evaluation.tasks import evaluate

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")

data = task_data.data  # a fixture


@pytest.fixture(scope="module")
def plain(data_folder, data):
    return evaluate(lj.load(data_folder / "tiny-gpt2"), "copa,cb", data)


@pytest.fixture
def command(monkeypatch, capsys, data_folder):
    """A function: arguments of `layerjump eval MODEL` → exit code, output."""

    def call(*arguments, model="tiny-gpt2"):
        line = ["layerjump", "eval", str(data_folder / model), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code or 0, capsys.readouterr()

    return call


def test_the_command_writes_scores_and_settings(command, data, tmp_path, plain):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(stories(5).documents))
    given = ("--tasks", "copa,cb", "--data", data, "--limit", 2, "--perplexity-text", text)
    code, said = command(*given, "--window", 32, "-o", tmp_path / "out.json")
    assert code == 0, said.err
    assert "copa" in said.out
    assert "windows of 32, stride 16" in said.out
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["settings"]["limit"] == 2
    assert saved["lm_eval"] == lm_eval.__version__
    assert saved["items"]["copa"] == [asdict(item) for item in plain.items["copa"][:2]]
    assert saved["items"]["cb"] == [asdict(item) for item in plain.items["cb"][:2]]
    assert saved["wikitext"]["windows"] == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --tasks"),
        (["--tasks", "copa"], "--data"),
        (["--tasks", "hellaswag", "--data", "DATA"], "among arc_easy"),
        (["--tasks", "copa", "--data", "DATA/none"], "does not exist"),
        (["--tasks", "copa", "--data", "DATA", "--limit", "0"], "--limit of 1 item or more, got 0"),
        (["--tasks", "copa", "--data", "DATA", "--jumps", "DATA"], "error: "),
        (["--tasks", "copa", "--data", "DATA", "--batch-size", "0"], "--batch-size"),
        (["--perplexity-text", "DATA/none.txt"], "cannot be read"),
        (["--perplexity-text", "DATA/copa.jsonl", "--window", "1"], "2 to 128"),
        (["--perplexity-text", "DATA/copa.jsonl", "--stride", "0"], "--stride of 1 to 128, got 0"),
        (["--perplexity-text", "DATA/copa.jsonl", "--limit", "0"], "1 window"),
    ],
)
def test_bad_input_is_one_line(command, data, arguments, said):
    code, told = command(*[part.replace("DATA", str(data)) for part in arguments])
    assert code == 1
    assert said in told.err
    assert told.err.startswith("error: ")
    assert told.err.count("\n") == 1


def test_an_encoder_is_a_one_line_error(command, data):
    code, told = command("--tasks", "copa", "--data", data, model="tiny-bert")
    assert code == 1
    assert "masked model" in told.err
    assert told.err.count("\n") == 1


def test_without_lm_eval_the_error_says_what_to_install(command, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, told = command("--tasks", "copa", "--data", data)
    assert code == 1
    assert "pip install 'layerjump[eval]'" in told.err


def test_lm_evals_own_command_line_knows_the_model():
    """With a model folder that is not there, the refusal is ours: the model's name was found in lm-eval's table."""
    line = [sys.executable, "-m", "layerjump.evaluation", "run", "--model", "layerjump"]
    line += ["--tasks", "copa", "--model_args", "pretrained=no/such/folder"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "no/such/folder" in done.stderr
