"""Problems and legal variants for tests to draw from."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from generator.errors import NormforgeError
from generator.kernels.compile_pool import CompilePool
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.strategies import STRATEGIES
from generator.kernels.variant import Variant, make_variant
from generator.package.emit import emit_package
from generator.package.entries import PROVENANCE_KEYS, Entry, Forwards
from generator.package.fallback_kernels import DTYPES as FALLBACK_DTYPES
from generator.package.fallback_kernels import compile_fallbacks, fallbacks_to_compile
from generator.problem import ITEMSIZE, RMSNORM_BACKWARD, Problem
from generator.space.forward_space import fallback_forwards, forward_variants
from generator.space.load import load_space, space_file
from generator.space.space import Space
from generator.target import Target, find_target, load_targets
from generator.tuner.emission import usable_forwards
from normforge.api import Package
from normforge.spec import MAIN_KERNEL

SPACE = load_space()

BY_TEMPLATE = {strategy.template: strategy for strategy in STRATEGIES}
REDUCTION: dict[str, dict[str, int | str]] = {n: {**s.knobs} for n, s in BY_TEMPLATE.items()}
"""The knobs of every way from partial dw to dw, by the name of its template."""

DETERMINISTIC = tuple(name for name, s in BY_TEMPLATE.items() if s.deterministic)
DTYPES = tuple(ITEMSIZE)

PLAIN: dict[str, int | str] = {
    "pipeline": "direct",
    "cluster": 1,
    "threads_per_row": 128,
    "rows_per_cta": 2,
    "rows_in_flight": 1,
    "reload": "none",
    "weight_in": "registers",
    "ctas_per_sm": 1,
    "min_blocks": 0,
    "register_cap": 0,
}
"""Knobs of a conservative config for N = 1024: few registers, no staging."""


def in_turn(*outer: Sequence[Any], inner: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Parameters of a test: every combination of the outer choices, each with one of the inner
    ones. They take turns, so that every pair occurs where the outer choices are as many."""
    found = product(*map(enumerate, outer))
    return [(*(c for _, c in one), inner[sum(i for i, _ in one) % len(inner)]) for one in found]


@cache
def space_of(operation: str) -> Space:
    return load_space(space_file(operation))


def sample_variant(
    problem: Problem | str,
    target: Target,
    seed: int = 0,
    *,
    space: Space | None = None,
    **fixed: int | str,
) -> Variant:
    """A legal variant, the same for the same arguments; `fixed` are knobs that keep their value.
    space: default that of the problem's operation."""
    if isinstance(problem, str):
        problem = Problem.parse(problem)
    space = space or space_of(problem.operation)
    return make_variant(space.sample(problem, target, random.Random(seed), fixed), problem)


def drawn_variant(
    problem: Problem, target: Target, seed: int, **fixed: int | str
) -> Variant | None:
    """Return what `sample_variant` does, or None where nothing is legal: to say why takes long."""
    legal = space_of(problem.operation).legal(problem, target, rng=random.Random(seed), fixed=fixed)
    config = next(legal, None)
    return make_variant(config, problem) if config else None


def legal_variant(problem: Problem, target: Target, **knobs: int | str) -> Variant | str:
    """Return the conservative config with `knobs` changed, or what its space has against it."""
    widest = next(v for v in (16, 8, 4, 2) if problem.N * problem.itemsize % v == 0)
    config: Config = {"vector_bytes": widest, **PLAIN, **knobs}
    space = space_of(problem.operation)
    try:
        config = space.normalize(config, problem, target)
    except NormforgeError as error:
        return str(error)
    if {**config, **knobs} != config:
        return "the space leaves no choice in one of these knobs"
    rejection = space.reject(config, problem, target)
    return make_variant(config, problem) if rejection is None else str(rejection)


def plain_variant(problem: Problem | str, target: Target, **knobs: int | str) -> Variant:
    """The conservative config with `knobs` changed, which has to be legal."""
    if isinstance(problem, str):
        problem = Problem.parse(problem)
    found = legal_variant(problem, target, **knobs)
    assert isinstance(found, Variant), found
    return found


def sm_of(cubin: bytes) -> int:
    """The compute capability in the flags of a cubin's ELF header, for example 90."""
    assert cubin[:4] == b"\x7fELF"
    (flags,) = struct.unpack_from("<I", cubin, 48)
    abi_version = cubin[8]
    return (flags >> 8) & 0xFF if abi_version >= 8 else flags & 0xFF


def opcodes(cubin: bytes, kernel: str = MAIN_KERNEL) -> Counter[int]:
    """Count each instruction in the machine code of a kernel, by the low 12 bits of its 16 bytes,
    which say what it does on every GPU since sm_70. 0xfae is cp.async (LDGSTS)."""
    (sections,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, sections + size * i) for i in range(count)]
    for name, _, _, _, start, length in headers:
        at = headers[names][4] + name
        if cubin[at : cubin.index(b"\0", at)].decode() == f".text.{kernel}":
            words = struct.iter_unpack("<QQ", cubin[start : start + length])
            return Counter(low & 0xFFF for low, _ in words)
    raise AssertionError(f"no {kernel} in the cubin")


