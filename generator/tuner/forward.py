"""Chooses the forward kernels of a package: measured where the GPU is, else by a rule.

The space of a shape is so small that all of it is compiled and timed; there is no study.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import datetime, timezone
from typing import Any

import torch

from generator.emulate.build import find_compiler
from generator.emulate.forward import FORWARD_SCHEDULES, emulate_forward
from generator.errors import NormforgeError
from generator.evaluate.gpu.forward import ForwardGpu
from generator.kernels.compile_pool import CompilePool
from generator.kernels.forward import (
    ForwardVariant,
    compile_forward,
    forward_fault,
    forward_variants,
    generic_forwards,
)
from generator.kernels.nvrtc import Compiled, nvrtc_version
from generator.kernels.precompile import cached
from generator.kernels.revision import code_of_all
from generator.package.entries import ForwardEntry, Forwards, Made
from generator.package.fallback_kernels import DTYPES
from generator.problem import Problem
from generator.runtime.table import ForwardTable
from generator.search.choose_winner import TIE
from generator.target import Target
from generator.tuner.plan import longest_first

MOST_VARIANTS = 60


def unsettled(
    problems: Sequence[Problem],
    target: Target,
    devices: Sequence[int],
    known: ForwardTable | None,
) -> list[Problem]:
    """The shapes (M, N and dtypes) whose forward `tune_forwards` chooses, in its order: all but
    those whose choice in `known` was made among the same code. Measured are the longest first, so
    that all GPUs end at about the same time."""
    kept = set()
    for old in known.tuned if known else ():
        shape = Problem(old.M, old.N, old.dtype, old.weight_dtype)
        fresh = old.provenance.get("code") == space_code(shape, target)
        if fresh and (not devices or old.evidence == "measured"):
            kept.add(shape)
    found = [shape for shape in _shapes(problems) if shape not in kept]
    return longest_first(found) if devices else found


def space_code(problem: Problem, target: Target) -> str:
    """Digest of the code that a shape's forward is chosen from."""
    return code_of_all(forward_variants(problem, target), target.arch)


def _shapes(problems: Sequence[Problem]) -> list[Problem]:
    """Without the options of a backward, which its forward does not know."""
    return list(dict.fromkeys(Problem(p.M, p.N, p.dtype, p.weight_dtype) for p in problems))


def forwards_to_compile(shapes: Sequence[Problem], target: Target) -> list[ForwardVariant]:
    """All that `tune_forwards` compiles to measure these shapes, in the order in which it needs
    them: each source once."""
    found = generic_forwards(DTYPES)
    for shape in shapes:
        found += _candidates(shape, target)
    return list({variant.id: variant for variant in found}.values())


def _candidates(problem: Problem, target: Target) -> list[ForwardVariant]:
    return forward_variants(problem, target)[:MOST_VARIANTS]


