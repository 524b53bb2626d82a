"""How long a compiled variant takes on a target that is not here: an analytical model, and a
correction of it that was learned from measurements.

The main loop is the smooth maximum of five bounds (memory traffic, bytes in flight, instruction
issue, copy engine, the SM's memory port); launch, pipeline fill, drain and the strategy's dw
reduction are added to it. docs/prediction.md is the one-page account. Times are microseconds
throughout.
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
from generator.evaluate.predict.model import MODEL, Case, Model, Rates, floor_us
from generator.evaluate.predict.prior import TIE, agreement
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant
from generator.operations import operation_of
from generator.problem import Problem
from generator.result import Result
from generator.runtime.spec import ceil_div, plan_launch
from generator.target import Target


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


def _main_loop(case: Case) -> dict[str, float]:
    v, m, rates, launch = case.variant, case.model, case.rates, case.launch
    batch, teams = v.batch_rows, launch.participants * v.teams
    rounds = ceil_div(case.problem.M, batch * teams)
    full, left = divmod(case.problem.M, batch * teams)
    memory = rates.memory * m.row_efficiency

    problem, sums = case.problem, case.problem.sums
    row_bytes = operation_of(problem).traffic_bytes(problem) // problem.M + 4 * sums.statistics
    moved = problem.M * row_bytes + (1 + sums.column_sums) * problem.N * problem.weight_itemsize
    traffic = (moved + rates.written_back(moved)) / memory
    row_us = row_bytes / memory
    # A last round that is not full lasts as long as its batches take, however few they are.
    imbalance = max(0.0, min(case.period_us, batch * teams * row_us) - left * row_us)

    sm_batches = rounds * case.ctas_per_sm * v.teams
    waves = ceil_div(case.ctas_per_sm, case.resident)
    copies = 2 * batch * sm_batches if v["pipeline"] == "bulk" else 0
    cta_row_bytes = row_bytes / v["cluster"]
    bounds = {
        "flight": (rounds * waves - 1) * case.period_us,
        "issue": sm_batches * case.instructions / m.issue_per_clock / rates.clocks,
        "copies": copies * m.copy_clocks / rates.clocks,
        "port": sm_batches * batch * cta_row_bytes / rates.port,
    }
    parts = {
        "launch": m.launch_us,
        "fill": m.memory_latency_us,
        "traffic": traffic,
        "imbalance": imbalance if full and left else 0.0,
    }
    loop = parts["traffic"] + parts["imbalance"]
    for name, bound in bounds.items():
        longer = m.smooth_max(loop, bound)
        parts[name] = longer - loop
        loop = longer
    parts["drain"] = case.batch_us
    return parts


def _partials(case: Case) -> dict[str, float]:
    v, rates = case.variant, case.rates
    fold = 0.0
    if v.teams > 1:
        per_sm = 2 * v.fold_bytes * min(case.resident, case.ctas_per_sm)
        fold = (per_sm / case.model.smem_bytes_per_clock + case.model.barrier_clocks) / rates.clocks
    written = case.launch.participants * case.partial_row_bytes if v.stores_rows else 0
    return {"fold": fold, "partials": rates.exchange(written, case.sms_used)}


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
    parts = _main_loop(case) | _partials(case) | DW_REDUCTIONS[str(variant.strategy)](case)
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
        """How far a config is like those winners."""
        return agreement(self.fitted.prior.votes(problem, self.target), config)

    def finals(self, problem: Problem, entries: Sequence[tuple[Variant, Compiled]]) -> list[Result]:
        """Results of the finalists in the order given: the numbers of `evaluate` again."""
        return [self.evaluate(problem, variant, compiled, None) for variant, compiled in entries]
