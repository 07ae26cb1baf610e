"""Import a lens of another tool as jumps; export jumps as a lens of another tool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from layerjump.errors import BadForeignLens, argument
from layerjump.jumps.convert import jacobian_lens, mat, tuned_lens
from layerjump.jumps.convert.foreign_lens import ForeignLens, to_jumps
from layerjump.jumps.jumps import Jumps, describe_sites
from layerjump.jumps.pairs import Pair
from layerjump.jumps.serialization import check_model
from layerjump.models.model import Model

log = logging.getLogger("layerjump")


@dataclass(frozen=True)
class Format:
    """How another tool's lenses are told, read and written."""

    recognises: Callable[[Path], bool]
    read: Callable[[Path, Model], ForeignLens]
    write: Callable[[Jumps, Model, Path], list[Pair]]
    """Gives back the jumps that were written: no format holds all there are."""
    wanted: str


FORMATS = {
    "tuned-lens": Format(
        tuned_lens.recognises,
        tuned_lens.read,
        tuned_lens.write,
        "a folder with config.json and params.pt",
    ),
    "mat": Format(
        mat.recognises,
        mat.read,
        mat.write,
        "a folder of 0_12.pickle and the like",
    ),
    "jacobian": Format(
        jacobian_lens.recognises, jacobian_lens.read, jacobian_lens.write, "a .pt file"
    ),
}


def import_lens(path: str | Path, model: Model, *, format: str | None = None) -> Jumps:
    """Read a lens of another tool as jumps of a model: `tuned-lens`, `mat` or `jacobian`, told by the files.

    Nothing in the files is run. Sizes are compared with the model's; that its weights are those the lens was fitted on,
    nobody can tell from these files.
    """
    source = Path(path).expanduser()
    if not source.exists():
        raise BadForeignLens(f"there is no file or folder {source}; check the name")
    chosen = _format(format) if format else _recognised(source)
    return to_jumps(chosen.read(source, model), model, source)


def export_lens(jumps: Jumps, model: Model, path: str | Path, format: str) -> list[Pair]:
    """Write jumps as a lens of another tool; gives back the jumps for which its format has no place."""
    chosen = _format(format)
    check_model(jumps, model, allow_other_weights=jumps.used_on is not None)
    written = set(chosen.write(jumps, model, Path(path).expanduser()))
    left_out = [pair for pair in jumps if pair not in written]
    if left_out:
        log.warning(
            "%s of %s jumps left out, from %s: %s has no place for them",
            len(left_out),
            len(jumps),
            describe_sites({source for source, _ in left_out}),
            format,
        )
    return left_out


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise BadForeignLens(
            f"there is no format {name!r}; known are {', '.join(FORMATS)}: give one of them"
        )
    return FORMATS[name]


def _recognised(source: Path) -> Format:
    for found in FORMATS.values():
        if found.recognises(source):
            return found
    known = "; ".join(f"{found.wanted} ({name})" for name, found in FORMATS.items())
    raise BadForeignLens(
        f"{source} looks like no lens that is known here: wanted is {known}; give one, or say which "
        f"with {argument('format')}"
    )
