"""Compiles variants to machine code: what is in the source, what the compiler says, what is
kept."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
from hypothesis import given, settings

from generator.kernels.cubin_cache import (
    STALE_SECONDS,
    compile_cached,
    compile_variant,
    entry_path,
)
from generator.kernels.nvrtc import Compiled, compile_source
from generator.kernels.ptxas import Resources, read_resources
from generator.kernels.render import headers, render
from generator.kernels.resource_gate import refuse, resource_fault
from generator.kernels.strategies import STRATEGIES
from generator.kernels.variant import Variant
from generator.paths import REPOSITORY, TEMPLATES, template_named
from generator.problem import Problem
from generator.target import Target, find_target
from normforge.operations import OPERATIONS
from normforge.spec import MAIN_KERNEL, SUM_KERNEL, plan_launch
from tests.support.planted import BAD, WRONG, broken
from tests.support.samples import (
    BY_TEMPLATE,
    DTYPES,
    REDUCTION,
    cases,
    drawn_variant,
    in_turn,
    opcodes,
    plain_variant,
    sm_of,
    space_of,
)

SHAPE = "4096x1024:bf16"
TINY = 'extern "C" __global__ void rmsnorm_backward(int* p) { p[0] = 1; }'
GPUS = ("h200", "gb200", "rtx-5090", "a100")
OF_GROUPS = [strategy.name for strategy in STRATEGIES if strategy.group_fragments]
ARCHS = {"h200": "sm_90a", "gb200": "sm_100a", "rtx-5090": "sm_120a", "a100": "sm_80"}


# ---- The source ----------------------------------------------------------------------------------


def fragments(v: Variant) -> set[str]:
    """The template fragments that a variant is made of."""
    if v.run_rows:
        return invariant_fragments(v)
    chosen = {"primitives", "elements", "row_sum", "row_blocks", "partial_dw"}
    chosen |= {
        *v.strategy.fragments,
        "teams",
        "rows",
        "schedule",
        "dw_output",
        "dw_context",
        f"weight_{v['weight_in']}",
    }
    chosen |= {"row_of", "load_rstds"}
    chosen |= {f"rows_{v['pipeline']}", "row_sum_cta" if v["cluster"] == 1 else "row_sum_cluster"}
    if v["pipeline"] == "producer":
        chosen = chosen - {"row_sum", "row_sum_cluster", "row_sum_cta"} | {"primitives_producer"}
        chosen |= {"primitives_producer_cluster"} if v["cluster"] > 1 else set()
    if v.holds_numbers:
        chosen = chosen - {"load_rstds"} | {"row_numbers"}
    if v.signature.pairs:
        chosen |= {"pairs", "groups"}
        chosen |= {"weight_pairs"} if v.signature.columns.paired else set()
        chosen |= {"primitives_prefetch"} if v.groups_ahead else set()
        chosen |= {"primitives_staged"} if v.stages_groups else set()
    if v.shifted:
        chosen -= {"rows", "rows_producer", "partial_dw", "dw_context", "weight_registers"}
        chosen |= {"shifted", "weight_shifted"}
    if v.signature.scales:
        chosen |= {"primitives_fp8", "quantized", f"scales_{v.signature.scales.kind}"}
    if v.operation.startswith("gate") or (v.signature.scales and v.signature.scales.kind == "fp32"):
        chosen |= {"approximate"}
    if not v.signature.sums:
        chosen -= {"row_blocks", "partial_dw", "dw_output", "dw_context"}
    if "sum_partials" in chosen and v["cluster"] > 1 and not v.exact:
        chosen = chosen - {"sum_partials"} | {"sum_partials_any_row", "row_part"}
    return chosen


def present(source: str) -> set[str]:
    """The fragments that were pasted into a source."""
    pasted = (name for name, text in headers().items() if text.rstrip("\n") in source)
    return {name.removesuffix(".cuh") for name in pasted}


def invariant_fragments(v: Variant) -> set[str]:
    """Return the fragments of a batch-invariant variant: those that add up rows are its own."""
    plain = replace(v, operation=MAIN_KERNEL, config={**v.config, "run_rows": 0})
    chosen = fragments(plain) - {"row_of", "schedule", "row_blocks", *v.strategy.fragments}
    chosen |= {"row_of_group", "runs", "sum_groups", *v.strategy.group_fragments}
    return chosen | ({"rows_bulk_group"} if v["pipeline"] == "bulk" else set())


@settings(max_examples=60)
@given(cases())
def test_source_has_the_code_of_its_own_choices_only(case: tuple[Problem, Target, Variant]) -> None:
    _, _, v = case
    source = render(v)
    assert present(source) == fragments(v)
    assert not re.search(r"\{\{|\{% |\{#", source), "a template tag is left"
    assert source.count('extern "C"') == v.strategy.launches
    assert f"Determinism class: {v.determinism}." in source
    assert v.id in source.splitlines()[0]


@settings(max_examples=20)
@given(cases())
def test_source_names_every_constant_once(case: tuple[Problem, Target, Variant]) -> None:
    names = re.findall(r"^constexpr \w+ (k\w+) =", render(case[2]), re.MULTILINE)
    assert len(names) > 20
    assert len(set(names)) == len(names)


def test_every_fragment_is_used_by_some_variant() -> None:
    used: set[str] = set()
    for reduction in REDUCTION.values():
        for pipeline in ("bulk", "direct", "async"):
            used |= fragments(
                plain_variant(SHAPE, find_target("h200"), **reduction, pipeline=pipeline)
            )
    one_row = clustered(find_target("h200"))
    knobs = {"pipeline": "async", "rows_per_cta": 1}
    any_row = replace(one_row, exact=False, config={**one_row.config, **knobs})
    assert present(render(any_row)) == fragments(any_row)
    used |= fragments(one_row) | fragments(any_row)
    used |= fragments(plain_variant(SHAPE, find_target("h200"), weight_in="smem"))
    for i, strategy in enumerate(OF_GROUPS):
        problem, pipeline = (
            Problem.parse(SHAPE, "rmsnorm_invariant_backward"),
            ("bulk", "async")[i % 2],
        )
        v = plain_variant(problem, find_target("h200"), strategy=strategy, pipeline=pipeline)
        assert present(render(v)) == fragments(v)
        used |= fragments(v)
    for operation in ("rope_forward", "rope_backward", "fp8_forward", "mxfp8_forward"):
        strategy = "none" if operation.endswith("forward") else "column_slices"
        of_tensors = Problem.parse(SHAPE, f"rmsnorm_{operation}")
        v = plain_variant(of_tensors, find_target("h200"), strategy=strategy)
        of_others = {"rows", "rows_direct", "quantized" if operation == "fp8_forward" else ""}
        assert present(render(v)) == fragments(v) - of_others
        used |= fragments(v)
    heads = Problem.parse(SHAPE, "rmsnorm_rope_forward")
    for knob in ({"groups_ahead": 2}, {"groups_in": "smem"}):
        ways = {"pipeline": "bulk", "stages": 2, **knob}
        v = plain_variant(heads, find_target("h200"), strategy="none", **ways)
        assert present(render(v)) == fragments(v) - {"rows", "rows_bulk", "groups"}
        used |= fragments(v)
    knobs = {"pipeline": "producer", "stages": 3, "rows_per_cta": 2, "column_sums": "late"}
    for plain in (one_row, plain_variant(SHAPE, find_target("h200"))):
        producer = replace(plain, config={**plain.config, **knobs, "row_numbers": "held"})
        source = render(producer, include=True)
        used |= {*re.findall(r'^#include "(\w+)\.cuh"', source, flags=re.M)}
        odd = {**producer.config, "cluster": 1, "weight_in": "registers", "rows_in_flight": 1}
        used |= fragments(replace(producer, N=1023, config=odd))
    examples = (REPOSITORY / "examples" / "own_operation").glob("*.cu.j2")
    for template in (*examples, template_named("gate.j2")):
        used |= {*re.findall(r'source\("(\w+)\.cuh"\)', template.read_text())}
    found = {path.name.partition(".")[0] for path in TEMPLATES.rglob("*.cuh*")}
    assert used == {name for name in found if not name.startswith("forward_")}


def clustered(target: Target) -> Variant:
    knobs = {"strategy": "separate", "cluster": 4, "threads_per_row": 256, "pipeline": "bulk"}
    return plain_variant("4096x16384:bf16", target, **knobs)


def check_compiled(v: Variant, compiled: Compiled, target: Target) -> None:
    assert compiled.error == "", compiled.error
    assert compiled.spills == 0
    assert sm_of(compiled.cubin) == int(re.sub(r"\D", "", target.arch))
    assert set(compiled.kernels) == (
        {v.operation, SUM_KERNEL} if v.strategy.launches > 1 else {v.operation}
    )
    launch = plan_launch(v.spec(target.sms), 4096)
    assert resource_fault(v, compiled, launch, target) == ""


REDUCTIONS = [
    (operation, name)
    for operation in sorted(OPERATIONS)
    for name, reduction in REDUCTION.items()
    if any(reduction["strategy"] in knob.values for knob in space_of(operation).knobs)
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("kind", "gpu", "dtype"), in_turn(REDUCTIONS, GPUS, inner=DTYPES))
def test_every_strategy_compiles_without_spills_in_every_dtype(
    kind: tuple[str, str], gpu: str, dtype: str
) -> None:
    """Each in each dtype on one of the GPUs: what a dtype changes is the same code for all."""
    target = find_target(gpu)
    assert target.arch == ARCHS[gpu]
    operation, reduction = kind
    problem = Problem.parse(f"4096x1024:{dtype}", operation)
    if problem.signature.scales and not target.has_fp8:
        assert drawn_variant(problem, target, 0) is None
        return
    if gpu == "a100" and BY_TEMPLATE[reduction].bulk_adds:
        # The instructions do not exist there, and the rule says so.
        space = space_of(operation)
        config = space.normalize(
            {**plain_variant(problem, target).config, **REDUCTION[reduction]}, problem, target
        )
        rejection = space.reject(config, problem, target)
        assert rejection is not None
        assert rejection.rule == "bulk_instructions"
        assert "need sm_90, which a100 does not have" in rejection.sentence
        return
    v = plain_variant(problem, target, **REDUCTION[reduction])
    check_compiled(v, compile_source(render(v), target.arch), target)


@pytest.mark.parametrize("gpu", GPUS)
def test_batch_invariant_kernels_compile(gpu: str) -> None:  # the a100's without mbarriers
    problem, target = Problem.parse(SHAPE, "rmsnorm_invariant_backward"), find_target(gpu)
    for strategy in OF_GROUPS:
        v = plain_variant(problem, target, strategy=strategy, pipeline="direct", stages=1)
        check_compiled(v, compile_source(render(v), target.arch), target)


@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        (SHAPE, {"pipeline": "bulk", "stages": 3}),
        (SHAPE, {"pipeline": "bulk", "stages": 3, "reload": "smem", "rows_in_flight": 2}),
        (SHAPE, {"pipeline": "async", "stages": 3, "weight_in": "smem"}),
        ("9x256:bf16", {"pipeline": "async", "threads_per_row": 32, "rows_per_cta": 8}),
        ("4096x1024:fp32", {"pipeline": "bulk", "stages": 2, "load_hint": "default"}),
        ("4096x1024:bf16:fp32", {"weight_in": "smem", "store_hint": "streaming"}),
        ("4096x1024:fp16:fp32", {"load_hint": "no_allocate"}),
        ("64x1001:bf16:fp32", {"load_hint": "streaming"}),
        ("64x1001:fp32", {"pipeline": "async", "strategy": "last_cta", "levels": 2}),
        ("64x500:fp16", {"strategy": "semaphore", "levels": 1}),
    ],
)
def test_row_pipelines_and_odd_widths_compile(shape: str, knobs: dict[str, int | str]) -> None:
    target = find_target("h200")
    v = plain_variant(shape, target, **knobs)
    check_compiled(v, compile_source(render(v), target.arch), target)


@pytest.mark.parametrize("gpu", ["h200", "gb200"])
@pytest.mark.parametrize(
    ("shape", "knobs"),
    [
        ("4096x64:bf16", {"threads_per_row": 8, "strategy": "semaphore", "rows_in_flight": 4}),
        ("4096x128:fp16:fp32", {"threads_per_row": 16, "pipeline": "async", "stages": 3}),
        ("4096x256:bf16", {"threads_per_row": 8, "strategy": "last_cta", "weight_in": "smem"}),
        ("4096x128:fp32", {"threads_per_row": 16, "pipeline": "async", "reload": "smem"}),
        ("4096x100:bf16+offset+residual", {"threads_per_row": 8, "strategy": "separate"}),
    ],
)
def test_rows_of_less_than_a_warp_compile(
    shape: str, knobs: dict[str, int | str], gpu: str
) -> None:
    target = find_target(gpu)
    v = plain_variant(shape, target, rows_per_cta=8, **knobs)
    check_compiled(v, compile_source(render(v), target.arch), target)


def test_clusters_and_kernels_for_any_width_compile() -> None:
    target = find_target("gb200")
    v = clustered(target)
    check_compiled(v, compile_source(render(v), target.arch), target)
    wide = plain_variant(SHAPE, target, vector_bytes=32, threads_per_row=64, rows_per_cta=4)
    check_compiled(wide, compile_source(render(wide), target.arch), target)
    short = plain_variant(
        "4096x128:bf16", target, vector_bytes=32, threads_per_row=8, rows_per_cta=8
    )
    check_compiled(short, compile_source(render(short), target.arch), target)
    anything = replace(plain_variant(SHAPE, target, strategy="separate"), exact=False)
    check_compiled(anything, compile_source(render(anything), target.arch), target)


@pytest.mark.parametrize("reload", ["none", "smem"])
def test_first_copies_of_a_priority_are_a_loop(reload: str) -> None:
    """Unrolled, NVRTC 13.0 makes some of them illegal instructions: x and dy are copied in two
    places only, before the first row and in its loop."""
    target = find_target("h200")
    rows: dict[str, int | str] = {"pipeline": "async", "stages": 4, "load_hint": "evict_last"}
    ctas: dict[str, int | str] = {"cluster": 8, "threads_per_row": 256, "rows_per_cta": 1}
    v = plain_variant("4096x16384:bf16", target, **rows, **ctas, weight_in="smem", reload=reload)
    assert v.vectors == 1
    source = render(v)
    start = source.split("DEVICE void start(")[1].split("DEVICE")[0]
    assert re.search(r"#pragma unroll 1\n\s+for .* fetch\(", start)
    assert opcodes(compile_source(source, target.arch).cubin)[0xFAE] == 2 * 2
    unrolled = source.replace(start, start.replace("#pragma unroll 1", "#pragma unroll"))
    ahead = 4 - (reload == "smem")
    assert opcodes(compile_source(unrolled, target.arch).cubin)[0xFAE] == 2 * (ahead + 1)


# ---- What the compiler reports -------------------------------------------------------------------

LOG = """\
ptxas info    : Overriding global maxrregcount 40 with entry-specific value 64
ptxas info    : 101 bytes gmem, 208 bytes cmem[4]
ptxas info    : Compiling entry function 'sum_partials' for 'sm_90a'
ptxas info    : Function properties for sum_partials
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 8192 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 21.3 ms
ptxas info    : Compiling entry function 'rmsnorm_backward' for 'sm_90a'
ptxas info    : Function properties for rmsnorm_backward
ptxas         .     448 bytes stack frame, 1132 bytes spill stores, 1296 bytes spill loads
ptxas info    : Used 64 registers, used 16 barriers, 448 bytes cumulative stack size
ptxas info    : Compile time = 75.787 ms"""


def test_report_of_ptxas_is_read_kernel_by_kernel() -> None:
    assert read_resources(LOG) == {
        "sum_partials": Resources(32, 0, 0, 8192, 1),
        "rmsnorm_backward": Resources(64, 2428, 448, 0, 16),
    }
    assert read_resources("nothing of the kind") == {}


def test_resources_are_what_ptxas_wrote() -> None:
    target = find_target("h200")
    compiled = compile_source(
        render(plain_variant(SHAPE, target, strategy="separate")), target.arch
    )
    for name, resources in compiled.kernels.items():
        block = compiled.log.split(f"'{name}'")[1].split("Compile time")[0]
        assert f"Used {resources.registers} registers" in block
        assert f"used {resources.barriers} barriers" in block
        assert f"{resources.stack_bytes} bytes stack frame" in block
    assert compiled.kernels[SUM_KERNEL].smem_bytes == 4 * 4 * 512
    assert compiled.main.smem_bytes == 0, "the main kernel has dynamic shared memory only"


def test_equal_sources_give_equal_machine_code() -> None:
    target = find_target("h200")
    source = render(plain_variant(SHAPE, target))
    one, two = (compile_source(source, target.arch) for _ in range(2))
    assert one.cubin == two.cubin
    assert one.digest == two.digest
    assert one.digest != compile_source(source, "sm_100a").digest


def test_cap_that_launch_bounds_override_is_recorded_and_refused() -> None:
    target = find_target("h200")
    bounded = plain_variant(SHAPE, target, min_blocks=1)
    compiled = compile_source(render(bounded), target.arch, register_cap=40)
    assert "Overriding" in compiled.log
    assert compiled.cap_ignored
    capped = replace(bounded, config={**bounded.config, "register_cap": 40})
    launch = plan_launch(capped.spec(target.sms), 4096)
    assert "did not respect the register cap of 40" in resource_fault(
        capped, compiled, launch, target
    )


def test_cap_that_holds_is_not_reported_as_ignored() -> None:
    target = find_target("h200")
    compiled = compile_source(render(plain_variant(SHAPE, target)), target.arch, register_cap=128)
    assert not compiled.cap_ignored
    assert compiled.main.registers <= 128


@pytest.mark.parametrize("bug", [*WRONG, *BAD])
def test_bug_that_the_gpu_tests_plant_still_has_its_line_and_compiles(
    bug: str, target: Target
) -> None:
    knobs, old, new, _ = WRONG[bug] if bug in WRONG else ({}, *BAD[bug])
    source = broken(plain_variant(SHAPE, target, **knobs), old, new)
    assert compile_source(source, target.arch).error == ""


def test_variant_that_spills_is_refused() -> None:
    target, problem = find_target("h200"), Problem.parse(SHAPE)
    v = plain_variant(problem, target)
    compiled = compile_source(render(v), target.arch, register_cap=24)
    assert compiled.spills > 0
    launch = plan_launch(v.spec(target.sms), problem.M)
    assert resource_fault(v, compiled, launch, target).startswith("spills or stack: ")
    result = refuse(v, compiled, problem, target)
    assert result is not None
    assert result.outcome == "resource"
    assert not result.may_win


@pytest.mark.parametrize(
    ("knobs", "resources", "says"),
    [
        ({"register_cap": 96}, Resources(97, 0, 0, 0), "uses 97 registers, the cap is 96"),
        ({}, Resources(255, 0, 0, 0), ""),
        ({"rows_per_cta": 8}, Resources(128, 0, 0, 0), "1024 threads with 128 registers"),
        ({}, Resources(64, 0, 0, 230 * 1024), "no CTA fits an SM of h200"),
        ({"ctas_per_sm": 4}, Resources(96, 0, 0, 0), "4 CTAs per SM wanted, 2 fit (96 registers"),
        ({"ctas_per_sm": 6}, Resources(40, 0, 0, 0, 16), "6 CTAs per SM wanted, 4 fit (40 regis"),
        ({"ctas_per_sm": 6}, Resources(40, 0, 0, 0, 1), ""),
    ],
)
def test_kernel_that_does_not_fit_the_gpu_is_refused_with_the_numbers(
    knobs: dict[str, int | str], resources: Resources, says: str
) -> None:
    target = find_target("h200")
    v = plain_variant("65536x1024:bf16", target, strategy="separate")
    v = replace(v, config={**v.config, **knobs})
    compiled = Compiled(target.arch, "", b"cubin", {MAIN_KERNEL: resources}, "13.0", False, "")
    fault = resource_fault(v, compiled, plan_launch(v.spec(target.sms), 65536), target)
    assert fault.startswith(says) if says else fault == ""


@pytest.mark.parametrize("strategy", ["column_slices", "mailbox", "separate"])
def test_only_the_grid_of_the_problem_must_fit(strategy: str) -> None:
    """A module may serve more rows with that kernel: its CTAs need not run all at once."""
    target = find_target("h200")
    resources = Resources(96, 0, 0, 0)
    compiled = Compiled(target.arch, "", b"cubin", {MAIN_KERNEL: resources}, "13.0", False, "")
    v = plain_variant("65536x1024:bf16", target, strategy=strategy)
    v = replace(v, config={**v.config, "ctas_per_sm": 4})
    for M, says in ((132, ""), (65536, "4 CTAs per SM wanted, 2 fit")):
        fault = resource_fault(v, compiled, plan_launch(v.spec(target.sms), M), target)
        assert fault.startswith(says) if says else fault == ""


def test_source_that_does_not_compile_is_an_outcome() -> None:
    target, problem = find_target("h200"), Problem.parse(SHAPE)
    v = plain_variant(problem, target)
    compiled = compile_source(render(v).replace("float sum[", "flaot sum[", 1), target.arch)
    assert compiled.cubin == b""
    assert "flaot" in compiled.error
    result = refuse(v, compiled, problem, target)
    assert result is not None
    assert result.outcome == "compile_error"
    assert "flaot" in result.note
    assert "\n" not in result.note


# ---- The cache -----------------------------------------------------------------------------------


@pytest.fixture
def count_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures of the compilations that really happen."""
    done: list[str] = []

    def compile_and_count(source: str, arch: str, register_cap: int = 0) -> Compiled:
        done.append(arch)
        return compile_source(source, arch, register_cap)

    monkeypatch.setattr("generator.kernels.cubin_cache.compile_source", compile_and_count)
    return done


