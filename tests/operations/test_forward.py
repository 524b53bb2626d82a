"""The forward: its kernels compile, compute, repeat their bits and are emitted; the call on the CPU
and, marked `gpu`, on a device."""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from generator.emulate import forward as emulated
from generator.emulate.build import find_compiler
from generator.emulate.forward import run_forward
from generator.emulate.run import Layout, Schedule
from generator.errors import NormforgeError
from generator.evaluate.gpu.forward import ForwardGpu, ForwardTime
from generator.kernels.compile_pool import LIVES, CompilePool
from generator.kernels.forward import (
    ANY_COLUMNS,
    MOST_VECTORS,
    ForwardVariant,
    compile_forward,
    forward_fault,
    forward_variants,
    generic_forwards,
    render_forward,
)
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.operations.rmsnorm_forward import ForwardInputs, forward_inputs, output_fault
from generator.package.emit import emit_package
from generator.package.entries import ForwardEntry, Forwards
from generator.package.fallback_kernels import DTYPES
from generator.paths import TEMPLATES
from generator.problem import Problem
from generator.runtime.forward_table import KERNELS, ForwardTable
from generator.runtime.launch import forward_call as call_module
from generator.runtime.launch.forward_call import forward_call
from generator.runtime.launch.row_layout import RowLayout, row_layout
from generator.runtime.serve.forward import Forward, reference_forward
from generator.target import Target, find_target, load_targets
from generator.tuner import forward as forward_tune
from generator.tuner.forward import MOST_VARIANTS, tune_forwards
from tests.support.fake_gpu import CrashingCompiler, Log
from tests.support.fake_run import forks
from tests.support.samples import problems, targets

H200 = find_target("h200")
EPS = 1e-6
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCHEDULES = [Schedule(1, 2), Schedule(2, 5), Schedule(3, 1000)]

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def of_kind(shape: str, target: Target = H200, **wanted: Any) -> ForwardVariant:
    """The preferred variant of a shape with these fields; `walks` says whether its CTAs do."""
    walks = wanted.pop("walks", None)
    for variant in forward_variants(Problem.parse(shape), target):
        if walks is not None and walks != (variant.ctas_per_sm > 0):
            continue
        if all(getattr(variant, name) == value for name, value in wanted.items()):
            return variant
    raise AssertionError(f"{shape} has no variant with {wanted}")


# ---- The space -----------------------------------------------------------------------------------


@settings(max_examples=80)
@given(problems(), targets())
def test_every_shape_has_variants_that_cover_its_rows(problem: Problem, target: Target) -> None:
    variants = forward_variants(problem, target)
    assert variants
    assert len({v.id + str(v.ctas_per_sm) for v in variants}) == len(variants)
    for v in variants:
        assert v.threads % 32 == 0
        assert v.threads <= 1024
        assert problem.N * problem.itemsize % v.vector_bytes == 0
        assert v.columns * v.cluster == problem.N
        assert v.columns % v.elements == 0
        assert v.cluster == 1 or (target.has_bulk_copy and v.rows_per_cta == 1)
        if v.form == "registers":
            assert v.vectors * v.threads_per_row * v.elements >= v.columns
            assert v.vectors * v.rows_in_flight <= MOST_VECTORS


def test_variants_differ_in_id_exactly_when_their_sources_differ() -> None:
    variants = forward_variants(Problem.parse("4096x4096:bf16"), H200)
    sources: dict[str, set[str]] = {}
    for v in variants:
        sources.setdefault(v.id, set()).add(render_forward(v))
    assert all(len(texts) == 1 for texts in sources.values())
    assert len(set().union(*sources.values())) == len(sources)


def test_grid_gives_every_row_to_a_cta_and_walkers_no_more_than_they_are() -> None:
    spec = of_kind("4096x256:bf16", walks=False).spec(132)
    rows = spec.rows_per_cta * spec.rows_in_flight
    for M in (1, rows, rows + 1, 10**9 + 7):
        assert spec.grid(M) * rows >= M > (spec.grid(M) - 1) * rows
    walker = replace(spec, ctas_per_sm=3)
    assert walker.grid(10**9) == 3 * 132
    assert walker.grid(1) == 1
    assert replace(walker, cluster=4).grid(10**9) == 3 * 132


# ---- The kernels compile -------------------------------------------------------------------------


@pytest.mark.parametrize("arch", sorted({t.arch for t in load_targets().values()}))
def test_preferred_and_generic_kernels_compile_without_spills_for(arch: str) -> None:
    target = next(t for t in load_targets().values() if t.arch == arch)
    shapes = ("4096x128:bf16", "4096x4096:bf16:fp32", "4096x16384:fp32")
    variants = [forward_variants(Problem.parse(shape), target)[0] for shape in shapes]
    variants += generic_forwards((("fp16", "fp32"),))[:3]
    for variant in variants:
        compiled = compile_forward(variant, arch)
        assert forward_fault(variant, compiled, target) == "", f"{variant} for {arch}"
        assert set(compiled.kernels) == set(KERNELS)


