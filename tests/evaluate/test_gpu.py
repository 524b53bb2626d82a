"""Every strategy is right and repeats its bits on a GPU, and the harness catches what is not.

The harness is the one that tunes: the session and the worker of `generator.evaluate.gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.l2_flush import ColdCache
from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.supervisor import Supervisor
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.gpu.workload import Workload
from generator.evaluate.verify.accuracy import check_accuracy, compare_all
from generator.evaluate.verify.bench import Bench
from generator.evaluate.verify.determinism import check_call_options, check_repeats, digest
from generator.evaluate.verify.guarded import Guarded
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.nvrtc import Compiled, compile_source
from generator.kernels.render import render, render_forward
from generator.kernels.resource_gate import refuse
from generator.kernels.variant import Variant
from generator.operations import RMSNORM_BACKWARD
from generator.operations.rmsnorm_backward import make_inputs, make_reference
from generator.operations.rows import RowRunner
from generator.package.emit import emit_package
from generator.package.fallback_kernels import fallback_variants
from generator.problem import Problem
from generator.result import Result
from generator.target import Target
from normforge.api import Package
from normforge.operations import OPERATIONS
from normforge.spec import plan_launch
from tests.support.forward import of_kind
from tests.support.planted import BAD, SHAPE, WRONG, broken
from tests.support.runs import command, kill_and_resume
from tests.support.samples import (
    BY_TEMPLATE,
    DETERMINISTIC,
    DTYPES,
    REDUCTION,
    SPACE,
    compiled_fallbacks,
    plain_variant,
    planted_entry,
    sample_variant,
    space_of,
)

pytestmark = pytest.mark.gpu

INELIGIBLE = [name for name in REDUCTION if name not in DETERMINISTIC]
SECONDS = 15.0
"""Deadline of a job in these tests. A fresh worker needs a few seconds for its first one."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def workload(device: torch.device) -> Callable[[str], Workload]:
    """The workload of a problem; the last one is kept."""
    last: list[Workload] = []

    def of(shape: str) -> Workload:
        problem = Problem.parse(shape)
        if not last or last[0].problem != problem:
            last[:] = [Workload(problem, device)]
        return last[0]

    return of


def reductions_of(target: Target) -> list[str]:
    return [name for name, s in BY_TEMPLATE.items() if target.has_bulk_copy or not s.bulk_adds]


def runnable(
    problem: str, target: Target, seed: int, **fixed: int | str
) -> tuple[Variant, Compiled]:
    """A random legal variant that neither spills nor asks for more CTAs than fit."""
    for attempt in range(100):
        v = sample_variant(problem, target, 1000 * seed + attempt, **fixed)
        compiled = compile_variant(v, target.arch)
        if refuse(v, compiled, Problem.parse(problem), target) is None:
            return v, compiled
    raise AssertionError(f"no runnable variant of {fixed} for {problem}")


def bench_of(workload: Workload, v: Variant, target: Target, old: str = "", new: str = "") -> Bench:
    """The variant on a workload, with `old` replaced by `new` in its source."""
    compiled = compile_source(broken(v, old, new), target.arch, int(v["register_cap"]))
    assert compiled.error == "", compiled.error
    return workload.bench(Candidate(compiled.cubin, v.spec(target.sms)))


# ---- Every strategy is right ---------------------------------------------------------------------


def has_configs(reduction: str, problem: Problem) -> bool:
    """Return True if the space of an operation has this reduction and the problem's rows."""
    space = space_of(problem.operation)
    values = {knob.name: knob.values for knob in space.knobs}
    fixed, of = [(entry.widths, entry.dtypes) for entry in space.fixed], problem.signature
    whole = of.scales.block if of.scales else 1 + of.pairs
    return all(value in values[name] for name, value in REDUCTION[reduction].items()) and (
        (not fixed and not problem.N % whole)
        or any(problem.N in widths and problem.dtype in dtypes for widths, dtypes in fixed)
    )


CASES = [
    (operation, reduction, M, N, dtype)
    for operation in sorted(OPERATIONS)
    for M, N in ((1000, 1024), (777, 3072), (300, 1001), (257, 8192))
    for dtype in DTYPES
    for reduction in REDUCTION
    if has_configs(reduction, Problem(M, N, dtype, dtype, operation=operation))
]


