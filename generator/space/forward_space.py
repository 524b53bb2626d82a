"""Every forward of a shape, in the order of the rule, and those that take any row."""

from __future__ import annotations

from generator.kernels.forward import (
    ANY_COLUMNS,
    TILE_FORMS,
    TILE_THREADS,
    ForwardVariant,
    make_forward,
)
from generator.problem import FORWARDS, ITEMSIZE, RMSNORM_FORWARD, Problem
from generator.space.load import load_space_once, space_file
from generator.target import Target
from normforge.spec import ceil_div

TILE_ARCHES = ("sm_90a",)


def forward_variants(problem: Problem, target: Target) -> list[ForwardVariant]:
    """Every variant of the search space for a forward, the preferred one (see `preference`) first.
    All of them serve any M. Those of a problem of another operation are RMSNorm's."""
    operation = problem.operation if problem.operation in FORWARDS else RMSNORM_FORWARD
    configs = load_space_once(space_file(operation)).legal(problem, target)
    found = [make_forward(config, problem) for config in configs]
    return sorted(found, key=lambda v: preference(v, problem, target))


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