def test_a_kernel_that_spills_does_not_compile_or_does_not_fit_is_refused() -> None:
    greedy = ForwardVariant(65536, "bf16", "bf16", "registers", 1024, 1, 1, 16)
    assert "spills" in forward_fault(greedy, compile_forward(greedy, H200.arch), H200)
    fine = of_kind("4096x4096:bf16")
    broken = Compiled(H200.arch, "", b"", {}, "13", False, "", "error: no")
    assert "does not compile" in forward_fault(fine, broken, H200)
    large = dict.fromkeys(KERNELS, Resources(255, 0, 0, 0))
    wide = replace(fine, threads_per_row=1024)
    compiled = Compiled(H200.arch, "", b"x", large, "13", False, "")
    assert "no CTA fits" in forward_fault(wide, compiled, H200)


def test_the_host_packs_arguments_as_the_kernel_declares_them() -> None:
    source = (TEMPLATES / "rmsnorm_forward.cu.j2").read_text()
    (body,) = re.findall(r"struct Arguments \{(.*?)\};", source, re.DOTALL)
    codes = {"float": "f", "long long": "q", "int": "i", "unsigned": "I"}
    layout = "@"
    for line in re.sub(r"//.*", "", body).split(";"):
        if names := line.split(","):
            kind = re.match(r"\s*((?:const )?\w+\*|long long|\w+) ", names[0])
            if kind:
                layout += ("Q" if kind[1].endswith("*") else codes[kind[1]]) * len(names)
    assert len(layout) > 10
    assert struct.calcsize(layout) == call_module._ARGUMENTS.size
    assert layout == re.sub(r"(\d)(\w)", lambda m: m[2] * int(m[1]), call_module._ARGUMENTS.format)


# ---- The kernels compute -------------------------------------------------------------------------

KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "several rows in a warp": ("4096x64:bf16", 45, {"walks": False}),
    "a warp for a row": ("4096x256:fp16", 37, {"threads_per_row": 32, "rows_in_flight": 2}),
    "walking CTAs": ("4096x512:bf16:fp32", 33, {"walks": True}),
    "several warps and rows": ("4096x3072:bf16", 11, {"rows_per_cta": 2, "walks": True}),
    "one row, fp32": ("4096x4096:fp32", 5, {"walks": False}),
    "odd row length": ("4096x1001:bf16", 9, {}),
    "read twice": ("4096x16384:bf16", 5, {"form": "twice", "walks": True}),
    "cluster": ("4096x16384:bf16", 5, {"cluster": 4, "walks": True}),
}


def drawn(problem: Problem, M: int) -> ForwardInputs:
    return forward_inputs(replace(problem, M=M), torch.device("cpu"))


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_is_accurate_and_has_one_result_under_all_schedules(kind: str) -> None:
    shape, M, wanted = KINDS[kind]
    variant = of_kind(shape, **wanted)
    problem = replace(Problem.parse(shape), M=M)
    inputs = drawn(problem, M)
    runs = run_forward(variant, inputs.x, inputs.weight, SCHEDULES)
    assert runs.faults == []
    assert len(runs.results) == 1
    y, rstd = runs.results[0]
    assert output_fault(problem, inputs, (y, rstd[:, None])) == ""
    if problem.itemsize == 4:
        return
    options = {"weight_offset": 1.0, "residual": inputs.residual}
    layout = Layout(pad_x=16)
    runs = run_forward(variant, inputs.x, None, SCHEDULES[:2], layout=layout, **options)  # type: ignore[arg-type]
    assert runs.faults == []
    y, rstd, stream = runs.results[0]
    outputs = (y, rstd[:, None], stream)
    assert output_fault(problem, inputs, outputs, weight=False, weight_offset=1.0) == ""


@needs_compiler
def test_packed_rows_are_read_in_place() -> None:
    variant = of_kind("4096x128:bf16")
    problem = Problem(60, 128, "bf16", "bf16")
    inputs = drawn(problem, 60)
    runs = run_forward(variant, inputs.x, inputs.weight, SCHEDULES[:1], inner=4)
    assert runs.faults == []
    y, rstd = runs.results[0]
    assert output_fault(problem, inputs, (y, rstd[:, None])) == ""


@needs_compiler
@pytest.mark.parametrize(
    ("N", "vector_bytes"), [(40, 16), (9000, 16), (1, 2), (3, 2), (999, 2), (1000, 2)]
)
def test_generic_kernels_serve_any_row_length(N: int, vector_bytes: int) -> None:
    M = min(N, 5)
    problem = Problem(M, N, "bf16", "bf16")
    inputs = drawn(problem, M)
    fitting = [
        v
        for v in generic_forwards((("bf16", "bf16"),))
        if v.vector_bytes == vector_bytes and v.N >= N
    ]
    assert fitting[-1].N == ANY_COLUMNS
    for variant in (fitting[0], fitting[-1]):
        runs = run_forward(variant, inputs.x, inputs.weight, SCHEDULES[:1])
        assert runs.faults == []
        y, rstd = runs.results[0]
        assert output_fault(problem, inputs, (y, rstd[:, None])) == "", str(variant)