WIDTHS = (
    8,
    64,
    100,
    256,
    500,
    768,
    1000,
    1001,
    1024,
    1025,
    1536,
    2048,
    2880,
    3072,
    4096,
    4097,
    5120,
    8192,
    12288,
    16384,
    32768,
    65536,
)
"""Row lengths: what models have, what no wide vector divides, and what needs a cluster."""


def problems() -> st.SearchStrategy[Problem]:
    """Problems that can be tuned: every dtype, few rows and many."""

    def build(m: int, n: int, dtype: str, wide: bool) -> Problem:
        return Problem(m, n, dtype, "fp32" if wide else dtype)

    rows = st.one_of(st.integers(64, 4000), st.sampled_from([4096, 65536, 1 << 17, 99991]))
    return st.builds(build, rows, st.sampled_from(WIDTHS), st.sampled_from(DTYPES), st.booleans())


def targets() -> st.SearchStrategy[Target]:
    """Every target of gpus.yaml."""
    return st.sampled_from(sorted(load_targets())).map(find_target)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Problem, Target, Variant]:
    """A problem, a target, and a legal variant. The reduction kind and the pipeline, the cluster or
    a part of a warp for each row are drawn first, so that the rare ones show up."""
    problem, target = draw(problems()), draw(targets())
    bulk = target.has_bulk_copy
    strategy = draw(st.sampled_from([s for s in STRATEGIES if bulk or not s.bulk_adds]))
    extras: list[dict[str, int | str]] = [{}, {"pipeline": "async"}]
    if bulk and problem.N * problem.itemsize % 16 == 0:
        extras.append({"pipeline": "bulk"})
    if strategy.way != "in_turns" and not strategy.bulk_adds:
        for cluster in (2, 4, 8):
            whole = problem.N % cluster == 0 and problem.N * problem.itemsize >= 4096 * cluster
            extras += [{"cluster": cluster}] if bulk and whole else []
    if problem.N * problem.itemsize % 16 == 0 and problem.N * problem.itemsize <= 512:
        extras.append({"threads_per_row": 8})
    extra = draw(st.sampled_from(extras))
    seed = draw(st.integers(0, 99))
    return (
        problem,
        target,
        _sampled(problem, target, seed, tuple({**strategy.knobs, **extra}.items())),
    )


@cache
def _sampled(
    problem: Problem, target: Target, seed: int, fixed: tuple[tuple[str, int | str], ...]
) -> Variant:
    return drawn_variant(problem, target, seed, **dict(fixed)) or reject()


def compiled_fallbacks(
    target: Target, operation: str = RMSNORM_BACKWARD
) -> list[tuple[Variant, Compiled]]:
    """The fallback kernels of a package, which is a minute's work for one core."""
    cores = len(os.sched_getaffinity(0))
    with CompilePool(target.arch, cores, compile=compile_variant) as pool:

        def compile(variants: list[Variant]) -> list[Compiled]:
            jobs = [(variant, pool.submit(variant)) for variant in variants]
            return [pool.result(variant, job) for variant, job in jobs]

        variants = fallbacks_to_compile("all", target, [], operation)
        return compile_fallbacks(target, compile, variants)


def planted_entry(problem: Problem | str, target: Target, **knobs: int | str) -> Entry:
    """Return a package's entry for a problem whose winner is the conservative config for 4096 rows,
    with `knobs` changed."""
    if isinstance(problem, str):
        problem = Problem.parse(problem)
    config = plain_variant(replace(problem, M=4096), target, **knobs).config
    variant = make_variant(config, problem)
    facts = dict.fromkeys(PROVENANCE_KEYS, "known")
    return Entry(problem, variant, compile_variant(variant, target.arch), "measured", facts)


def compiled_forwards(target: Target, *shapes: str) -> Forwards:
    """The forwards for any row, and of some shapes the preferred ones."""
    problems = [Problem.parse(shape) for shape in shapes]
    chosen = [(p, forward_variants(p, target)[0]) for p in problems]
    entries = [Entry(p, v, compile_variant(v, target.arch), "predicted", {}) for p, v in chosen]
    with CompilePool(target.arch, len(os.sched_getaffinity(0)), compile=compile_variant) as pool:
        rest = usable_forwards(fallback_forwards(FALLBACK_DTYPES), target, pool)
    return Forwards(tuple(entries), rest)


def training_package(target: Target, folder: Path) -> Package:
    """Make a package for `entry_points.Training` on a GPU: hidden norms by a strategy whose CTAs
    wait for each other, the rest by fallback kernels."""
    shapes = ("68x1024:bf16", "68x1024:fp32")
    entries = [planted_entry(shape, target, strategy="column_slices") for shape in shapes]
    folder = folder / "rmsnorm_backward"
    emit_package(entries, compiled_fallbacks(target), target, folder, compiled_forwards(target))
    return Package(folder)
