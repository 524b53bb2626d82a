"""The forward kernels that a choice is made from, compiled while others are measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from generator.emulate.forward import emulate_forward, few_rows
from generator.kernels.compile_pool import CompilePool
from generator.kernels.cubin_cache import find_cached
from generator.kernels.forward import CompiledForward, ForwardVariant, forward_fault
from generator.kernels.nvrtc import Compiled
from generator.problem import Problem
from generator.target import Target


class ForwardCompiler:
    """Compiles in a pool what the cache lacks, and remembers, since shapes that differ in M share
    their kernels."""

    def __init__(self, pool: CompilePool, target: Target, say: Callable[[str], None]) -> None:
        self.pool, self.target, self._say = pool, target, say
        # What waits, waits here: a process that dies takes along all that its pool has been given.
        self._threads = ThreadPoolExecutor(pool.processes)
        self._jobs: dict[str, Compiled | Future[Compiled]] = {}
        self._emulated: dict[tuple[ForwardVariant, Problem], str] = {}
        self._closed = False

    def start(self, variants: Sequence[ForwardVariant]) -> list[Compiled | Future[Compiled]]:
        """The kernels, or the promise of those that the cache lacks, compiled in this order."""
        pool, jobs = self.pool, self._jobs
        for v in variants:
            if v.id not in jobs:
                found = find_cached(v, pool.arch, pool.cache_folder)
                jobs[v.id] = found or self._threads.submit(self._compile, v)
        return [jobs[v.id] for v in variants]

    def _compile(self, variant: ForwardVariant) -> Compiled:
        compiled = self.pool.result(variant, self.pool.submit(variant))
        if compiled.error and not self._closed:
            self._say(f"forward {variant}: {compiled.error.splitlines()[0]}")
        return compiled

    def usable(self, variants: Sequence[ForwardVariant]) -> list[CompiledForward]:
        """Those that compile and neither spill nor ask for more than an SM has."""
        jobs = zip(variants, self.start(variants), strict=True)
        made = [(v, job.result() if isinstance(job, Future) else job) for v, job in jobs]
        return [(v, c) for v, c in made if not forward_fault(v, c, self.target)]

    def emulate(self, variant: ForwardVariant, problem: Problem) -> str:
        """What executing a variant on the CPU found, once for all M that are reduced to the same
        few rows; "" for nothing."""
        few = few_rows(variant, problem)
        if (variant, few) not in self._emulated:
            self._emulated[variant, few] = emulate_forward(variant, few)
        return self._emulated[variant, few]

    def close(self) -> None:
        """Drops what waits. What is being compiled ends with the pool, and nobody is told."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
