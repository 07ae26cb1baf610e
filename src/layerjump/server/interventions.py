"""The interventions of one request, applied while the model runs for it and for nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from layerjump.errors import BadIntervention
from layerjump.interventions.lens_interventions import ablate, patch, steer, swap
from layerjump.lens.lens import Lens, read_trajectories
from layerjump.lens.trajectory import Trajectory
from layerjump.models.model import Model
from layerjump.server.request_text import as_prompt, count_tokens
from layerjump.server.schemas import Intervention, PatchChange, SteerChange, SwapChange


class RequestInterventions:
    """A context in which the interventions of a request act.

    A generation lets other requests run between two tokens; `suspended` takes the interventions off meanwhile.
    """

    def __init__(self, lens: Lens, interventions: Sequence[Intervention], *, n_positions: int) -> None:
        self._lens, self._interventions = lens, interventions
        self._stack = ExitStack()
        self._sources = {change: _read_source(lens, change) for change in interventions if change.kind == "patch"}
        for change in interventions:
            positions = [change.position] if isinstance(change, PatchChange) else change.positions or ()
            if max(positions, default=0) >= n_positions:
                raise BadIntervention(
                    f"expected positions from 0 to {n_positions - 1} to change, got {max(positions)}; the text has no "
                    f"more tokens"
                )

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for change in self._interventions:
                stack.enter_context(self._context(change))
            self._stack = stack.pop_all()

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The plain model inside the `with` block, the changed one again after it."""
        self._stack.close()
        try:
            yield
        finally:
            self.__enter__()

    def _context(self, change: Intervention) -> AbstractContextManager[Model]:
        lens, levels = self._lens, change.levels
        if isinstance(change, PatchChange):
            source, at = self._sources[change], [change.source_position]
            return patch(lens, source, levels=levels, positions=[change.position], source_positions=at)
        if isinstance(change, SwapChange):
            return swap(lens, change.first, change.second, levels=levels, positions=change.positions)
        if isinstance(change, SteerChange):
            strength = change.strength
            return steer(lens, change.token, levels=levels, strength=strength, positions=change.positions)
        return ablate(lens, change.tokens, levels=levels, positions=change.positions)


def _read_source(lens: Lens, change: PatchChange) -> Trajectory:
    """The other text of a patch, read at the patched levels by the plain model."""
    text = as_prompt(change.source)
    count_tokens(lens.model, "other text", text)
    (trajectories,) = read_trajectories({"source": lens}, [text], k=1, levels=change.levels)
    return trajectories["source"]
