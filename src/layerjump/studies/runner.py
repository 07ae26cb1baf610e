"""Run studies one after another; save each when it is done, and resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layerjump import __version__
from layerjump.errors import BadArtifact, NewerFormat, argument
from layerjump.io import read_json, write_json, write_text, writing
from layerjump.metrics.timing import describe_machine
from layerjump.models.fingerprint import fingerprint
from layerjump.studies.registry import Study
from layerjump.studies.results import Result, plain
from layerjump.studies.setup import Setup, differences

FORMAT = 1
KIND = "layerjump results"
FILE = "results.json"

Say = Callable[[str], None]


def run_studies(
    setup: Setup,
    studies: Sequence[Study],
    folder: Path,
    *,
    command: str = "",
    resume: bool = False,
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Run the studies and write `results.json` after each; returns what that file holds."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    before = load_results(path) if resume and path.exists() else None
    pairs = {study.level_pairs for study in studies if not study.unable(setup)}
    if before:
        # All pairs draw other positions: what is still to do must read the same jumps as what was done.
        pairs.add(str(before.get("level_pairs")))
    setup.level_pairs = "all" if "all" in pairs else "to-last"
    results = _fresh(setup, command)
    if before:
        _require_same(before, results, path)
        results["studies"] = dict(before["studies"])
    for study in studies:
        if study.name in results["studies"]:
            say(f"{study.name}: done before")
            _hand_on(setup, Result.from_json(results["studies"][study.name]))
            continue
        result = _run_one(setup, study, say)
        _hand_on(setup, result)
        results["studies"][study.name] = result.as_json()
        for name, text in result.files.items():
            write_text(folder / name, text)
        write_json(path, results)
    return results


def _hand_on(setup: Setup, result: Result) -> None:
    """Later studies may build on an earlier one's result."""
    setup.keep(f"{result.study} result", lambda: result)


def _run_one(setup: Setup, study: Study, say: Say) -> Result:
    reason = study.unable(setup)
    if reason:
        say(f"{study.name}: skipped, {reason}")
        return Result(study.name, skipped=reason)
    say(f"{study.name}: {study.asks}")
    start = time.perf_counter()
    result = study.run(setup)
    result.seconds = time.perf_counter() - start
    return result


def _fresh(setup: Setup, command: str) -> dict[str, Any]:
    model, corpus = setup.model, setup.corpus
    return plain(
        {
            "kind": KIND,
            "format": FORMAT,
            "layerjump": __version__,
            "machine": describe_machine(),
            "command": command,
            "model": {
                "name": model.name,
                "revision": model.revision,
                "fingerprint": fingerprint(model.hf),
                "family": model.hf.config.model_type,
                "task": model.structure.family.task,
                "blocks": model.n_blocks,
                "width": model.d_model,
                "vocabulary": model.structure.vocab_size,
            },
            "text": {"name": corpus.name, "sha256": corpus.sha256, "note": corpus.note},
            "other_texts": [{"name": other.name, "sha256": other.sha256} for other in setup.others],
            "settings": asdict(setup.settings),
            "differs_from_paper": differences(setup),
            "level_pairs": setup.level_pairs,
            "studies": {},
        }
    )


def _require_same(before: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """An unfinished run goes on only with the same model, text and settings."""
    for name in ("model", "text", "other_texts", "settings", "level_pairs"):
        if before.get(name) != now[name]:
            raise BadArtifact(
                f"{path} holds results with another {name} than this run's; give "
                f"{argument('force', True)} in place of {argument('resume', True)}, or another folder"
            )


def load_results(path: Path) -> dict[str, Any]:
    """Read a `results.json`, or the one in a folder."""
    path = path / FILE if path.is_dir() else path
    saved = read_json(path)
    if saved.get("kind") != KIND or not isinstance(saved.get("studies"), dict):
        raise BadArtifact(
            f"{path} does not hold results of `layerjump study`; give a folder that it wrote"
        )
    if type(saved.get("format", 0)) is not int:
        raise BadArtifact(
            f"{path} has format {str(saved['format'])[:50]!r}, but a number was wanted; run the study again"
        )
    if saved.get("format", 0) > FORMAT:
        raise NewerFormat(
            f"{path} has format {str(saved['format'])[:50]}, but this version reads up to {FORMAT}; update layerjump"
        )
    return saved
