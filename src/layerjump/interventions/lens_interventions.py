"""Change hidden states while a model runs: steer, swap, ablate, patch.

    lens = lj.Lens(model, jumps)
    with lj.swap(lens, " Paris", " Rome", levels=range(10, 21)):     # exchange what the lens reads of two tokens
        lens("The capital of France is")
        lj.generate(model, None, "The capital of France is")
    with lj.steer(lens, " Rome", levels=[20], strength=0.3):         # add 0.3 of each state's norm
        model.hf.generate(ids)
    with lj.ablate(lens, [" Paris"], levels=[20], positions=[4]):    # project a direction out, at one position
        lens("The capital of France is")
    with lj.patch(lens, trajectory, levels=[12], positions=[4]):     # states of another text
        lens("The capital of Italy is")

An intervention acts on the Hugging Face model itself, so it acts in a lens, in both `generate` and under the hooks of
other tools. It ends with its `with` block. Interventions nest; the outer one acts first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from layerjump.errors import BadIntervention, argument
from layerjump.lens.lens import Lens, SiteName
from layerjump.lens.token_direction import depends_on_state
from layerjump.lens.trajectory import Trajectory
from layerjump.models.hooks import Hooks
from layerjump.models.model import Model
from layerjump.models.sites import Site
from layerjump.models.structure import Tap

Direction = str | int | Tensor
"""A token, whose direction the lens tells at each level, or a vector as wide as the states."""
Edit = Callable[[Tensor], Tensor]
"""Hidden states (rows, positions, d) → those to go on with."""
PositionEdit = Callable[[Tensor, Tensor], Tensor]
"""Hidden states (rows, positions, d) and the positions in the text → those to go on with."""


@contextmanager
def steer(
    lens: Lens,
    direction: Direction,
    *,
    levels: Sequence[SiteName],
    strength: float = 0.3,
    positions: Sequence[int] | None = None,
) -> Iterator[Model]:
    """Add a direction to the states at some levels: h + strength · ‖h‖ · direction.

    Args:
        lens: Tells the direction of a token at each level; `Lens(model)` for plain unembedding directions.
        direction: A token, or a vector, whose length does not matter.
        levels: Levels or other sites of width d_model.
        strength: In units of each state's own norm; negative to steer away.
        positions: Positions in the text, from 0. Default: all, those of generated tokens too.
    """

    def edit(site: Site) -> Edit:
        directions = _Directions(lens, [direction], site)

        def add(states: Tensor) -> Tensor:
            unit = directions(states)[..., 0, :].to(states)
            return states + strength * states.norm(dim=-1, keepdim=True) * unit

        return add

    with _intervene(lens.model, levels, positions, edit):
        yield lens.model


@contextmanager
def swap(
    lens: Lens,
    first: Direction,
    second: Direction,
    *,
    levels: Sequence[SiteName],
    positions: Sequence[int] | None = None,
) -> Iterator[Model]:
    """Exchange two directions in the states at some levels: each gets the other's coordinate, all else stays.

    This is the smallest change that exchanges the state's projections on the two unit vectors. Arguments are those of
    `steer`.
    """

    def edit(site: Site) -> Edit:
        directions = _Directions(lens, [first, second], site)
        return lambda states: exchange_coordinates(states, directions(states))

    with _intervene(lens.model, levels, positions, edit):
        yield lens.model


def exchange_coordinates(states: Tensor, both: Tensor) -> Tensor:
    """States (…, d) whose coordinates along two unit vectors (…, 2, d) are exchanged, in the plane of the two."""
    coordinates = states.double().unsqueeze(-2) @ torch.linalg.pinv(both)
    change = (coordinates.flip(-1) - coordinates) @ both
    return states + change.squeeze(-2).to(states)


@contextmanager
def ablate(
    lens: Lens, directions: Sequence[Direction], *, levels: Sequence[SiteName], positions: Sequence[int] | None = None
) -> Iterator[Model]:
    """Project directions out of the states at some levels; arguments are those of `steer`."""
    if isinstance(directions, str | Tensor) or not len(directions):
        raise BadIntervention(f"expected a list of {argument('directions')}, such as [' Paris'], got {directions!r}")

    def edit(site: Site) -> Edit:
        at_states = _Directions(lens, directions, site)

        def project(states: Tensor) -> Tensor:
            plane = torch.linalg.qr(at_states(states).mT).Q
            return states - (states.double().unsqueeze(-2) @ plane @ plane.mT).squeeze(-2).to(states)

        return project

    with _intervene(lens.model, levels, positions, edit):
        yield lens.model


@contextmanager
def patch(
    lens: Lens,
    source: Trajectory,
    *,
    levels: Sequence[SiteName],
    positions: Sequence[int],
    source_positions: Sequence[int] | None = None,
) -> Iterator[Model]:
    """Replace the states at some levels and positions by those of another text, taken from its trajectory.

    `source_positions` are positions in the other text, one for each of `positions`. Default: the same.
    """
    pairs = dict(zip(positions, positions if source_positions is None else source_positions, strict=False))
    if source_positions is not None and len(source_positions) != len(positions):
        raise BadIntervention(
            f"expected as many {argument('source_positions')} as {argument('positions')}, got {len(source_positions)} "
            f"and {len(positions)}"
        )
    if source.model.d_model != lens.model.d_model:
        raise BadIntervention(
            f"expected a trajectory of {lens.model.name}, got one of {source.model.name} with another width; read the "
            f"other text with this model"
        )
    cells = {
        (site, at): source.state(site, source_at) for site in map(Site.parse, levels) for at, source_at in pairs.items()
    }

    def edit(site: Site) -> PositionEdit:
        return lambda states, at: torch.stack([cells[site, position] for position in at.tolist()]).to(states)

    with _Intervention(lens.model, _taps(lens.model, levels, edit), positions):
        yield lens.model


@contextmanager
def _intervene(
    model: Model, levels: Sequence[SiteName], positions: Sequence[int] | None, edit: Callable[[Site], Edit]
) -> Iterator[None]:
    def at_positions(site: Site) -> PositionEdit:
        change = edit(site)
        return lambda states, at: change(states)

    with _Intervention(model, _taps(model, levels, at_positions), positions):
        yield


def _taps(model: Model, levels: Sequence[SiteName], edit: Callable[[Site], PositionEdit]) -> dict[Tap, PositionEdit]:
    if isinstance(levels, str | int) or not len(levels):
        raise BadIntervention(f"expected a list of {argument('levels')}, such as [10, 11], got {levels!r}")
    return {model.structure.tap(site): edit(site) for site in map(Site.parse, levels)}


class _Directions:
    """Unit vectors (…, directions, d) in float64 for states (…, d); they are computed once where no state matters."""

    def __init__(self, lens: Lens, directions: Sequence[Direction], site: Site) -> None:
        self._lens, self._site, self._directions = lens, site, list(directions)
        width = lens.model.structure.width(site)
        readout = None if all(isinstance(direction, Tensor) for direction in directions) else lens.readout(site)
        for direction in directions:
            if not isinstance(direction, Tensor):
                lens.model.prediction_id(direction)
            elif direction.shape != (width,) or not direction.norm() > 0:
                raise BadIntervention(
                    f"expected a token or a non-zero vector of width {width}, got a vector of shape "
                    f"{tuple(direction.shape)}"
                )
        needs_states = readout is not None and depends_on_state(lens.model, readout)
        self._fixed = None if needs_states else self._compute(None)

    def __call__(self, states: Tensor) -> Tensor:
        return self._compute(states) if self._fixed is None else self._fixed.to(states.device)

    def _compute(self, states: Tensor | None) -> Tensor:
        rows = []
        for direction in self._directions:
            if isinstance(direction, Tensor):
                vector = direction.detach().double() / direction.detach().double().norm()
                vector = vector if states is None else vector.to(states.device).expand(states.shape)
            else:
                vector = self._lens.direction(direction, self._site, states)
            rows.append(vector)
        return torch.stack([row.to(rows[0].device) for row in rows], -2)


class _Intervention(Hooks):
    """Hooks that edit states; they know which positions of the text a pass holds, with a KV cache too."""

    def __init__(self, model: Model, edits: dict[Tap, PositionEdit], positions: Sequence[int] | None) -> None:
        if positions is not None and (not len(positions) or any(position < 0 for position in positions)):
            raise BadIntervention(f"expected {argument('positions')} from 0, or none for all, got {list(positions)}")
        blocks = model.structure.blocks
        # Early exit runs blocks one by one, so calls tell blocks apart only where blocks share a module.
        super().__init__(edits, counts_calls=len(set(blocks)) < len(blocks), entries=(model.hf, model.stack))
        self._edits = edits
        self._positions = None if positions is None else torch.tensor(sorted(set(positions)))
        self._length = 0
        """Tokens of the text up to and with those of this pass."""
        self._padding = torch.zeros(1, dtype=torch.long)
        """(rows,) or (1,) tokens of padding before each text."""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().enter(module, args, kwargs)
        inputs = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.dim() >= 2), None)
        cache = kwargs.get("past_key_values")
        past = cache.get_seq_length() if cache is not None else 0
        self._length = (0 if inputs is None else inputs.shape[1]) + int(past)
        mask = kwargs.get("attention_mask")
        if mask is None:
            self._padding = torch.zeros(1, dtype=torch.long)
        elif isinstance(mask, Tensor) and mask.dim() == 2:  # a mask of another form comes from one of these
            self._padding = mask.bool().long().argmax(1).cpu()

    def visit(self, tap: Tap, states: Tensor) -> Tensor:
        if states.dim() == 2:  # rows and positions in one: experts, for example
            if self._positions is not None:
                raise BadIntervention(
                    f"expected {argument('levels')} that keep positions apart, such as a level, got a site at which "
                    f"this model joins them; leave {argument('positions')} out"
                )
            return self._edits[tap](states[None].clone(), torch.arange(len(states)))[0]
        n_columns = states.shape[1]
        at = torch.arange(max(self._length, n_columns) - n_columns, max(self._length, n_columns))
        if self._positions is None:
            return self._edits[tap](states.clone(), at)
        changed = states.clone()
        padding = self._padding.expand(len(states))
        for offset in padding.unique():
            rows = (padding == offset).nonzero()
            columns = torch.isin(at - offset, self._positions).nonzero()[:, 0]
            if len(columns):
                changed[rows, columns] = self._edits[tap](states[rows, columns], at[columns] - offset)
        return changed
