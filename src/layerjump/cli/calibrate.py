"""`layerjump calibrate`: choose an exit rule that keeps a target agreement, and save it with the jumps."""

from __future__ import annotations

from pathlib import Path

import typer

from layerjump.cli._options import COLUMN, JSON, MODEL, SEED, TEXT, LoadModel, loads_model, option, text_option
from layerjump.cli._output_folder import locks_output
from layerjump.cli._printing import log, print_table


@locks_output("run the same command again", option="jumps")
@loads_model
def calibrate(
    model: str = MODEL,
    jumps: Path = typer.Option(help="Folder of jumps; the exit rule is saved there."),
    target: float = option(0.95, "Agreement with the full model to guarantee."),
    confidence: float = option(0.95, "Confidence level of the guarantee."),
    rule_types: str = option("gap,probe,two-stage", "Candidate rules: gap, probe, two-stage."),
    self_generated_tokens: int | None = option(
        None, "Calibrate on self-generated text: continue the opening of each document by this many tokens."
    ),
    draft_documents: int = option(
        400, "Documents whose continuations drafters for `generate --verify` are fitted on (0: no drafters)."
    ),
    text: str = TEXT,
    column: str | None = COLUMN,
    documents: int = text_option(2_000, "Largest number of documents."),
    seed: int = SEED,
    as_json: bool = JSON,
    *,
    load: LoadModel,
) -> None:
    """Find the cheapest exit rule that keeps a target agreement with the full model; save it with the jumps.

    Drafters for `generate --verify` are fitted and chosen too. Costs are measured on this machine. The guarantee holds
    for text like the calibration text, or, with --self-generated-tokens, for text that the model writes: closer to
    generation, slower.

    [bold]layerjump calibrate smollm2 --jumps jumps --text wiki.txt --target 0.95[/]
    [bold]layerjump calibrate smollm2 --jumps jumps --text wiki.txt --self-generated-tokens 64[/]
    [bold]layerjump generate smollm2 "Once upon a time" --jumps jumps[/]    generate with the calibrated rule
    """
    from layerjump.data.corpus import load_text
    from layerjump.generation.calibration import calibration_file
    from layerjump.generation.calibration.calibrate import calibrate as find_rule
    from layerjump.jumps.jumps import Jumps

    loaded = load(model)
    calibration = find_rule(
        loaded,
        Jumps.from_pretrained(jumps, model=loaded),
        load_text(text, column=column),
        target=target,
        confidence=confidence,
        rule_types=[name.strip() for name in rule_types.split(",")],  # type: ignore[misc]
        documents=documents,
        self_generated_tokens=self_generated_tokens,
        draft_documents=draft_documents,
        seed=seed,
        log=log,
    )
    path = calibration_file.save_calibration(calibration, jumps)
    about = calibration.report.model_dump(mode="json", by_alias=True)
    rows = [
        {"what": f"{rule} {name}", "value": about[rule][name]}
        for rule in ("rule", "lossless")
        for name in ("kind", "levels", "threshold")
    ]
    rows.append({"what": "lossless unverified", "value": about["unverified"]})
    rows.append({"what": "lossless cost (select)", "value": about["lossless_cost"]})
    if (drafts := about["drafts"]) is not None:
        rows.append({"what": "drafters", "value": drafts["drafters"]})
        rows += [{"what": name.replace("_", " "), "value": drafts[name]} for name in ("tokens_per_step", "speedup")]
    rows += [{"what": f"test {name.replace('_', ' ')}", "value": value} for name, value in about["test"].items()]
    rows += [{"what": f"cost of {kind} (select)", "value": value} for kind, value in about["select_cost"].items()]
    rows += [{"what": f"{name}, ms", "value": ms} for name, ms in about["costs"].items()]
    print_table(str(calibration), rows, as_json=as_json)
    log(f"wrote {path}")
