"""The model card of jumps on the hub: what they are, how to use them, held-out scores of every level."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerjump.jumps.jumps import Jumps

HUB_OWNER = "layerjump"
"""Where the jumps of a model are looked for: `layerjump/<model>`."""
_SLOTS = ("kl", "kl_identity", "agreement", "agreement_identity")


@dataclass(frozen=True)
class HeldOutScores:
    """Scores of a lens and of the logit lens on held-out text, a value for each level."""

    text: str
    text_sha256: str
    positions: int
    level: list[int]
    kl: list[float]
    """KL from the model's prediction to the lens', in nats."""
    kl_identity: list[float]
    agreement: list[float]
    """Share of positions at which the top token is the model's."""
    agreement_identity: list[float]

    @classmethod
    def of(cls, jumps: Jumps) -> HeldOutScores | None:
        """The scores that jumps carry in their provenance; None without any, or where they are incomplete."""
        record = jumps.provenance.settings.get("held_out")
        if not isinstance(record, dict) or record.keys() != cls.__dataclass_fields__.keys():
            return None
        columns = [record["level"], *(record[name] for name in _SLOTS)]
        if not all(isinstance(column, list) and len(column) == len(record["level"]) for column in columns):
            return None
        return cls(**record)


def hub_name(model_name: str) -> str | None:
    """The repository of the jumps of a model: `layerjump/` and the last part of its hub id; None for local models."""
    if Path(model_name).expanduser().exists() or model_name.count("/") > 1 or model_name.startswith((".", "~")):
        return None
    return f"{HUB_OWNER}/{model_name.rpartition('/')[2]}"


def model_card(jumps: Jumps, repo_id: str, *, command: str | None = None) -> str:
    """Return the README.md of a repository with jumps; `command` is the one that fitted them."""
    fitted = jumps.provenance
    # JSON strings are YAML strings: a name may hold anything.
    lines = ["---", "library_name: layerjump", "tags: [layerjump, logit-lens, interpretability]"]
    if hub_name(fitted.model) is not None and "/" in fitted.model:
        lines.append(f"base_model: {json.dumps(fitted.model)}")
    lines += ["---", "", f"# Jumps of {_cell(fitted.model.rpartition('/')[2] or fitted.model)}", "", _describe(jumps)]
    lines += ["", "```python", "import layerjump as lj", "", f"model = lj.load({json.dumps(fitted.model)})"]
    lines += [f"jumps = lj.Jumps.from_pretrained({json.dumps(repo_id)}, model=model)"]
    lines += ['print(lj.Lens(model, jumps)("The capital of France is"))', "```", "", *_scores(jumps), "", "## Fit", ""]
    facts = {
        "estimator": fitted.estimator,
        "text": f"{fitted.text} (sha256 {fitted.text_sha256[:16]})",
        "tokens run": f"{fitted.tokens:,}",
        "positions (fit, validation, test)": f"{fitted.n_fit:,}, {fitted.n_select:,}, {fitted.n_test:,}",
        "seed": fitted.seed,
        "weights (fingerprint)": fitted.fingerprint[:16],
        "layerjump": fitted.layerjump,
    }
    lines += ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in facts.items())]
    if command is not None:
        lines += ["", "```", command, "```"]
    return "\n".join(lines) + "\n"


def _describe(jumps: Jumps) -> str:
    return (
        f"Linear maps of [layerjump](https://github.com/layerjump/layerjump) from the hidden levels of "
        f"{_cell(jumps.provenance.model)} to its predictions: {len(jumps)} maps, {jumps.n_parameters:,} parameters."
    )


def _scores(jumps: Jumps) -> list[str]:
    """The table of held-out scores: as a lens if they were taken, and R² where maps have one."""
    held_out = HeldOutScores.of(jumps)
    if held_out is not None:
        head = ["level", "KL", "KL, logit lens", "same top token", "same top token, logit lens"]
        columns = zip(held_out.level, *(getattr(held_out, name) for name in _SLOTS), strict=True)
        rows = [[str(level), *(f"{value:.3f}" for value in values)] for level, *values in columns]
        about = f"Against the model's own predictions at {held_out.positions:,} positions of {_cell(held_out.text)}."
        return ["## Held-out scores", "", about, "", *_table(head, rows)]
    scored = [(pair, info) for pair, info in jumps.info.items() if info.r2 is not None]
    if not scored:
        return ["## Held-out scores", "", "None were taken."]
    rows = [
        [f"{source} → {target}", f"{info.r2[0]:.3f}", f"{info.r2_identity[0]:.3f}" if info.r2_identity else "–"]
        for (source, target), info in scored
        if info.r2 is not None
    ]
    about = f"R² on {jumps.provenance.n_test:,} positions of the test split."
    return ["## Held-out scores", "", about, "", *_table(["jump", "R²", "R² of the identity"], rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _cell(value: object) -> str:
    """A value in one line of Markdown, without what would end a cell or open a tag."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("<", "&lt;")
