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
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled, nvrtc_version
from generator.kernels.variant import Variant, make_variant
from generator.package.emit import emit_package, read_forward_table
from generator.package.entries import Emission, Entry, recorded_bits
from generator.package.fallback_kernels import (
    COMMON_VECTOR_BYTES,
    compile_fallbacks,
    fallback_dtypes,
    fallbacks_to_compile,
)
from generator.space.forward_space import fallback_forwards, tile_forwards
from generator.studies.records import Winner
from generator.studies.study_log import StudyLog
from generator.tuner.display import Status
from generator.tuner.forward import tune_forwards
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.task_runner import compiler_processes


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
    Choosing forwards can take minutes: after SIGTERM, the next run chooses the rest. After Ctrl-C,
    KeyboardInterrupt is raised and nothing written.
    """
    target = plan.target
    status.phase("winners", 0, len(winners))
    chosen = [make_variant(winner.config, winner.problem) for winner in winners]
    made = _compile(chosen, pool, partial(status.phase, "winners"))
    entries = [
        Entry(winner.problem, variant, compiled, winner.evidence, provenance(winner, storage))
        for winner, variant, compiled in zip(winners, chosen, made, strict=True)
    ]
    phases = chain(["fallback kernels"], repeat("replacements of fallback kernels"))

    def compile(variants: list[Variant]) -> list[Compiled]:
        return _compile(variants, pool, partial(status.phase, next(phases)))

    fallbacks = compile_fallbacks(
        target, compile, fallbacks_to_compile(plan.fallbacks_of_operation, target, plan.problems)
    )
    forwards = None
    if plan.operation.forward:
        forwards = tune_forwards(
            [winner.problem for winner in winners],
            target,
            plan.devices,
            known=read_forward_table(plan.package),
            processes=compiler_processes(),
            say=status.say,
            fallbacks=fallback_forwards_of(plan),
            choices=plan.forwards,
            tell=partial(status.phase, "forward kernels"),
            check=stop.check,
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


def _compile(
    variants: Sequence[Variant], pool: CompilePool, tell: Callable[[int, int], None]
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
    return {
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
        "floor_bytes": result.extra.get("floor_bytes"),
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
