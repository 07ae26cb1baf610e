"""Documentation that is made from the code is up to date, and names what it should."""

import runpy
from pathlib import Path

import pytest

from layerjump.studies.runner import STUDIES

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_the_command_line_page_is_what_the_help_says():
    made = runpy.run_path(str(DOCS / "make_cli.py"))["page"]()
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == made, "run: python docs/make_cli.py"


@pytest.mark.parametrize("study", STUDIES)
def test_every_study_is_explained(study):
    assert f"\n## {study}\n" in (DOCS / "studies.md").read_text(encoding="utf-8")
