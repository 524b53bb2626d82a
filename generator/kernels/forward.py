"""The forward's kernels: one variant, its geometry, its source, and the small space of a shape.

A forward has no sum over rows, so there is little to choose: how many threads share a row, how many
rows they take at once, and whether CTAs walk over the rows or each takes its share and ends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

from generator.kernels.cubin_cache import DEFAULT_CACHE, CubinCache
from generator.kernels.nvrtc import Compiled
from generator.kernels.render import _ELEMENT, constant_lines, environment
from generator.problem import ITEMSIZE, Problem
from generator.runtime.spec import FORWARD_KERNELS, ForwardSpec, ceil_div, round_up
from generator.target import WARP, Target

MOST_VECTORS = 8
"""Vectors of x that a thread holds, in all of its rows; half as many in the largest CTAs, whose
threads have 64 registers."""
READ_TWICE = 4
"""Vectors that a thread has under way where rows are read twice."""
ANY_COLUMNS = 1 << 30
CTA_THREADS = (128, 256, 512)
CLUSTER_ROW_BYTES = 16384
"""Rows shorter than this are not shared by several CTAs."""


@dataclass(frozen=True)
class ForwardVariant:
    """One forward kernel. form: `registers`, where a row stays in registers, or `twice`, where it
    is read again and may have any length. ctas_per_sm: CTAs that walk over the rows and load the
    next ones ahead; 0 for as many CTAs as the rows need. exact: for N alone, else for any N up to
    it."""

    N: int
    dtype: str
    weight_dtype: str
    form: str
    threads_per_row: int
    rows_per_cta: int
    rows_in_flight: int
    vector_bytes: int
    cluster: int = 1
    ctas_per_sm: int = 0
    exact: bool = True

    def __str__(self) -> str:
        return self.id

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return self.threads_per_row * self.rows_per_cta

    @property
    def columns(self) -> int:
        """Columns that one CTA owns."""
        return self.N // self.cluster

    @property
    def elements(self) -> int:
        """Elements of x in one vector."""
        return self.vector_bytes // ITEMSIZE[self.dtype]

    @property
    def vectors(self) -> int:
        """Vectors of one row that a thread holds at once."""
        if self.form == "twice":
            return READ_TWICE
        return ceil_div(self.columns, self.threads_per_row * self.elements)

    @property
    def warps_per_row(self) -> int:
        return ceil_div(self.threads_per_row, WARP)

    @property
    def sums_offset(self) -> int:
        """Bytes of shared memory in front of the sums: a cluster's two transaction barriers."""
        return 16 if self.cluster > 1 else 0

    @property
    def smem_bytes(self) -> int:
        if self.warps_per_row == 1 and self.cluster == 1:
            return 0
        sums = self.rows_in_flight * self.warps_per_row * self.cluster
        return self.sums_offset + round_up(2 * self.rows_per_cta * sums * 4, 16)

    @cached_property
    def id(self) -> str:
        """A readable name that is unique to the source."""
        source = replace(self, ctas_per_sm=min(1, self.ctas_per_sm))
        digest = hashlib.sha256(repr(astuple(source)).encode()).hexdigest()[:8]
        weight = "" if self.weight_dtype == self.dtype else f"w{self.weight_dtype}_"
        width = "any" if self.N == ANY_COLUMNS else f"{'n' if self.exact else 'upto'}{self.N}"
        shape = f"{self.threads_per_row}x{self.rows_per_cta}x{self.rows_in_flight}"
        return f"forward_{self.form}_{width}_{self.dtype}_{weight}{shape}_{digest}"

    def spec(self, sms: int) -> ForwardSpec:
        """The facts that a launch on `sms` multiprocessors needs."""
        return ForwardSpec(
            name=self.id,
            N=self.N,
            exact=self.exact,
            dtype=self.dtype,
            weight_dtype=self.weight_dtype,
            threads=self.threads,
            smem_bytes=self.smem_bytes,
            vector_bytes=self.vector_bytes,
            rows_per_cta=self.rows_per_cta,
            rows_in_flight=self.rows_in_flight,
            cluster=self.cluster,
            ctas_per_sm=self.ctas_per_sm,
            sms=sms,
        )


def render_forward(variant: ForwardVariant, *, comments: bool = True, include: str = "") -> str:
    """The CUDA C++ source of a variant. comments, include: as of `generator.kernels.render`."""
    v = variant
    rows: list[tuple[str, int, str]] = [
        ("kRowColumns", v.N, "N" if v.exact else "largest N served"),
        ("kColumns", v.columns, "columns of one CTA"),
        ("kCluster", v.cluster, "CTAs that share a row"),
        ("kThreadsPerRow", v.threads_per_row, ""),
        ("kTeams", v.rows_per_cta, "rows that a CTA works on, each by a team of its own"),
        ("kThreads", v.threads, "of one CTA"),
        ("kRowsInFlight", v.rows_in_flight, "rows that a team works on at once"),
        ("kVectorBytes", v.vector_bytes, ""),
        ("kElements", v.elements, "elements of x in a vector"),
        ("kVectors", v.vectors, "vectors of a row in one thread"),
        ("kWarpsPerRow", v.warps_per_row, ""),
        ("kWeightBytes", v.elements * ITEMSIZE[v.weight_dtype], "of the weight for one vector"),
        ("kResidualBytes", v.vector_bytes, "of the residual for one vector"),
        ("kStageBarriers", 0, ""),
        ("kSumsOffset", v.sums_offset, "bytes into shared memory"),
    ]
    flags = [
        ("kExact", v.exact, "N is a constant"),
        ("kWalks", v.ctas_per_sm > 0, "CTAs walk over the rows"),
        ("kOffset", True, "a number, added in fp32, comes with every call"),
    ]
    constants = [
        f"constexpr bool {name} = {str(value).lower()};" + f"  // {meaning}" * comments
        for name, value, meaning in flags
    ]
    constants += constant_lines(rows, comments)
    return (
        environment(comments, include)
        .get_template("rmsnorm_forward.cu.j2")
        .render(
            name=v.id,
            constants=constants,
            element=_ELEMENT[v.dtype],
            weight=_ELEMENT[v.weight_dtype],
            cluster=v.cluster,
            form=v.form,
        )
    )


