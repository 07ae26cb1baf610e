"""Every cell of every notebook runs, on a small model and a little text, and its result can be shown."""

import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SMALLER = {
    'lj.load_text("pydoc")': 'lj.load_text("pydoc", limit=150)',
    "tokens=8_000": "tokens=2_000",
    "tokens=4_000": "tokens=2_000",
    "tokens=6_000": "tokens=2_000",
    "n_test_positions=200": "n_test_positions=60",
    "n_test_positions=150": "n_test_positions=60",
    "max_new_tokens=24": "max_new_tokens=8",
}
"""What is replaced so that a notebook takes seconds."""


def cells(path):
    nbformat = pytest.importorskip("nbformat")
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_six():
    assert len(NOTEBOOKS) == 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, data_folder, tmp_path, monkeypatch):
    """In IPython, as a kernel runs it: the result of the last line of a cell goes through the formatters."""
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setenv("LAYERJUMP_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shell = interactive.InteractiveShell.instance()
    shell.reset(new_session=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few positions for the width of the model
        for cell in cells(path):
            source = cell.source.replace('"smollm2"', repr(str(data_folder / "tiny-gpt2")))
            for old, new in SMALLER.items():
                source = source.replace(old, new)
            result = shell.run_cell(source)
            result.raise_error()
            if result.result is not None:
                data, _ = shell.display_formatter.format(result.result)
                assert data or hasattr(result.result, "_ipython_display_")  # plotly's figures display themselves


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(path):
    """Every notebook holds what its last run showed, and no error."""
    code = cells(path)
    outputs = [output for cell in code for output in cell.outputs]
    assert all(cell.execution_count for cell in code), "run: make notebooks"
    assert outputs
    assert all(output.output_type != "error" for output in outputs)
    assert path.stat().st_size < 1_000_000
