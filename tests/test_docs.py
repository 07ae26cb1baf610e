"""Documentation that is made from the code is up to date, and names what it should."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from layerjump.models.architectures import read_table
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
