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
from layerjump.jumps.serialization import check_model
from layerjump.models.model import Model
from layerjump.models.sites import Pair

log = logging.getLogger("layerjump")


@dataclass(frozen=True)
class Format:
    """How another tool's lenses are recognised, read and written."""

    description: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, Model], ForeignLens]
    write: Callable[[Jumps, Model, Path], list[Pair]]
    """Returns the jumps that were written: no format can hold all pairs."""


FORMATS = {
    "tuned-lens": Format(
        "a folder with config.json and params.pt", tuned_lens.recognises, tuned_lens.read, tuned_lens.write
    ),
    "mat": Format("a folder of files named like 0_12.pickle", mat.recognises, mat.read, mat.write),
    "jacobian": Format("a .pt file", jacobian_lens.recognises, jacobian_lens.read, jacobian_lens.write),
}


def import_lens(path: str | Path, model: Model, *, format: str | None = None) -> Jumps:
    """Read a lens of another tool as jumps of a model.

    `format` is tuned-lens, mat or jacobian; by default it is recognised from the files. No code in the files is run.
    Sizes are compared with the model's; these files do not record which weights the lens was fitted on.
    """
    source = Path(path).expanduser()
    if not source.exists():
        raise BadForeignLens(f"{source} does not exist; check the name")
    if format is not None:
        reader = _find_format(format)
    else:
        recognised = [entry for entry in FORMATS.values() if entry.recognises(source)]
        if not recognised:
            expected = "; ".join(f"{entry.description} ({n})" for n, entry in FORMATS.items())
            raise BadForeignLens(
                f"unrecognised lens format: {source}; expected {expected}; pass {argument('format')} to override"
            )
        reader = recognised[0]
    return to_jumps(reader.read(source, model), model, source)


def export_lens(jumps: Jumps, model: Model, path: str | Path, format: str) -> list[Pair]:
    """Write jumps as a lens of another tool; return the jumps that its format cannot hold."""
    writer = _find_format(format)
    check_model(jumps, model, allow_other_weights=jumps.used_on is not None)
    written = set(writer.write(jumps, model, Path(path).expanduser()))
    left_out = [pair for pair in jumps if pair not in written]
    if left_out:
        log.warning(
            "%s of %s jumps left out, from %s: %s cannot hold them",
            len(left_out),
            len(jumps),
            describe_sites({source for source, _ in left_out}),
            format,
        )
    return left_out


def _find_format(name: str) -> Format:
    if name not in FORMATS:
        raise BadForeignLens(f"unknown format {name!r}; use one of {', '.join(FORMATS)}")
    return FORMATS[name]
