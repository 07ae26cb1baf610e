"""On-disk cache of default jumps fitted on the built-in corpus.

They are in layerjump's home folder: `jumps/<fingerprint of the weights>/<text>-<tokens>-<estimator>`. A folder is
written under a temporary name and renamed, under a lock: a second process waits and then loads what the first fitted.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from layerjump.data.corpus import load_text
from layerjump.data.positions import MASKED_SHARE
from layerjump.errors import BadArtifact, BadEstimator
from layerjump.io import only_writer, replace_folder
from layerjump.jumps import serialization
from layerjump.jumps.collect_moments import Progress, plan_run
from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.models.default_model import cache_home
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model

TEXT = "pydoc"
TOKENS = 16_000


def cached_jumps(
    model: Model,
    estimators: Sequence[str] = ("mat",),
    *,
    text: str = TEXT,
    tokens: int = TOKENS,
    progress: Progress | None = None,
) -> dict[str, Jumps]:
    """Return default jumps of each estimator: those in the cache, the others from one pass over the text."""
    for name in estimators:
        required = find_estimator(name, closed_form=True).required
        if required:
            raise BadEstimator(
                f"{name} needs a {required[0]}, so there are no default jumps of it; fit it, and pass the jumps"
            )
    folders = {name: cache_folder(model, name, text=text, tokens=tokens) for name in estimators}
    jumps = _load_all(folders, model)
    if len(jumps) == len(folders):
        return jumps
    with only_writer(cache_home() / "jumps" / fingerprint(model.hf), wait=True):
        jumps = _load_all(folders, model)  # another process may have been first
        missing = [name for name in folders if name not in jumps]
        # One pass over the text serves all estimators that need the same pairs and features.
        passes: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name in missing:
            passes[find_estimator(name).pairs, find_estimator(name).features].append(name)
        for names in passes.values():
            moments = plan_run(
                model,
                text,
                estimator=names[0],
                positions=MASKED_SHARE if model.masked else None,
                tokens=tokens,
                use_validation=any(find_estimator(name).needs_validation() for name in names),
            ).run(progress=progress)
            jumps |= {name: solve_jumps(moments, name, model=model) for name in names}
        for name in missing:
            replace_folder(folders[name], jumps[name].save_pretrained, force=True)
    return {name: jumps[name] for name in folders}


def has_cached_jumps(
    model: Model, estimators: Sequence[str] = ("mat",), *, text: str = TEXT, tokens: int = TOKENS
) -> bool:
    """Whether the cache holds the jumps of all these estimators; the files are not read."""
    folders = [cache_folder(model, name, text=text, tokens=tokens) for name in estimators]
    return all((folder / serialization.TENSORS).is_file() for folder in folders)


def cache_folder(model: Model, estimator: str, *, text: str = TEXT, tokens: int = TOKENS) -> Path:
    """Return the folder of these jumps in the cache, whether or not it exists."""
    # A file may change under its name, so it is identified by its content.
    name = text if text == TEXT else load_text(text).sha256[:16]
    return cache_home() / "jumps" / fingerprint(model.hf) / f"{name}-{tokens}-{estimator}"


def _load_all(folders: Mapping[str, Path], model: Model) -> dict[str, Jumps]:
    """The jumps of those folders that exist and can be loaded."""
    jumps: dict[str, Jumps] = {}
    for name, folder in folders.items():
        with contextlib.suppress(BadArtifact):  # missing, or broken: fitted again
            jumps[name] = serialization.load(folder, model=model)
    return jumps
