"""The small space of a forward: every variant of a shape, in the order of the rule, and those that
take any row.

A forward has no sum over rows, so there is little to choose: how many threads share a row, how many
rows they take at once, and whether CTAs walk over the rows or each takes its share and ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from generator.errors import NormforgeError
from generator.kernels.forward import (
    ANY_COLUMNS,
    TILE_FORMS,
    TILE_THREADS,
    VECTORS_READ_TWICE,
    ForwardVariant,
)
from generator.problem import ITEMSIZE, Problem
from generator.target import Target
from normforge.spec import ceil_div

MOST_VECTORS = 8
"""Vectors of x that a thread holds, in all of its rows; half as many in the largest CTAs, whose
threads have 64 registers."""
CTA_THREADS = (128, 256, 512)
TILE_ARCHES = ("sm_90a",)
CLUSTER_ROW_BYTES = 16384
"""Rows shorter than this are not shared by several CTAs."""


def widest_vector(N: int, dtype: str, target: Target) -> int:
    """The widest vector, in bytes, that divides a row of N columns."""
    row_bytes = N * ITEMSIZE[dtype]
    return next(
        size
        for size in (32, 16, 8, 4, 2)
        if size <= target.max_vector_bytes and row_bytes % size == 0
    )


def forward_variants(problem: Problem, target: Target) -> list[ForwardVariant]:
    """Every variant worth a measurement for a shape: at most some ninety, the preferred one (see
    `preference`) first. All of them serve any M."""
    found = dict.fromkeys(_variants(problem.N, problem.dtype, problem.weight_dtype, target))
    return sorted(found, key=lambda v: preference(v, problem, target))


def forwards_with(
    fixed: Mapping[str, int | str], problem: Problem, target: Target
) -> list[ForwardVariant]:
    """Those of `forward_variants` that have these values; in registers, if there are any values.
    Raises NormforgeError when none has them all."""
    found = [
        variant
        for variant in forward_variants(problem, target)
        if all(getattr(variant, name) == value for name, value in fixed.items())
        and (not fixed or variant.form == "registers")
    ]
    if fixed and not found:
        raise NormforgeError(
            f"{problem}: no forward for {target} has {dict(fixed)}, which is fixed"
        )
    return found


def _variants(N: int, dtype: str, weight_dtype: str, target: Target) -> Iterator[ForwardVariant]:
    row = (N, dtype, weight_dtype)
    widest = widest_vector(N, dtype, target)
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
    return MOST_VECTORS if threads <= 512 else MOST_VECTORS // 2


def _cta_sizes(per_row: int) -> list[int]:
    """CTAs of whole rows and whole warps, of about the usual sizes."""
    if per_row > CTA_THREADS[-1]:
        return [per_row]
    return sorted({max(1, threads // per_row) * per_row for threads in CTA_THREADS})


def preference(variant: ForwardVariant, problem: Problem, target: Target) -> tuple[float, ...]:
    """Sort key, smallest first, of the rule that chooses where nothing can be measured: rows in
    registers; CTAs that end after their rows, so that the hardware balances the SMs; no clusters;
    at least two CTAs per SM; about 32 bytes of x in flight per thread (on full SMs what the memory
    latency needs); about 256 threads per CTA; few rows in flight; wide vectors."""
    v = variant
    in_thread = v.vectors * v.rows_in_flight * v.vector_bytes
    enough = ceil_div(problem.M, v.rows_per_cta * v.rows_in_flight) >= 2 * target.sms
    return (
        v.form == "twice",
        v.ctas_per_sm > 0,
        v.cluster > 1,
        not enough,
        abs(in_thread - 32) / 32,
        abs(v.threads - 256) / 256,
        v.rows_in_flight,
        -v.vector_bytes,
        v.threads_per_row,
    )


def fallback_forwards(dtypes: tuple[tuple[str, str], ...]) -> list[ForwardVariant]:
    """The variants that take any row: of whole 16-byte vectors at aligned addresses, or any other.
    Each has room for twice the columns of the one before, so at most half of the threads of a row
    idle. dtypes: pairs of x's and the weight's dtype."""
    found = []
    for dtype, weight_dtype in dtypes:
        for vector_bytes in (16, ITEMSIZE[dtype]):
            wide = ((2, 8), (2, 16), (2, 32), (4, 32), (4, 64), (4, 128), (4, 256))
            narrow = ((8, 32), (8, 64), (8, 128), (8, 256), (8, 512))
            for vectors, per_row in wide if vector_bytes == 16 else narrow:
                N = vectors * per_row * vector_bytes // ITEMSIZE[dtype]
                found.append(
                    ForwardVariant(
                        N,
                        dtype,
                        weight_dtype,
                        form="registers",
                        threads_per_row=per_row,
                        rows_per_cta=max(1, 256 // per_row),
                        rows_in_flight=1,
                        vector_bytes=vector_bytes,
                        exact=False,
                    )
                )
            found.append(
                ForwardVariant(
                    ANY_COLUMNS,
                    dtype,
                    weight_dtype,
                    form="twice",
                    threads_per_row=512,
                    rows_per_cta=1,
                    rows_in_flight=1,
                    vector_bytes=vector_bytes,
                    exact=False,
                )
            )
    return found


def tile_forwards(target: Target) -> list[ForwardVariant]:
    """The variants with the arithmetic of vLLM's Triton kernel: of either order of a thread's sum,
    for rows of a multiple of 16 columns, which are read in vectors, and for any other. None for an
    architecture for which nobody has read that arithmetic off the machine code."""
    if target.arch not in TILE_ARCHES:
        return []
    return [
        ForwardVariant(
            ANY_COLUMNS,
            dtype,
            dtype,
            form=form,
            threads_per_row=TILE_THREADS,
            rows_per_cta=1,
            rows_in_flight=1,
            vector_bytes=vector_bytes,
            exact=False,
        )
        for form in TILE_FORMS
        for dtype in ITEMSIZE
        for vector_bytes in (16, ITEMSIZE[dtype])
    ]
