"""Linear shortcuts in transformers.

    import layerjump as lj
    model = lj.load("smollm2")                    # or a hub id, a folder, a GGUF file
    text = lj.read("pydoc")                       # or a file, a hub dataset, a list of strings

The rooms, in the order in which data flows (a module imports only from earlier rooms):

    inputs/    text → tokens → states: models, families, self-check, corpora, batches, forward hooks
    cli.py     the command line

Names are loaded on first use, so that `import layerjump` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerjump.inputs.batches import Batch as Batch
    from layerjump.inputs.batches import Batches as Batches
    from layerjump.inputs.batches import batches as batches
    from layerjump.inputs.check import self_check as self_check
    from layerjump.inputs.corpus import Corpus as Corpus
    from layerjump.inputs.corpus import read as read
    from layerjump.inputs.corpus import split as split
    from layerjump.inputs.models import Model as Model
    from layerjump.inputs.models import load as load
    from layerjump.inputs.positions import Positions as Positions
    from layerjump.inputs.sites import Site as Site
    from layerjump.inputs.states import states as states

__version__ = "0.1.0.dev0"

_HOME = {
    "Batch": "inputs.batches",
    "Batches": "inputs.batches",
    "Corpus": "inputs.corpus",
    "Model": "inputs.models",
    "Positions": "inputs.positions",
    "Site": "inputs.sites",
    "batches": "inputs.batches",
    "load": "inputs.models",
    "read": "inputs.corpus",
    "self_check": "inputs.check",
    "split": "inputs.corpus",
    "states": "inputs.states",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'layerjump' has no attribute {name!r}")
    return getattr(importlib.import_module(f"layerjump.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
