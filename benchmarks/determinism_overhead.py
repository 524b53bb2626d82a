"""Measure the overhead of determinism: the winner of a shape beside sums in any order, searched as
long.

    python -m benchmarks.determinism_overhead --out overhead.json

A study gives reductions that are not deterministic (atomics, bulk reduce-adds without turns) few
trials, because they cannot win. Here each of them gets as many as the strategy of the winner got in
the committed study. They start from the best configs of that study with the reduction exchanged;
then random configs and neighbours of the best so far take turns. The fastest are timed in the same
blocks as the winner. The file is written after each shape. Exit code: 1 where --seconds left shapes
without times, 2 for bad input or without the GPU of the studies.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.command import command_line, exit_code, spare_cores
from benchmarks.compare import TUNED
from benchmarks.repeatability import measured_studies
from benchmarks.results import machine
from benchmarks.shape_by_shape import measure_shapes
from generator.errors import NormforgeError
from generator.evaluate.evaluator import Pool, Shortlisting
from generator.kernels.compile_pool import CompilePool
from generator.kernels.geometry import Config
from generator.kernels.strategies import REDUCTION_KNOBS, is_deterministic, strategy_of
from generator.paths import GENERATED
from generator.problem import Problem
from generator.search.finals import compile_configs
from generator.shape_lists import load_problems
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.studies.reader import Study
from generator.tuner.choose_device import choose_target

BEST = 5
"""Configs of which neighbours are tried."""
FROM_STUDY = 1 / 3
"""The share of the trials that are configs of the study with the reduction exchanged."""
SIDE_BY_SIDE = 8
"""The number of the fastest configs of one reduction that are timed side by side."""
BLOCKS = 3


class Climb:
    """A search among the configs that sum over rows as `kind` does. ranked: configs of the study,
    best first. Ask for a generation, then tell the times."""

    def __init__(
        self, legal: LegalConfigs, kind: Config, ranked: Sequence[Config], trials: int, rng: Random
    ) -> None:
        self.legal, self.rng, self.trials = legal, rng, trials
        self.kind = {name: kind[name] for name in REDUCTION_KNOBS}
        self.timed: list[tuple[float, Config]] = []
        self.tried = 0
        self._taken: set[Any] = set()
        self._plan = self._configs(ranked)

    def ask(self, count: int) -> list[Config]:
        """The next configs, fewer at the end of the budget."""
        found = list(islice(self._plan, min(count, self.trials - self.tried)))
        self.tried += len(found)
        return found

    def tell(self, config: Config, ratio: float) -> None:
        """ratio: of a config's time to the floor."""
        self.timed.append((ratio, config))

    def best(self, count: int) -> list[Config]:
        """The fastest so far, fastest first."""
        return [config for _, config in sorted(self.timed, key=lambda entry: entry[0])[:count]]

    def _configs(self, ranked: Sequence[Config]) -> Iterator[Config]:
        for config in ranked:
            if len(self._taken) >= FROM_STUDY * self.trials:
                break
            yield from self._new(self._near({**config, **self.kind}))
        space, problem, target = self.legal.space, self.legal.problem, self.legal.target
        knobs = [knob for knob in space.knobs if knob.name not in REDUCTION_KNOBS]
        for _ in range(20 * self.trials):  # an end where nothing is left
            best = self.best(BEST)
            if best and self.rng.random() < 0.5:
                knob = self.rng.choice(knobs)
                moved = {**self.rng.choice(best), knob.name: self.rng.choice(knob.values)}
                yield from self._new(self._near(moved, knob.name))
            else:
                yield from self._new(space.sample(problem, target, self.rng, self.kind))

    def _near(self, config: Config, *held: str) -> Config | None:
        held = (*REDUCTION_KNOBS, *held)
        return self.legal.nearest(config, self.rng, held=held, taken=self._taken)

    def _new(self, config: Config | None) -> Iterator[Config]:
        if config is not None and (key := self.legal.key(config)) not in self._taken:
            self._taken.add(key)
            yield config


def overhead(
    legal: LegalConfigs, pool: Pool, evaluator: Shortlisting, study: Study, seed: int
) -> dict[str, Any]:
    """Measure one shape: the winner and the fastest of each free reduction, side by side."""
    winner = study.winner
    assert winner is not None
    strategy = strategy_of(winner.config)
    trials = sum(strategy_of(record.config) == strategy for record in study.records)
    ranked = [dict(winner.config), *(record.config for record in study.ranked)]
    kinds = [kind for kind in legal.reduction_kinds if not is_deterministic(kind)]
    finalists: list[Config] = [winner.config]
    tried = {}
    for kind in kinds:
        climb = Climb(legal, kind, ranked, trials, Random(f"{seed}/{legal.problem}"))
        while configs := climb.ask(pool.processes):
            for variant, code in compile_configs(legal, pool, configs):
                result = evaluator.evaluate(legal.problem, variant, code, None)
                if result.timed and result.ratio is not None:
                    climb.tell(variant.config, result.ratio)
        tried[str(strategy_of(kind))] = climb.tried
        finalists += climb.best(SIDE_BY_SIDE)
    entries = compile_configs(legal, pool, finalists)
    blocks = [evaluator.shortlist(legal.problem, entries, 1) for _ in range(BLOCKS)]
    ratios = [median(values) for values in zip(*filter(None, blocks), strict=True)]
    best: dict[str, float] = {}
    for (variant, _), ratio in zip(entries, ratios, strict=False):
        name = str(strategy_of(variant.config))
        best[name] = min(ratio, best.get(name, inf))
    return {
        "winner": str(strategy),
        "trials_of_winner": trials,
        "trials": tried,
        "over_floor": {name: round(ratio, 4) for name, ratio in best.items()},
    }


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out", shapes=TUNED, seconds=inf, seed=0, resume=False)
    parser.add_argument("--studies", type=Path, default=GENERATED / "h200")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    until = time.monotonic() + args.seconds
    problems = load_problems(args.shapes)
    studies = measured_studies(args.studies, problems)
    target, evaluator, sentence = choose_target(studies[problems[0]].gpu, 0)
    if evaluator is None:
        raise NormforgeError(f"the studies' GPU is needed: {sentence}")
    document = {"environment": machine(evaluator.facts, timed=True)}
    with closing(evaluator), CompilePool(target.arch, spare_cores()) as pool:

        def measure(problem: Problem) -> dict[str, Any]:
            legal = LegalConfigs(load_space(), problem, target)
            return overhead(legal, pool, evaluator, studies[problem], args.seed)

        _, left = measure_shapes(args, until, problems, document, measure, str)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
