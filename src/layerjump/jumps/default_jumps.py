"""Jumps of a model that nobody has to fit by hand: in the package, in the cache, on the hub; or fitted once.

`pretrained_jumps` looks, in this order, in the package, which brings jumps of the bundled model; in the cache; on the
hub, for `layerjump/<model>`. `cached_jumps` returns those of named estimators, and fits what is missing on the built-in
corpus. The cache is in layerjump's home folder: `jumps/<fingerprint of the weights>/<text>-<tokens>-<estimator>`. A
folder is written under a temporary name and renamed, under a lock: a second process waits and then loads what the first
fitted.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from layerjump.data.corpus import load_text
from layerjump.data.positions import MASKED_SHARE
from layerjump.errors import BadArtifact, BadEstimator, JumpsNotFound, WrongModel
from layerjump.io import cache_home, only_writer, replace_folder
from layerjump.jumps import serialization
from layerjump.jumps.collect_moments import Progress, plan_run
from layerjump.jumps.estimators.registry import find_estimator
from layerjump.jumps.fit import solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.jumps.model_card import hub_name
from layerjump.models import bundled_model
from layerjump.models.fingerprint import fingerprint
from layerjump.models.model import Model

TEXT = "pydoc"
TOKENS = 16_000
ESTIMATORS = ("calibrated", "mat")
"""Estimators whose cached jumps a lens takes if none is named, the best first."""
PACKAGED = Path(__file__).parent / "packaged"
"""Jumps that the package brings: a folder for each bundled model."""

log = logging.getLogger("layerjump")


def load_jumps(model: Model | str) -> Jumps:
    """Return jumps of a model without fitting: from the package, the cache, or the hub (`layerjump/<model>`).

    The name of a model is enough for the package and the hub; the cache and the check that weights are those of the fit
    need the model itself. Raises `JumpsNotFound`, which says how to fit some.
    """
    name = model if isinstance(model, str) else model.name
    jumps = _by_name(name) if isinstance(model, str) else pretrained_jumps(model)
    if jumps is None:
        hub = hub_name(name)
        places = [
            "in the package",
            *([] if isinstance(model, str) else ["in the cache"]),
            *([f"as {hub} on the hub"] if hub else []),
        ]
        raise JumpsNotFound(
            f"there are no jumps of {name} {' or '.join(places)}; fit some with lj.fit(model, text), or run: layerjump "
            f"fit {name} -o jumps"
        )
    return jumps


def pretrained_jumps(model: Model) -> Jumps | None:
    """Return the jumps that exist for a model: in the package, in the cache, or on the hub; None without any."""
    jumps = _packaged(model.name, model)
    if jumps is not None:
        return jumps
    for name in ESTIMATORS:
        if has_cached_jumps(model, (name,)) and (cached := _load_all({name: cache_folder(model, name)}, model)):
            return cached[name]
    return _from_hub(model.name, model)


def _by_name(name: str) -> Jumps | None:
    packaged = _packaged(name, None)
    return _from_hub(name, None) if packaged is None else packaged


def _packaged(name: str, model: Model | None) -> Jumps | None:
    """The jumps that the package brings for a bundled model, under its own name or its hub id."""
    name = bundled_model.NAMES[0] if name == bundled_model.HUB_ID else name
    if name not in bundled_model.NAMES or not (PACKAGED / name).is_dir():
        return None
    # The bundled model has the original weights or, from the package index, their 4-bit form: jumps serve both.
    return serialization.load(PACKAGED / name, model=model, allow_other_weights=True)


def _from_hub(name: str, model: Model | None) -> Jumps | None:
    """The jumps `layerjump/<model>`, downloaded or in the hub's cache; None without any, and for those of others."""
    from huggingface_hub import constants

    repository = hub_name(name)
    if repository is None:
        return None
    offline = constants.HF_HUB_OFFLINE or not bundled_model.hub_answers()
    try:
        return Jumps.from_pretrained(repository, model=model, local_files_only=offline)
    except WrongModel as error:
        log.warning("%s on the hub is not used: %s", repository, error)
    except BadArtifact:
        pass  # there is no such repository, or the hub cannot be reached
    return None


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
