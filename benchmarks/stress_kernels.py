"""The kernels of benchmarks.stress, with and without delays, and the planted bugs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from random import Random

from generator.errors import NormforgeError
from generator.evaluate.gpu.protocol import Candidate
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import compile_source
from generator.kernels.render import render
from generator.kernels.resource_gate import refuse
from generator.kernels.strategies import REDUCTION_KNOBS, is_deterministic, strategy_of
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.target import Target

PROBLEMS: dict[Problem, int] = {
    Problem.parse("2000x1024:bf16"): 1,
    Problem.parse("1500x8192:bf16"): 2,
    Problem.parse("700x16384:bf16"): 8,
    Problem(2000, 1024, "bf16", "bf16", operation="layernorm_backward"): 1,
    Problem(9000, 1024, "bf16", "bf16", operation="rmsnorm_invariant_backward"): 1,
}
"""The problems, each with the CTAs of a cluster."""
PIPELINES = ("async", "bulk")
DELAYED = re.compile(
    r"(DEVICE [^;{}]*?\b(?:send_words|receive_words|(?:load|store|add)_workspace\w*|load_acquire"
    r"|load_relaxed|store_release|store_relaxed|take_ticket|read_acquire|read_relaxed|book_\w+"
    r"|warp_barrier|cta_barrier|named_barrier|copy_async\w*|mbarrier_\w+|bulk_\w+|fence_\w+"
    r"|cluster_barrier|store_cluster|allow_dependents|wait_for_primary)\([^()]*\) \{)"
)
DELAY = r"""
DEVICE void delay() {
  unsigned r = static_cast<unsigned>(clock64()) ^ blockIdx.x * 2654435761u;
  r = (r ^ (r >> 15)) * 0x85ebca6bu;
  r ^= r >> 13;
  if ((r & 7) == 0) __nanosleep((r >> 3) & 2047);
}
"""
"""A function of which one call in eight sleeps, for up to 2 µs (twice that, as __nanosleep may)."""

CONTROLS: dict[str, tuple[Config, str, str]] = {
    "no barrier before the ticket": (
        {"strategy": "last_cta"},
        "    cta_barrier();\n    unsigned ticket",
        "    unsigned ticket",
    ),
    "slices summed when all have started, not arrived": (
        {"strategy": "column_slices"},
        "if (complete(seen)) return true;",
        "if (complete(seen) || starts(seen) == participants) return true;",
    ),
    "words of partial dw read once, not until they arrive": (
        {"strategy": "mailbox", "arrival": "early"},
        "} while (missing);",
        "} while (false);",
    ),
}
"""Bugs by name: in kernels with which knobs, and what becomes of which text."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that is compiled twice, as it is and with delays. planted: the bug that its delayed
    copy has."""

    problem: Problem
    strategy: str
    pipeline: str
    cluster: int
    plain: Candidate
    delayed: Candidate
    planted: str = ""

    @property
    def label(self) -> str:
        return f"{self.problem} {self.strategy} {self.pipeline} cluster {self.cluster}"


def with_delays(source: str) -> str:
    """A rendered source in which every primitive that orders something may sleep first. Raises
    NormforgeError for a source without them."""
    define = re.search(r"^#define DEVICE .*\n", source, re.M)
    delayed, count = DELAYED.subn(r"\1 delay();", source)
    if not define or not count:
        raise NormforgeError("the rendered source has no primitives to delay")
    return delayed.replace(define[0], define[0] + DELAY, 1)


def variants(target: Target, seed: int) -> Iterator[tuple[Variant, str]]:
    """A variant of every deterministic strategy, pipeline and problem, as far as there are any, and
    one for each control, with its name."""
    for problem, cluster in PROBLEMS.items():
        legal = LegalConfigs(load_space(space_file(problem.operation)), problem, target)
        kinds = [
            {name: kind[name] for name in REDUCTION_KNOBS}
            for kind in legal.reduction_kinds
            if is_deterministic(kind)
        ]
        wanted: list[tuple[Config, str]] = [
            ({**kind, "pipeline": pipeline, "cluster": cluster}, "")
            for kind in kinds
            for pipeline in PIPELINES
        ]
        if problem == next(iter(PROBLEMS)):
            wanted += [({**knobs, "cluster": 1}, bug) for bug, (knobs, _, _) in CONTROLS.items()]
        for knobs, bug in wanted:
            rng = Random(f"{seed}/{problem}/{knobs}")
            config = next(legal.space.legal(problem, target, rng=rng, fixed=knobs), None)
            if config is not None:
                yield make_variant(config, problem), bug


def build(job: tuple[Variant, str], target: Target) -> Kernel | None:
    """The kernel of a variant, with a bug or "", None for one that must not run. Raises
    NormforgeError."""
    variant, bug = job
    problem = next(p for p in PROBLEMS if (p.operation, p.N) == (variant.operation, variant.N))
    source, cap = render(variant), int(variant["register_cap"])
    plain = compile_source(source, target.arch, cap)
    if refuse(variant, plain, problem, target):
        return None
    if bug:
        _, old, new = CONTROLS[bug]
        if old not in source:
            raise NormforgeError(f"the templates no longer have {old!r}")
        source = source.replace(old, new)
    delayed = compile_source(with_delays(source), target.arch, cap)
    if delayed.error:
        raise NormforgeError(f"{variant} does not compile with delays: {delayed.error[:500]}")
    spec = variant.spec(target.sms)
    return Kernel(
        problem,
        str(strategy_of(variant.config)),
        str(variant["pipeline"]),
        int(variant["cluster"]),
        Candidate(plain.cubin, spec),
        Candidate(delayed.cubin, spec),
        bug,
    )


def kernels(target: Target, seed: int) -> list[Kernel]:
    """All of them; a variant is drawn again where the first must not run."""
    found: dict[str, Kernel] = {}
    with ProcessPoolExecutor() as pool:
        for attempt in range(4):
            drawn = list(variants(target, seed + 1000 * attempt))
            for kernel in pool.map(partial(build, target=target), drawn):
                if kernel:
                    found.setdefault(kernel.label + kernel.planted, kernel)
    return list(found.values())
