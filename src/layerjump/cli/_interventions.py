"""Options that change hidden states while a command runs the model, the same in `lens` and `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerjump.cli._options import OptionPanel, parse_numbers
from layerjump.errors import BadIntervention

if TYPE_CHECKING:
    from layerjump.lens.lens import Lens

_option = OptionPanel("Interventions")
SWAP: tuple[str, str] | None = _option(None, "Exchange two tokens' directions, e.g. ' Paris' ' Rome'.", "--swap")
STEER: list[str] | None = _option(None, "Steer towards a token; repeatable.", "--steer")
ABLATE: list[str] | None = _option(None, "Project a token's direction out; repeatable.", "--ablate")
STRENGTH = _option(0.3, "--steer: share of each state's norm that is added; negative steers away.", "--strength")
LEVELS: str | None = _option(None, "Levels that are changed, e.g. 10-20.", "--levels")
EDIT_POSITIONS: str | None = _option(
    None, "Positions that are changed, e.g. 0,3-5 (default: all, generated ones too).", "--edit-positions"
)
INTERVENTION_LENS = _option(
    "mat", "The lens that tells tokens' directions if there are no --jumps; the first use fits it.", "--lens"
)


@dataclass(frozen=True)
class Interventions:
    """What the options ask for."""

    swap: tuple[str, str] | None
    steer: Sequence[str] | None
    ablate: Sequence[str] | None
    strength: float
    levels: Sequence[str] | None
    positions: str | None

    @property
    def is_active(self) -> bool:
        return bool(self.swap or self.steer or self.ablate)

    def __str__(self) -> str:
        edits = [f"{' and '.join(map(repr, self.swap))} exchanged"] if self.swap else []
        edits += [f"{self.strength:+g} towards {token!r}" for token in self.steer or ()]
        edits += [f"{token!r} ablated" for token in self.ablate or ()]
        return f"{', '.join(edits)} at levels {join_ranges(self.levels or ())}"

    def check(self, lens: Lens) -> None:
        """Raise for tokens, levels and positions that the lens' model does not have, before anything runs."""
        if self.is_active:
            with self.apply(lens):
                pass

    @contextmanager
    def apply(self, lens: Lens) -> Iterator[None]:
        """Change the states of the lens' model inside the `with` block; the lens tells the tokens' directions."""
        from layerjump.interventions.lens_interventions import ablate, steer, swap

        if not self.levels:
            raise BadIntervention("expected --levels for --swap, --steer and --ablate, e.g. --levels 10-20, got none")
        positions = (
            None
            if self.positions is None
            else list(parse_numbers(",".join(parse_ranges(self.positions)), BadIntervention))
        )
        with ExitStack() as stack:
            if self.swap:
                stack.enter_context(swap(lens, *self.swap, levels=self.levels, positions=positions))
            for token in self.steer or ():
                options = {"levels": self.levels, "strength": self.strength, "positions": positions}
                stack.enter_context(steer(lens, token, **options))  # type: ignore[arg-type]
            if self.ablate:
                stack.enter_context(ablate(lens, self.ablate, levels=self.levels, positions=positions))
            yield


def join_ranges(entries: Sequence[str]) -> str:
    """A list in short: `0, 3-6, 5.mid`."""
    runs: list[list[str]] = []
    for entry in entries:
        if runs and entry.isdecimal() and runs[-1][-1].isdecimal() and int(entry) == int(runs[-1][-1]) + 1:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def parse_ranges(text: str) -> list[str]:
    """The entries of a list such as `0,3-6,5.mid`, in which `3-6` stands for 3, 4, 5 and 6."""
    entries: list[str] = []
    for item in text.split(","):
        first, dash, last = item.strip().partition("-")
        if dash and first.isdecimal() and last.isdecimal():
            entries += [str(number) for number in range(int(first), int(last) + 1)]
        else:
            entries.append(item.strip())
    return entries