@pytest.mark.parametrize(("operation", "reduction", "M", "N", "dtype"), CASES)
def test_random_variants_are_accurate_and_repeat_their_bits_exactly_if_they_claim_to(
    here: Target,
    workload: Callable[[str], Workload],
    operation: str,
    reduction: str,
    dtype: str,
    M: int,
    N: int,
) -> None:
    if reduction not in reductions_of(here):
        pytest.skip(f"{here} has no bulk copies")
    for seed, weight in ((0, dtype), (1, "fp32")):
        shape = f"{operation}:{M}x{N}:{dtype}:{weight}"
        v, compiled = runnable(shape, here, seed, **REDUCTION[reduction])
        work = workload(shape)
        bench = work.bench(Candidate(compiled.cubin, v.spec(here.sms)))
        accuracy = check_accuracy(bench, work.inputs, work.expected)
        assert accuracy.fault == "", f"{v}: {accuracy.fault}"
        if v.determinism == "none":
            assert bench.fault() == ""
            continue
        assert check_repeats(bench, work.inputs) == "", v
        assert check_repeats(bench, work.cancelling) == "", v


@pytest.mark.parametrize("reduction", DETERMINISTIC)
@pytest.mark.parametrize(
    "shape",
    [
        *("999x1024:bf16", "999x1024:bf16+offset", "300x1001:fp16:fp32", "600x3072:fp32+residual"),
        *("999x1024:bf16+offset+residual", "300x4096:bf16:fp32+residual_fp32"),
        *("layernorm_backward:999x1024:bf16", "layernorm_backward:300x1001:fp16:fp32+residual"),
    ],
)
def test_bits_and_call_options_are_right(
    here: Target, workload: Callable[[str], Workload], reduction: str, shape: str
) -> None:
    if reduction not in reductions_of(here):
        pytest.skip(f"{here} has no bulk copies")
    v, compiled = runnable(shape, here, 2, **REDUCTION[reduction])
    work = workload(shape)
    bench = work.bench(Candidate(compiled.cubin, v.spec(here.sms)))
    assert check_accuracy(bench, work.inputs, work.expected).fault == ""
    assert check_repeats(bench, work.cancelling) == ""
    assert check_call_options(bench, work.inputs, v.signature, packs=not v.shifted) == ""


@pytest.mark.parametrize("reduction", INELIGIBLE)
def test_order_of_arrival_is_refuted(
    here: Target, workload: Callable[[str], Workload], reduction: str
) -> None:
    """The harness would otherwise not see what it is there for."""
    if reduction not in reductions_of(here):
        pytest.skip(f"{here} has no bulk copies")
    work = workload("4096x1024:bf16")
    v = plain_variant("4096x1024:bf16", here, **REDUCTION[reduction])
    bench = bench_of(work, v, here)
    assert check_accuracy(bench, work.inputs, work.expected).fault == ""
    assert check_repeats(bench, work.cancelling).startswith("dw of run ")


@pytest.mark.parametrize("reduction", DETERMINISTIC)
@pytest.mark.parametrize("N", [1024, 1001])
def test_one_cubin_serves_every_number_of_rows(
    here: Target, workload: Callable[[str], Workload], reduction: str, N: int
) -> None:
    if reduction not in reductions_of(here):
        pytest.skip(f"{here} has no bulk copies")
    v, compiled = runnable(f"4096x{N}:bf16", here, 3, **REDUCTION[reduction])
    for M in (1, 2, 3, 131, 133, 777, 10007):
        work = workload(f"{M}x{N}:bf16")
        bench = work.bench(Candidate(compiled.cubin, v.spec(here.sms)))
        accuracy = check_accuracy(bench, work.inputs, work.expected)
        assert accuracy.fault == "", f"{v} at {M} rows: {accuracy.fault}"
        assert check_repeats(bench, work.cancelling, runs=3) == ""


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["column_slices", "mailbox", "separate", "last_cta", "atomic"])
def test_clusters_are_right(
    here: Target, workload: Callable[[str], Workload], strategy: str, cluster: int
) -> None:
    if not here.has_bulk_copy:
        pytest.skip(f"{here} has no clusters")
    shape = "333x16384:bf16"
    v, compiled = runnable(shape, here, 5, strategy=strategy, cluster=cluster)
    work = workload(shape)
    bench = work.bench(Candidate(compiled.cubin, v.spec(here.sms)))
    assert check_accuracy(bench, work.inputs, work.expected).fault == ""
    if v.determinism != "none":
        assert check_repeats(bench, work.cancelling) == ""


