"""On-disk cache of default jumps fitted on the built-in corpus.

They lie in layerjump's home folder: `jumps/<the weights' fingerprint>/<text>-<tokens>-<estimator>`. A folder is written
under a temporary name and renamed, under a lock: a second process waits and then loads what the first one fitted.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from filelock import FileLock

from layerjump.data.corpus import load_text
from layerjump.data.positions import MASKED_SHARE
from layerjump.errors import BadArtifact, BadEstimator, argument
from layerjump.io import writing
from layerjump.jumps import serialization
from layerjump.jumps.collect import plan_run
from layerjump.jumps.fit import TO_PREDICTIONS, plan_settings, selects, solve_jumps
from layerjump.jumps.jumps import Jumps
from layerjump.models.bundled_model import cache_home
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
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Jumps]:
    """Jumps from every level to the last by each estimator: those kept, the others from one pass over the text.

    `progress` is called after each batch with the tokens done and the tokens to do.
    """
    for estimator in estimators:
        _check(estimator)
    place = _place(model)
    folders = {name: place / _name(name, text, tokens) for name in estimators}
    found = _load_all(folders, model)
    if len(found) == len(folders):
        return found
    with writing(place):
        place.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place / ".lock")
        lock.acquire()
    try:
        found = _load_all(folders, model)  # another process may have been first
        missing = [name for name in folders if name not in found]
        if missing:
            found |= _fit(model, missing, text, tokens, progress)
        for name in missing:
            _keep(found[name], folders[name])
    finally:
        lock.release()
    return {name: found[name] for name in folders}


def has_cached_jumps(
    model: Model, estimators: Sequence[str] = ("mat",), *, text: str = TEXT, tokens: int = TOKENS
) -> bool:
    """Whether `kept_jumps` would find all of these on disk, without a look inside."""
    folders = [cache_folder(model, name, text=text, tokens=tokens) for name in estimators]
    return all((folder / serialization.TENSORS).is_file() for folder in folders)


def cache_folder(model: Model, estimator: str, *, text: str = TEXT, tokens: int = TOKENS) -> Path:
    """Where these jumps are kept, if they are."""
    return _place(model) / _name(estimator, text, tokens)


def _place(model: Model) -> Path:
    return cache_home() / "jumps" / fingerprint(model.hf)


def _name(estimator: str, text: str, tokens: int) -> str:
    # A file may change under its name, so it goes by what it holds.
    said = text if text == TEXT else load_text(text).sha256[:16]
    return f"{said}-{tokens}-{estimator}"


def _check(estimator: str) -> None:
    selects(estimator)  # an error if there is none of this name
    if estimator == "low-rank":
        raise BadEstimator(
            f"low-rank needs a rank, so no default jumps exist; fit them with {argument('estimator', 'low-rank')} and "
            f"{argument('rank')}, and give their folder"
        )


def _load_all(folders: Mapping[str, Path], model: Model) -> dict[str, Jumps]:
    """What is kept in these folders and can be used."""
    found: dict[str, Jumps] = {}
    for name, folder in folders.items():
        with contextlib.suppress(BadArtifact):  # not there, or broken: it is fitted again
            found[name] = serialization.load(folder, model=model)
    return found


def _fit(
    model: Model,
    estimators: Sequence[str],
    text: str,
    tokens: int,
    progress: Callable[[int, int], None] | None,
) -> dict[str, Jumps]:
    found: dict[str, Jumps] = {}
    # Those onto `final` want sums of their own.
    for names in ([n for n in estimators if n != TO_PREDICTIONS], [TO_PREDICTIONS]):
        wanted = [plan_settings(name) for name in names if name in estimators]
        if not wanted:
            continue
        collected = plan_run(
            model,
            text,
            positions=MASKED_SHARE if model.masked else None,
            tokens=tokens,
            **wanted[0] | {"select": any(each["select"] for each in wanted)},
        ).run(progress=progress)
        found |= {name: solve_jumps(collected, name, model=model) for name in names}
    return found


def _keep(jumps: Jumps, folder: Path) -> None:
    with writing(folder):
        work = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            jumps.save_pretrained(work / "jumps")
            shutil.rmtree(folder, ignore_errors=True)  # broken, or it would have been used
            (work / "jumps").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
