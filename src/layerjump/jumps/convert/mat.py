"""The pickled matrices of "Jump to Conclusions".

With an intercept it is a list of two tensors, A and b. Levels are ours: j = L is before the final norm. Files for parts
of blocks (`pi_a_b.pickle`) that lie in the same folder are not read.
"""

from __future__ import annotations

import re
from pathlib import Path

from layerjump import io
from layerjump.errors import BadForeignLens, WrongModel, argument
from layerjump.jumps.convert.foreign_lens import ForeignLens, checked, most_bytes, plain_map
from layerjump.jumps.convert.safe_unpickle import read_pickle, write_pickle
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.jumps.pairs import Pair
from layerjump.models.model import Model
from layerjump.models.structure import Site

_NAME = re.compile(r"([0-9]{1,4})_([0-9]{1,4})\.pickle")


def recognises(path: Path) -> bool:
    """Whether this is such a folder, or one file of it."""
    return bool(_files(path))


def read(path: Path, model: Model) -> ForeignLens:
    """The matrices in a folder, or in one file, as maps between levels."""
    found = _files(path)
    if not found:
        raise BadForeignLens(
            f"{path} has no matrix in it, but files called 0_12.pickle or the like were wanted; give their folder"
        )
    maps = {pair: _map(found[pair], pair, model) for pair in sorted(found)}
    return ForeignLens(maps, "mat")


def write(jumps: Jumps, model: Model, folder: Path) -> list[Pair]:
    """Write the jumps that lead from a level to a later one; gives back those that were written."""
    pairs = [pair for pair in jumps if pair[0].part == pair[1].part == "level"]
    pairs = [(source, target) for source, target in pairs if source < target]
    if not pairs:
        raise BadForeignLens(
            f"{jumps} has no jump between levels to write; fit with {argument('pairs', 'all')}"
        )
    if _files(folder):
        raise BadForeignLens(
            f"{folder} holds matrices already, and the new ones would be mixed with them; give a new folder"
        )
    with io.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for source, target in pairs:
        affine = plain_map(jumps, (source, target))
        weight = affine.weight.float()
        content = weight if affine.bias is None else [weight, affine.bias.float()]
        write_pickle(folder / f"{source}_{target}.pickle", content)
    return pairs


def _files(path: Path) -> dict[Pair, Path]:
    listed = path.iterdir() if path.is_dir() else [path] if path.is_file() else []
    named = {file: _NAME.fullmatch(file.name) for file in listed}
    found: dict[Pair, Path] = {}
    for file, match in named.items():
        if match is None:
            continue
        pair = Site(int(match[1])), Site(int(match[2]))
        if pair in found:
            raise BadForeignLens(
                f"{path} has two matrices {pair[0]} → {pair[1]}, {found[pair].name} and {file.name}; remove one"
            )
        found[pair] = file
    return found


def _map(path: Path, pair: Pair, model: Model) -> Affine:
    source, target = pair
    if not source.index < target.index <= model.n_blocks:
        raise WrongModel(
            f"{path} leads from level {source} to level {target}, but the model given has levels 0 to "
            f"{model.n_blocks}; load the model that it was fitted on"
        )
    content = read_pickle(path, most_bytes(model, 1))
    weight, *biases = content if isinstance(content, list) and content else [content]
    if len(biases) > 1:
        raise BadForeignLens(
            f"{path} holds {1 + len(biases)} things, but a matrix and perhaps an intercept were wanted; give another"
        )
    width = model.d_model
    weight = checked(weight, (width, width), "its matrix", path)
    bias = checked(biases[0], (width,), "its intercept", path) if biases else None
    return Affine.of(weight, bias=bias)
