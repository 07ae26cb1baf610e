"""The result of a calibration: calibrated exit configurations, and the report of how they were found.

The classes are the records of the calibration file; a field may have another key there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from layerjump.generation.exit_rules import ExitConfig, Never

RuleType = Literal["gap", "probe", "two-stage"]


class FileRecord(BaseModel):
    """A part of the calibration file."""

    model_config = ConfigDict(frozen=True, strict=True, populate_by_name=True)


def in_file(key: str, **settings: Any) -> Any:
    """A field that has another key in the file."""
    return Field(validation_alias=key, serialization_alias=key, **settings)


class Costs(FileRecord):
    """Milliseconds at batch size 1."""

    block: float
    """One block, one token."""
    queued_token: float = in_file("waiting")
    """What a queued token adds when it runs through a block together with another."""
    unembedding: float = in_file("head")
    """One reading of a level: jump, final norm, unembedding, softmax."""
    probe: float = in_file("gate")
    shortlist_unembedding: float | None = in_file("short", default=None)
    """One reading of a level with a shortlist; None: there is no shortlist."""

    @property
    def early_unembedding(self) -> float:
        """One reading of a level before the last."""
        return self.unembedding if self.shortlist_unembedding is None else self.shortlist_unembedding

    def full_model(self, n_blocks: int) -> float:
        """One token for which the full model runs."""
        return n_blocks * self.block + self.unembedding

    def __str__(self) -> str:
        costs = self.model_dump(exclude_none=True)
        return ", ".join(f"{name.replace('_', ' ')} {cost:.3g}" for name, cost in costs.items())


def _check_rising(levels: tuple[int, ...]) -> tuple[int, ...]:
    if list(levels) != sorted(set(levels)):
        raise ValueError("levels must be strictly increasing")
    return levels


_PROBE_IN_FILE = (
    BeforeValidator(lambda name: "probe" if name == "gate" else name),
    PlainSerializer(lambda name: "gate" if name == "probe" else name),
)
"""A rule with a probe has another name in the file."""
_TypeInFile = Annotated[RuleType, *_PROBE_IN_FILE]
_Share = Annotated[float, Field(ge=0, le=1)]


class RuleRecord(FileRecord):
    """A rule without its weights."""

    rule_type: _TypeInFile = in_file("kind")
    levels: Annotated[tuple[int, ...], AfterValidator(_check_rising)]
    threshold: _Share | None
    """None: never exit."""
    unembed_above: _Share = in_file("worth")


class DraftRuleRecord(RuleRecord):
    """A rule for verified generation, without its weights."""

    min_acceptance: float = in_file("least", default=0.0, ge=0)
    """The share of drafts that must be accepted to pay for them all."""


class PositionCounts(FileRecord):
    """Positions used in each role."""

    probes: int = in_file("gates")
    selection: int = in_file("select")
    thresholds: int
    test: int


class HeldOutResult(FileRecord):
    """The rule on documents that nothing was chosen on; costs are relative to the full model's."""

    agreement: float
    low: float
    high: float
    """The 95 % bootstrap interval of the agreement."""
    blocks_saved: float
    cost: float
    unembeddings: float = in_file("heads")
    """Per token, like the next."""
    probe_evaluations: float = in_file("gates")


class CurvePoint(FileRecord):
    """Examples of similar predicted probability."""

    predicted: float
    """Their mean predicted probability of the full model's token."""
    observed: float = in_file("found")
    """The share that gave it."""
    n: int


class DrafterRecord(FileRecord):
    """The drafts of one drafter in the replay, by depth."""

    drafted: list[int]
    accepted: list[int]


class DraftsRecord(FileRecord):
    """The drafters that calibration chose, without their weights."""

    drafters: list[str]
    max_tokens: int = Field(ge=1)
    step_seconds: list[tuple[int, float]]
    """(columns, seconds) of verification steps on the machine of the calibration."""
    priors: dict[str, dict[int, _Share]]
    """Drafter → evidence → the share of right proposals."""
    tokens_per_step: float
    """Expected, like the next: in a replay of documents that nothing was fitted on."""
    speedup: float
    """Over the same loop without drafts."""
    by_drafter: dict[str, DrafterRecord]
    head_sites: list[str]
    """What the draft head reads of the last position; none: there is no draft head."""
    n_fit: int
    """Self-generated tokens that the draft head was fitted on."""


class CalibrationReport(FileRecord):
    """How a calibration was made and what it achieves."""

    target: float
    confidence: float
    model: str
    fingerprint: str
    rule_type: Annotated[Literal[RuleType, "never"], *_PROBE_IN_FILE] = in_file("kind")
    rule: RuleRecord
    verified_rule: DraftRuleRecord = in_file("lossless")
    max_draft_tokens: int = in_file("unverified", ge=1)
    text: str
    text_sha256: str
    shortlist_tokens: int | None = in_file("shortlist", default=None)
    """Tokens of the shortlist; None: early levels are read with the full vocabulary."""
    positions: PositionCounts
    seed: int
    self_generated_tokens: int | None = in_file("own", default=None)
    """Tokens that the model wrote after each document's opening; None: the documents themselves were used."""
    costs: Costs
    selection_cost: dict[_TypeInFile, float] = in_file("select_cost")
    """Each rule type's cost on the selection documents, relative to the full model's."""
    verified_cost: float = in_file("lossless_cost")
    """The same of verified generation."""
    drafts: DraftsRecord | None = None
    """The drafters of verified generation; None: its exit rule alone, if that drafts."""
    test: HeldOutResult
    probe_curves: dict[int, list[CurvePoint]] = in_file("gate_curves")
    """Level → the probe's calibration curve on the test documents."""


@dataclass(frozen=True)
class Calibration:
    """Calibrated exit configurations, and the report of how they were found."""

    exit: ExitConfig
    """The cheapest that keeps the target agreement."""
    verified_exit: ExitConfig
    """The cheapest with `verify`; its rule is `Never` where drafts do not pay on this machine."""
    report: CalibrationReport = field(repr=False)

    @property
    def max_draft_tokens(self) -> int:
        """Drafts in one verification step."""
        drafts = self.verified_exit.drafts
        return self.report.max_draft_tokens if drafts is None else drafts.max_tokens

    def __str__(self) -> str:
        test = self.report.test
        no_drafts = isinstance(self.verified_exit.rule, Never)
        drafts = self.report.drafts
        verified = "no drafts" if no_drafts else f"up to {self.max_draft_tokens} drafts"
        if drafts is not None:
            verified = (
                f"up to {drafts.max_tokens} drafts by {', '.join(drafts.drafters)}, {drafts.tokens_per_step:.2f} "
                f"tokens a step, {drafts.speedup:.2f} times as fast expected"
            )
        return (
            f"{self.report.rule_type} at levels {list(self.exit.rule.levels or ())}: agreement {test.agreement:.3f} "
            f"({test.low:.3f} to {test.high:.3f}), {test.blocks_saved:.1%} of blocks saved, "
            f"{test.cost:.2f} of the full model's cost; verified: {verified}"
        )
