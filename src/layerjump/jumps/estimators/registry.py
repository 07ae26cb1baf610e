"""The registry of estimators: what each one is, what it needs, and the function that computes its maps.

Python, the command line, the server and the help texts read this one table. A row names its function instead of
importing it, so that `layerjump --help` does not load torch. Adding an estimator means one function and one row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from layerjump.errors import BadEstimator, argument

if TYPE_CHECKING:
    from torch import Tensor

    from layerjump.jumps.maps import Affine, FeatureKind
    from layerjump.jumps.moments import Source, Target
    from layerjump.models.sites import Pair, Site

Pooling = Literal["pooled", "best-level"]
Scope = Literal["source", "run", "text"]
"""How an estimator's function is called.

- `source`: `f(source, targets, **settings) -> Iterator[Affine]`; all jumps from one site share one factorisation.
- `run`: `f(moments, settings, model) -> Iterator[SolvedMap]`; it reads all sites at once, or the model.
- `text`: `f(model, text, …) -> Jumps`; it reads the text itself, because second moments of states do not suffice.
"""


@dataclass(frozen=True, kw_only=True)
class EstimatorSettings:
    """The settings of estimators; None or False stands for the estimator's default."""

    strength: float | None = None
    """Regularisation strength in units of the mean variance; None: chosen on the validation split."""
    rank: int | None = None
    """Rank of the map."""
    metric: str | None = None
    """`unembedding`: weigh errors by their effect on the logits."""
    ojfa_pooling: Pooling | None = None
    """One map fitted to all levels' rows (`pooled`), or one level's map that serves all (`best-level`)."""
    noise: float | None = None
    """Length of the noise under which differences are taken, in units of the spread of the states."""
    keep_both_targets: bool = False
    """Keep the maps to level L and to `final`, so that `refine` can compare them after tuning."""

    def non_defaults(self) -> dict[str, Any]:
        """The settings that differ from their defaults, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        # By identity: a strength of 0 equals False, and is a setting.
        return {k: v for k, v in values.items() if v is not None and v is not False}

    def on_disk(self) -> dict[str, Any]:
        """The same as a jumps file records them: `how` stands for `ojfa_pooling` and for `keep_both_targets`."""
        recorded = self.non_defaults()
        if recorded.pop("keep_both_targets", False):
            recorded["how"] = KEPT_BOTH_TARGETS
        if "ojfa_pooling" in recorded:
            recorded["how"] = recorded.pop("ojfa_pooling")
        return recorded


KEPT_BOTH_TARGETS = "to-tune"
"""The value of `how` in a jumps file whose late levels have a map to level L and one to `final`."""


@dataclass(frozen=True)
class Estimator:
    """One way to compute maps."""

    name: str
    description: str
    function: str
    """Module and name of the function, within this package."""
    scope: Scope = "source"
    settings: tuple[str, ...] = ()
    """Fields of `EstimatorSettings` that it takes."""
    required: tuple[str, ...] = ()
    """Those of them that have no default."""
    uses_validation: bool = False
    """Whether it chooses something on the validation split (a strength, unless one is given)."""
    needs_model: bool = False
    """Whether second moments do not suffice: it compares predictions with the model's own."""
    same_width: bool = False
    """Whether source and target must have the same width."""
    pairs: str = "to-last"
    """Pairs that it is fitted on by default."""
    targets: Literal["any", "one", "predictions"] = "any"
    """Targets it can map to: any site, one for all sources, or `final` (and level L in addition)."""
    features: FeatureKind = "raw"
    """Features of the source states that it is fitted on by default."""
    float32_products: bool = False
    """Whether products in float32 are exact enough for it, where there are many."""
    served: bool = False
    """Whether the local page offers to fit it."""

    @property
    def reads_text(self) -> bool:
        """Whether it runs the model in its own way (backwards, with noise, in training) instead of solving moments."""
        return self.scope == "text"

    def needs_validation(self, strength: float | None = None) -> bool:
        """Whether a fit needs a validation split; not, if a strength is passed."""
        return self.uses_validation and strength is None

    def load(self) -> Callable[..., Any]:
        """Import the function that computes the maps."""
        module, _, name = self.function.partition(".")
        return getattr(importlib.import_module(f"layerjump.jumps.estimators.{module}"), name)

    def check_settings(self, settings: EstimatorSettings) -> None:
        """Raise `BadEstimator` for a setting that it does not take, and for one that it lacks."""
        passed = settings.non_defaults()
        for name in passed:
            if name not in self.settings:
                takes = ", ".join(map(argument, self.settings)) or "no settings"
                raise BadEstimator(
                    f"{self.name} has no setting {argument(name)}, it takes {takes}; leave {argument(name)} out"
                )
        for name in self.required:
            if name not in passed:
                raise BadEstimator(f"{self.name} needs a {name}; pass {argument(name)}")

    def check_targets(self, pairs: Sequence[Pair], n_blocks: int) -> None:
        """Raise `BadEstimator` for pairs that it cannot solve; called before a pass over the text."""
        from layerjump.models.sites import FINAL, Site

        targets = {target for _, target in pairs}
        lacking = {source for source, _ in pairs} - {a for a, target in pairs if target == FINAL}
        if self.targets == "predictions" and (lacking or targets - {FINAL, Site(n_blocks)}):
            raise BadEstimator(
                f"{self.name} maps to the state after the final norm; use {argument('pairs', self.pairs)} or to-final, "
                f"or an estimator such as affine, which maps to any site"
            )
        if self.targets == "one" and len(targets) > 1:
            raise BadEstimator(
                f"{self.name} is one map from every level to one target; use {argument('pairs', self.pairs)}"
            )

    def check_widths(self, pairs: Sequence[Pair], width: Callable[[Site], int]) -> None:
        """Raise `BadEstimator` for a source that is not as wide as its target, if it needs that."""
        for source, target in pairs if self.same_width else ():
            if width(source) != width(target):
                raise BadEstimator(
                    f"expected a source as wide as its target for {self.name}, got {source} ({width(source)}) and "
                    f"{target} ({width(target)}); use mat, affine or ridge"
                )