@pytest.mark.parametrize(("N", "cluster"), [(4096, 1), (8192, 4)])
@pytest.mark.parametrize("strategy", ["column_slices", "mailbox"])
def test_more_ctas_than_the_device_holds_at_once_end_with_the_same_bits(
    here: Target, workload: Callable[[str], Workload], strategy: str, N: int, cluster: int
) -> None:
    """One machine code and one grid, with the shared memory that it needs and with so much that an
    SM holds one CTA. More CTAs have slices than can wait at once then: some hand theirs over."""
    if cluster > 1 and not here.has_bulk_copy:
        pytest.skip(f"{here} has no clusters")
    work = workload(f"4096x{N}:bf16")
    knobs: dict[str, int | str] = {"strategy": strategy, "cluster": cluster, "slice_columns": 16}
    knobs |= {"threads_per_row": 256, "rows_per_cta": 1, "ctas_per_sm": 2}
    v = plain_variant(work.problem, here, **knobs)
    compiled = compile_variant(v, here.arch)
    assert refuse(v, compiled, work.problem, here) is None
    spec, most = v.spec(here.sms), here.smem_per_cta - compiled.main.smem_bytes
    crowded = replace(spec, smem_bytes=most)
    fits, exceeds = (work.bench(Candidate(compiled.cubin, s)) for s in (spec, crowded))
    launch = plan_launch(spec, work.problem.M)
    assert plan_launch(crowded, work.problem.M) == launch
    assert here.occupancy(v.threads, compiled.main.registers, most) == 1
    with_slices = min(launch.participants, v.columns // 16)
    assert with_slices > here.sms // cluster
    assert check_accuracy(exceeds, work.inputs, work.expected).fault == ""
    assert check_repeats(exceeds, work.cancelling) == ""
    assert digest(exceeds, work.cancelling) == digest(fits, work.cancelling)


def test_equal_bits_on_another_day(here: Target, workload: Callable[[str], Workload]) -> None:
    """The fingerprint that is compared between processes changes with the bits only."""
    work = workload("777x1024:bf16")
    v = plain_variant("777x1024:bf16", here)
    one, two = (bench_of(work, v, here) for _ in range(2))
    assert digest(one, work.cancelling) == digest(two, work.cancelling)
    assert digest(one, work.cancelling) != digest(one, work.inputs)


def test_more_than_two_to_the_31_elements(here: Target, device: torch.device) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 40e9:
        pytest.skip(f"needs 40 GB of free GPU memory, {free / 1e9:.0f} GB are there")
    problem = Problem.parse("131080x16384:bf16")
    assert problem.M * problem.N > 2**31
    inputs = make_inputs(problem, device)
    expected = RMSNORM_BACKWARD.bounds(problem, inputs)
    outputs = {
        "dx": Guarded((problem.M, problem.N), torch.bfloat16, device),
        "dw": Guarded((problem.N,), torch.bfloat16, device),
    }
    wide = [v for v in fallback_variants(here, [("bf16", "bf16")]) if v.least <= problem.N <= v.N]
    chosen = [(v, compile_variant(v, here.arch)) for v in wide]
    for seed, pipeline in enumerate(("bulk", "direct", "async") if here.has_bulk_copy else ()):
        chosen.append(runnable(str(problem), here, seed, pipeline=pipeline))
    chosen = [entry for entry in chosen if refuse(*entry, problem, here) is None]
    assert chosen
    for v, compiled in chosen:
        runner = RowRunner(compiled.cubin, v.spec(here.sms), problem)
        accuracy = check_accuracy(Bench(runner, outputs, device), inputs, expected)
        assert accuracy.fault == "", f"{v}: {accuracy.fault}"


# ---- Planted bugs are caught ---------------------------------------------------------------------


@pytest.mark.parametrize("bug", WRONG)
def test_planted_bug_is_caught_as_wrong(
    here: Target, workload: Callable[[str], Workload], bug: str
) -> None:
    knobs, old, new, says = WRONG[bug]
    work = workload(SHAPE)
    v = plain_variant(SHAPE, here, **knobs)
    assert check_accuracy(bench_of(work, v, here), work.inputs, work.expected).fault == ""
    bench = bench_of(work, v, here, old, new)
    accuracy = check_accuracy(bench, work.inputs, work.expected)
    assert accuracy.fault.startswith(says), accuracy


@pytest.mark.parametrize("residual", ["", "+residual"])
def test_forward_is_accurate_and_one_that_writes_to_another_row_is_caught(
    here: Target, device: torch.device, residual: str
) -> None:
    work = Workload(Problem.parse(f"777x1024:bf16{residual}", "rmsnorm_forward"), device)
    v = of_kind("777x1024:bf16", here)
    source = render_forward(v)
    row = "store_rstd(rows.rstd + row, rstd)"
    assert source.count(row) == 1

    def bench(text: str) -> Bench:
        compiled = compile_source(text, here.arch)
        assert compiled.error == "", compiled.error
        return work.bench(Candidate(compiled.cubin, v.spec(here.sms)))

    good = bench(source)
    assert check_accuracy(good, work.inputs, work.expected).fault == ""
    assert check_repeats(good, work.inputs) == ""
    for place, says in (("(row ^ 1)", "rstd["), ("(row + 1)", "rstd[")):
        bad = bench(source.replace(row, row.replace("+ row", f"+ {place}")))
        assert check_accuracy(bad, work.inputs, work.expected).fault.startswith(says)


# ---- The evaluator survives what it evaluates ----------------------------------------------------


@pytest.fixture(scope="module")
def evaluator(here: Target) -> Iterator[MeasuredEvaluator]:
    with MeasuredEvaluator(here, Supervisor(0, SECONDS)) as evaluator:
        yield evaluator


PROBLEM = Problem.parse("4096x1024:bf16")


def evaluate(evaluator: MeasuredEvaluator, v: Variant, old: str = "", new: str = "") -> Result:
    compiled = compile_source(broken(v, old, new), evaluator.target.arch)
    assert compiled.error == "", compiled.error
    return evaluator.evaluate(PROBLEM, v, compiled, None)


@pytest.mark.parametrize("bad", BAD)
def test_bad_variant_is_an_outcome_and_the_next_one_is_measured(
    evaluator: MeasuredEvaluator, bad: str
) -> None:
    old, new, outcome = BAD[bad]
    v = plain_variant(PROBLEM, evaluator.target)
    result = evaluate(evaluator, v, old, new)
    assert result.outcome == outcome, result
    assert result.note
    assert not result.may_win
    good = evaluate(evaluator, v)
    assert good.outcome == "ok", good
    assert good.determinism == "verified"
    assert good.checks == ("accuracy", "20 runs")


def test_machine_code_of_another_gpu_is_refused_by_the_driver(
    evaluator: MeasuredEvaluator,
) -> None:
    v = plain_variant(PROBLEM, evaluator.target)
    arch = "sm_80" if evaluator.target.arch != "sm_80" else "sm_90a"
    result = evaluator.evaluate(PROBLEM, v, compile_source(render(v), arch), None)
    assert result.outcome == "launch_error", result
    assert evaluate(evaluator, v).outcome == "ok"


def test_slow_variant_is_timed_and_given_up(evaluator: MeasuredEvaluator) -> None:
    v = plain_variant(PROBLEM, evaluator.target)
    compiled = compile_variant(v, evaluator.target.arch)
    result = evaluator.evaluate(PROBLEM, v, compiled, 0.5)
    assert result.outcome == "slow"
    assert result.us is not None
    assert not result.may_win


def test_finals_verify_the_ordered_and_refute_the_unordered(evaluator: MeasuredEvaluator) -> None:
    target = evaluator.target
    variants = [plain_variant(PROBLEM, target, **REDUCTION[f]) for f in ("column_slices", "atomic")]
    entries = [(v, compile_variant(v, target.arch)) for v in variants]
    ordered, unordered = evaluator.finals(PROBLEM, entries)
    assert ordered.outcome == "ok", ordered
    assert ordered.determinism == "verified"
    assert set(ordered.checks) == {
        *("accuracy", "20 runs", "cancelling magnitudes", "busy GPU and thrashed L2"),
        *("call options", "fresh process"),
    }
    assert unordered.outcome == "nondeterministic", unordered
    assert unordered.determinism == "refuted"
    for result in (ordered, unordered):
        assert result.us is not None
        assert result.floor_us is not None
        assert result.ratio is not None
        assert result.ratio == pytest.approx(result.us / result.floor_us, rel=0.2)
    assert ordered.floor_us == unordered.floor_us, "both were timed in the same blocks"


def test_times_are_of_the_whole_operation_and_cold(device: torch.device) -> None:
    a, b = (torch.randn(1 << 20, device=device) for _ in range(2))
    out = torch.empty_like(a)

    def once() -> None:
        torch.add(a, b, out=out)

    def twice() -> None:
        once()
        once()

    cold, *times = Timer(device).block([once, once, twice], 15)
    one, two = (median(map(truediv, each, cold)) for each in times)
    assert one == pytest.approx(1.0, abs=0.1)
    # The second pass finds its data in the L2 and is faster, but it is there.
    assert 1.15 < two < 2.1
    (warm,) = Timer(device, flush_bytes=1024).block([once], 15)
    assert median(cold) > 1.1 * median(warm)


def test_flush_displaces_what_a_kernel_read_with_priority(device: torch.device) -> None:
    reader = ColdCache(device, 32 << 20)
    kept = reader._read.view(torch.float32)
    other, out = torch.zeros_like(kept), torch.empty_like(kept)

    def reads(tensor: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.add(tensor, 1.0, out=out)

    operations = [lambda: reader.flush(0.0), reads(kept), reads(other)]
    _, after, cold = map(median, Timer(device).block(operations, 30))
    assert after == pytest.approx(cold, rel=0.04)


# ---- The emitted module --------------------------------------------------------------------------

FIRST_M = 777


@pytest.fixture(scope="module")
def package(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """One "tuned" shape for every deterministic strategy, told apart by M, and the fallbacks."""
    folder = tmp_path_factory.mktemp("gpu") / "rmsnorm_backward"
    entries = []
    for i, reduction in enumerate(DETERMINISTIC):
        if reduction in reductions_of(here):
            problem = Problem(FIRST_M + i, 1024, "bf16", "bf16")
            entries.append(planted_entry(problem, here, **REDUCTION[reduction]))
    emit_package(entries, compiled_fallbacks(here), here, folder)
    return Package(folder)


@pytest.fixture(params=DETERMINISTIC)
def rows(request: pytest.FixtureRequest, here: Target) -> int:
    """The M that selects one strategy of the package."""
    if request.param not in reductions_of(here):
        pytest.skip(f"{here} has no bulk copies")
    return FIRST_M + DETERMINISTIC.index(request.param)


Arguments = list[torch.Tensor]


def arguments_of(M: int, device: torch.device, N: int = 1024, dtype: str = "bf16") -> Arguments:
    inputs = make_inputs(Problem(M, N, dtype, dtype), device)
    return [inputs.dy, inputs.x, inputs.rstd, inputs.weight]


def same(one: tuple[torch.Tensor, ...], two: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_rows_of_a_wider_tensor_give_the_bits_of_contiguous_ones(
    package: Package, rows: int, device: torch.device
) -> None:
    dy, x, rstd, weight = arguments_of(rows, device)
    contiguous = package.rmsnorm_backward(dy, x, rstd, weight)
    wide_x, wide_dy = torch.cat([dy, x, dy], 1), torch.cat([x, dy], 1)
    for strided_x in (x, wide_x[:, 1024:2048]):
        for strided_dy in (dy, wide_dy[:, 1024:]):
            results = package.rmsnorm_backward(strided_dy, strided_x, rstd, weight)
            assert same(results, contiguous)
            assert results[0].is_contiguous()


def test_unaligned_rows_are_served_by_another_kernel_as_accurately(
    package: Package, rows: int, device: torch.device
) -> None:
    problem = Problem(rows, 1024, "bf16", "bf16")
    inputs = make_inputs(problem, device)
    reference = make_reference(problem, inputs)
    for offset in (1, 3, 4):
        wide = torch.zeros(rows, 1024 + 8, dtype=inputs.x.dtype, device=device)
        wide[:, offset : offset + 1024] = inputs.x
        odd = torch.zeros(rows, 1024 + 7, dtype=inputs.x.dtype, device=device)
        odd[:, :1024] = inputs.dy
        dx, dw = package.rmsnorm_backward(
            odd[:, :1024], wide[:, offset : offset + 1024], inputs.rstd, inputs.weight
        )
        for name, found in (("dx", dx), ("dw", dw)):
            assert relative_error(found, reference.outputs[name]) < 2.0**-8


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


LONG_ROWS = ["1x16392:bf16", "4096x20480:bf16", "37x24584:fp32", "9x65536:fp16"]


@pytest.mark.parametrize("shape", LONG_ROWS)
def test_rows_of_any_length_are_shared_in_clusters(
    package: Package, here: Target, shape: str, device: torch.device
) -> None:
    if not here.has_bulk_copy:
        pytest.skip(f"{here} has no clusters")
    problem = Problem.parse(shape)
    assert package.explain(problem.M, problem.N, problem.dtype)["how"] == "fallback"
    inputs = make_inputs(problem, device)
    reference = make_reference(problem, inputs)
    given = (inputs.dy, inputs.x, inputs.rstd, inputs.weight)
    dx, dw = package.rmsnorm_backward(*given)
    for name, found in (("dx", dx), ("dw", dw)):
        assert relative_error(found, reference.outputs[name]) < 2.0**-8
    assert all(same(package.rmsnorm_backward(*given), (dx, dw)) for _ in range(20))
    assert torch.equal(package.rmsnorm_backward(*given, need_dw=False)[0], dx)


def test_one_row_repeated_by_expand_gives_the_bits_of_the_copies(
    package: Package, rows: int, device: torch.device
) -> None:
    dy, x, rstd, weight = arguments_of(rows, device)
    expanded = dy[:1].expand(rows, 1024)
    assert expanded.stride(0) == 0
    copies = package.rmsnorm_backward(expanded.contiguous(), x, rstd, weight)
    assert same(package.rmsnorm_backward(expanded, x, rstd, weight), copies)


def test_captured_graph_gives_the_bits_of_the_eager_call_at_every_replay(
    package: Package, rows: int, device: torch.device
) -> None:
    arguments = arguments_of(rows, device)
    eager = package.rmsnorm_backward(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = package.rmsnorm_backward(*arguments)
    for byte in (0xFF, 0x3C):
        for output in captured:
            output.view(torch.uint8).fill_(byte)
        graph.replay()
        torch.cuda.synchronize()
        assert same(captured, eager)


def test_two_streams_at_once_give_the_bits_of_one_after_the_other(
    package: Package, rows: int, device: torch.device
) -> None:
    """Other inputs on each stream: a shared counter or workspace would mix them."""
    inputs = [arguments_of(rows, device), arguments_of(rows, device)]
    inputs[1][0] = inputs[1][0] * 2
    alone = [package.rmsnorm_backward(*arguments) for arguments in inputs]
    streams = [torch.cuda.Stream(device) for _ in inputs]
    torch.cuda.synchronize()
    results: list[list[Any]] = [[] for _ in inputs]
    for _ in range(50):
        for stream, arguments, found in zip(streams, inputs, results, strict=True):
            with torch.cuda.stream(stream):
                found.append(package.rmsnorm_backward(*arguments))
    torch.cuda.synchronize()
    for found, expected in zip(results, alone, strict=True):
        assert all(same(result, expected) for result in found)


@pytest.mark.parametrize("M", [1, 2, 5, 131, 1000, 4099])
@pytest.mark.parametrize("N", [1, 33, 1024, 1025, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_is_served_within_the_bounds(
    package: Package, device: torch.device, M: int, N: int, dtype: str
) -> None:
    problem = Problem(M, N, dtype, dtype)
    inputs = make_inputs(problem, device)
    dx, dw = package.rmsnorm_backward(inputs.dy, inputs.x, inputs.rstd, inputs.weight)
    expected = RMSNORM_BACKWARD.bounds(problem, inputs)
    assert compare_all({"dx": dx, "dw": dw}, expected).fault == ""


# ---- The command line ----------------------------------------------------------------------------


def test_measuring_run_that_is_killed_resumes(here: Target, tmp_path: Path) -> None:
    out = tmp_path / here.name
    line = command("--gpu", here.name, "--shapes", "4096x1024:bf16", "--trials", "30", "--json")
    document = kill_and_resume([*line, "--out", str(out)], out, 30)
    (row,) = document["shapes"]
    assert document["evidence"] == row["evidence"] == "measured"
    assert row["determinism"] == "verified"
    assert "fresh process" in row["checks"]
    dispatch = Package(out / "rmsnorm_backward").explain(4096, 1024, "bf16")
    assert dispatch["how"] == "tuned"
    assert dispatch["provenance"]["space"] == SPACE.digest(PROBLEM)
