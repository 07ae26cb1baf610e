"""The states of every level of a training forward pass, with their gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from layerjump.errors import BadTraining
from layerjump.inputs.anatomy import Anatomy
from layerjump.inputs.hooks import Hooks
from layerjump.inputs.sites import Site


class Levels(Hooks):
    """Hooks that hold on to levels 0 to L of the last forward pass, whole and differentiable.

    They are a Hugging Face model's own block outputs, so level L is before the final norm; in a wrapped model
    (`DistributedDataParallel`) give the model inside.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        anatomy = Anatomy(hf)
        self._levels: dict[tuple[nn.Module, str], dict[int, int]] = {}
        for level in range(anatomy.n_blocks + 1):
            tap = anatomy.tap(Site(level))
            self._levels.setdefault((tap.module, tap.side), {})[tap.call] = level
        self._turns = Counter(anatomy.blocks)  # a block that is shared runs several times a pass
        self._calls: Counter[tuple[nn.Module, str]] = Counter()
        self._states: dict[int, Tensor] = {}
        self._last = anatomy.n_blocks
        super().__init__(self._levels)

    @property
    def states(self) -> list[Tensor]:
        """Levels 0 to L of the last forward pass, each (batch, positions, d)."""
        if len(self._states) <= self._last:
            raise BadTraining(
                f"levels were asked for, but {len(self._states)} of {self._last + 1} have been seen; run the model "
                "within `with Levels(model)`, and without gradient checkpointing"
            )
        return [self._states[level] for level in range(self._last + 1)]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        # The states stay to be asked for, the places in the pass do not: it may have been cut short.
        self._calls.clear()

    def clear(self) -> None:
        """Let go of the states, and of the graph behind them."""
        self._states.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(module, "in", args[0] if args else kwargs["hidden_states"])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._keep(module, "out", output[0] if isinstance(output, tuple) else output)

    def _keep(self, module: nn.Module, side: str, states: Tensor) -> None:
        call = self._calls[module, side] % self._turns[module]
        self._calls[module, side] += 1
        level = self._levels[module, side].get(call)
        if level == 0:
            self._states.clear()  # a new pass begins
        if level is not None:
            self._states[level] = states
