"""`layerjump prune` as a process."""

import json
import sys

import pytest
from helpers.cli import refused, run

import layerjump as lj
from layerjump.cli import main

SMALL = ("--text", "pydoc", "--tokens", "3000", "--criterion", "deepest")


@pytest.fixture(scope="module")
def model(data_folder) -> str:
    return str(data_folder / "tiny-gpt2")


def test_it_writes_a_checkpoint_that_other_commands_load(model, tmp_path):
    folder = tmp_path / "out"
    done = run("prune", model, "--drop", "25%", *SMALL, "--distill-steps", "2", "--json", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["dropped"] == [3]
    assert record["method"] == "fold"
    assert record["distilled"]["steps"] == 2
    assert json.loads((folder / "config.json").read_text())["n_layer"] == 3
    checked = run("check", str(folder), "--json")
    assert all(row["passed"] for row in json.loads(checked.stdout)["checks"])
    again = run("prune", model, "--drop", "1", *SMALL, "-o", str(folder))
    assert again.returncode == 1
    assert again.stderr.count("\n") == 1
    assert "--force" in again.stderr


def test_generate_loads_a_model_with_attached_maps(model, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "linear"
    lj.prune(lj.load(model), lj.load_text("pydoc"), drop=1, method="linear", criterion="deepest", tokens=3_000).save(
        folder
    )
    options = ["--max-new-tokens", "8", "--json"]
    monkeypatch.setattr(sys, "argv", ["layerjump", "generate", str(folder), "Once upon", *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    whole = lj.load(folder)
    inputs = whole.tokenization.generation_inputs(["Once upon"])
    written = whole.hf.generate(**inputs, max_new_tokens=8, do_sample=False, pad_token_id=0)
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    assert text["ids"] == written[0, inputs["input_ids"].shape[1] :].tolist()


def test_a_refitted_model_is_written_without_its_working_folder(model, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "out"
    options = ["--drop", "1", "--method", "refit", *SMALL, "--json", "-o", str(folder)]
    monkeypatch.setattr(sys, "argv", ["layerjump", "prune", model, *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    record = json.loads(capsys.readouterr().out)
    assert [step["part"] for step in record["refitted"]] == ["ffn", "attn", "ffn"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of"),
        (["--drop", "1", "--draft-blocks", "2"], "give one of"),
        (["--drop", "4"], "leaves none"),
        (["--drop", "-1"], "less than one"),
        (["--max-loss-ratio", "lots"], "1.05x"),
        (["--drop", "1", "--protect", "one"], "expected numbers"),
        (["--drop", "1", "--method", "rotation"], "use fold"),
    ],
)
def test_bad_input_is_one_line(model, tmp_path, monkeypatch, capsys, arguments, said):
    command = ["prune", model, *arguments, *SMALL, "-o", str(tmp_path / "out")]
    assert said in refused(monkeypatch, capsys, *command)
    assert not (tmp_path / "out").exists()
