"""Run batches and yield hidden states at sites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from layerjump.data.batches import Batch
from layerjump.errors import BadModel
from layerjump.models.hooks import Hooks
from layerjump.models.structure import FINAL, Site, Structure

if TYPE_CHECKING:
    from layerjump.models.model import Model


@dataclass(frozen=True)
class States:
    """States at sites for one batch: row r of every tensor belongs to pick r of the batch."""

    batch: Batch
    at: dict[Site, Tensor]
    logits: Tensor | None = None

    def __getitem__(self, site: Site | str | int) -> Tensor:
        return self.at[Site.parse(site)]


def capture_states(
    model: Model,
    batches: Iterable[Batch],
    sites: Sequence[Site | str | int],
    *,
    logits: bool = False,
    room: int = 0,
) -> Generator[States, None, None]:
    """Yield the states of each batch at the sites, for the batch's picked positions only.

    The body runs no further than the last of the sites, and without its vocabulary product; `logits` adds the model's
    own logits of the picks. With `room` (picks of the largest batch) every batch's states are written over the last
    one's: over many batches of ever new sizes, memory taken and given back would fray.
    """
    from layerjump.models.model import require_model  # which imports this module

    require_model(model)
    wanted = [Site.parse(site) for site in sites]
    structure = model.structure
    last = Site(structure.n_blocks)
    tapped = [site for site in wanted if site != FINAL]
    if (logits or FINAL in wanted) and last not in tapped:
        tapped.append(last)
    if logits:
        model.require_predictions()
    with Recorder(structure, tapped, room) as recorder:
        for batch in batches:
            found = recorder.run(model, batch)
            own = None
            with torch.no_grad():
                if logits or FINAL in wanted:
                    found[FINAL] = structure.to_final(found[last])
                if logits:
                    own = structure.decode(found[FINAL])
            made = States(batch, {site: found[site] for site in wanted}, own)
            del found, own
            yield made
            del made  # so that two batches' states are not held while the next is run


class _Enough(Exception):
    """Every site is found: what follows in the model need not run."""


class Recorder(Hooks):
    """Hooks that copy the picked rows at sites while a model runs; they are gone when the `with` ends."""

    def __init__(self, structure: Structure, sites: Sequence[Site], room: int = 0) -> None:
        self._room = room
        self._held: dict[Site, Tensor] = {}
        """Site → the rows that every batch's states are written to, where there is room for them."""
        self._wanted: dict[tuple[nn.Module, str], dict[int, list[Site]]] = defaultdict(dict)
        for site in sites:
            tap = structure.tap(site)
            self._wanted[tap.module, tap.side].setdefault(tap.call, []).append(site)
        self._sites = list(sites)
        self._stops = False
        self._calls: dict[tuple[nn.Module, str], int] = {}
        self._found: dict[Site, Tensor] = {}
        self._rows: Tensor | None = None
        super().__init__(self._wanted)

    @torch.no_grad()
    def run(self, model: Model, batch: Batch) -> dict[Site, Tensor]:
        """The states of the batch's picks at the sites."""
        # Row and position become one index: some modules see (batch · positions, d), most (batch, positions, d).
        self.start(batch.row * batch.input_ids.shape[1] + batch.position)
        # accelerate moves weights to and fro behind each module that it has spread: those runs must end as they began.
        self._stops = not hasattr(model.hf, "hf_device_map")
        try:
            model.body(batch.input_ids, batch.attention_mask, batch.source_ids, batch.source_mask)
        except _Enough:
            pass
        finally:
            self._stops = False
        return self.take()

    def start(self, rows: Tensor) -> None:
        """Say which rows of the flattened (batch · positions) states the next forward pass is asked for."""
        self._rows, self._found, self._calls = rows, {}, defaultdict(int)

    def take(self) -> dict[Site, Tensor]:
        """What the last forward pass left."""
        missing = [str(site) for site in self._sites if site not in self._found]
        if missing:
            raise BadModel(
                f"the forward pass never reached {', '.join(missing)}: this model does not run the modules "
                f"its family's row names (an unusual configuration?)"
            )
        found, self._found = self._found, {}
        return found

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._keep(module, "in", args[0] if args else kwargs["hidden_states"])

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._keep(module, "out", output[0] if isinstance(output, tuple) else output)

    def _keep(self, module: nn.Module, side: str, states: Tensor) -> None:
        call = self._calls[module, side]
        self._calls[module, side] = call + 1
        for site in self._wanted[module, side].get(call, ()):
            self._found[site] = self._kept(site, states)
        if self._stops and len(self._found) == len(set(self._sites)):
            raise _Enough

    def _kept(self, site: Site, states: Tensor) -> Tensor:
        """The picked rows, always a copy: Falcon adds to its feed-forward output in place afterwards."""
        assert self._rows is not None
        states = states.reshape(-1, states.shape[-1])
        rows = self._rows.to(states.device)
        if len(rows) > self._room:
            return states.index_select(0, rows)
        if site not in self._held:
            self._held[site] = states.new_empty(self._room, states.shape[-1])
        return torch.index_select(states, 0, rows, out=self._held[site][: len(rows)])