def tune_forwards(
    problems: Sequence[Problem],
    target: Target,
    devices: Sequence[int] = (),
    *,
    known: ForwardTable | None = None,
    processes: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Forwards:
    """The forwards for these shapes (M, N and dtypes count) and for any other.

    devices: indices of GPUs that are the target and share the shapes, none to choose by
    `generator.kernels.forward.preference`.
    known: a table whose choices are kept as they are while the sources are the same; predicted ones
    are measured where they can be.
    processes: compilers at a time. After Ctrl-C the shapes that are left are chosen by the rule.
    A shape of which no kernel compiles or passes its checks is left to the fallback kernels, with a
    line that says so.
    """
    waiting = deque(unsettled(problems, target, devices, known))
    found: dict[Problem, ForwardEntry] = {}
    with ExitStack() as stack:
        # Their processes take seconds to start, in which the kernels are compiled.
        busy = devices[: len(waiting)]
        gpus = [stack.enter_context(closing(ForwardGpu(device))) for device in busy]
        pool = stack.enter_context(CompilePool(target.arch, processes, compile=compile_forward))
        compiler = stack.enter_context(closing(_Compiler(pool, target, say)))
        if gpus:
            compiler.start(forwards_to_compile(waiting, target))
        fallback = compiler.usable(generic_forwards(DTYPES))

        def serve(problem: Problem, gpu: ForwardGpu | None) -> None:
            try:
                if gpu is None:
                    entry = _predict(problem, target, compiler)
                else:
                    entry = _measure(problem, target, compiler, gpu)
            except NormforgeError as error:
                # The backward's winner must not be lost for it.
                say(f"forward {error}; a fallback kernel serves it")
                return
            found[problem] = entry
            facts = entry.provenance
            timed = f"{facts['us']:.1f} us, {facts['ratio']:.3f} of a copy" if "us" in facts else ""
            say(f"forward {problem}: {entry.variant} ({timed or 'by rule'})")

        def lane(gpu: ForwardGpu) -> None:
            while waiting:
                try:
                    problem = waiting.popleft()
                except IndexError:
                    break  # another lane took the last one
                serve(problem, gpu)

        left: list[Problem] = [] if gpus else list(waiting)
        with ThreadPoolExecutor(max(1, len(gpus))) as lanes:
            try:
                for done in [lanes.submit(lane, gpu) for gpu in gpus]:
                    done.result()
            except KeyboardInterrupt:
                left = list(waiting)
                waiting.clear()
        for problem in left:
            serve(problem, None)
    chosen = tuple(found[shape] for shape in _shapes(problems) if shape in found)
    return Forwards(chosen, tuple(fallback))


class _Compiler:
    """Compiles in a pool what the cache lacks, and remembers, since shapes that differ in M share
    their kernels."""

    def __init__(
        self, pool: CompilePool[ForwardVariant], target: Target, say: Callable[[str], None]
    ) -> None:
        self.pool, self.target, self._say = pool, target, say
        # What waits, waits here: a process that dies takes along all that its pool has been given.
        self._threads = ThreadPoolExecutor(pool.processes)
        self._jobs: dict[str, Compiled | Future[Compiled]] = {}
        self._emulated: dict[ForwardVariant, str] = {}

    def start(self, variants: Sequence[ForwardVariant]) -> list[Compiled | Future[Compiled]]:
        """The kernels, or the promise of those that the cache lacks, compiled in this order."""
        pool, jobs = self.pool, self._jobs
        for v in variants:
            if v.id not in jobs:
                found = cached(v, pool.arch, pool.cache_folder)
                jobs[v.id] = found or self._threads.submit(self._compile, v)
        return [jobs[v.id] for v in variants]

    def _compile(self, variant: ForwardVariant) -> Compiled:
        compiled = self.pool.result(variant, self.pool.submit(variant))
        if compiled.error:
            self._say(f"forward {variant}: {compiled.error.splitlines()[0]}")
        return compiled

    def usable(self, variants: Sequence[ForwardVariant]) -> list[Made]:
        """Those that compile and neither spill nor ask for more than an SM has."""
        jobs = zip(variants, self.start(variants), strict=True)
        made = [(v, job.result() if isinstance(job, Future) else job) for v, job in jobs]
        return [(v, c) for v, c in made if not forward_fault(v, c, self.target)]

    def emulate(self, variant: ForwardVariant, problem: Problem) -> str:
        """What executing a variant on the CPU found, once for all M; "" for nothing."""
        if variant not in self._emulated:
            self._emulated[variant] = emulate_forward(variant, problem)
        return self._emulated[variant]

    def close(self) -> None:
        """Waits for what is being compiled, and drops what waits."""
        self._threads.shutdown(cancel_futures=True)


def _predict(problem: Problem, target: Target, compiler: _Compiler) -> ForwardEntry:
    reason, checks, fault = "the rule's first choice that compiles without spills", [], ""
    for variant in forward_variants(problem, target):
        for usable, compiled in compiler.usable([variant]):
            if find_compiler() is not None:
                fault = compiler.emulate(usable, problem)
                checks = [f"{len(FORWARD_SCHEDULES)} schedules on the CPU"]
            if not fault:
                facts = _facts(reason, problem, target) | {"checks": checks}
                return ForwardEntry(problem, usable, compiled, "predicted", facts)
    raise NormforgeError(
        f"{problem}: no forward kernel for {target} passes ({fault or 'none compiles'})"
    )


def _measure(
    problem: Problem, target: Target, compiler: _Compiler, gpu: ForwardGpu
) -> ForwardEntry:
    made = compiler.usable(_candidates(problem, target))
    times = gpu.measure(problem, made, target.sms)
    if isinstance(times, str):
        entry = _predict(problem, target, compiler)
        return ForwardEntry(
            *(problem, entry.variant, entry.compiled, "predicted"),
            entry.provenance
            | {"reason": f"{entry.provenance['reason']}, because measuring failed: {times}"},
        )
    finals = [i for i, time in enumerate(times) if time.final and time.ratio is not None]
    if not finals:
        faults = next((time.fault for time in times if time.fault), "no candidate")
        raise NormforgeError(f"{problem}: no forward kernel passes its checks ({faults})")
    ratio = {i: times[i].ratio or 0.0 for i in finals}
    best = min(ratio.values())
    tied = [i for i in finals if ratio[i] <= best * (1 + TIE)]
    chosen = tied[0]  # the candidates are in the order of the rule
    time = times[chosen]
    reason = f"first in the order of the rule of {len(tied)} within 1 % of the best"
    facts = _facts(reason, problem, target) | {
        "us": time.us,
        "floor_us": time.floor_us,
        "ratio": time.ratio,
        "candidates": len(times),
        "faults": sum(bool(t.fault) for t in times),
        "checks": ["accuracy", "20 runs", "residual"],
        "tie": [
            {"variant": made[i][0].id, "us": times[i].us, "ratio": times[i].ratio} for i in tied
        ],
    }
    return ForwardEntry(problem, *made[chosen], "measured", facts)


def _facts(reason: str, problem: Problem, target: Target) -> dict[str, Any]:
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {
        "reason": reason,
        "code": space_code(problem, target),
        "nvrtc": nvrtc_version(),
        "torch": torch.__version__,
        "date": date,
    }
