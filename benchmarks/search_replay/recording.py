"""A swept space: every legal config of it measured on a GPU, in one small file.

`python -m benchmarks.search_replay --record FILE` makes one; replay.py searches in it.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from optuna.storages import BaseStorage

from benchmarks.search_replay.narrow import Narrow, narrow
from generator.disk import replacing
from generator.errors import NormforgeError
from generator.evaluate.evaluator import Evaluator, Pool, Shortlisting
from generator.evaluate.gpu.noise import NoisyError
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.strategies import REDUCTION_KNOBS
from generator.kernels.variant import AnyVariant, make_variant
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import Budget, Progress
from generator.search.finals import compile_configs
from generator.search.search import search_problem
from generator.space.legal_configs import Key, LegalConfigs
from generator.space.load import load_space
from generator.space.space import Space
from generator.studies.records import Record, may_win, now, study_name
from generator.studies.study_log import StudyLog
from generator.target import Target, find_target

RESULTS = Path(__file__).parents[1] / "results"
RECORDING_FILE = RESULTS / "sweep_h200.json.xz"
FORMAT = 1
NEAR = 1.1
"""Configs up to this many times the best are measured REPEATS more times."""
REPEATS = 2
NEAREST = 1.04
"""Configs up to this many times the best are then timed side by side, which judges the searches."""
GROUP, BLOCKS, TIMES, TRIES = 60, 3, 5, 40
"""Configs that take turns, and blocks at a time; how often that is done, each time in another
order, of which the median counts; and how often it is tried where the GPU is disturbed."""
MOST = 10_000
"""More legal configs than this are no space to sweep."""


def recordings() -> list[Path]:
    """Every committed recording."""
    return sorted(RESULTS.glob("sweep_*.json.xz"))


@dataclass(frozen=True)
class Recording:
    """The results of a sweep.

    values: the swept knobs and REDUCTION_KNOBS with their values; all other knobs have their first
    one. facts: where, when and with what it was measured. entries: for every legal config, by its
    values in the order of `values`, the result and a number shared by equal machine code. In a
    loaded one all results have the sweep's median floor, as those in `over_median_floor`.
    side_by_side: of what is near the best, the ratio to the floor when it was timed side by side.
    rules: as in Narrow."""

    problem: Problem
    gpu: str
    values: Mapping[str, tuple[int | str, ...]]
    facts: Mapping[str, Any]
    entries: Mapping[Key, tuple[Result, int]]
    rules: tuple[Mapping[str, str], ...] = ()
    side_by_side: Mapping[Key, float] = field(default_factory=dict)

    def key(self, config: Config) -> Key:
        return tuple(config[name] for name in self.values)

    def space(self, whole: Space | None = None) -> Space:
        """The space that was swept, with the rules of today and those of the sweep."""
        return narrow(whole or load_space(), self.values, "the recording", self.rules)

    @cached_property
    def optimum(self) -> float:
        """The lowest ratio to the floor of a config that may win, by which searches are judged."""
        return min(map(self.ratio, self.entries))

    def ratio(self, key: Key) -> float:
        """Ratio to the floor by which a config is judged; infinite for one that may not win."""
        return self.side_by_side.get(key, self._beside_others * self.by_trial(key))

    @cached_property
    def _beside_others(self) -> float:
        """Return how much larger ratios are side by side: the lowest trial happened to be low."""
        timed = self.side_by_side.items()
        return median(ratio / self.by_trial(key) for key, ratio in timed) if timed else 1.0

    def by_trial(self, key: Key) -> float:
        """Return the ratio of a config from its trial alone, as a search hears of it."""
        result, _ = self.entries[key]
        if result.ratio is None or not may_win(self.config(key), result):
            return inf
        return result.ratio

    def config(self, key: Key) -> dict[str, int | str]:
        return dict(zip(self.values, key, strict=True))

    def save(self, path: Path) -> None:
        """Write the file; it appears whole or not at all."""
        results = [result for result, _ in self.entries.values()]
        content = {
            "format": FORMAT,
            "problem": str(self.problem),
            "gpu": self.gpu,
            "values": {name: list(values) for name, values in self.values.items()},
            "rules": [dict(rule) for rule in self.rules],
            "facts": dict(self.facts),
            "configs": [list(key) for key in self.entries],
            "outcomes": [result.outcome for result in results],
            "us": [result.us and round(result.us, 3) for result in results],
            "ratios": [result.ratio and round(result.ratio, 5) for result in results],
            "cubins": [cubin for _, cubin in self.entries.values()],
            "side_by_side": [self.side_by_side.get(key) for key in self.entries],
        }
        with replacing(path) as part, lzma.open(part, "wt", preset=9, encoding="utf-8") as file:
            json.dump(content, file, separators=(",", ":"))

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file that `save` wrote. Raises NormforgeError when it is none."""
        try:
            with lzma.open(path, "rt", encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, lzma.LZMAError, EOFError, ValueError) as error:
            raise NormforgeError(f"cannot read the recording {path}: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise NormforgeError(f"{path} is no recording of this version: record it again")
        columns = ("outcomes", "us", "cubins")
        configs = [tuple(config) for config in content["configs"]]
        side_by_side = content.get("side_by_side", [None] * len(configs))
        floor_us = median(
            us / ratio
            for us, ratio in zip(content["us"], content["ratios"], strict=True)
            if us and ratio
        )
        return cls(
            problem=Problem.parse(content["problem"]),
            gpu=content["gpu"],
            values={name: tuple(values) for name, values in content["values"].items()},
            rules=tuple(content.get("rules", ())),
            facts=content["facts"],
            entries={
                key: (_result(outcome, us, floor_us), cubin)
                for key, outcome, us, cubin in zip(
                    configs, *(content[column] for column in columns), strict=True
                )
            },
            side_by_side={
                key: ratio
                for key, ratio in zip(configs, side_by_side, strict=True)
                if ratio is not None
            },
        )


def _result(outcome: str, us: float | None, floor_us: float) -> Result:
    determinism = {"ok": "verified", "nondeterministic": "refuted"}.get(outcome, "unverified")
    if not us:
        return Result(outcome, determinism=determinism)
    return Result(outcome, us, floor_us, us / floor_us, determinism)


@dataclass(frozen=True)
class _Thorough:
    """An evaluator that gives no variant up early: a search may meet it when little else is known,
    and then asks for the whole result."""

    inner: Evaluator

    @property
    def evidence(self) -> str:
        return self.inner.evidence

    def evaluate(
        self, problem: Problem, variant: AnyVariant, compiled: Compiled, best_us: float | None
    ) -> Result:
        return self.inner.evaluate(problem, variant, compiled, None)

    def finals(self, problem: Problem, entries: list[Any]) -> Sequence[Result]:
        return self.inner.finals(problem, entries)


def record(
    swept: Narrow,
    target: Target,
    pool: Pool,
    evaluator: Evaluator,
    storage: BaseStorage,
    facts: Mapping[str, Any],
    *,
    on_progress: Callable[[Progress], None] | None = None,
) -> Recording:
    """Sweep a narrowed space. The sweep is a study: with the same storage it is resumed. What is
    near the best is then measured REPEATS more times, in random order, and gets the median; what is
    nearest is timed side by side, with an evaluator that can. Raises NormforgeError when nothing
    may win or the space is too large."""
    problem, space = swept.problem, swept.space
    legal = LegalConfigs(space, problem, target)
    count = len(legal.first(MOST + 1))
    if count > MOST:
        raise NormforgeError(f"more than {MOST} legal configs: narrow {space.path.name} further")
    budget = Budget(trials=max(count, 1), sweep_limit=MOST)
    search_problem(legal, pool, _Thorough(evaluator), storage, budget, on_progress=on_progress)
    log = StudyLog(storage, study_name(problem, target, evaluator.evidence))
    records = [r for r in map(Record.from_trial, log.trials()) if legal.is_legal(r.config)]
    results = {record.identity: record.result for record in records if record.identity}
    results |= _measured_again(problem, records, pool, evaluator)
    values = {
        k.name: k.values for k in space.knobs if len(k.values) > 1 or k.name in REDUCTION_KNOBS
    }
    cubins: dict[str, int] = {}
    entries = {}
    for entry in sorted(records, key=lambda record: legal.rank(record.config)):
        result = results.get(entry.identity, entry.result)
        cubin = cubins.setdefault(entry.cubin or entry.variant, len(cubins))
        entries[tuple(entry.config[knob] for knob in values)] = (result, cubin)
    if len(entries) != count:
        raise NormforgeError(f"{len(entries)} of {count} legal configs were tried: run it again")
    facts = {**facts, "date": now()}
    found = Recording(problem, target.name, values, facts, entries, swept.rules)
    return time_side_by_side(found, pool, evaluator)


def time_side_by_side(recording: Recording, pool: Pool, evaluator: Evaluator) -> Recording:
    """The recording, with what is nearest to the best timed side by side (the same where the
    evaluator cannot) and without times of what no longer fits. Raises NoisyError without clean
    times."""
    if not isinstance(evaluator, Shortlisting):
        return recording
    key, by_trial = recording.key, recording.by_trial
    legal = LegalConfigs(recording.space(), recording.problem, find_target(recording.gpu))
    limit = NEAREST * min(map(by_trial, recording.entries))
    near = [c for c in legal.first(len(recording.entries)) if by_trial(key(c)) <= limit]
    rng = random.Random(0)
    rng.shuffle(near)
    found: dict[Key, float] = {}
    results = dict(recording.entries)
    for start in range(0, len(near), GROUP):
        group = near[start : start + GROUP]
        entries = compile_configs(legal, pool, group)
        unfit = set(map(key, group)) - {key(variant.config) for variant, _ in entries}
        results |= {each: (Result("resource"), results[each][1]) for each in unfit}
        times: dict[Key, list[float]] = {key(variant.config): [] for variant, _ in entries}
        for _ in range(TRIES):
            rng.shuffle(entries)  # a kernel's time also depends on what ran before it
            ratios = evaluator.shortlist(recording.problem, entries, BLOCKS)
            for (variant, _), ratio in zip(entries, ratios, strict=bool(ratios)):
                times[key(variant.config)].append(ratio)
            if all(len(own) == TIMES for own in times.values()):
                break
        else:
            raise NoisyError(f"{recording.problem}: no clean times side by side; run it again")
        found |= {each: round(median(own), 5) for each, own in times.items()}
    return replace(recording, entries=results, side_by_side=found)


def _measured_again(
    problem: Problem, records: Sequence[Record], pool: Pool, evaluator: Evaluator
) -> dict[str, Result]:
    """Measure what is near the best again. Returns the results by identity, with the median time. A
    repeat that fails is the result: a variant that fails in one run of three may not win."""
    timed = [record for record in records if record.result.timed and record.shared_with is None]
    limit = NEAR * min((record.ratio for record in timed if record.feasible), default=0.0)
    near = [record for record in timed if record.ratio <= limit]
    found = {record.identity: [record.result] for record in near}
    rng = random.Random(0)
    for _ in range(REPEATS):
        for entry in rng.sample(near, len(near)):
            variant = make_variant(entry.config, problem)
            compiled = pool.result(variant, pool.submit(variant))
            again = evaluator.evaluate(problem, variant, compiled, None)
            found[entry.identity].append(again)
    return {identity: _median(results) for identity, results in found.items()}


def _median(results: Sequence[Result]) -> Result:
    failed = next((result for result in results if not result.timed), None)
    if failed is not None:
        return failed
    refuted = next((result for result in results if result.outcome != "ok"), results[0])
    return replace(
        refuted,
        us=median(result.us for result in results if result.us is not None),
        ratio=median(result.ratio for result in results if result.ratio is not None),
    )
