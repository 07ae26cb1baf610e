"""From states to jumps: sums, estimators, scores, files. `layerjump.fit(model, text)` fits jumps in one pass.

The room and its main function share a name, so the room itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **settings: Any) -> Any:
        """Fit jumps in one pass over a text (see `layerjump.fit.fit.fit`)."""
        from layerjump.fit.fit import fit

        return fit(*args, **settings)


sys.modules[__name__].__class__ = _Room
