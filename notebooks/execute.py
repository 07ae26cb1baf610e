"""Execute the notebooks in place, so that they hold the outputs of this version.

    python notebooks/execute.py [--model FOLDER] [NAME …]

With a model, it stands in for `smollm2`; the notebooks keep that name.
"""

import argparse
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
DEFAULT = '"smollm2"'


def execute(path: Path, model: str | None = None) -> None:
    """Run all cells of a notebook in a new kernel and write it with their outputs."""
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    for cell in notebook.cells:
        if cell.cell_type == "code" and model is not None:
            cell.source = cell.source.replace(DEFAULT, repr(model))
    NotebookClient(notebook, timeout=1800, kernel_name="python3").execute()
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        cell.metadata.pop("execution", None)  # times differ from run to run
        if cell.cell_type == "code":  # notes of libraries name paths of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    # The state of widgets holds the whole page; the table next to it shows the same.
    notebook.metadata.pop("widgets", None)
    nbformat.write(notebook, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks without .ipynb (default: all)")
    parser.add_argument("--model", help="a model folder in place of smollm2")
    options = parser.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore"
    os.environ["PLOTLY_RENDERER"] = "notebook_connected"  # figures without a copy of plotly in each notebook
    for path in sorted(HERE.glob("*.ipynb")):
        if not options.names or path.stem in options.names:
            print(path.name, flush=True)
            execute(path, options.model)


if __name__ == "__main__":
    main()