@needs_compiler
def test_bits_of_a_row_depend_neither_on_the_grid_nor_on_the_other_rows() -> None:
    variant = of_kind("4096x512:bf16", walks=True)
    inputs = drawn(Problem.parse("1x512:bf16"), 37)
    (first,) = run_forward(variant, inputs.x, inputs.weight, SCHEDULES[:1], sms=1).results
    (other,) = run_forward(variant, inputs.x, inputs.weight, SCHEDULES[:1], sms=3).results
    (part,) = run_forward(variant, inputs.x[20:].clone(), inputs.weight, SCHEDULES[:1]).results
    for whole, again, rest in zip(first, other, part, strict=True):
        assert torch.equal(whole, again)
        assert torch.equal(whole[20:], rest)


@needs_compiler
def test_the_executor_finds_a_missing_barrier_and_a_wrong_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant = of_kind("4096x3072:bf16", rows_per_cta=2, walks=True)
    problem = replace(Problem.parse("4096x3072:bf16"), M=11)
    inputs = drawn(problem, 11)

    def mutated(old: str, new: str) -> emulated.ForwardRuns:
        source = render_forward(variant)
        assert source.count(old) == 1, f"the templates no longer have {old!r}"
        monkeypatch.setattr(emulated, "render_forward", lambda v: source.replace(old, new))
        return run_forward(variant, inputs.x, inputs.weight, SCHEDULES)

    barrier = "      cta_barrier();\n#pragma unroll\n      for (int u = 0; u < kRowsInFlight; ++u)"
    assert mutated(barrier, barrier.replace("cta_barrier();", "")).faults
    runs = mutated("store_rstd(rows.rstd + row, rstd)", "store_rstd(rows.rstd + (row ^ 1), rstd)")
    y, rstd, *_ = runs.results[0] if runs.results else (None, None)
    assert runs.faults or output_fault(problem, inputs, (y, rstd[:, None]))  # type: ignore[index]


# ---- Rows in memory ------------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 4), min_size=0, max_size=3),
    st.integers(1, 5),
    st.permutations(range(4)),
    st.integers(0, 3),
)
def test_row_layout_finds_every_row_or_asks_for_a_copy(
    sizes: list[int], N: int, order: list[int], gap: int
) -> None:
    shape = (*sizes, N)
    # Dimensions lie in memory in any order, with a gap behind each.
    strides, step = [0] * len(shape), 1
    for place in [len(shape) - 1, *(p for p in order if p < len(shape) - 1)]:
        strides[place] = step
        step = step * shape[place] + (gap if place % 2 else 0)
    tensor = torch.arange(float(step + 1)).as_strided(shape, strides)
    layout = row_layout(tensor)
    if layout is None:
        return
    rows = tensor.reshape(-1, N)
    for i in range(len(rows)):
        at = i * layout.stride
        if layout.inner:
            at = i // layout.inner * layout.outer + i % layout.inner * layout.stride
        assert float(rows[i, 0]) == at


def test_common_layouts_need_no_copy() -> None:
    packed = torch.empty(2, 7, 3, 4, 64)  # batch, tokens, q and k and v, heads, head
    assert row_layout(torch.empty(5, 8)) == RowLayout(8)
    assert row_layout(torch.empty(2, 3, 5, 8)) == RowLayout(8)
    assert row_layout(torch.empty(5, 16)[:, :8]) == RowLayout(16)
    assert row_layout(torch.empty(8).expand(5, 8)) == RowLayout(0)
    assert row_layout(packed[:, :, 1]) == RowLayout(64, 4, 3 * 4 * 64)
    assert row_layout(packed[:, :, 1].transpose(1, 2)) is None
    assert row_layout(torch.empty(8, 5).t()) is None


# ---- The call on the CPU -------------------------------------------------------------------------


@pytest.fixture
def forward(tmp_path: Path) -> Forward:
    """Of a package without forward kernels."""
    return Forward(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_cpu_rows_get_what_pytorch_computes(
    forward: Forward, dtype: torch.dtype, eps: float | None
) -> None:
    torch.manual_seed(0)
    x = (1e-3 * torch.randn(3, 5, 40)).to(dtype)  # small enough for eps to show
    weight = torch.randn(40).to(dtype)
    y, rstd = forward(x, weight, eps)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (40,), weight, eps))
    assert rstd.shape == (3, 5, 1)
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bare, _ = forward(x, None, eps)
    torch.testing.assert_close(bare, torch.nn.functional.rms_norm(x, (40,), None, eps))


def test_offset_is_added_to_the_weight_and_to_the_ones_of_no_weight(forward: Forward) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    plain, _ = forward(x, 1 + weight)
    shifted, _ = forward(x, weight, None, 1.0)
    assert torch.equal(plain, shifted)
    twice, _ = forward(x, None, None, 1.0)
    assert torch.equal(twice, forward(x, torch.full((16,), 2.0))[0])


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
def test_residual_is_rounded_before_it_is_normalised(
    forward: Forward, residual_dtype: torch.dtype
) -> None:
    x = torch.randn(4, 64).bfloat16()
    residual = torch.randn(4, 64).to(residual_dtype)
    y, rstd, stream = forward(x, None, EPS, 0.0, residual)
    assert torch.equal(stream, (x.float() + residual.float()).to(residual_dtype))
    again, rstd_again = reference_forward(stream.float(), None, EPS)
    assert torch.equal(rstd, rstd_again)
    assert torch.equal(y, again.bfloat16())


