"""The pickled matrices of "Jump to Conclusions": a folder of `i_j.pickle`, each a map from level i to level j.

With an intercept a file holds a list of two tensors, A and b. Levels are numbered as ours: j = L is before the final
norm. Files for parts of blocks (`pi_a_b.pickle`) in the same folder are not read.
"""

from __future__ import annotations

import re
from pathlib import Path

from layerjump import io
from layerjump.errors import BadForeignLens, WrongModel, argument
from layerjump.jumps.convert import foreign_lens, safe_pickle
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.maps import Affine
from layerjump.models.model import Model
from layerjump.models.sites import Pair, Site

_NAME = re.compile(r"([0-9]{1,4})_([0-9]{1,4})\.pickle")


def recognises(path: Path) -> bool:
    """Whether this is such a folder, or one file of it."""
    return bool(_list_files(path))


def read(path: Path, model: Model) -> foreign_lens.ForeignLens:
    """Read the matrices in a folder, or in one file, as maps between levels."""
    files = _list_files(path)
    if not files:
        raise BadForeignLens(f"expected a folder with files named like 0_12.pickle, got {path}, which has none")
    maps, d = {}, model.d_model
    for (source, target), file in sorted(files.items()):
        if not source.index < target.index <= model.n_blocks:
            raise WrongModel(
                f"{file} maps level {source} to level {target}, but the model has levels 0 to {model.n_blocks}; load "
                f"the model that it was fitted on"
            )
        content = safe_pickle.read_pickle(file, foreign_lens.max_bytes(model, 1))
        weight, *biases = content if isinstance(content, list) and content else [content]
        if len(biases) > 1:
            raise BadForeignLens(
                f"expected a matrix and perhaps an intercept, but {file} holds {1 + len(biases)} things"
            )
        weight = foreign_lens.check_tensor(weight, (d, d), "its matrix", file)
        bias = foreign_lens.check_tensor(biases[0], (d,), "its intercept", file) if biases else None
        maps[source, target] = Affine.of(weight, bias=bias)
    return foreign_lens.ForeignLens(maps, "mat")


def write(jumps: Jumps, model: Model, folder: Path) -> list[Pair]:
    """Write the jumps from a level to a later one; return those that were written."""
    pairs = [(source, target) for source, target in jumps if source.part == target.part == "level" and source < target]
    if not pairs:
        raise BadForeignLens(f"{jumps} has no jump between levels to write; fit with {argument('pairs', 'all')}")
    if _list_files(folder):
        raise BadForeignLens(
            f"{folder} holds matrices already, and the new ones would be mixed with them; use a new folder"
        )
    with io.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for source, target in pairs:
        affine = foreign_lens.plain_map(jumps, (source, target))
        weight = affine.weight.float()
        content = weight if affine.bias is None else [weight, affine.bias.float()]
        safe_pickle.write_pickle(folder / f"{source}_{target}.pickle", content)
    return pairs


def _list_files(path: Path) -> dict[Pair, Path]:
    files: dict[Pair, Path] = {}
    for file in path.iterdir() if path.is_dir() else [path] if path.is_file() else []:
        match = _NAME.fullmatch(file.name)
        if match is None:
            continue
        pair = Site(int(match[1])), Site(int(match[2]))
        if pair in files:
            raise BadForeignLens(
                f"{path} has two matrices {pair[0]} → {pair[1]}, {files[pair].name} and {file.name}; remove one"
            )
        files[pair] = file
    return files
