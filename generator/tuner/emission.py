"""Writes the winners of a run to its package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from optuna.storages import BaseStorage

from generator.kernels.compile_pool import CompilePool
from generator.kernels.cubin_cache import find_cached
from generator.kernels.forward import CompiledForward, ForwardVariant
from generator.kernels.nvrtc import Compiled, nvrtc_version
from generator.kernels.resource_gate import forward_fault
from generator.kernels.variant import AnyVariant, Variant, kernel_of
from generator.package.emit import emit_package
from generator.package.entries import Emission, Entry, Forwards, recorded_bits
from generator.package.fallback_kernels import (
    COMMON_VECTOR_BYTES,
    compile_fallbacks,
    fallback_dtypes,
    fallbacks_to_compile,
)
from generator.problem import FORWARDS, Problem
from generator.result import FLOOR_BYTES
from generator.space.forward_space import fallback_forwards, tile_forwards
from generator.studies.records import Winner
from generator.studies.study_log import StudyLog
from generator.target import Target
from generator.tuner.display import Status
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan


def fallback_forwards_of(plan: Plan) -> list[ForwardVariant]:
    """The forward kernels for any rows that the package of a plan is to have."""
    if plan.operation.tiles:
        return tile_forwards(plan.target)
    pairs = fallback_dtypes(plan.fallbacks_of_operation, plan.problems)
    found = fallback_forwards(tuple(pairs))
    if plan.fallbacks == "common":
        return [v for v in found if v.vector_bytes == COMMON_VECTOR_BYTES]
    return found


def emit(
    plan: Plan,
    winners: Sequence[Winner],
    storage: BaseStorage,
    pool: CompilePool,
    status: Status,
    stop: Stop,
) -> Emission:
    """Write the package with these winners, and the other kernels of the operation's packages.
    Fallback kernels that the package has already for other rows stay, unless the plan makes all.
    After Ctrl-C, KeyboardInterrupt is raised and nothing written.
    """
    target = plan.target
    status.phase("winners", 0, len(winners))
    chosen = [kernel_of(winner.config, winner.problem) for winner in winners]
    made = _compile(chosen, pool, partial(status.phase, "winners"))
    entries: list[Entry] = []
    of_forwards: list[Entry] = []
    for winner, variant, compiled in zip(winners, chosen, made, strict=True):
        p, facts = winner.problem, provenance(winner, storage)
        if isinstance(variant, ForwardVariant):  # whose table has shapes alone
            shape = Problem(p.M, p.N, p.dtype, p.weight_dtype)
            of_forwards.append(Entry(shape, variant, compiled, winner.evidence, facts))
        else:
            entries.append(Entry(p, variant, compiled, winner.evidence, facts))
    phases = chain(["fallback kernels"], repeat("replacements of fallback kernels"))

    def compile(variants: list[Variant]) -> list[Compiled]:
        return _compile(variants, pool, partial(status.phase, next(phases)))

    wanted = (plan.fallbacks_of_operation, target, plan.problems, plan.operation.name)
    fallbacks = compile_fallbacks(target, compile, fallbacks_to_compile(*wanted))
    forwards = None
    if plan.operation.forward:
        tell = partial(status.phase, "forward kernels")
        forwards = Forwards(
            tuple(of_forwards), usable_forwards(fallback_forwards_of(plan), target, pool, tell)
        )
    if stop.at_once:
        stop.check()  # the package stays as it was
    status.phase("writing", 0, 1)
    keep = plan.fallbacks != "all"
    emission = emit_package(
        entries,
        fallbacks,
        target,
        plan.package,
        forwards,
        keep_fallbacks=keep,
        standalone=plan.standalone,
    )
    status.phase("writing", 1, 1)
    return emission


def usable_forwards(
    variants: Sequence[ForwardVariant],
    target: Target,
    pool: CompilePool,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[CompiledForward, ...]:
    """The forwards for any row that may run on the target, compiled."""
    made = zip(variants, _compile(variants, pool, tell), strict=True)
    return tuple((v, c) for v, c in made if not (c.error or forward_fault(v, c, target)))


def _compile(
    variants: Sequence[AnyVariant], pool: CompilePool, tell: Callable[[int, int], None]
) -> list[Compiled]:
    """All of them. No process starts for what the cache has, which after a search is nearly all.
    tell: is told how many are done, and of how many."""
    jobs = [(v, find_cached(v, pool.arch, pool.cache_folder) or pool.submit(v)) for v in variants]
    found = []
    for variant, job in jobs:
        found.append(job if isinstance(job, Compiled) else pool.result(variant, job))
        tell(len(found), len(jobs))
    return found


def provenance(winner: Winner, storage: BaseStorage) -> dict[str, Any]:
    """Everything a reader of the package may ask about where a winner comes from."""
    result = winner.result
    machine = StudyLog(storage, winner.study).machine
    fastest = winner.fastest_nondeterministic
    facts = {
        "gpu": machine.get("gpu", winner.target),
        "driver": machine.get("driver"),
        "nvrtc": machine.get("nvrtc", nvrtc_version()),
        "torch": machine.get("torch", torch.__version__),
        "python": machine.get("python", sys.version.split()[0]),
        "space": winner.space_hash,
        "study": winner.study,
        "date": winner.date,
        "trials": winner.trials,
        "outcomes": dict(winner.counts),
        "us": result.us,
        "floor_us": result.floor_us,
        FLOOR_BYTES: result.extra.get(FLOOR_BYTES),
        "ratio": result.ratio,
        "condition": result.extra.get("condition"),
        **result.named_errors,
        "verified": result.determinism,
        "checks": list(result.checks),
        **recorded_bits(result),
        "note": result.note,
        "tie": [{"variant": f.variant, "us": f.us, "ratio": f.ratio} for f in winner.tied],
        "fastest_nondeterministic": (
            {"variant": fastest.variant, "us": fastest.us, "ratio": fastest.ratio}
            if fastest
            else None
        ),
        "overhead_of_determinism": winner.overhead_of_determinism,
        "reason": winner.reason,
    }
    if winner.problem.operation in FORWARDS and winner.evidence == "predicted":
        return {name: fact for name, fact in facts.items() if name not in _OF_TIMES}
    return facts


_OF_TIMES = ("us", "floor_us", "ratio", "tie")
"""Fields that are not stated of a forward that was chosen by the rule."""
