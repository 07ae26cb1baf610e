"""Forward hooks that are removed when their `with` block ends."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle


class Hooks:
    """Something that listens at modules' inputs and outputs while a model runs."""

    def __init__(self, places: Iterable[tuple[nn.Module, str]]) -> None:
        self._places = list(places)
        """(module, "in" or "out")."""
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for module, side in self._places:
            if side == "in":
                handle = module.register_forward_pre_hook(self._before, with_kwargs=True)
            else:
                handle = module.register_forward_hook(self._after)
            self._handles.append(handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is about to run."""
        raise NotImplementedError

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """A module has run."""
        raise NotImplementedError
