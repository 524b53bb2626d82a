"""The finals of a study: the best variants once more, side by side, under the full checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import inf
from operator import itemgetter

from generator.evaluate.evaluator import Confirming, Evaluator, Pool, Shortlisting
from generator.evaluate.gpu.noise import drifted
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.resource_gate import refuse
from generator.kernels.strategies import launches
from generator.kernels.variant import AnyVariant, kernel_of
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import FINALISTS
from generator.search.choose_winner import HOST_US, choose, preference_of
from generator.space.family import family_of
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import Finalist, Record, fastest_first, may_win

REMEASURED = 10
"""Noisy records that are measured once more, in units of the finalists wanted: noise may have put a
good one far behind, and each costs no more than a trial."""


SHORTLIST = 48
"""Contenders that are timed side by side for the places in the finals. On one H200, 20 to 190 of
312 trials of a shape were within 2 % of the best one, and a trial's ratio scatters by 0.2 % where
it takes long and by 2 % where it takes 10 us."""
SHORTLIST_US = 12_000.0
"""Most time that they may take together in one round, and so fewer where they take long."""
ONE_LAUNCH_PLACES = 2
"""Places in the finals for kernels of one launch where that may decide."""
FAMILIES = 3
"""Families in the finals at least, as far as there are so many: under the final checks and beside
the others, a whole family may do better or worse than in the trials."""


@dataclass(frozen=True)
class Final:
    """One variant in the finals."""

    variant: AnyVariant
    compiled: Compiled
    result: Result

    @property
    def may_win(self) -> bool:
        return may_win(self.variant.config, self.result)

    @property
    def finalist(self) -> Finalist:
        """Its entry in a Winner; only a timed variant has one."""
        assert self.result.us is not None
        assert self.result.ratio is not None
        config = dict(self.variant.config)
        return Finalist(self.variant.id, config, self.result.us, self.result.ratio)


def hold_finals(
    legal: LegalConfigs,
    pool: Pool,
    evaluator: Evaluator,
    records: Sequence[Record],
    incumbent: Config | None,
    size: int = FINALISTS,
) -> list[Final]:
    """Finals of the `size` best of `records` and the incumbent, in rounds: while nobody passes, the
    next best are called up. The fastest variant that may not win runs in the first round, for its
    time. Records whose times are noisy are measured once more before, those most likely to count.
    Then many of the best are timed side by side, which decides who is called up first. The best
    record runs in the first round in any case, and so does the best one of FAMILIES families.

    Raises NoisyError when no clean times can be had."""
    records = _cleared(legal, pool, evaluator, records, REMEASURED * size)
    timed = [record for record in fastest_first(records, legal.rank) if record.result.timed]
    called = [incumbent] if incumbent is not None else []
    called += [record.config for record in timed if not record.feasible][:1]
    ranked = [record for record in contenders(legal, records) if record.config not in called]
    us = _fastest_us(records)
    preference = preference_of(evaluator, legal.problem)
    if preference is not None:
        best = ranked[0].ratio if ranked else inf
        preferred = sorted(ranked, key=lambda r: preference.key(r.config, r.ratio, best))
        waiting = [record.config for record in preferred]
    else:
        waiting = _shortlisted(legal, pool, evaluator, ranked, us, size)
        if us < HOST_US:
            waiting = _with_one_launch(waiting, size)
        waiting = _with_families(waiting, size, one_launch=us < HOST_US)
    if ranked and ranked[0].config not in waiting[:size]:
        # Whoever reads the study wants to know what became of its best trial.
        called.append(ranked[0].config)
        waiting.remove(ranked[0].config)
    finals: list[Final] = []
    while (called or waiting) and not any(final.may_win for final in finals):
        entries = compile_configs(legal, pool, called + waiting[:size])
        called, waiting = [], waiting[size:]
        results = hold_round(evaluator, legal.problem, entries, legal.rank, incumbent)
        finals += [
            Final(variant, compiled, result)
            for (variant, compiled), result in zip(entries, results, strict=True)
        ]
    return finals


def hold_round(
    evaluator: Evaluator,
    problem: Problem,
    entries: Sequence[tuple[AnyVariant, Compiled]],
    rank: Callable[[Config], tuple[int, ...]],
    incumbent: Config | None,
) -> list[Result]:
    """The results of one round. With an evaluator that confirms, it ends with the check of whoever
    is to win by `choose`, to which `rank` and `incumbent` go."""
    if not entries:
        return []
    results = list(evaluator.finals(problem, list(entries)))
    if not isinstance(evaluator, Confirming):
        return results
    asked: set[int] = set()
    while True:
        found = [(v.config, r) for (v, _), r in zip(entries, results, strict=True)]
        choice = choose(found, rank, incumbent, preference_of(evaluator, problem))
        if choice is None or choice.winner in asked:
            return results
        asked.add(choice.winner)
        variant, _ = entries[choice.winner]
        results[choice.winner] = evaluator.confirm(problem, variant, results[choice.winner])


def noisy(records: Sequence[Record]) -> list[Record]:
    """Records that may win by a time that was taken while the GPU was disturbed: those that say so,
    and those whose reference was slow by what is known now of the same GPU. Fastest first."""
    feasible = [record for record in records if record.feasible]
    best: dict[str, float] = {}
    for result in (record.result for record in feasible):
        if result.floor_us and not result.noisy:
            best[result.gpu] = min(result.floor_us, best.get(result.gpu, inf))

    def disturbed(result: Result) -> bool:
        return result.noisy or drifted(result.floor_us or 0.0, best.get(result.gpu, inf))

    return [r for r in fastest_first(records) if r.feasible and disturbed(r.result)]


def _cleared(
    legal: LegalConfigs,
    pool: Pool,
    evaluator: Evaluator,
    records: Sequence[Record],
    limit: int,
) -> list[Record]:
    """The records, with new results for up to `limit` noisy ones. The study keeps the old ones."""
    if evaluator.evidence != "measured":
        return list(records)
    again: dict[str, Result] = {}
    for record in noisy(records):
        if record.identity in again or len(again) == limit:
            continue
        for variant, compiled in compile_configs(legal, pool, [record.config]):
            result = evaluator.evaluate(legal.problem, variant, compiled, None)
            again[record.identity] = result
    return [replace(r, result=again.get(r.identity, r.result)) for r in records]


def _shortlisted(
    legal: LegalConfigs,
    pool: Pool,
    evaluator: Evaluator,
    ranked: Sequence[Record],
    us: float,
    size: int,
) -> list[Config]:
    """The records' configs, the first of them in a better order where the evaluator can find one.
    us: about what one takes."""
    configs = [record.config for record in ranked]
    count = min(SHORTLIST, int(SHORTLIST_US / us))
    if not isinstance(evaluator, Shortlisting) or min(count, len(ranked)) <= size:
        return configs
    entries = compile_configs(
        legal, pool, [record.config for record in of_every_gpu(ranked)[:count]]
    )
    ratios = evaluator.shortlist(legal.problem, entries)
    first = [variant.config for variant, _ in entries]
    order = sorted(zip(ratios, map(legal.rank, first), first, strict=False), key=itemgetter(0, 1))
    best = [config for _, _, config in order]
    return best + [config for config in configs if config not in best]


def of_every_gpu(ranked: Iterable[Record]) -> list[Record]:
    """The records, those of every GPU in turn. Ratios of different GPUs do not compare where a
    kernel takes 10 us: between H200s the floor alone differs by 5 %, and one GPU would fill all
    places."""
    by_gpu: dict[str, list[Record]] = {}
    for record in ranked:
        by_gpu.setdefault(record.result.gpu, []).append(record)
    turns = zip_longest(*by_gpu.values())
    return [record for turn in turns for record in turn if record is not None]


def _with_one_launch(ranked: list[Config], size: int) -> list[Config]:
    """The configs, the best of one launch among the first `size`."""
    places = min(ONE_LAUNCH_PLACES, size - 1)
    chosen = [config for config in ranked if launches(config) == 1][:places]
    others = [config for config in ranked if config not in chosen]
    return others[: size - len(chosen)] + chosen + others[size - len(chosen) :]


def _with_families(ranked: list[Config], size: int, one_launch: bool) -> list[Config]:
    """The configs, the best of FAMILIES families among the first `size`. The last of a family with
    more there gives way, but never the first of all; with one_launch, one of two launches if there
    is any."""
    first, rest = ranked[:size], ranked[size:]
    while True:
        count = Counter(map(family_of, first))
        newcomer = next((config for config in rest if family_of(config) not in count), None)
        if newcomer is None or len(count) >= min(FAMILIES, size):
            return first + rest
        several = [config for config in reversed(first[1:]) if count[family_of(config)] > 1]
        leaver = max(several, key=lambda config: one_launch and launches(config) > 1)
        first = [config for config in first if config is not leaver] + [newcomer]
        rest = [leaver, *(config for config in rest if config is not newcomer)]


def _fastest_us(records: Sequence[Record]) -> float:
    return min((r.result.us for r in records if r.feasible and r.result.us), default=inf)


def contenders(legal: LegalConfigs, records: Sequence[Record]) -> list[Record]:
    """Records that may win, fastest first. Of several that are one measurement, the first in the
    order of the space stands for all, whichever was tried first."""
    first: dict[str, Record] = {}
    for record in fastest_first(records, legal.rank):
        if record.feasible:
            first.setdefault(record.identity, record)
    return list(first.values())


def fastest_ineligible(finals: Sequence[Final]) -> Finalist | None:
    """The fastest variant of the finals that may not win because its bits change."""
    times = [final.finalist for final in finals if final.result.timed and not final.may_win]
    return min(times, key=lambda finalist: finalist.ratio, default=None)


def compile_configs(
    legal: LegalConfigs, pool: Pool, configs: Sequence[Config]
) -> list[tuple[AnyVariant, Compiled]]:
    """The configs' variants, compiled: those that may run."""
    variants = [kernel_of(config, legal.problem) for config in configs]
    futures = [pool.submit(variant) for variant in variants]
    entries = []
    for variant, future in zip(variants, futures, strict=True):
        compiled = pool.result(variant, future)
        # Fit to run when they were tried, but the templates or the compiler may have changed.
        if refuse(variant, compiled, legal.problem, legal.target) is None:
            entries.append((variant, compiled))
    return entries
