"""The starts of a search: the incumbent, and winners of other problems."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from generator.evaluate.evaluator import Evaluator, Preferring
from generator.kernels.geometry import Config
from generator.kernels.knobs import KNOBS
from generator.problem import FORWARDS, Problem
from generator.space.family import Family, family_of
from generator.space.legal_configs import LegalConfigs, Values
from generator.studies.records import Winner, without_space
from generator.target import Target

WARM_STARTS = 6
"""Configs that a search starts from, beside the incumbent, with an evaluator that prefers some:
those, then the ones from the winners of other problems, of which one with another N gives two."""
FAMILIES = 10
"""Configs, each of another family, that any other search starts from, beside the incumbent."""
_LOOKED_AT = 40  # winners of a kind, for that: to make a config legal takes up to 30 ms

Expect = Callable[[Sequence[Config]], list[float]]
"""The times to expect of some legal configs, in any unit (`Experience.expect`)."""


def incumbent_and_starts(
    legal: LegalConfigs,
    evaluator: Evaluator,
    winners: Sequence[Winner],
    study: str,
    rng: random.Random,
    expect: Expect | None = None,
) -> tuple[Config | None, list[Config]]:
    """The config of the last winner of the same problem, target and evidence, None where there is
    none or it is not legal any more; and configs to begin with, most promising first, among them
    that winner even if it is not legal. study: its name; predicted winners of other studies are no
    incumbents, because another model predicted them. rng: draws among equally near legal configs.
    expect: what experience says of them, if there is any."""
    place = (legal.problem, legal.target.name, evaluator.evidence)
    incumbents = [w for w in winners if (w.problem, w.target, w.evidence) == place]
    if evaluator.evidence == "predicted":
        own = without_space(study)
        incumbents = [w for w in incumbents if without_space(w.study) == own]
    others = [w for w in winners if w not in incumbents and _alike(w, legal)]
    starts: list[Config] = []
    if isinstance(evaluator, Preferring):
        known_good = evaluator.starts(legal.problem)
        for config in (*known_good, *warm_starts(legal.problem, legal.target, others)):
            if len(starts) < WARM_STARTS and config not in starts:
                starts.append(config)
    else:
        starts += one_of_each_family(legal, others, rng, expect)
    if not incumbents:
        return None, starts
    incumbent = incumbents[-1].config
    return legal.today(incumbent), [incumbent, *starts]


def _alike(winner: Winner, legal: LegalConfigs) -> bool:
    """Tell whether its knobs are of the same kind of kernel: forwards of RMSNorm have others."""
    return (winner.problem.operation in FORWARDS) == (legal.problem.operation in FORWARDS)


def distance(one: Problem, other: Problem) -> float:
    """Return the distance of two problems, in powers of 2 of M and N. Another dtype counts as much
    as a factor of 1.4 does, and another dtype of the weight or another operation as much as one of
    1.2, and so does another rotation."""
    return (
        math.hypot(math.log2(one.M / other.M), math.log2(one.N / other.N))
        + 0.5 * (one.dtype != other.dtype)
        + 0.25 * (one.weight_dtype != other.weight_dtype)
        + 0.25 * (one.operation != other.operation)
        + 0.25 * (one.rotation != other.rotation)
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


def one_of_each_family(
    legal: LegalConfigs,
    winners: Sequence[Winner],
    rng: random.Random,
    expect: Expect | None = None,
    number: int = FAMILIES,
) -> list[Values]:
    """Legal configs of `number` families, as far as so many won elsewhere. Winners of the same GPU
    and of other GPUs take turns, so that neither fills all places. Those of the same GPU come in
    the order that is expected. Where nothing is expected, the nearest come first, and elements as
    wide and others take turns, too."""
    problem, target = legal.problem, legal.target

    def near(winners: Sequence[Winner]) -> Iterator[Values]:
        for config in warm_starts(problem, target, winners)[:_LOOKED_AT]:
            adapted = legal.adapt(config, rng)
            if adapted is not None:
                yield adapted

    here = [winner for winner in winners if winner.target == target.name]
    elsewhere = near([winner for winner in winners if winner.target != target.name])
    if expect is None:
        as_wide = [w for w in here if w.problem.itemsize == problem.itemsize]
        groups = [near(as_wide), near([w for w in here if w not in as_wide]), elsewhere]
    else:
        known = [*near(here)]
        order = sorted(zip(expect(known), range(len(known)), strict=True))
        groups = [(known[place] for _, place in order), elsewhere]
    found: dict[Family, Values] = {}
    for turn in zip_longest(*map(_first_of_each_family, groups)):
        for config in filter(None, turn):
            found.setdefault(family_of(config), config)
        if len(found) >= number:
            break
    return [*found.values()][:number]


def _first_of_each_family(configs: Iterable[Values]) -> Iterator[Values]:
    seen: set[Family] = set()
    for config in configs:
        if family_of(config) not in seen:
            seen.add(family_of(config))
            yield config


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
