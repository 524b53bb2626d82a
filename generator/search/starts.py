"""What a search starts from: the incumbent, and winners of other problems."""

from __future__ import annotations

import math
from collections.abc import Sequence

from generator.evaluate.evaluator import Evaluator, Preferring
from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS
from generator.problem import Problem
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import Winner, without_space
from generator.target import Target

WARM_STARTS = 6
"""Configs that a search starts from, beside the incumbent: those that the evaluator prefers, then
those from the winners of other problems, of which one with another N gives two."""


def incumbent_and_starts(
    legal: LegalConfigs, evaluator: Evaluator, winners: Sequence[Winner], study: str
) -> tuple[Config | None, list[Config]]:
    """The config of the last winner of the same problem, target and evidence, None where there is
    none or it is not legal any more; and configs to begin with, most promising first, among them
    that winner even if it is not legal. study: its name; predicted winners of other studies are no
    incumbents, because another model predicted them."""
    place = (legal.problem, legal.target.name, evaluator.evidence)
    incumbents = [w for w in winners if (w.problem, w.target, w.evidence) == place]
    if evaluator.evidence == "predicted":
        own = without_space(study)
        incumbents = [w for w in incumbents if without_space(w.study) == own]
    others = [w for w in winners if w not in incumbents]
    known_good = evaluator.starts(legal.problem) if isinstance(evaluator, Preferring) else []
    starts: list[Config] = []
    for config in (*known_good, *warm_starts(legal.problem, legal.target, others)):
        if len(starts) < WARM_STARTS and config not in starts:
            starts.append(config)
    if not incumbents:
        return None, starts
    incumbent = incumbents[-1].config
    return legal.today(incumbent), [incumbent, *starts]


def distance(one: Problem, other: Problem) -> float:
    """In powers of 2 of M and N. Another dtype counts as much as a factor of 1.4 does, and another
    dtype of the weight or another operation as much as one of 1.2."""
    return (
        math.hypot(math.log2(one.M / other.M), math.log2(one.N / other.N))
        + 0.5 * (one.dtype != other.dtype)
        + 0.25 * (one.weight_dtype != other.weight_dtype)
        + 0.25 * (one.operation != other.operation)
    )


def warm_starts(problem: Problem, target: Target, winners: Sequence[Winner]) -> list[Config]:
    """Configs of known winners, nearest first: those of the same target, then of elements as wide,
    then by `distance`. Where N differs, the config for as many columns in each CTA comes before the
    winner's own."""

    def order(winner: Winner) -> tuple[bool, bool, float]:
        other = winner.problem
        wider = other.itemsize != problem.itemsize
        return winner.target != target.name, wider, distance(other, problem)

    found: list[Config] = []
    for winner in sorted(winners, key=order):
        for config in (_with_as_many_columns(winner, problem), winner.config):
            if config is not None and config not in found:
                found.append(config)
    return found


def _with_as_many_columns(winner: Winner, problem: Problem) -> Config | None:
    """The winner's config with a cluster by as much larger as the rows are longer, so that each CTA
    has the same work; None where there is no such cluster. How many SMs a grid of such clusters
    leaves out is not said: it depends on their size."""
    width = winner.problem.N // int(winner.config["cluster"])
    cluster = problem.N // width
    exists = cluster in KNOBS["cluster"].domain and cluster * width == problem.N
    if not exists or problem.N == winner.problem.N:
        return None
    return {k: v for k, v in winner.config.items() if k != "spare_sms"} | {"cluster": cluster}
