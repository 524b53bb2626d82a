"""A pool and an evaluator without a compiler or a GPU: the real space, a made-up cost.

Run as a program it searches one problem, slowly enough to be killed: see search/test_search.py.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.result import Result
from generator.space.legal_configs import LegalConfigs
from generator.space.load import SPACE_FILE, load_space
from generator.space.space import Space
from generator.studies.records import Winner
from generator.target import find_target
from normforge.spec import MAIN_KERNEL

PROBLEM = Problem.parse("4096x1024:bf16")
TARGET = find_target("h200")
SPACE = load_space()
LEGAL = LegalConfigs(SPACE, PROBLEM, TARGET)
FLOOR_US = 20.0
"""A floor that is long enough that the host, and so a launch less, does not count."""
DW_COST = {
    "slices": 0.05,
    "flagged_slices": 0.07,
    "second_kernel": 0.09,
    "last_cta": 0.12,
    "in_turns": 0.15,
    "on_arrival": 0.04,
}
"""Made-up costs by `Strategy.way`."""
BULK_COST = 0.1
STATIC_SMEM = 96
"""Bytes of shared memory that a kernel has beside what its launch asks for."""


def digest(*values: object) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()


def registers(variant: Variant) -> int:
    """Registers that a compiler might use, within the cap."""
    kept = 1 if variant["reload"] == "smem" else 1 + variant["rows_in_flight"]
    return min(variant["register_cap"] or 255, int(28 + variant.accumulators * kept))


def cost(variant: Variant) -> float:
    """Return a config's ratio to the floor: knobs that work together, and 1 % of ruggedness that is
    the same in every run."""
    v = variant
    resident = v["ctas_per_sm"] * v.teams
    flying = max(v["stages"] - 1, 0.5) * v["rows_in_flight"] * resident * 2 * v.row_bytes
    dw = BULK_COST if v.strategy.bulk_adds else DW_COST[v.strategy.way]
    ratio = 1.0 + dw + 0.3 * max(0.0, 1 - flying / 65536)
    ratio += 0.05 * abs(v.accumulators - 8) / 8 + 0.03 * (v["ctas_per_sm"] - 1)
    ratio += 0.02 * (v["slice_columns"] != 64) + 0.1 * (v["load_hint"] == "evict_first")
    ratio += 0.01 * (v["store_hint"] == "default") + 0.02 * (v["grid"] == "full")
    return ratio + 0.01 * int(digest(sorted(v.config.items()))[:8], 16) / 2**32


class FakePool:
    """Compiles at once. `broken` configs are compile errors, `spilling` ones spill, and sources
    that differ in the knobs `unseen` only are one cubin."""

    processes = 2

    def __init__(
        self,
        broken: Callable[[Config], bool] = lambda config: False,
        spilling: Callable[[Config], bool] = lambda config: False,
        unseen: tuple[str, ...] = (),
        version: str = "",
    ) -> None:
        self.broken, self.spilling = broken, spilling
        self.unseen, self.version = unseen, version
        self.submitted = 0

    def submit(self, variant: Variant) -> Future[Compiled]:
        self.submitted += 1
        future: Future[Compiled] = Future()
        future.set_result(self._compile(variant))
        return future

    def result(self, variant: Variant, future: Future[Compiled]) -> Compiled:
        return future.result()

    def code(self, variant: Variant) -> str:
        return digest(self.version, sorted(variant.source_config.items()), variant.N)[:16]

    def _compile(self, variant: Variant) -> Compiled:
        if self.broken(variant.config):
            log = "rmsnorm_backward.cu(7): error: planted\n1 error detected"
            return Compiled(TARGET.arch, "", b"", {}, "0.0", False, log, log)
        seen = [pair for pair in variant.source_config.items() if pair[0] not in self.unseen]
        cubin = digest(self.version, sorted(seen), variant.N).encode()
        spills = 8 if self.spilling(variant.config) else 0
        kernels = {MAIN_KERNEL: Resources(registers(variant), spills, 0, STATIC_SMEM)}
        return Compiled(TARGET.arch, "", cubin, kernels, "0.0", False, "")


class FakeEvaluator:
    """Answers from a cost function. Like a GPU worker it finds out about variants that are not
    deterministic; with `lucky` their bits happen to repeat."""

    def __init__(
        self,
        cost: Callable[[Variant], float] = cost,
        evidence: str = "measured",
        lucky: bool = False,
        final: Callable[[Variant], Result | None] = lambda variant: None,
        delay: float = 0.0,
    ) -> None:
        self.cost, self.evidence, self.lucky, self.final = cost, evidence, lucky, final
        self.delay = delay
        self.evaluated: list[dict[str, int | str]] = []
        self.finalists: list[list[dict[str, int | str]]] = []

    def evaluate(
        self, problem: Problem, variant: Variant, compiled: Compiled, best_us: float | None
    ) -> Result:
        assert not compiled.error
        self.evaluated.append(dict(variant.config))
        time.sleep(self.delay)
        return self._result(variant)

    def finals(self, problem: Problem, entries: list[tuple[Variant, Compiled]]) -> list[Result]:
        self.finalists.append([dict(variant.config) for variant, _ in entries])
        return [self.final(variant) or self._result(variant) for variant, _ in entries]

    def _result(self, variant: Variant) -> Result:
        ratio = self.cost(variant)
        if variant.determinism == "none" and not self.lucky:
            return timed(ratio, "nondeterministic", "refuted")
        return timed(ratio)


def timed(
    ratio: float,
    outcome: str = "ok",
    determinism: str = "verified",
    floor_us: float = FLOOR_US,
) -> Result:
    times = (ratio * floor_us, floor_us, ratio)
    errors = {"dw": 0.0018, "dx": 0.0017}
    return Result(outcome, *times, determinism, errors, checks=("accuracy",))


def make_winner(config: Config, ratio: float = 1.2, **changes: Any) -> Winner:
    variant = make_variant(config, PROBLEM)
    winner = Winner(
        problem=PROBLEM,
        target=TARGET.name,
        config=dict(config),
        variant=variant.id,
        cubin="0" * 16,
        result=timed(ratio),
        evidence="measured",
        tied=(),
        fastest_nondeterministic=None,
        trials=1,
        counts={"ok": 1},
        study="elsewhere",
        space_hash=SPACE.digest(PROBLEM),
        reason="",
        date="2026-01-01T00:00:00+00:00",
    )
    return replace(winner, **changes)


def shrink(folder: Path, keep: Config, **open_knobs: list[int | str]) -> Space:
    """A space file with one value per knob, that of `keep`, but for the knobs given."""
    content = yaml.safe_load(SPACE_FILE.read_text())
    for name, entry in content["knobs"].items():
        entry.setdefault("otherwise", entry["values"][0])
        if name in open_knobs:
            entry["values"] = open_knobs[name]
        else:
            kept = keep[name] in entry["values"]
            entry["values"] = [keep[name] if kept else entry["values"][0]]
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_space(path)