def essence(compiled: Compiled) -> Compiled:
    """Return the result without the log, which has the time that the compiler took."""
    return replace(compiled, log="")


def entries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_second_compilation_is_a_copy_of_the_first(
    tmp_path: Path, count_compiles: list[str]
) -> None:
    first = compile_cached(tmp_path, TINY, "sm_90a")
    second = compile_cached(tmp_path, TINY, "sm_90a")
    assert first == second
    assert len(count_compiles) == 1


def test_errors_are_kept_too(tmp_path: Path, count_compiles: list[str]) -> None:
    broken = TINY.replace("int*", "itn*")
    assert compile_cached(tmp_path, broken, "sm_90a").error
    assert compile_cached(tmp_path, broken, "sm_90a").error
    assert len(count_compiles) == 1


def test_source_architecture_and_cap_each_have_an_entry(
    tmp_path: Path, count_compiles: list[str]
) -> None:
    for _ in range(2):
        compile_cached(tmp_path, TINY, "sm_90a")
        compile_cached(tmp_path, TINY + "\n", "sm_90a")
        compile_cached(tmp_path, TINY, "sm_100a")
        compile_cached(tmp_path, TINY, "sm_90a", 32)
    assert len(count_compiles) == len(entries(tmp_path)) == 4


def test_what_another_compiler_made_is_not_looked_at(
    tmp_path: Path, count_compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what it made with other options, nor an entry of another format."""
    first = compile_cached(tmp_path, TINY, "sm_90a")
    for name, other in (
        ("nvrtc_version", lambda: "99.9"),
        ("compile_options", lambda *_: ["--another"]),
        ("ENTRY_FORMAT", -1),
    ):
        before = len(count_compiles)
        with monkeypatch.context() as later:
            later.setattr(f"generator.kernels.cubin_cache.{name}", other)
            for _ in range(2):
                compile_cached(tmp_path, TINY, "sm_90a")
        assert len(count_compiles) == before + 1, name
    assert compile_cached(tmp_path, TINY, "sm_90a") == first
    assert len(count_compiles) == len(entries(tmp_path)) == 4


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "one byte changed": lambda content: content[:-200] + b"X" + content[-199:],
    "first byte changed": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "garbage": lambda content: bytes(range(256)),
    "another version": lambda content: json.dumps({"cubin": ""}).encode(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entry_is_compiled_again_and_replaced(
    tmp_path: Path, count_compiles: list[str], damage: str
) -> None:
    good = compile_cached(tmp_path, TINY, "sm_90a")
    (path,) = entries(tmp_path)
    content = path.read_bytes()
    path.write_bytes(DAMAGES[damage](content))
    again = compile_cached(tmp_path, TINY, "sm_90a")
    assert essence(again) == essence(good)
    assert len(count_compiles) == 2
    assert compile_cached(tmp_path, TINY, "sm_90a") == again
    assert len(count_compiles) == 2


def test_entry_that_is_a_folder_costs_a_compilation_and_no_more(tmp_path: Path) -> None:
    entry_path(tmp_path, TINY, "sm_90a").mkdir(parents=True)
    assert compile_cached(tmp_path, TINY, "sm_90a").cubin
    assert entries(tmp_path) == []


def test_cache_that_cannot_be_written_costs_a_compilation_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert compile_cached(tmp_path / "file" / "cache", TINY, "sm_90a").cubin
    assert (tmp_path / "file").read_text() == "in the way"


def test_half_written_entries_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    folder = entry_path(tmp_path, TINY, "sm_90a").parent
    folder.mkdir(parents=True)
    dead, living, entry = (folder / name for name in ("dead.part", "living.part", "old.json"))
    for path in (dead, living, entry):
        path.write_text("half")
    before = time.time() - STALE_SECONDS - 60
    for path in (dead, entry):
        os.utime(path, (before, before))
    compile_cached(tmp_path, TINY, "sm_90a")
    assert entry_path(tmp_path, TINY, "sm_90a").exists()
    assert [path for path in (dead, living, entry) if path.exists()] == [living, entry]


def test_two_processes_at_once_get_the_same_code_and_leave_one_entry(tmp_path: Path) -> None:
    target = find_target("h200")
    v = plain_variant(SHAPE, target)
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = [pool.submit(compile_variant, v, target.arch, tmp_path) for _ in range(4)]
        results = [job.result(60) for job in jobs]
    assert all(essence(result) == essence(results[0]) for result in results)
    (path,) = entries(tmp_path)
    assert path.suffix == ".json"
    assert compile_cached(tmp_path, render(v), target.arch) in results
