"""Predicts how long a compiled variant takes on a target that is not here, by an analytical model
and a correction of it that was learned from measurements.

The time of the rows (`main_loop`) and of the strategy's dw reduction (`dw_reduction`) are added.
docs/prediction.md is the one-page account. Times are microseconds throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import ClassVar

from generator.errors import NormforgeError
from generator.evaluate.predict.dw_reduction import DW_REDUCTIONS
from generator.evaluate.predict.features import features
from generator.evaluate.predict.fitted import Fitted, load_fitted
from generator.evaluate.predict.main_loop import main_loop, partials
from generator.evaluate.predict.model import MODEL, Case, Model, Rates, floor_us
from generator.evaluate.predict.prior import TIE, agreement
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant
from generator.operations import operation_of
from generator.problem import Problem
from generator.result import Result
from generator.target import Target
from normforge.spec import plan_launch


@dataclass(frozen=True)
class Prediction:
    """Predicted µs by part, in the order in which they happen; `us` is their sum.

    launch, fill (first row arrives), traffic, imbalance (last round of rows is not full), flight
    (too few bytes in flight, or batches that wait on their barriers), issue, copies and port (what
    those bounds add), drain (the last batch), fold (teams of a CTA), partials (rows of partial dw
    written), then those of the dw reduction: arrival, sums, turns, adds, second_launch, cluster.
    """

    parts: Mapping[str, float]

    @property
    def us(self) -> float:
        return sum(self.parts.values())


def predict_us(
    variant: Variant,
    compiled_resources: Resources,
    problem: Problem,
    target: Target,
    model: Model = MODEL,
) -> Prediction:
    """The predicted time of `variant` for the M rows of `problem` on `target`.

    compiled_resources are those of the main kernel (registers per thread, static smem per CTA).
    Raises NormforgeError when not even one CTA fits an SM."""
    return _physical(_case(variant, compiled_resources, problem, target, model))


def _case(
    variant: Variant, resources: Resources, problem: Problem, target: Target, model: Model
) -> Case:
    smem = variant.smem_bytes + resources.smem_bytes
    fit = target.occupancy(variant.threads, resources.registers, smem)
    if fit == 0:
        raise NormforgeError(
            f"{variant} cannot be predicted: a CTA of {variant.threads} threads with "
            f"{resources.registers} registers and {smem} bytes of shared memory does not "
            f"fit an SM of {target}; choose a config with a smaller CTA"
        )
    launch = plan_launch(variant.spec(target.sms), problem.M)
    return Case(variant, problem, Rates(target, model), launch, fit)


def _physical(case: Case) -> Prediction:
    variant = case.variant
    parts = main_loop(case) | partials(case) | DW_REDUCTIONS[variant.strategy.way](case)
    if variant["cluster"] > 1:
        parts["cluster"] = case.model.cluster_us
    return Prediction(parts)


def features_of(
    variant: Variant,
    resources: Resources,
    problem: Problem,
    target: Target,
    model: Model = MODEL,
) -> dict[str, float]:
    """The features of the physical prediction, of which the learned correction makes a factor."""
    case = _case(variant, resources, problem, target, model)
    return features(case, _physical(case).parts, resources)


@dataclass(frozen=True)
class Predictor:
    """Answers the search where the target is absent, in the place of a GPU worker: the physical
    terms, corrected by what measurements taught."""

    target: Target
    model: Model = MODEL
    fitted: Fitted = field(default_factory=load_fitted, compare=False, repr=False)

    evidence: ClassVar[str] = "predicted"
    tie: ClassVar[float] = TIE

    def evaluate(
        self, problem: Problem, variant: Variant, compiled: Compiled, best_us: float | None
    ) -> Result:
        """The predicted time as a Result. Nothing ran: determinism stays unverified, and a variant
        whose class is `none` is nondeterministic by construction. best_us, with which a worker
        gives up early on a slow variant, is not needed here."""
        case = _case(variant, compiled.main, problem, self.target, self.model)
        physical = _physical(case)
        known = features(case, physical.parts, compiled.main)
        us = physical.us * exp(self.fitted.correction.log_factor(known))
        floor = floor_us(problem, self.target, self.model)
        fixed = variant.determinism != "none"
        return Result(
            outcome="ok" if fixed else "nondeterministic",
            us=us,
            floor_us=floor,
            ratio=us / floor,
            note="" if fixed else "not deterministic by construction: adds in order of arrival",
            extra={
                "parts": {**physical.parts, "learned": us - physical.us},
                "expected_error": self.fitted.errors.get(problem.operation),
                "floor_bytes": operation_of(problem).traffic_bytes(problem),
            },
        )

    def starts(self, problem: Problem) -> list[Config]:
        """Winners of the nearest measured shapes."""
        nearest = self.fitted.prior.nearest(problem, self.target)
        return [winner.config for winner in nearest]

    def agreement(self, problem: Problem, config: Config) -> float:
        """Return how much a config resembles the measured winners."""
        return agreement(self.fitted.prior.votes(problem, self.target), config)

    def finals(self, problem: Problem, entries: Sequence[tuple[Variant, Compiled]]) -> list[Result]:
        """Results of the finalists in the order given: the numbers of `evaluate` again."""
        return [self.evaluate(problem, variant, compiled, None) for variant, compiled in entries]
