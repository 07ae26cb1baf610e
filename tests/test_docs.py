"""Documentation that is made from the code is up to date, and names what it should."""

import re
import runpy
import warnings
from collections import Counter
from pathlib import Path

import pytest
from helpers.small_llama import save_small_llama
from transformers import AutoTokenizer

from layerjump.models.support_table import read_table
from layerjump.studies.runner import STUDIES

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_command_line_page_is_what_the_help_says():
    made = runpy.run_path(str(DOCS / "make_cli.py"))["page"]()
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == made, "run: python docs/make_cli.py"


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_is_explained(study):
    assert f"\n## {study}\n" in (DOCS / "studies.md").read_text(encoding="utf-8")


def test_the_examples_of_models_that_transformers_does_not_know_run():
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 2
    exec("\n".join(blocks), {"__name__": "families"})


def test_the_counts_of_degrees_are_those_of_the_table():
    page = (DOCS / "families.md").read_text(encoding="utf-8")
    names = {"causal": "causal", "masked": "masked", "seq2seq": "encoder–decoder", "image-text": "image–text"}
    for task, name in (*names.items(), (None, "all")):
        counts = Counter(row.degree for row in read_table() if task in (row.task, None))
        cells = (name, counts.total(), counts["full"], counts["levels"], counts["refused"])
        assert f"| {' | '.join(map(str, cells))} |" in page
        assert counts["states"] == 0


BLOCK = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
PAGES = {"index": 60, "guides": 60}
"""Pages whose code runs, and the documents of text that it needs."""
CITIES = [" Paris", " Rome"]


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    """A small model with as many blocks as SmolLM2, whose tokenizer knows the words of the pages."""
    folder = save_small_llama(tmp_path_factory.mktemp("docs") / "deep", num_hidden_layers=30, vocab_size=1100)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(CITIES)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name, deep_model, tmp_path, monkeypatch):
    """All blocks in one namespace, on a small model and a part of the text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path / "home"))
    page = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    assert blocks
    code = "\n".join(blocks).replace('"smollm2"', repr(str(deep_model)))
    code = code.replace('lj.load_text("pydoc")', f'lj.load_text("pydoc", limit={PAGES[name]})')
    code = code.replace("tokens=8_000", "tokens=2_000")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few positions for the width of the model
        exec(compile(code, f"{name}.md", "exec"), {"__name__": name})