_ROWS = (
    Estimator("identity", "the state itself, unchanged (the logit lens)", "least_squares.identity", same_width=True),
    Estimator(
        "mean-shift", "the state, shifted by the difference of the means", "least_squares.mean_shift", same_width=True
    ),
    Estimator("mat", "least squares without an intercept, as in Jump to Conclusions", "least_squares.mat", served=True),
    Estimator("affine", "least squares with an intercept", "least_squares.affine", served=True),
    Estimator(
        "ridge",
        "least squares with an intercept and an L2 penalty",
        "least_squares.ridge",
        settings=("strength",),
        uses_validation=True,
        served=True,
    ),
    Estimator(
        "orthogonal", "the best rotation or reflection, and a shift", "least_squares.orthogonal", same_width=True
    ),
    Estimator(
        "low-rank",
        "reduced-rank regression with an intercept",
        "low_rank.low_rank",
        settings=("rank", "metric"),
        required=("rank",),
    ),
    Estimator("n-njtc", "reduced-rank regression of rank d // 100 (N-NJTC)", "n_njtc.n_njtc"),
    Estimator(
        "ojfa",
        "one low-rank map that serves all levels (OJFA)",
        "ojfa.solve_ojfa",
        scope="run",
        settings=("rank", "ojfa_pooling"),
        uses_validation=True,
        targets="one",
    ),
    Estimator(
        "calibrated",
        "ridge onto the state after the final norm, with a temperature",
        "calibrated.solve_calibrated",
        scope="run",
        settings=("keep_both_targets",),
        uses_validation=True,
        needs_model=True,
        pairs="predictions",
        targets="predictions",
        features="both",
        float32_products=True,
    ),
    Estimator(
        "jacobian",
        "the mean Jacobian of the last level, by backward passes",
        "jacobian.fit_jacobian",
        scope="text",
        needs_model=True,
        targets="one",
    ),
    Estimator(
        "differences",
        "least squares on differences of states under noise, by forward passes",
        "finite_differences.fit_finite_differences",
        scope="text",
        settings=("noise",),
        needs_model=True,
        targets="one",
    ),
    Estimator(
        "n-njtc-trained",
        "N-NJTC as published, trained by gradient descent",
        "n_njtc.train_n_njtc",
        scope="text",
        settings=("rank",),
        needs_model=True,
        targets="one",
    ),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}
CLOSED_FORM = tuple(name for name, row in ESTIMATORS.items() if not row.reads_text)
"""Estimators that are solved from second moments."""
FROM_TEXT = tuple(name for name, row in ESTIMATORS.items() if row.reads_text)
"""Estimators that run the model in their own way."""
SERVED = tuple(name for name, row in ESTIMATORS.items() if row.served)
"""Estimators that the local page offers to fit."""


def find_estimator(name: str, *, closed_form: bool = False) -> Estimator:
    """Return the row of this name; with `closed_form`, only one that is solved from second moments."""
    names = CLOSED_FORM if closed_form else tuple(ESTIMATORS)
    if name in names:
        return ESTIMATORS[name]
    if name in FROM_TEXT:
        function = ESTIMATORS[name].function.partition(".")[2]
        raise BadEstimator(
            f"{name} is not solved from second moments; call lj.{function}, or choose one of {', '.join(names)}"
        )
    raise BadEstimator(f"unknown estimator {name!r}; choose one of {', '.join(names)}")


def solve(
    name: str,
    source: Source,
    targets: Sequence[Target],
    *,
    strength: float | None = None,
    rank: int | None = None,
    metric: Tensor | None = None,
    validation: tuple[Source, Sequence[Target]] | None = None,
) -> list[Affine]:
    """Fit the maps from one source to each of its targets, with an estimator of scope `source`.

    `validation` holds the same sites' moments of the validation split, on which ridge chooses its strength.
    """
    from layerjump.jumps.moments import check_moments

    estimator = find_estimator(name, closed_form=True)
    if estimator.scope != "source":
        raise BadEstimator(f"{name} is not solved source by source; use solve_jumps")
    settings = EstimatorSettings(strength=strength, rank=rank, metric=None if metric is None else "tensor")
    estimator.check_settings(settings)
    if validation is not None and not estimator.uses_validation:
        raise BadEstimator(f"{name} chooses nothing on a validation split; leave it out")
    check_moments(source, targets)
    values = {"strength": strength, "rank": rank, "metric": metric, "validation": validation}
    passed = {key: value for key, value in values.items() if value is not None}
    return list(estimator.load()(source, targets, **passed))
