"""Load any model, also one that `prune` saved as base and jumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layerjump.compress.cuts import blocks_in
from layerjump.compress.export import BASE, LINEAR
from layerjump.compress.stand_ins import attach
from layerjump.errors import BadArtifact, WrongModel
from layerjump.fit.files import read_json
from layerjump.fit.fingerprint import fingerprint
from layerjump.fit.jumps import Jumps
from layerjump.inputs import loading
from layerjump.inputs.models import Model
from layerjump.inputs.sites import Site


def load(source: str | Path, **settings: Any) -> Model:
    """Load a hub id, a folder, a GGUF file or the built-in `smollm2`, and check it.

    The settings are revision, device, dtype, device_map and trust_remote_code. The device is a GPU where there is one;
    on a CPU the dtype is float32, elsewhere the checkpoint's own. A folder of `prune --method linear` is loaded with
    its maps in place.
    """
    folder = Path(source).expanduser()
    if not (folder / LINEAR).is_file():
        return loading.load(source, **settings)
    head = read_json(folder / LINEAR)
    try:
        cuts = [(int(i), int(j)) for i, j in head["cuts"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadArtifact(f"{folder / LINEAR} is damaged: {error}; prune again") from error
    # The base is checked by itself: with maps in place its blocks no longer add up.
    model = loading.load(folder / BASE, **settings)
    if head.get("fingerprint") != fingerprint(model.hf):
        raise WrongModel(
            f"{folder / BASE} holds other weights than the jumps beside it were saved with; prune again"
        )
    jumps = Jumps.from_pretrained(folder)
    absent = [(i, j) for i, j in cuts if (Site(i), Site(j)) not in jumps]
    if absent:
        i, j = (str(level)[:20] for level in absent[0])
        raise BadArtifact(
            f"{folder / LINEAR} names a map from level {i} to {j}, which {folder} does not hold; prune again"
        )
    dropped = blocks_in(cuts)
    attach(model, {i - sum(block <= i for block in dropped): jumps[i, j] for i, j in cuts})
    return model
