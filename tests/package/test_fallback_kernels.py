"""The kernels for what nobody tuned: they cover every width, in the widest vectors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from generator.errors import NormforgeError
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant
from generator.package import fallback_kernels
from generator.package.fallback_kernels import (
    DTYPES,
    compile_fallbacks,
    fallback_variants,
    fallbacks_to_compile,
    first_choices,
    load_layouts,
    rows_key,
    serves,
)
from generator.problem import ITEMSIZE, Problem
from generator.target import Target, find_target, load_targets
from normforge.spec import MAIN_KERNEL
from normforge.table import Kernel, Table
from tests.support.packages import (
    H200,
    compiled,
)


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_fallback_variants_cover_all_dtypes_on_every_gpu(name: str) -> None:
    variants = fallback_variants(find_target(name))
    assert len({variant.id for variant in variants}) == len(variants)
    for dtype, weight_dtype in DTYPES:
        same = [v for v in variants if (v.dtype, v.weight_dtype) == (dtype, weight_dtype)]
        for size in ({v["vector_bytes"] for v in same}, {v.N for v in same}):
            assert len(size) >= 2
        assert max(v.N for v in same) >= 8192
        assert all(v.determinism == "gpu_to_gpu" and not v.exact for v in same)


def fallback_table(variants: list[Variant], target: Target) -> Table:
    """A package of fallback kernels alone: of those that take the same rows, the first."""
    kernels = (Kernel(v.id, "", v.spec(target.sms)) for v in first_choices(variants))
    return Table({}, (), tuple(kernels))


def served(table: Table, N: int, pair: tuple[str, str], **alignment: int) -> tuple[int, int]:
    """Bytes of a vector and columns of the kernel that serves a call; (0, 0) for none."""
    kernel = table.choose(4096, N, *pair, **alignment).kernel
    return (kernel.spec.vector_bytes, kernel.spec.N) if kernel else (0, 0)


def widest(table: Table, N: int, pair: tuple[str, str], alignment: int = 16) -> int:
    """Bytes of the widest vector of the package that divides rows and addresses."""
    sizes = {kernel.spec.vector_bytes for kernel in table.fallback}
    units = (N * ITEMSIZE[pair[0]], alignment)
    return max(size for size in sizes if all(unit % size == 0 for unit in units))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", sorted(load_targets()))
def test_rows_are_read_in_the_widest_vectors_that_divide_them(name: str) -> None:
    """Up to 8192 columns on every GPU; whole words in words up to 16384 where there is room."""
    target = find_target(name)
    for pair in DTYPES:
        table = fallback_table(fallback_variants(target, [pair]), target)
        for N in range(1, 8193):
            vector, columns = served(table, N, pair)
            assert columns >= N
            assert vector == widest(table, N, pair), N
            assert vector >= 4 or N % 2, N
        if target.smem_per_cta >= 200 << 10 and pair[0] != "fp32":
            assert all(served(table, N, pair)[0] >= 4 for N in range(8194, 16385, 2))


@pytest.mark.parametrize("name", sorted(load_targets()))
def test_rows_of_narrow_vectors_have_a_kernel_for_about_their_length(name: str) -> None:
    """One for rows several times as long keeps most of its threads idle."""
    target = find_target(name)
    for pair in DTYPES:
        table = fallback_table(fallback_variants(target, [pair]), target)
        for N in (129, 257, 513, 1025, 2049, 3073, 4097):
            for columns in (N, N + 1):
                assert served(table, columns, pair)[1] <= 3 * N, (pair, columns)


@pytest.mark.parametrize("pair", DTYPES)
def test_a_variant_serves_its_rows_to_both_ends(pair: tuple[str, str]) -> None:
    """The rows are those for which a package chooses it."""
    variants = first_choices(fallback_variants(H200, [pair]))
    table = fallback_table(variants, H200)
    ends = {end + more for v in variants for end in (v.least, v.N) for more in (-1, 0, 1)}
    for N in sorted(ends - {0}):
        found = [v for v in variants if serves(v, Problem(64, N, *pair))]
        chosen = max(found, key=lambda v: v["vector_bytes"], default=None)
        size = (chosen["vector_bytes"], chosen.N) if chosen else (0, 0)
        assert size == served(table, N, pair), N
        assert len({v["vector_bytes"] for v in found}) == len(found), N


@pytest.mark.parametrize("operation", ["layernorm_backward", "layernorm_forward"])
@pytest.mark.parametrize("name", ["h200", "gb200", "a100"])
def test_layernorm_has_kernels_for_any_rows_too(operation: str, name: str) -> None:
    target = find_target(name)
    for pair in DTYPES:
        variants = fallback_variants(target, [pair], operation)
        assert {v.operation for v in variants} == {operation}
        assert {v["cluster"] for v in variants} == {1}
        ways = {"second_kernel"} if operation.endswith("backward") else {""}
        assert {v.strategy.way for v in variants} == ways
        assert len({v.id for v in variants}) == len(variants)
        table = fallback_table(variants, target)
        for N in (1, 7, 64, 129, 256, 768, 1001, 1536, 3080, 4096, 6001, 8192):
            vector, columns = served(table, N, pair)
            assert columns >= N and vector == widest(table, N, pair), (pair, N)
    problems = [Problem.parse("64x512:bf16", operation), Problem.parse("64x512:fp32", operation)]
    common = fallbacks_to_compile("common", target, problems, operation)
    assert {(v.operation, v.dtype) for v in common} == {(operation, d) for d in ("bf16", "fp32")}
    assert {v["vector_bytes"] for v in common} == {16}
    assert fallbacks_to_compile("none", target, problems, operation) == []


@pytest.mark.parametrize("pair", DTYPES)
def test_clusters_share_rows_of_whole_vectors_up_to_65536(pair: tuple[str, str]) -> None:
    for name, most in (("h200", 65536), ("gb200", 65536), ("a100", 16384)):
        target = find_target(name)
        table = fallback_table(fallback_variants(target, [pair]), target)
        for N in (16392, 20480, 24576, 24584, 32776, 40000, 65528, 65536, 65544):
            assert bool(served(table, N, pair)[0]) == (most >= N)
        assert served(table, 20481, pair)[0] == 0
    part = replace(find_target("h200"), sms=32)
    table = fallback_table(fallback_variants(part, [pair]), part)
    assert served(table, 16384, pair)[0] == 16
    assert served(table, 65536, pair)[0] == 0


@pytest.mark.parametrize("pair", DTYPES)
def test_addresses_that_rule_out_a_vector_leave_it_to_a_narrower_one(pair: tuple[str, str]) -> None:
    table = fallback_table(fallback_variants(H200, [pair]), H200)
    narrowest = ITEMSIZE[pair[0]]
    for alignment in (32, 16, 8, 4, 2):
        for N in (1024, 1026, 1023):
            if alignment >= narrowest:
                vector, _ = served(table, N, pair, alignment=alignment)
                assert vector == widest(table, N, pair, alignment)
    # Beside 4 bytes of x lie as many weights, which may be wider.
    weights = 4 // narrowest * ITEMSIZE[pair[1]]
    assert served(table, 1026, pair, alignment=4, weight_alignment=weights)[0] == 4
    if narrowest == 2:
        assert served(table, 1026, pair, weight_alignment=weights // 2)[0] == 2


@pytest.mark.slow
def test_kernels_of_narrow_vectors_compile_without_spills() -> None:
    """Every length of rows has the first choice or one that takes its place, also on a GPU with
    little shared memory. The committed packages have those of larger ones."""
    target, pair = find_target("rtx-5090"), ("bf16", "bf16")
    made = compile_fallbacks(
        target,
        lambda variants: [compile_variant(v, target.arch) for v in variants],
        fallback_variants(target, [pair]),
    )
    table = fallback_table([variant for variant, _ in made], target)
    for N in (129, 257, 513, 1025, 2049, 4097, 8191):
        for columns in (N, N + 1):
            vector, longest = served(table, columns, pair)
            assert vector == widest(table, columns, pair) and longest <= 4 * N, columns
    if target.smem_per_cta >= 200 << 10:
        assert served(table, 16382, pair) == (4, 16384)


@pytest.mark.parametrize(
    ("leasts", "wanted"),
    [((), 1281), ((1281,), 1025), ((1281, 1025), 1)],
    ids=["none refused", "the bracket refused", "the wider bracket refused, too"],
)
def test_rows_of_a_refused_bracket_go_to_the_next(leasts: tuple[int, ...], wanted: int) -> None:
    """The refused one takes 1025 to 1280 columns in words; then those that reach over it go."""

    def compile(variants: list[Variant]) -> list[Compiled]:
        return [made(variant) for variant in variants]

    def made(variant: Variant) -> Compiled:
        words = variant["vector_bytes"] == 4
        gone = words and variant.N == 1280 and leasts
        # The first refusal is that of the bracket itself, others are of those that reach over it.
        if gone or (words and variant.N == 1536 and variant.least in leasts[1:]):
            return Compiled(H200.arch, "", b"", {}, "13", False, "error: planted", "planted")
        kernels = {MAIN_KERNEL: Resources(32, 0, 0, 0)}
        return replace(compiled(variant), kernels=kernels)

    fallback = compile_fallbacks(H200, compile, fallback_variants(H200, [("bf16", "bf16")]))
    table = fallback_table([variant for variant, _ in fallback], H200)
    (over,) = (v for v, _ in fallback if (v["vector_bytes"], v.N) == (4, 1536))
    assert over.least == wanted
    for N in (1026, 1150, 1278, 1282):
        expected = 1536 if leasts or N > 1280 else 1280
        assert served(table, N, ("bf16", "bf16")) == (4, expected)
    assert served(table, 1024 - 2, ("bf16", "bf16")) == (4, 1024)
    assert len({(v["vector_bytes"], v.N) for v, _ in fallback}) == len(fallback)


def test_a_refused_first_choice_gives_way_to_the_next_for_the_same_rows() -> None:
    variants = fallback_variants(H200, [("bf16", "bf16")])
    choices: dict[tuple[object, ...], list[Variant]] = {}
    for variant in variants:
        choices.setdefault(rows_key(variant), []).append(variant)
    rows, (refused, second) = next((k, v[:2]) for k, v in choices.items() if len(v) > 1)

    def compile(asked: list[Variant]) -> list[Compiled]:
        kernels = {MAIN_KERNEL: Resources(32, 0, 0, 0)}
        spills = {MAIN_KERNEL: Resources(32, 8, 0, 0)}
        return [replace(compiled(v), kernels=spills if v.id == refused.id else kernels)
                for v in asked]  # fmt: skip

    found = {rows_key(v): v for v, _ in compile_fallbacks(H200, compile, variants)}
    assert found[rows].id == second.id
    assert found.keys() == choices.keys()


def test_a_damaged_file_of_layouts_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = tmp_path / "fallback_kernels.yaml"
    monkeypatch.setattr(fallback_kernels, "LAYOUTS_FILE", damaged)
    for content in (b"\xff", b"{", b"layouts: 3"):
        damaged.write_bytes(content)
        load_layouts.cache_clear()
        with pytest.raises(NormforgeError, match="cannot read the fallback layouts"):
            load_layouts()
    load_layouts.cache_clear()
