"""`layerjump lens` as a process: JSON, pipes, one-line errors, cached jumps."""

import json
import os
import subprocess
import sys
import unicodedata

import pytest

import layerjump as lj


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def run(home):
    def call(*arguments: str, **options) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "layerjump", "lens", *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=os.environ | {"LAYERJUMP_HOME": str(home), "COLUMNS": "120"},
            encoding="utf-8",
            **options,
        )

    return call


def test_json_equals_the_trajectories_and_jumps_are_fitted_once(run, data_folder):
    folder, text = str(data_folder / "tiny-gpt2"), "Once upon a time, there was"
    settings = ["--lenses", "identity,mat", "--top-k", "3", "--token", " a", "--json"]
    first = run(folder, text, *settings)
    assert "fitting mat on 16,000 tokens" in first.stderr
    plain, mapped = json.loads(first.stdout)
    assert (plain["lens"], mapped["lens"]) == ("identity", "mat")
    assert (plain["fitted_from"], mapped["fitted_from"]) == (0, 1)
    assert plain.pop("findings")
    assert plain == lj.Lens(lj.load(folder))(text, k=3, tokens=[" a"]).to_dict()
    again = run(folder, "-", *settings, input=text)
    assert again.stderr == ""
    assert again.stdout == first.stdout
    assert first.stdout.isascii()


def test_piped_output_has_no_control_characters(run, data_folder):
    prompt = "A\x1b[31m red\u202e ball\n\tשלום 👩‍🚀 <b>"
    done = run(str(data_folder / "tiny-gpt2"), prompt, "--lenses", "identity")
    assert done.returncode == 0, done.stderr
    assert "through identity, 4 blocks" in " ".join(done.stdout.split())
    hidden = {c for c in done.stdout if unicodedata.category(c) in ("Cc", "Cf")}
    assert hidden <= {"\n"}


def test_a_folder_of_jumps_reads_sites_inside_blocks(run, data_folder, tmp_path):
    folder = str(data_folder / "tiny-bert")
    model = lj.load(folder)
    jumps = lj.fit(model, "pydoc", pairs="2:4,2.mid:4", tokens=4_000, split="100/0/0")
    jumps.save_pretrained(tmp_path / "jumps")
    place = str(tmp_path / "jumps")
    text = "Lily saw a [MASK] dog."
    done = run(folder, text, "--jumps", place, "--levels", "2, 2.mid,4-4", "--json")
    (found,) = json.loads(done.stdout)
    assert found["levels"] == ["2", "2.mid", "4"]
    assert found.pop("findings")
    assert found == lj.Lens(model, jumps)(text, k=5, levels=[2, "2.mid", 4]).to_dict()
    refused = run(folder, text, "--jumps", place, "--levels", "3.mid")
    assert refused.returncode == 1
    assert "--pairs 3.mid:4" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--token", "once upon", "--lenses", "identity"], "which is 3 tokens"),
        (["ball " * 200, "--lenses", "identity"], "reads at most 128"),
        (["a", "--lenses", "magic"], "unknown estimator 'magic'"),
    ],
)
def test_bad_input_is_one_line(arguments, message, run, data_folder):
    done = run(str(data_folder / "tiny-gpt2"), *arguments)
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
