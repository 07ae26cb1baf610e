"""The command line, as real processes: help without torch, one-line errors, JSON that parses."""

import json
import subprocess
import sys

import pytest
import torch
from tiny import tiny_model

import layerjump


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "layerjump", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("gpt2", dtype=torch.float32).save_pretrained(place)
    return place


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["families", "--help"], ["families"]]
)
def test_help_imports_neither_torch_nor_transformers(arguments):
    code = (
        "import sys; from layerjump.cli import app\n"
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
    assert {"gpt2", "llama", "bert", "albert"} <= {row["family"] for row in rows}
    assert len(rows) == 22
    assert "gemma3_text" in run("families", env=_wide()).stdout


def test_families_checks_one_model(folder):
    rows = json.loads(run("families", str(folder), "--json").stdout)
    assert {row["check"] for row in rows} >= {
        "logits",
        "levels",
        "blocks",
        "inputs",
        "causality",
        "weights",
    }
    assert all(row["passed"] == "yes" for row in rows)


@pytest.mark.parametrize("model", ["nobody/nothing", "./no-such-folder"])
def test_a_bad_model_is_one_line_and_exit_code_1(model):
    done = run("families", model)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert model in done.stderr


def test_debug_shows_the_traceback():
    done = run("--debug", "families", "./no-such-folder")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ModelNotFound" in done.stderr


def test_wrong_usage_is_exit_code_2():
    assert run("families", "--no-such-option").returncode == 2
    assert run("no-such-command").returncode == 2


def _wide():
    import os

    return os.environ | {"COLUMNS": "200"}
