"""Kernels that a package needs whatever a search finds: compiled beside the search, and found in
the cache after it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

from generator.kernels.cubin_cache import DEFAULT_CACHE, compile_variant
from generator.kernels.revision import AnyVariant
from generator.processes import end_pool, end_with_parent, shielded

MOST_PROCESSES = 8
CORES_PER_PROCESS = 8
NICE = 19
"""Behind everything else of a run: the compilers of `CompilePool` have 5."""


@contextmanager
def precompiling(
    variants: Sequence[AnyVariant], arch: str, cache_folder: Path = DEFAULT_CACHE
) -> Iterator[None]:
    """While the body runs, compile the variants into the cache, in this order, at low priority. At
    its end the processes are killed. Raises nothing: what fails here, or is not reached, is
    compiled where it is needed, and an error is reported there."""
    cores = len(os.sched_getaffinity(0))
    processes = min(MOST_PROCESSES, max(1, cores // CORES_PER_PROCESS))
    pool = ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent, (NICE,))
    try:
        # The machine may have no process left, or one of ours may be dead already.
        with suppress(OSError, RuntimeError), shielded():
            for variant in variants:
                pool.submit(_fill, variant, arch, cache_folder)
        yield
    finally:
        end_pool(pool)


def _fill(variant: AnyVariant, arch: str, cache_folder: Path) -> None:
    """Sends nothing back: its parent may be searching, and would have to read the machine code."""
    compile_variant(variant, arch, cache_folder)