def test_no_rows_meta_and_fake_tensors_get_results_of_the_right_shape(forward: Forward) -> None:
    y, rstd = forward(torch.empty(0, 8), torch.ones(8))
    assert (y.shape, rstd.shape) == ((0, 8), (0, 1))
    x = torch.empty(3, 8, 2, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    y, rstd = forward(x)
    assert (y.shape, y.is_contiguous(), rstd.shape) == (x.shape, True, (3, 2, 1))
    with FakeTensorMode():
        fake = torch.empty(3, 8, device="cuda", dtype=torch.bfloat16)
        y, rstd, stream = forward(fake, None, None, 0.0, fake)
        assert (y.shape, y.dtype, stream.dtype) == ((3, 8), torch.bfloat16, torch.bfloat16)
        assert (rstd.shape, rstd.dtype, rstd.device.type) == ((3, 1), torch.float32, "cuda")


def test_a_remembered_signature_serves_no_other_arguments(forward: Forward) -> None:
    x, weight = torch.randn(3, 5, 8), torch.randn(8)
    other = torch.randn(3, 5, 8)
    calls: list[tuple[Any, ...]] = [
        (x, weight),
        (x,),
        (x[0], weight),
        (x.double(), weight.double()),
        (x.half(), weight),
        (x.transpose(0, 1), weight),
        (x, None, EPS, 1.0, other),
        (x, weight, EPS, 0.0, other.bfloat16()),
        (x, weight, None, 0.5, x),
        (x.flatten()[1:113].view(14, 8), weight),
    ]
    for known in forward._calls.values():
        known._device = ""  # keep calls on the CPU too
    for _ in range(3):
        for arguments in calls:
            for out, expected in zip(
                forward(*arguments), reference_forward(*arguments), strict=True
            ):
                torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert sum(len(known.recent) for known in forward._calls.values()) >= 6


@pytest.mark.parametrize(
    ("arguments", "kind", "sentence"),
    [
        ((torch.ones(2, 4).int(),), TypeError, "x must be bfloat16"),
        (([1.0],), TypeError, "x must be a torch.Tensor, got list"),
        ((torch.ones(()),), ValueError, r"x must be \(..., N\)"),
        ((torch.ones(2, 4), torch.ones(3)), ValueError, r"weight must have shape \(4,\)"),
        ((torch.ones(2, 4), torch.ones(4).half()), TypeError, "weight must have x's dtype"),
        ((torch.ones(2, 4), None, None, 0.0, torch.ones(4)), ValueError, "residual must have x's"),
        ((torch.ones(2, 4), torch.ones(4, device="meta")), ValueError, "weight is on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_a_sentence(
    forward: Forward, arguments: tuple[Any, ...], kind: type[Exception], sentence: str
) -> None:
    for _ in range(2):  # a refused signature is not remembered as one that fits
        with pytest.raises(kind, match=sentence):
            forward(*arguments)


# ---- The launch, with the driver replaced --------------------------------------------------------


class Launched(SimpleNamespace):
    """What the driver was given."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Calls on CPU tensors reach a driver that notes its arguments."""
    seen: list[Launched] = []

    def launch(config: Any, function: Any, arguments: int, extra: int) -> tuple[int]:
        (block,) = (ctypes.c_void_p * 1).from_address(arguments)
        values = call_module._ARGUMENTS.unpack(ctypes.string_at(block, call_module._ARGUMENTS.size))
        seen.append(Launched(config=config, function=function, values=values))
        return (0,)

    driver = SimpleNamespace(cuLaunchKernelEx=launch)
    monkeypatch.setattr(call_module, "cuda_driver", lambda: driver)
    monkeypatch.setattr(call_module, "current_device", lambda: -1)
    monkeypatch.setattr(call_module, "raw_stream", lambda device: 7)
    monkeypatch.setattr(call_module, "is_capturing", lambda: False)
    monkeypatch.setattr(
        call_module,
        "empty_strided",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    )
    return seen


def test_launch_gets_addresses_extents_and_the_function_for_the_residual(
    launches: list[Launched],
) -> None:
    spec = of_kind("4096x256:bf16").spec(132)
    kernel: Any = SimpleNamespace(spec=spec, load=lambda device: ("plain", "with residual"))
    kernel.main_config = lambda grid, stream: (grid, stream)
    x = torch.empty(3, 5, 2, 256, dtype=torch.bfloat16)[:, :, 0]
    weight = torch.empty(512, dtype=torch.bfloat16)[::2]
    residual = torch.empty(3, 5, 256, dtype=torch.bfloat16)
    call = forward_call(kernel, x, weight, None, row_layout(x), None)
    y, rstd = call(x, weight, None, 1.0, None)
    (first,) = launches
    assert (first.config, first.function) == ((spec.grid(15), 7), "plain")
    addresses, numbers = first.values[:6], first.values[6:]
    assert addresses[0] == x.data_ptr()
    assert addresses[1] == addresses[5] == 0
    assert addresses[2] != weight.data_ptr()  # it was copied
    assert addresses[3:5] == (y.data_ptr(), rstd.data_ptr())
    assert numbers == (torch.finfo(torch.float32).eps, 1.0, 15, 512, 0, 256, 256, 0)
    assert (y.shape, rstd.shape, rstd.dtype) == (x.shape, (3, 5, 1), torch.float32)

    layouts = (row_layout(x), row_layout(residual))
    call = forward_call(kernel, x, None, residual, *layouts)
    y, rstd, stream = call(x, None, 0.5, 0.0, residual)
    second = launches[1]
    assert second.function == "with residual"
    assert second.values[1:3] == (residual.data_ptr(), 0)
    assert second.values[5:8] == (stream.data_ptr(), 0.5, 0.0)


# ---- Choice and package --------------------------------------------------------------------------


@cache
def emitted() -> tuple[ForwardEntry, tuple[tuple[ForwardVariant, Compiled], ...]]:
    """A small set of real kernels."""
    variant = of_kind("4096x1024:bf16")
    entry = ForwardEntry(
        *(Problem.parse("4096x1024:bf16"), variant, compile_forward(variant, H200.arch)),
        *("measured", {"reason": "test", "us": 1.0, "ratio": 1.1}),
    )
    generic = tuple((v, compile_forward(v, H200.arch)) for v in generic_forwards(DTYPES[:1]))
    return entry, generic


@pytest.fixture
def package(tmp_path: Path) -> Path:
    entry, generic = emitted()
    folder = tmp_path / "h200" / "rmsnorm_backward"
    emit_package([], [], H200, folder, Forwards((entry,), generic))
    return folder


def test_package_holds_forward_kernels_that_its_runtime_finds(package: Path) -> None:
    entry, generic = emitted()
    table = ForwardTable.load(package)
    assert table is not None
    kernels = list(table.kernels())
    assert len(kernels) == 1 + len(generic)
    for kernel in kernels:
        assert kernel.read_cubin(package)
        assert (package / "kernels" / f"{kernel.file}.cu").read_text().count("__global__") == 2
    assert Forward(package).explain(9000, 1024, "bf16") == {
        "how": "nearest",
        "kernel": entry.variant.id,
        "evidence": "measured",
    }
    sys.path.insert(0, str(package.parent))
    try:
        from rmsnorm_backward.runtime.serve.forward import Forward as Emitted  # type: ignore

        y, _ = Emitted(package)(torch.ones(2, 8))
        assert y.shape == (2, 8)
    finally:
        sys.path.remove(str(package.parent))
        for name in [name for name in sys.modules if name.split(".")[0] == "rmsnorm_backward"]:
            del sys.modules[name]


def test_choice_follows_width_alignment_and_dtype(package: Path) -> None:
    table = ForwardTable.load(package)
    assert table is not None

    def choose(N: int, dtype: str = "bf16", *, at: int = 16, weight_at: int = 16) -> Any:
        how, kernel, _ = table.choose(4096, N, dtype, dtype, at, weight_at)
        return how, kernel and (kernel.spec.N, kernel.spec.vector_bytes)

    assert choose(1024) == ("tuned", (1024, 16))
    assert choose(1024, at=2) == ("generic", (4096, 2))
    assert choose(1024, weight_at=4) == ("generic", (4096, 2))
    assert choose(1000) == ("generic", (1024, 16))
    assert choose(8192)[1] == (8192, 16)
    assert choose(8200)[1] == (ANY_COLUMNS, 16)
    assert choose(8201)[1] == (ANY_COLUMNS, 2)
    assert choose(100_003)[1] == (ANY_COLUMNS, 2)
    assert choose(1024, "fp32") == ("none", None)


def test_emission_without_forwards_keeps_them_and_a_rule_never_replaces_a_measurement(
    package: Path,
) -> None:
    before = (package / "forward.json").read_text()
    emit_package([], [], H200, package)
    assert (package / "forward.json").read_text() == before
    entry, generic = emitted()
    predicted = replace(entry, evidence="predicted", provenance={"reason": "rule"})
    other = replace(predicted, problem=Problem.parse("64x1024:bf16"))
    emit_package([], [], H200, package, Forwards((predicted, other), generic))
    tuned = json.loads((package / "forward.json").read_text())["tuned"]
    assert [(e["M"], e["evidence"]) for e in tuned] == [(64, "predicted"), (4096, "measured")]


def test_package_without_a_forward_table_loads_and_a_damaged_one_says_so(package: Path) -> None:
    (package / "forward.json").write_text("{}")
    with pytest.raises(ValueError, match=r"forward\.json is damaged"):
        Forward(package)
    with pytest.raises(NormforgeError, match="no readable forward table"):
        emit_package([], [], H200, package)
    (package / "forward.json").unlink()
    assert Forward(package).explain(4096, 1024, "bf16")["how"] == "none"


def test_rule_gives_every_shape_a_kernel_without_a_gpu() -> None:
    shapes = [Problem.parse("4096x1024:bf16"), Problem.parse("4096x1024:bf16+offset")]
    lines: list[str] = []
    forwards = tune_forwards(shapes, H200, say=lines.append)
    (entry,) = forwards.tuned
    assert entry.evidence == "predicted"
    assert str(entry.problem) == "4096x1024:bf16"
    assert len(lines) == 1
    assert {(v.dtype, v.weight_dtype) for v, _ in forwards.generic} == set(DTYPES)
    table = SimpleNamespace(
        tuned=[
            SimpleNamespace(
                **{"M": 4096, "N": 1024, "dtype": "bf16", "weight_dtype": "bf16"},
                **{"evidence": "measured", "provenance": entry.provenance},
            )
        ]
    )
    known: Any = table
    assert tune_forwards(shapes, H200, known=known).tuned == ()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No process starts for a GPU; which ones would have."""
    started: list[int] = []
    monkeypatch.setattr(ForwardGpu, "_start", lambda gpu: started.append(gpu.device))
    return started


def measured(made: list[Any]) -> list[ForwardTime]:
    return [ForwardTime(1.0, 1.0, 1.0, final=True) for _ in made]


@pytest.mark.usefixtures("gpus")
def test_longest_shapes_are_measured_first_and_the_order_of_the_result_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 64, 65536, 512)]
    order: list[int] = []

    def measure(gpu: Any, problem: Problem, made: list[Any], sms: int) -> list[ForwardTime]:
        order.append(problem.M)
        return measured(made)

    monkeypatch.setattr(forward_tune, "forward_variants", lambda p, t: [of_kind(str(p))])
    monkeypatch.setattr(ForwardGpu, "measure", measure)
    forwards = tune_forwards(shapes, H200, (0,))
    assert order == [65536, 4096, 512, 64]
    assert [entry.problem for entry in forwards.tuned] == shapes


def test_gpu_processes_start_before_anything_is_compiled_and_none_that_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, gpus: list[int]
) -> None:
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (64, 4096)]
    before: set[tuple[int, ...]] = set()

    def compile_where(variant: ForwardVariant, arch: str, folder: Path) -> Compiled:
        before.add(tuple(gpus))
        return compile_forward(variant, arch)

    monkeypatch.setattr(forward_tune, "cached", compile_where)
    monkeypatch.setattr(forward_tune, "forward_variants", lambda p, t: [of_kind(str(p))])
    monkeypatch.setattr(ForwardGpu, "measure", lambda gpu, p, made, sms: measured(made))
    forwards = tune_forwards(shapes, H200, (0, 2, 5))
    assert before == {(0, 2)}

    known: Any = SimpleNamespace(
        tuned=[
            SimpleNamespace(**vars(e.problem), evidence="measured", provenance=e.provenance)
            for e in forwards.tuned
        ]
    )
    gpus.clear()
    assert tune_forwards(shapes, H200, (0, 2, 5), known=known).tuned == ()
    assert gpus == []


@pytest.mark.usefixtures("gpus")
def test_kernels_of_later_shapes_are_compiled_while_the_first_one_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [Problem.parse(f"4096x{N}:bf16") for N in (512, 1024, 2048)]
    asked: set[int] = set()
    before: list[set[int]] = []

    def compile_where(variant: ForwardVariant, arch: str, folder: Path) -> Compiled:
        if variant.exact:
            asked.add(variant.N)
        return compile_forward(variant, arch)

    def measure(gpu: Any, problem: Problem, made: list[Any], sms: int) -> list[ForwardTime]:
        before.append(set(asked))
        return measured(made)

    monkeypatch.setattr(forward_tune, "cached", compile_where)
    monkeypatch.setattr(forward_tune, "forward_variants", lambda p, t: [of_kind(str(p))])
    monkeypatch.setattr(ForwardGpu, "measure", measure)
    tune_forwards(shapes, H200, (0,))
    assert before[0] == {512, 1024, 2048}


@pytest.mark.usefixtures("gpus")
def test_no_compiler_starts_for_kernels_that_the_cache_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*arguments: object) -> None:
        raise AssertionError("compiled again")

    variants = [of_kind("4096x1024:bf16")]
    for variant in [*variants, *generic_forwards(DTYPES)]:
        compile_forward(variant, H200.arch)
    monkeypatch.setattr(ProcessPoolExecutor, "submit", submit)
    monkeypatch.setattr(forward_tune, "forward_variants", lambda p, t: variants)
    monkeypatch.setattr(ForwardGpu, "measure", lambda gpu, p, made, sms: measured(made))
    (entry,) = tune_forwards([Problem.parse("4096x1024:bf16")], H200, (0,)).tuned
    assert entry.variant == variants[0]


@pytest.fixture
def crashing(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CrashingCompiler:
    """The compiler of a run whose cache is empty; the parameter is the variant that kills it."""
    forks()
    compiler = CrashingCompiler(Log(tmp_path / "log"), request.param.id)
    monkeypatch.setattr(forward_tune, "cached", lambda *_: None)
    monkeypatch.setattr(forward_tune, "compile_forward", compiler)
    monkeypatch.setattr(forward_tune, "CompilePool", partial(CompilePool, method="forkserver"))
    return compiler


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("crashing", [of_kind("4096x1024:bf16")], indirect=True)
def test_crash_of_the_compiler_costs_the_run_one_variant_and_those_that_wait_no_process(
    monkeypatch: pytest.MonkeyPatch, crashing: CrashingCompiler
) -> None:
    shapes = [Problem.parse(f"{M}x1024:bf16") for M in (4096, 8192)]
    candidates = {v.id for shape in shapes for v in forward_variants(shape, H200)[:MOST_VARIANTS]}
    seen: list[set[str]] = []

    def measure(gpu: Any, problem: Problem, made: list[Any], sms: int) -> list[ForwardTime]:
        seen.append({variant.id for variant, _ in made})
        return measured(made)

    monkeypatch.setattr(ForwardGpu, "measure", measure)
    said: list[str] = []
    forwards = tune_forwards(shapes, H200, (0,), say=said.append)
    assert [entry.evidence for entry in forwards.tuned] == ["measured", "measured"]
    assert seen == [candidates - {crashing.doomed}] * 2
    assert [v for v, _ in forwards.generic] == generic_forwards(DTYPES)
    told = [line for line in said if "crashed" in line]
    assert told == [f"forward {crashing.doomed}: NVRTC crashed on this variant {LIVES} times"]
    # With one compiler nothing else is under way at a crash: one process until then, the lives of
    # the variant, and one for all that waited.
    given = crashing.log.read()
    assert len({entry["pid"] for entry in given}) == 1 + LIVES + 1
    assert Counter(entry["variant"] for entry in given) == {
        **dict.fromkeys(candidates | {v.id for v in generic_forwards(DTYPES)}, 1),
        crashing.doomed: 1 + LIVES,
    }


@pytest.mark.parametrize("crashing", [generic_forwards(DTYPES)[0]], indirect=True)
def test_crash_on_a_generic_kernel_leaves_the_others(crashing: CrashingCompiler) -> None:
    forwards = tune_forwards([], H200, processes=2)
    assert [v for v, _ in forwards.generic] == generic_forwards(DTYPES)[1:]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([1.30, 1.105, 1.10, 1.2], 1),  # within 1 % of the best, and earlier in the rule
        ([1.30, 1.12, 1.10, 1.2], 2),
        ([None, 1.12, 1.2, None], 1),  # those that failed their checks
    ],
)
def test_measured_choice_is_the_rules_first_within_one_percent_of_the_best(
    monkeypatch: pytest.MonkeyPatch, times: list[float | None], chosen: int
) -> None:
    problem = Problem.parse("4096x1024:bf16")
    variants = forward_variants(problem, H200)[:4]
    monkeypatch.setattr(forward_tune, "forward_variants", lambda *_: variants)
    answer = [
        ForwardTime(fault="wrong") if ratio is None else ForwardTime(ratio, 1.0, ratio, final=True)
        for ratio in times
    ]
    monkeypatch.setattr(ForwardGpu, "measure", lambda *_: answer)
    (entry,) = tune_forwards([problem], H200, (0,)).tuned
    assert (entry.evidence, entry.variant) == ("measured", variants[chosen])
    assert entry.provenance["ratio"] == times[chosen]
    assert entry.provenance["faults"] == times.count(None)


@pytest.mark.usefixtures("gpus")
def test_a_lost_gpu_leaves_the_choice_to_the_rule_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward_tune, "forward_variants", lambda p, t: [of_kind(str(p))])
    monkeypatch.setattr(ForwardGpu, "measure", lambda *_: "no answer after 120 s")
    (entry,) = tune_forwards([Problem.parse("4096x1024:bf16")], H200, (0,)).tuned
    assert entry.evidence == "predicted"
    assert "no answer after 120 s" in entry.provenance["reason"]


def test_a_kernel_that_the_executor_refutes_is_not_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = Problem.parse("4096x1024:bf16")
    first, second = forward_variants(problem, H200)[:2]
    monkeypatch.setattr(forward_tune, "find_compiler", lambda: "c++")
    monkeypatch.setattr(
        forward_tune, "emulate_forward", lambda v, p: "y[0, 0] is 1" if v == first else ""
    )
    (entry,) = tune_forwards([problem], H200).tuned
    assert entry.variant == second
    monkeypatch.setattr(forward_tune, "forward_variants", lambda p, t: [first])
    said: list[str] = []
    forwards = tune_forwards([problem], H200, say=said.append)
    # The backward's winner is not lost for it: any row is served by the generic ones.
    assert forwards.tuned == () and forwards.generic != ()
    assert "no forward kernel for" in said[0] and "passes (y[0, 0] is 1)" in said[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a machine without a GPU")
def test_measuring_without_a_gpu_ends_in_the_rule_and_not_in_a_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward_tune, "forward_variants", lambda p, t: [of_kind(str(p))])
    (entry,) = tune_forwards([Problem.parse("4096x1024:bf16")], H200, (0,)).tuned
    assert entry.evidence == "predicted"
    assert "measuring failed" in entry.provenance["reason"]


# ---- On a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ours(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Forward:
    """The forward of a package with the generic kernels and two measured shapes."""
    folder = tmp_path_factory.mktemp("gpu") / "rmsnorm_backward"
    shapes = [Problem.parse("4096x256:bf16"), Problem.parse("1024x4096:bf16")]
    emit_package([], [], here, folder, tune_forwards(shapes, here, (0,), processes=2))
    return Forward(folder)


def rows(M: int, N: int, dtype: str) -> torch.Tensor:
    torch.manual_seed(M + N)
    x = torch.randn(M, N, device="cuda") * (0.5 + 3 * torch.rand(M, 1, device="cuda"))
    return x.to(TORCH[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize(
    ("M", "N"),
    [(1, 1), (5, 3), (4096, 256), (777, 64), (300, 1001), (1000, 4096), (33, 9999), (9, 65536)],
)
def test_gpu_error_is_not_above_that_of_aten(ours: Forward, dtype: str, M: int, N: int) -> None:
    x = rows(M, N, dtype)
    weight = (1 + 0.1 * torch.randn(N, device="cuda")).to(x.dtype)
    y, rstd = ours(x, weight, EPS)
    theirs, their_rstd = torch.ops.aten._fused_rms_norm(x, [N], weight, EPS)
    exact, exact_rstd = reference_forward(x.double(), weight.double(), EPS)
    few_roundings = 2.0**-23  # of fp32: on few rows chance decides who has one more
    for own, other, truth in ((y, theirs, exact), (rstd, their_rstd, exact_rstd)):
        own_error = float((own.double() - truth).norm() / truth.norm())
        their_error = float((other.double() - truth).norm() / truth.norm())
        assert own_error <= max(
            1.1 * their_error, few_roundings if own.dtype == torch.float32 else 0.0
        )
    inputs = ForwardInputs(x, x, weight)
    assert output_fault(Problem(M, N, dtype, dtype), inputs, (y, rstd)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("N", [256, 1001, 4096])
@pytest.mark.parametrize("weight_kind", ["none", "fp32", "same"])
def test_gpu_options_layouts_and_residuals(ours: Forward, N: int, weight_kind: str) -> None:
    problem = Problem(300, N, "bf16", "fp32" if weight_kind == "fp32" else "bf16")
    inputs = forward_inputs(problem, torch.device("cuda"))
    weight = None if weight_kind == "none" else inputs.weight
    check: Callable[..., str] = output_fault
    known = {"weight": weight is not None, "weight_offset": 1.0}
    assert check(problem, inputs, ours(inputs.x, weight, EPS, 1.0), **known) == ""
    outputs = ours(inputs.x, weight, EPS, 1.0, inputs.residual)
    assert check(problem, inputs, outputs, **known) == ""

    _, expected_rstd = ours(inputs.x, weight, EPS)
    wide = torch.empty(300, N + 8, device="cuda", dtype=torch.bfloat16)
    wide[:, :N] = inputs.x
    packed = torch.empty(75, 3, 4, N, device="cuda", dtype=torch.bfloat16)
    packed[:, 1] = inputs.x.view(75, 4, N)
    odd = torch.empty(300 * N + 1, device="cuda", dtype=torch.bfloat16)[1:].view(300, N)
    odd.copy_(inputs.x)
    for x in (wide[:, :N], packed[:, 1], odd, inputs.x.t().contiguous().t()):
        y, rstd = ours(x, weight, EPS)
        assert y.is_contiguous()
        torch.testing.assert_close(rstd.view(-1), expected_rstd.view(-1), rtol=1e-6, atol=0)
        assert (
            check(problem, inputs, (y.view(300, N), rstd.view(300, 1)), weight=weight is not None)
            == ""
        )
    for stream_dtype in (torch.float32, torch.float16):
        residual = inputs.residual.to(stream_dtype)
        own = ours(inputs.x, weight, EPS, 1.0, residual)
        for a, b in zip(own, reference_forward(inputs.x, weight, EPS, 1.0, residual), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("M", "N"), [(4096, 256), (1000, 4096), (64, 65536)])
def test_gpu_bits_repeat_in_20_runs_and_in_a_graph(ours: Forward, M: int, N: int) -> None:
    x, residual = rows(M, N, "bf16"), rows(M, N, "bf16")
    weight = torch.randn(N, device="cuda").bfloat16()
    first = [t.clone() for t in ours(x, weight, EPS, 0.0, residual)]
    for _ in range(20):
        for out, expected in zip(ours(x, weight, EPS, 0.0, residual), first, strict=True):
            assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours(x, weight, EPS, 0.0, residual)
    graph.replay()
    torch.cuda.synchronize()
    for out, expected in zip(captured, first, strict=True):
        assert torch.equal(out, expected)


@pytest.mark.gpu
def test_gpu_no_rows_and_more_than_2_to_31_elements(ours: Forward) -> None:
    y, rstd = ours(torch.empty(0, 256, device="cuda"), torch.ones(256, device="cuda"))
    assert (y.shape, rstd.shape) == ((0, 256), (0, 1))
    free, _ = torch.cuda.mem_get_info()
    if free < 14 << 30:
        pytest.skip("needs 14 GiB of free GPU memory")
    M, N = (1 << 31) // 4096 + 5, 4096
    x = torch.randn(1024, N, device="cuda").bfloat16().repeat(M // 1024 + 1, 1)[:M]
    weight = torch.ones(N, device="cuda").bfloat16()
    y, rstd = ours(x, weight, EPS)
    expected, expected_rstd = ours(x[-700:].clone(), weight, EPS)
    assert torch.equal(y[-700:], expected)
    assert torch.equal(rstd[-700:], expected_rstd)


@pytest.mark.gpu
def test_gpu_what_has_no_kernel_is_served_by_pytorch_with_one_warning(
    tmp_path: Path,
) -> None:
    bare = Forward(tmp_path)
    x, weight = rows(8, 64, "bf16"), torch.ones(64, device="cuda").bfloat16()
    with pytest.warns(UserWarning, match="no forward kernels") as caught:
        for _ in range(3):
            y, _ = bare(x, weight, EPS)
            bare(x, None, EPS, 1.0, x)
    assert len(caught) == 1
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (64,), weight, EPS))