def compile_forward(
    variant: ForwardVariant, arch: str, cache_folder: Path = DEFAULT_CACHE
) -> Compiled:
    """Render and compile a variant through the cache."""
    return CubinCache(cache_folder).compile(render_forward(variant), arch)


def forward_fault(variant: ForwardVariant, compiled: Compiled, target: Target) -> str:
    """Why a compiled variant must not run on the target: one sentence, or "" when it may."""
    if compiled.error:
        return f"does not compile: {compiled.error.splitlines()[0]}"
    if compiled.spills:
        return f"spills or stack: {compiled.spills} bytes per thread"
    for name in FORWARD_KERNELS:
        used = compiled.kernels[name]
        smem_bytes = variant.smem_bytes + used.smem_bytes
        barriers = max(1, used.barriers)
        if not target.occupancy(variant.threads, used.registers, smem_bytes, barriers):
            return f"no CTA fits an SM of {target} ({used.registers} registers)"
    return ""


def widest_vector(N: int, dtype: str, target: Target) -> int:
    """The widest vector, in bytes, that divides a row of N columns."""
    row_bytes = N * ITEMSIZE[dtype]
    return next(
        size
        for size in (32, 16, 8, 4, 2)
        if size <= target.max_vector_bytes and row_bytes % size == 0
    )


def forward_variants(problem: Problem, target: Target) -> list[ForwardVariant]:
    """Every variant worth a measurement for a shape: at most some sixty, the preferred one (see
    `preference`) first. All of them serve any M."""
    found = dict.fromkeys(_variants(problem.N, problem.dtype, problem.weight_dtype, target))
    return sorted(found, key=lambda v: preference(v, problem, target))


def _variants(N: int, dtype: str, weight_dtype: str, target: Target) -> Iterator[ForwardVariant]:
    widest = widest_vector(N, dtype, target)
    for vector_bytes in (32, 16) if widest == 32 else (widest,):
        kind = (N, dtype, weight_dtype)
        clusters = [1]
        if target.has_bulk_copy and N * ITEMSIZE[dtype] >= CLUSTER_ROW_BYTES:
            clusters += [c for c in (2, 4, 8) if N * ITEMSIZE[dtype] % (c * vector_bytes) == 0]
        for cluster in clusters:
            across = N * ITEMSIZE[dtype] // vector_bytes // cluster
            for per_row in _threads_per_row(across, 128 if cluster > 1 else 1):
                for in_flight in (1, 2, 4, 8):
                    if ceil_div(across, per_row) * in_flight > _most_vectors(per_row):
                        break
                    # Clusters are for rows so long that few of them are under way at once.
                    if cluster > 1 and in_flight > 1:
                        break
                    sizes = [per_row] if cluster > 1 else _cta_sizes(per_row)
                    for threads in sizes:
                        for ctas_per_sm in (0, max(1, 1024 // threads)):
                            if ctas_per_sm and vector_bytes < widest:
                                continue
                            yield ForwardVariant(
                                *(*kind, "registers", per_row, threads // per_row),
                                *(in_flight, vector_bytes, cluster, ctas_per_sm),
                            )
        if N * ITEMSIZE[dtype] // vector_bytes >= READ_TWICE * 256:
            for threads in (256, 512, 1024):
                for ctas_per_sm in (0, 2048 // threads):
                    yield ForwardVariant(
                        *(*kind, "twice", threads, 1, 1, vector_bytes, 1, ctas_per_sm)
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
    """Sort key of the rule that chooses where nothing can be measured; the smallest is preferred.

    Rows stay in registers; CTAs take their rows and end, so that the hardware hands rows to
    whichever SM is free; no clusters; at least two CTAs for every SM; about 32 bytes of x under
    way in every thread (on full SMs as much as the memory's latency asks for); CTAs of about 256
    threads; few rows in flight; wide vectors.
    """
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


def generic_forwards(dtypes: tuple[tuple[str, str], ...]) -> list[ForwardVariant]:
    """The variants that take any row: of whole 16-byte vectors at aligned addresses, or any other.

    dtypes: pairs of x's and the weight's dtype.
    """
    found = []
    for dtype, weight_dtype in dtypes:
        for vector_bytes in (16, ITEMSIZE[dtype]):
            wide = ((4, 32, 8), (4, 256, 1))
            narrow = ((8, 32, 8), (8, 512, 1))
            for vectors, per_row, rows in wide if vector_bytes == 16 else narrow:
                N = vectors * per_row * vector_bytes // ITEMSIZE[dtype]
                found.append(
                    ForwardVariant(
                        *(N, dtype, weight_dtype, "registers", per_row, rows, 1, vector_bytes),
                        exact=False,
                    )
                )
            found.append(
                ForwardVariant(
                    *(ANY_COLUMNS, dtype, weight_dtype, "twice", 512, 1, 1, vector_bytes),
                    exact=False,
                )
            )
    return found
