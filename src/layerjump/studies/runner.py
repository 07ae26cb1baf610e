"""Run studies one after another, save each when it is done, and resume.

`STUDIES` is the list of all studies. To add one, write a module with a `STUDY` and add it to the list.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerjump import __version__
from layerjump.errors import BadArtifact, BadStudy, NewerFormat, argument
from layerjump.io import read_json, write_json, write_text, writing
from layerjump.jumps.cost_estimate import format_size, require_memory
from layerjump.metrics.timing import describe_machine
from layerjump.models.fingerprint import fingerprint
from layerjump.studies import (
    architecture,
    attention_heads,
    data_requirements,
    early_exit,
    examples,
    exit_probes,
    failures,
    finetuning,
    human_evaluation,
    layer_skipping,
    linearity,
    map_size,
    predictions,
    pruning,
    r2,
    submodules,
    survey,
    text_transfer,
    training_dynamics,
)
from layerjump.studies.charts import Panel
from layerjump.studies.formatting import number, table_of_records
from layerjump.studies.results import (
    AnyStudy,
    MainTextInfo,
    ModelInfo,
    Result,
    Results,
    Skipped,
    Study,
    StudyRunInfo,
    TextInfo,
    from_json,
    to_json,
)
from layerjump.studies.setup import Setup, paper_deviations

_ALL: tuple[AnyStudy, ...] = (
    r2.STUDY,
    predictions.STUDY,
    early_exit.STUDY,
    exit_probes.STUDY,
    linearity.STUDY,
    submodules.STUDY,
    attention_heads.STUDY,
    layer_skipping.STUDY,
    pruning.STUDY,
    examples.STUDY,
    survey.STUDY,
    text_transfer.STUDY,
    data_requirements.STUDY,
    training_dynamics.STUDY,
    finetuning.STUDY,
    architecture.STUDY,
    map_size.STUDY,
    failures.STUDY,
    human_evaluation.STUDY,
)
STUDIES = {study.name: study for study in _ALL}
MAIN = ("r2", "predictions", "early_exit", "linearity", "examples")
"""The studies of a run by default."""

_FORMER_NAMES = {
    "exits": "early_exit",
    "gates": "exit_probes",
    "heads": "attention_heads",
    "alternation": "layer_skipping",
    "transfer": "text_transfer",
    "data": "data_requirements",
    "dynamics": "training_dynamics",
    "finetune": "finetuning",
    "size": "map_size",
    "plausibility": "human_evaluation",
}
"""Names of studies in older results.json files and commands → today's, which are those of their modules."""

FORMAT = 1
KIND = "layerjump results"
FILE = "results.json"


def select_studies(names: str | None) -> list[AnyStudy]:
    """Return the studies of a list such as `r2,early_exit`, in the order of `STUDIES`; `all` is every one."""
    if names is None:
        return [STUDIES[name] for name in MAIN]
    listed = [name.strip() for name in names.split(",")]
    selected = list(STUDIES) if names == "all" else [_FORMER_NAMES.get(name, name) for name in listed]
    for name in selected:
        if name not in STUDIES:
            raise BadStudy(f"unknown study {name!r}; choose one of {', '.join(STUDIES)}, or all")
    return [study for name, study in STUDIES.items() if name in selected]


