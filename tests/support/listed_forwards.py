"""The forwards of a shape in loops: what search_spaces/rmsnorm_forward.yaml has to allow."""

from __future__ import annotations

from collections.abc import Iterator

from generator.kernels.forward import VECTORS_READ_TWICE, ForwardVariant
from generator.problem import ITEMSIZE, Problem
from generator.target import Target
from normforge.spec import ceil_div

CTA_THREADS = (128, 256, 512)
CLUSTER_ROW_BYTES = 16384


def _widest_vector(N: int, dtype: str, target: Target) -> int:
    row_bytes = N * ITEMSIZE[dtype]
    sizes = (size for size in (32, 16, 8, 4, 2) if size <= target.max_vector_bytes)
    return next(size for size in sizes if row_bytes % size == 0)


def listed(problem: Problem, target: Target) -> Iterator[ForwardVariant]:
    """Every forward that a shape has on a target."""
    N, dtype = problem.N, problem.dtype
    row = (N, dtype, problem.weight_dtype)
    widest = _widest_vector(N, dtype, target)
    for vector_bytes in (32, 16) if widest == 32 else (widest,):
        clusters = [1]
        if target.has_bulk_copy and N * ITEMSIZE[dtype] >= CLUSTER_ROW_BYTES:
            clusters += [c for c in (2, 4, 8) if N * ITEMSIZE[dtype] % (c * vector_bytes) == 0]
        for cluster in clusters:
            for variant in _in_registers(row, vector_bytes, cluster):
                if variant.ctas_per_sm == 0 or vector_bytes == widest:
                    yield variant
        if N * ITEMSIZE[dtype] // vector_bytes >= VECTORS_READ_TWICE * 256:
            for threads in (256, 512, 1024):
                for ctas_per_sm in (0, 2048 // threads):
                    yield ForwardVariant(
                        *row,
                        form="twice",
                        threads_per_row=threads,
                        rows_per_cta=1,
                        rows_in_flight=1,
                        vector_bytes=vector_bytes,
                        ctas_per_sm=ctas_per_sm,
                    )


def _in_registers(
    row: tuple[int, str, str], vector_bytes: int, cluster: int
) -> Iterator[ForwardVariant]:
    """Variants that keep a row in registers. row: its N, dtype and weight dtype."""
    N, dtype, _ = row
    across = N * ITEMSIZE[dtype] // vector_bytes // cluster
    for per_row in _threads_per_row(across, 128 if cluster > 1 else 1):
        # Clusters are for rows so long that few of them are under way at once.
        for in_flight in (1,) if cluster > 1 else (1, 2, 4, 8):
            if ceil_div(across, per_row) * in_flight > _most_vectors(per_row):
                break
            for threads in [per_row] if cluster > 1 else _cta_sizes(per_row):
                for ctas_per_sm in (0, max(1, 1024 // threads)):
                    yield ForwardVariant(
                        *row,
                        form="registers",
                        threads_per_row=per_row,
                        rows_per_cta=threads // per_row,
                        rows_in_flight=in_flight,
                        vector_bytes=vector_bytes,
                        cluster=cluster,
                        ctas_per_sm=ctas_per_sm,
                    )


def _threads_per_row(across: int, least: int) -> list[int]:
    """Threads for a row of `across` vectors: numbers of which some whole multiple is the row, where
    there are such, else powers of two of which few threads idle."""
    powers = [n for n in (4, 8, 16, 32, 64, 128, 256, 512, 1024) if n >= least]
    whole = [n for n in range(32, 1025, 32) if n >= least and across % n == 0]
    whole += [n for n in powers if n < 32 and across % n == 0]
    held = [n for n in sorted(whole) if across // n <= _most_vectors(n)]
    if len(held) >= 2:
        return held
    held = [n for n in powers if across / n <= _most_vectors(n)]
    few_idle = [n for n in held if ceil_div(across, n) * n <= 1.25 * across]
    return few_idle or held[:1]


def _most_vectors(threads: int) -> int:
    return 8 if threads <= 512 else 4


def _cta_sizes(per_row: int) -> list[int]:
    """CTAs of whole rows and whole warps, of about the usual sizes."""
    if per_row > CTA_THREADS[-1]:
        return [per_row]
    return sorted({max(1, threads // per_row) * per_row for threads in CTA_THREADS})