def run_studies(
    setup: Setup,
    studies: Sequence[AnyStudy],
    folder: Path,
    *,
    command: str = "",
    resume: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Results:
    """Run the studies and write results.json after each; with `resume`, keep what an earlier run finished."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    before = load_results(path) if resume and path.exists() else None
    pairs = {study.level_pairs for study in studies if not study.cannot_run(setup)}
    if before:
        # All pairs draw other positions, and studies still to run must use the same jumps as those that ran.
        pairs.add(before.run.level_pairs)
    setup = replace(setup, level_pairs="all" if "all" in pairs else "to-last")

    model, corpus = setup.model, setup.corpus
    info = StudyRunInfo(
        layerjump=__version__,
        machine=describe_machine(),
        command=command,
        model=ModelInfo(
            name=model.name,
            revision=model.revision,
            fingerprint=fingerprint(model.hf),
            family=model.model_type,
            task=model.task,
            n_blocks=model.n_blocks,
            d_model=model.d_model,
            vocab_size=model.structure.vocab_size,
        ),
        text=MainTextInfo(corpus.name, corpus.sha256, corpus.note),
        other_texts=[TextInfo(other.name, other.sha256) for other in setup.others],
        settings=to_json(setup.settings),
        differs_from_paper=paper_deviations(setup),
        level_pairs=setup.level_pairs,
    )
    results = Results(info)
    if before:
        for name in ("model", "text", "other_texts", "settings", "level_pairs"):
            if getattr(before.run, name) != getattr(results.run, name):
                raise BadArtifact(
                    f"{path} holds results with another {name} than this run; pass {argument('force', True)} in place "
                    f"of {argument('resume', True)}, or another folder"
                )
        results.studies |= before.studies

    to_run = [study for study in studies if study.name not in results.studies and not study.cannot_run(setup)]
    if to_run:
        every_position = {study.all_position_pairs for study in to_run if study.all_position_pairs}
        needed = setup.estimate_bytes(sorted(every_position))
        log(f"memory {format_size(needed)} beyond the model, for the sums and maps of all studies")
        advice = f"run fewer studies at a time, or fewer {argument('estimators')}"
        require_memory(needed, "the sums and maps of all studies", model.device, advice=advice)
    for study in studies:
        if study.name in results.studies:
            log(f"{study.name}: done before")
        else:
            reason = study.cannot_run(setup)
            if reason:
                log(f"{study.name}: skipped, {reason}")
                results.studies[study.name] = Skipped(study.name, reason)
            else:
                log(f"{study.name}: {study.question}")
                start = time.perf_counter()
                results.studies[study.name] = result = study.run(setup)
                result.seconds = time.perf_counter() - start
                for name, text in result.files.items():
                    write_text(folder / name, text)
            write_json(path, results_to_json(results))
        setup.add_outcome(results.studies[study.name])
    return results


def results_to_json(results: Results) -> dict[str, Any]:
    """Return what results.json holds."""
    head = {"kind": KIND, "format": FORMAT}
    return head | to_json(results.run) | {"studies": to_json(results.studies)}


def results_from_json(saved: Mapping[str, Any]) -> Results:
    """Read what `results_to_json` returns."""
    run = from_json(StudyRunInfo, dict(saved))
    entries = from_json(dict[str, dict[str, Any]], saved.get("studies"))
    studies = {_FORMER_NAMES.get(name, name): entry for name, entry in entries.items()}
    return Results(run, {name: study_named(name).from_json(entry) for name, entry in studies.items()})


def load_results(path: Path) -> Results:
    """Read a results.json, or the one in a folder."""
    path = path / FILE if path.is_dir() else path
    saved = read_json(path)
    if saved.get("kind") != KIND or not isinstance(saved.get("studies"), dict):
        raise BadArtifact(f"{path} does not hold results of `layerjump study`; pass a folder that it wrote")
    version = saved.get("format", 0)
    if type(version) is not int:
        raise BadArtifact(f"{path}: expected a number as format, got {str(version)[:50]!r}; run the study again")
    if version > FORMAT:
        raise NewerFormat(
            f"{path} has format {str(version)[:50]}, but this version reads up to {FORMAT}; update layerjump"
        )
    return results_from_json(saved)


def study_named(name: str) -> AnyStudy:
    """Return a study; one that only another version has is shown as plain tables."""
    if name in STUDIES:
        return STUDIES[name]

    def figures(result: Result[dict[str, list[dict[str, Any]]], dict[str, Any]]) -> list[Panel]:
        return [
            Panel(table, f"{number(len(rows))} rows.", (table,), html=table_of_records(rows))
            for table, rows in result.tables.items()
            if rows
        ]

    def run(setup: Setup) -> Result[dict[str, list[dict[str, Any]]], dict[str, Any]]:
        raise BadStudy(f"unknown study {name!r}; choose one of {', '.join(STUDIES)}")

    return Study(name, name, run, figures)
