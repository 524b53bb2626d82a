"""The runtime of an emitted package, without a GPU: the formula, the choice of a kernel, what is
handed to the driver, and who shares which memory. A fake driver stands in for CUDA's."""

# ruff: noqa: N802 (the fake driver has the names of the real one)

from __future__ import annotations

import ctypes
import itertools
import json
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

from generator.package.emit import emit_package
from generator.runtime.api import Package
from generator.runtime.launch import binding as binding_module
from generator.runtime.launch import driver as driver_module
from generator.runtime.launch import launch as launch_module
from generator.runtime.launch import workspace as workspace_module
from generator.runtime.launch.launch import LaunchError, LoadedKernel
from generator.runtime.launch.row_layout import RowLayout, dense, read_layout, row_layout
from generator.runtime.launch.workspace import LINE, SLAB, Workspaces, Zeros
from generator.runtime.serve import call as call_module
from generator.runtime.serve.call import aten_call, kernel_call
from generator.runtime.serve.checks import check_arguments
from generator.runtime.serve.options import (
    PLAIN,
    Arguments,
    Options,
    add_residual,
    dw_elsewhere,
    offset_in_weight,
    per_head,
)
from generator.runtime.serve.reference import reference_backward
from generator.runtime.spec import KernelSpec, Launch, plan_launch
from generator.runtime.table import Kernel, Table, Tuned, runs_on
from generator.target import find_target

SPEC = KernelSpec(
    name="example",
    N=1024,
    exact=True,
    dtype="bf16",
    weight_dtype="bf16",
    strategy="column_slices",
    determinism="gpu_to_gpu",
    threads=256,
    sum_threads=512,
    smem_bytes=50_000,
    vector_bytes=16,
    columns=1024,
    partial_stride=1024,
    slice_columns=32,
    rows_in_flight=1,
    rows_per_cta=2,
    cluster=1,
    dependent=False,
    accumulates=False,
    turns=False,
    levels=1,
    ctas_per_sm=1,
    even_grid=False,
    sms=132,
)
SEPARATE = replace(SPEC, name="two_kernels", strategy="separate", dependent=True, cluster=2)


class FakeDriver:
    """Types and constants of the real bindings; calls are recorded and succeed."""

    def __init__(self) -> None:
        self.loads = 0
        self.attributes: list[tuple[Any, int]] = []
        self.launches: list[SimpleNamespace] = []
        self.zeroed: list[tuple[int, int]] = []
        self.freed: list[tuple[int, int]] = []
        self.capture_modes: list[Any] = []
        self.status: Any = cuda.CUresult.CUDA_SUCCESS
        self.capture_info: Any = cuda.CUresult.CUDA_SUCCESS
        self.capture_id = 1
        self.room: int | None = 1000  # clusters that run at once
        self.capture_status: Any = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        self._mode: Any = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self._next_address = 1 << 32

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu"):
            raise AssertionError(f"unexpected driver call {name}")
        return getattr(cuda, name)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        self.capture_modes.append(mode)
        before, self._mode = self._mode, mode
        return self.status, before

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        assert self._mode == cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.loads += 1
        return cuda.CUresult.CUDA_SUCCESS, image

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:
        return cuda.CUresult.CUDA_SUCCESS, name.decode()

    def cuFuncSetAttribute(self, function: str, attribute: Any, value: int) -> tuple[Any, ...]:
        self.attributes.append((attribute, value))
        return (cuda.CUresult.CUDA_SUCCESS,)

    def cuOccupancyMaxActiveClusters(self, function: str, config: Any) -> tuple[Any, ...]:
        assert config.gridDimX == config.attrs[0].value.clusterDim.x
        if self.room is None:
            return cuda.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        return cuda.CUresult.CUDA_SUCCESS, self.room

    def cuLaunchKernelEx(
        self, config: Any, function: str, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        attributes = {
            attribute.id: attribute.value for attribute in config.attrs[: config.numAttrs]
        }
        self.launches.append(
            SimpleNamespace(
                function=function,
                grid=config.gridDimX,
                block=config.blockDimX,
                smem=config.sharedMemBytes,
                stream=int(config.hStream),
                attributes=attributes,
                arguments=read_arguments(function, parameters),
                block_address=parameters,
            )
        )
        return (self.status,)

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        assert self._mode == cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        address, self._next_address = self._next_address, self._next_address + size
        return cuda.CUresult.CUDA_SUCCESS, cuda.CUdeviceptr(address)

    def cuMemAllocAsync(self, size: int, stream: int) -> tuple[Any, ...]:
        return self.cuMemAlloc(size)

    def cuMemFreeAsync(self, address: int, stream: int) -> tuple[Any, ...]:
        self.freed.append((address, stream))
        return (cuda.CUresult.CUDA_SUCCESS,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        return (
            self.capture_info,
            self.capture_status,
            cuda.cuuint64_t(self.capture_id),
            None,
            [],
            [],
            0,
        )

    def cuStreamCreate(self, flags: Any) -> tuple[Any, ...]:
        assert flags == cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        return cuda.CUresult.CUDA_SUCCESS, "aside"

    def cuMemsetD8Async(self, at: int, value: int, size: int, stream: str) -> tuple[Any, ...]:
        assert (value, stream) == (0, "aside")
        self.zeroed.append((at, size))
        return (cuda.CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, stream: str) -> tuple[Any, ...]:
        return (cuda.CUresult.CUDA_SUCCESS,)

    def cuStreamDestroy(self, stream: str) -> tuple[Any, ...]:
        return (cuda.CUresult.CUDA_SUCCESS,)


def read_arguments(function: str, parameters: int) -> tuple[int, ...]:
    """What the driver would copy, given the kernels' parameters: one structure of the main kernel
    (tensors, workspace, extent), five of the second one."""
    if function == "rmsnorm_backward":
        (address,) = struct.unpack("Q", ctypes.string_at(parameters, 8))
        form = "@8Q3Q7qI3if"
        return struct.unpack(form, ctypes.string_at(address, struct.calcsize(form)))
    formats = "QQiii"
    addresses = struct.unpack(f"{len(formats)}Q", ctypes.string_at(parameters, 8 * len(formats)))
    return tuple(
        struct.unpack(code, ctypes.string_at(address, struct.calcsize(code)))[0]
        for code, address in zip(formats, addresses, strict=True)
    )


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(driver_module, "cuda_driver", lambda: fake)
    monkeypatch.setattr(launch_module, "cuda_driver", lambda: fake)
    monkeypatch.setattr(workspace_module, "cuda_driver", lambda: fake)
    monkeypatch.setattr(binding_module, "cuda_driver", lambda: fake)
    monkeypatch.setattr(workspace_module, "is_capturing", lambda: False)
    return fake


def tensors(
    M: int = 6, N: int = 1024, dtype: torch.dtype = torch.bfloat16, weight: Any = None
) -> tuple[torch.Tensor, ...]:
    """dy, x, rstd, weight with a true rstd."""
    generator = torch.Generator().manual_seed(M * N)
    x = torch.randn(M, N, generator=generator).to(dtype)
    dy = torch.randn(M, N, generator=generator).to(dtype)
    scale = (1 + 0.1 * torch.randn(N, generator=generator)).to(weight or dtype)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return dy, x, rstd, scale


# ---- The formula -------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_formula_agrees_with_autograd_in_float64(dtype: torch.dtype, weight: Any) -> None:
    dy, x, rstd, scale = tensors(64, 96, dtype, weight)
    dx, dw = reference_backward(dy, x, rstd, scale)
    wide = [t.double().requires_grad_() for t in (x, scale)]
    y = torch.nn.functional.rms_norm(wide[0], (96,), wide[1], eps=1e-6)
    y.backward(dy.double())
    assert (dx.dtype, dw.dtype) == (x.dtype, scale.dtype)
    for got, leaf in ((dx, wide[0]), (dw, wide[1])):
        assert leaf.grad is not None
        # One rounding to the output's dtype, and fp32 in the middle (rstd is fp32 throughout).
        bound = 2e-6 + torch.finfo(got.dtype).eps
        error = (got.double() - leaf.grad).abs() / (1 + leaf.grad.abs())
        assert error.max() < bound


# ---- The arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"x": torch.zeros(6, 8, dtype=torch.int32)}, TypeError, "x must be bfloat16"),
        ({"dy": torch.zeros(6, 8, dtype=torch.half)}, TypeError, "dy must have x's dtype"),
        ({"weight": torch.zeros(8, dtype=torch.half)}, TypeError, "weight must have x's dtype"),
        ({"rstd": torch.zeros(6, dtype=torch.bfloat16)}, TypeError, "rstd must be float32"),
        ({"rstd": torch.zeros(6, dtype=torch.float64)}, TypeError, "rstd must be float32"),
        ({"dy": torch.zeros(5, 8, dtype=torch.bfloat16)}, ValueError, r"got \(5, 8\)"),
        ({"weight": torch.zeros(7)}, ValueError, r"shape \(8,\) or \(6, 8\), got \(7,\)"),
        ({"rstd": torch.zeros(5)}, ValueError, "each of the 6 rows of x, got 5"),
        ({"weight": torch.zeros(8, device="meta")}, ValueError, "weight is on meta and x on cpu"),
        (
            {"x": torch.zeros(6, 0).bfloat16(), "dy": torch.zeros(6, 0).bfloat16()},
            ValueError,
            "N >= 1",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    change: dict[str, torch.Tensor], error: type[Exception], sentence: str
) -> None:
    dy, x, rstd, weight = tensors(6, 8)
    arguments = {"dy": dy, "x": x, "rstd": rstd, "weight": weight} | change
    with pytest.raises(error, match=sentence):
        check_arguments(Arguments(**arguments), PLAIN)


@pytest.mark.parametrize(
    ("tensors_given", "options", "error", "sentence"),
    [
        ({"dresidual": torch.zeros(6, 8)}, {"need_dx": False}, ValueError, "need_dx must be True"),
        ({"dresidual": torch.zeros(5, 8)}, {}, ValueError, "dresidual must have x's shape"),
        ({"dresidual": torch.zeros(6, 8).int()}, {}, TypeError, "dresidual must be of a floating"),
        ({}, {"accumulate": True}, ValueError, "give the tensor to add to"),
        ({}, {"dw_dtype": torch.half}, TypeError, "dw_dtype must be the weight's or torch.float32"),
        ({"dw_out": torch.zeros(7)}, {}, ValueError, "dw_out must have the weight's shape"),
        ({"dw_out": torch.zeros(8).half()}, {}, TypeError, "dw_out must have the weight's dtype"),
        ({"dw_out": torch.zeros(8)}, {"need_dw": False}, ValueError, "dw is not computed"),
        ({"dw_out": torch.zeros(8), "weight": None}, {}, ValueError, "dw is not computed"),
    ],
)
def test_options_that_do_not_fit_are_named(
    tensors_given: Any, options: Any, error: type[Exception], sentence: str
) -> None:
    dy, x, rstd, weight = tensors(6, 8)
    arguments = {"dy": dy, "x": x, "rstd": rstd, "weight": weight} | tensors_given
    with pytest.raises(error, match=sentence):
        check_arguments(Arguments(**arguments), Options(**options))


def test_rows_are_read_in_place_wherever_one_or_two_strides_describe_them() -> None:
    x = torch.empty(4, 6, 16)
    assert row_layout(x) == RowLayout(16)
    assert row_layout(x[:, :, :8]) == RowLayout(16)
    assert row_layout(x.reshape(24, 16)[::2]) == RowLayout(32)
    assert row_layout(torch.empty(16).expand(4, 6, 16)) == RowLayout(0)
    assert row_layout(torch.empty(16)) == RowLayout(16)
    assert row_layout(torch.empty(6, 1)) == RowLayout(1)
    assert row_layout(x[:, ::2, :8]) == RowLayout(32)
    assert row_layout(x[:, :4]) == RowLayout(16, inner=4, outer=96)  # heads of a packed tensor
    assert row_layout(x.transpose(0, 1)) == RowLayout(96, inner=4, outer=16)
    assert row_layout(torch.empty(3, 4, 6, 16)[:, :2, :4]) is None  # three strides
    assert row_layout(x.transpose(1, 2)) is None
    assert row_layout(torch.ones(()).expand(4, 16)) is None


def rows_at(layout: RowLayout, count: int) -> list[int]:
    """Where a kernel looks for its rows: the arithmetic of `Rows::start` in the template."""
    if layout.inner == 0:
        return [row * layout.stride for row in range(count)]
    return [
        row // layout.inner * layout.outer + row % layout.inner * layout.stride
        for row in range(count)
    ]


@pytest.mark.parametrize("x_kind", ["dense", "heads", "turned", "three", "row", "scalar"])
@pytest.mark.parametrize("dy_kind", ["dense", "heads", "wide heads", "turned", "row", "scalar"])
def test_layout_finds_every_row_of_every_pair_of_tensors(x_kind: str, dy_kind: str) -> None:
    packed = torch.arange(4 * 10 * 16).reshape(4, 10, 16).bfloat16()
    kinds = {
        "dense": torch.empty(4, 6, 16).bfloat16(),
        "heads": packed[:, :6],
        "wide heads": packed[:, 2:8],
        "turned": packed.reshape(10, 4, 16)[:6].transpose(0, 1),
        "three": torch.empty(8, 7, 4, 16).bfloat16()[::4, :6, ::2].reshape(4, 6, 16),
        "row": packed[0, 0].expand(4, 6, 16),
        "scalar": torch.ones(()).bfloat16().expand(4, 6, 16),
    }
    x, dy = kinds[x_kind], kinds[dy_kind]
    layout, places = read_layout(Arguments(dy, x, torch.empty(24), None, dresidual=dy.float()))
    assert (layout.rows, layout.columns) == (24, 16)
    dresidual = RowLayout(layout.dresidual_stride)
    for tensor, rows, copied in (
        (dy, layout.dy, layout.copy[0]),
        (x, layout.x, layout.copy[1]),
        (dy.float(), dresidual, layout.copy[4]),
    ):
        read = dense(tensor) if copied else tensor
        index = torch.arange(4).reshape(4, 1) * read.stride(0) + torch.arange(6) * read.stride(1)
        assert rows_at(rows, 24) == index.flatten().tolist()
    for rows in (layout.dy, layout.x):
        assert all(step * 2 % (places & -places) == 0 for step in (rows.stride, rows.outer))


def test_repeated_rstd_and_weight_are_copied_whole(calls: Calls) -> None:
    """Kernels read them one after the other, whatever their strides were."""
    launched, seen = calls.driver.cuLaunchKernelEx, []

    def read(config: Any, function: str, parameters: int, extra: int) -> Any:
        _, _, rstd, weight, *_ = read_arguments(function, parameters)
        seen.append(struct.unpack("6f", ctypes.string_at(rstd, 24)))
        seen.append(struct.unpack("1024H", ctypes.string_at(weight, 2048)))
        return launched(config, function, parameters, extra)

    calls.driver.cuLaunchKernelEx = read  # type: ignore[method-assign]
    calls(rstd=torch.ones(1, 1).expand(6, 1), weight=torch.ones(()).bfloat16().expand(1024))
    assert seen == [(1.0,) * 6, (0x3F80,) * 1024]


def test_repeated_scalar_is_copied_as_one_row() -> None:
    """What `y.sum().backward()` delivers costs N elements, not M * N."""
    row = dense(torch.ones(()).expand(4, 6, 16))
    assert row.stride() == (0, 0, 1)
    assert torch.equal(row, torch.ones(4, 6, 16))


# ---- The choice of a kernel ---------------------------------------------------------------------


def entry(M: int, spec: KernelSpec = SPEC, **changes: Any) -> Tuned:
    kernel = Kernel(f"k{M}", "", replace(spec, **changes))
    return Tuned(M, spec.N, spec.dtype, spec.weight_dtype, "measured", kernel, {})


def generic(N: int, vector_bytes: int, least: int = 1) -> Kernel:
    spec = replace(SPEC, N=N, exact=False, vector_bytes=vector_bytes, strategy="separate")
    spec = replace(spec, least=least)
    return Kernel(f"any{N}_{vector_bytes}", "", spec)


TABLE = Table(
    {"name": "h200", "title": "H200", "arch": "sm_90a", "sms": 132},
    (entry(1024), entry(4096), entry(65536)),
    (generic(4096, 2), generic(1024, 2), generic(4096, 16), generic(1024, 16, 129)),
)


@pytest.mark.parametrize(
    ("M", "N", "how", "file"),
    [
        (4096, 1024, "tuned", "k4096"),
        (4097, 1024, "nearest", "k4096"),
        (1, 1024, "nearest", "k1024"),
        (2048, 1024, "nearest", "k1024"),  # as far from 4096: the smaller one
        (16383, 1024, "nearest", "k4096"),
        (20000, 1024, "nearest", "k65536"),
        (10**9, 1024, "nearest", "k65536"),
        (4096, 512, "fallback", "any1024_16"),
        (4096, 2048, "fallback", "any4096_16"),
        (4096, 513, "fallback", "any1024_2"),
        (4096, 1025, "fallback", "any4096_2"),
        (4096, 4104, "none", None),
        (4096, 128, "fallback", "any4096_16"),  # the other one takes no rows that short
    ],
)
def test_choice_by_shape(M: int, N: int, how: str, file: str | None) -> None:
    choice = TABLE.choose(M, N, "bf16", "bf16")
    assert (choice.how, choice.kernel and choice.kernel.file) == (how, file)


def test_choice_depends_on_the_dtypes() -> None:
    assert TABLE.choose(4096, 1024, "bf16", "fp32").how == "none"
    assert TABLE.choose(4096, 1024, "fp16", "fp16").how == "none"


@pytest.mark.parametrize("places", [{"alignment": 8}, {"weight_alignment": 8}])
def test_unaligned_rows_or_weights_get_a_kernel_with_narrow_vectors(places: Any) -> None:
    choice = TABLE.choose(4096, 1024, "bf16", "bf16", **places)
    assert (choice.how, choice.kernel and choice.kernel.file) == ("fallback", "any1024_2")
    assert "k4096 needs" in choice.reason


def test_kernel_that_fits_in_one_round_is_not_nearest_to_one_row_more() -> None:
    """8 rows for each of 132 CTAs: 1056 rows are one round of the grid, 1057 are two."""
    whole, fine = entry(1056, rows_in_flight=4), entry(2112)
    table = Table(TABLE.target, (whole, fine), ())

    def nearest(M: int) -> int:
        found = table.choose(M, 1024, "bf16", "bf16").tuned
        assert found is not None
        return found.M

    assert [nearest(M) for M in (900, 1056, 1057, 1300)] == [1056, 1056, 2112, 2112]
    assert nearest(2112) == 2112
    alone = Table(TABLE.target, (whole,), ())
    assert alone.choose(1057, 1024, "bf16", "bf16").kernel is whole.kernel


def test_wide_vectors_need_only_16_bytes_of_the_weight() -> None:
    wide = Table(TABLE.target, (entry(4096, vector_bytes=32),), ())
    assert wide.choose(4096, 1024, "bf16", "bf16", weight_alignment=16).how == "tuned"
    assert wide.choose(4096, 1024, "bf16", "bf16", alignment=16).how == "none"


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_103a", (10, 3), True),
        ("sm_120a", (12, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
    ],
)
def test_code_runs_on(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(arch, capability) is runs


# ---- What the driver gets ------------------------------------------------------------------------


def launch(kernel: LoadedKernel, stream: int = 7, workspace: int = 4096) -> tuple[Any, ...]:
    dy, x, rstd, weight = tensors()
    x = torch.cat([x, x], 1)[:, :1024]  # row stride 2048
    dx, dw = torch.empty_like(dy), torch.empty_like(weight)
    plan = plan_launch(kernel.spec, len(x))
    kernel.launch(x, dy, rstd, weight, dx, dw, workspace, plan, stream)
    return (x, dy, rstd, weight, dx, dw), plan


def test_launch_hands_over_arguments_in_the_order_of_the_kernel(driver: FakeDriver) -> None:
    given, plan = launch(LoadedKernel(b"cubin", SPEC))
    (seen,) = driver.launches
    assert seen.arguments == (
        *(*(tensor.data_ptr() for tensor in given), 0, 0),
        *(4096, 4096 + plan.zeroed_offset, 4096 + plan.scratch_offset),
        *(6, 2048, 1024, 0, 1024, 0, 0, 0),
        *(1024, plan.group, 0, 0.0),
    )
    assert (seen.function, seen.grid, seen.block) == ("rmsnorm_backward", plan.grid, 256)
    assert (seen.smem, seen.stream) == (50_000, 7)
    assert seen.attributes == {}
    size = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.attributes == [(size, 50_000)]


def test_second_kernel_follows_with_early_start(driver: FakeDriver) -> None:
    given, plan = launch(LoadedKernel(b"cubin", SEPARATE))
    main, second = driver.launches
    kinds = cuda.CUlaunchAttributeID
    cluster = main.attributes[kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (2, 1, 1)
    assert (second.function, second.grid, second.block) == ("sum_partials", plan.sum_grid, 512)
    assert (second.smem, second.stream) == (0, 7)
    scratch = 4096 + plan.scratch_offset
    assert second.arguments == (scratch, given[5].data_ptr(), plan.participants, 1024, 0)
    early = second.attributes[kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
    assert early.programmaticStreamSerializationAllowed == 1


def test_no_attribute_is_set_that_a_kernel_does_not_ask_for(driver: FakeDriver) -> None:
    plain = replace(SEPARATE, cluster=1, dependent=False, smem_bytes=0)
    launch(LoadedKernel(b"cubin", plain))
    assert [seen.attributes for seen in driver.launches] == [{}, {}]
    assert driver.attributes == []


def test_clusters_beyond_the_portable_size_opt_in(driver: FakeDriver) -> None:
    launch(LoadedKernel(b"cubin", replace(SPEC, cluster=16)))
    wide = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    assert (wide, 1) in driver.attributes


@pytest.mark.parametrize("room", [14, 15])
def test_clusters_without_room_are_told_once(driver: FakeDriver, room: int) -> None:
    driver.room = room
    said: list[str] = []
    kernel = LoadedKernel(b"cubin", replace(SPEC, cluster=8, sms=120), said.append)
    assert kernel.spec.participants == 15
    launch(kernel)
    launch(kernel)
    assert len(said) == (room < 15)
    assert all("15 clusters of 8 CTAs" in text and "room for 14" in text for text in said)
    assert len(driver.launches) == 2


def test_a_driver_that_does_not_know_the_room_is_no_fault(driver: FakeDriver) -> None:
    driver.room = None
    said: list[str] = []
    LoadedKernel(b"cubin", replace(SPEC, cluster=8), said.append).load(0)
    assert said == []


def test_cubin_is_loaded_once_and_each_thread_has_its_own_arguments(driver: FakeDriver) -> None:
    kernel = LoadedKernel(b"cubin", SPEC)
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        launch(kernel)
        barrier.wait()  # all blocks exist at once, so equal addresses would be shared ones

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.loads == 1
    assert len({seen.block_address for seen in driver.launches}) == 4
    modes = cuda.CUstreamCaptureMode
    assert driver.capture_modes == [  # loading is allowed during a capture, then as before
        modes.CU_STREAM_CAPTURE_MODE_RELAXED,
        modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
    ]


def test_configurations_are_built_once_per_grid_and_stream(driver: FakeDriver) -> None:
    kernel = LoadedKernel(b"cubin", SPEC)
    built = []

    def config() -> Any:
        built.append(cuda.CUlaunchConfig())
        return built[-1]

    driver.CUlaunchConfig = config
    for stream in (7, 8, 7, 8, 7):
        launch(kernel, stream)
    assert [seen.stream for seen in driver.launches] == [7, 8, 7, 8, 7]
    assert len(built) == 2


def test_refused_launch_names_the_error_and_the_kernel(driver: FakeDriver) -> None:
    kernel = LoadedKernel(b"cubin", SPEC)
    launch(kernel)
    driver.status = cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match="launching rmsnorm_backward of example") as caught:
        launch(kernel)
    assert caught.value.code == "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"


# ---- Who shares which memory ---------------------------------------------------------------------


def test_zeroed_lines_are_disjoint_whole_and_zeroed_before_use(driver: FakeDriver) -> None:
    zeros = Zeros()
    sizes = [8, 128, 129, 0, SLAB - LINE, 3 * SLAB, 4]
    taken = [(zeros.take(size), -(-size // LINE) * LINE) for size in sizes]
    assert taken[3][0] == 0
    taken.remove(taken[3])
    for at, size in taken:
        assert at % LINE == 0
        assert any(slab <= at and at + size <= slab + long for slab, long in driver.zeroed)
    taken.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))


class Calls:
    """Calls of one kernel on CPU tensors, with the device's state in attributes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver) -> None:
        self.driver = driver
        self.stream, self.device, self.capturing = 7, 0, False
        self.quick = False
        self.workspaces = Workspaces()
        self.kernel = LoadedKernel(b"cubin", SPEC)
        self._made: dict[Any, Any] = {}
        monkeypatch.setattr(call_module, "raw_stream", lambda device: self.stream)
        monkeypatch.setattr(call_module, "current_device", lambda: self.device)
        monkeypatch.setattr(call_module, "is_capturing", lambda: self.capturing)
        monkeypatch.setattr(
            call_module,
            "empty_strided",
            lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
        )

    def __call__(self, M: int = 6, options: Options = PLAIN, **change: Any) -> Any:
        dy, x, rstd, weight = tensors(M)
        given = Arguments(**({"dy": dy, "x": x, "rstd": rstd, "weight": weight} | change))
        layout, _ = read_layout(given)
        spec = self.kernel.spec
        # One call object per signature, as the package keeps them.
        kinds = tuple(
            (name, tensor is not None and tensor.dtype) for name, tensor in change.items()
        )
        key = (self.device, spec, options, layout, kinds)
        if key not in self._made:
            plan = plan_launch(spec, layout.rows)
            self._made[key] = kernel_call(
                *(self.kernel, plan, self.device, given, options, layout, self.workspaces)
            )
        call, results = self._made[key], None
        if self.quick and call.quick is not None:
            results = call.quick(given.dy, given.x, given.rstd, given.weight)
        if results is None:
            results = call(*vars(given).values())
        launched = {seen.function: seen for seen in self.driver.launches}
        seen = launched["rmsnorm_backward"]
        return SimpleNamespace(
            zeros=seen.arguments[8],
            scratch=seen.arguments[10],
            seen=seen,
            tensors=seen.arguments[:8],
            dw_mode=seen.arguments[-2],
            sum=launched.get("sum_partials"),
            results=results,
            given=given,
        )


@pytest.fixture(params=["any", "quick"])
def calls(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> Calls:
    made = Calls(monkeypatch, driver)
    made.quick = request.param == "quick"
    return made


def test_calls_on_one_stream_reuse_its_workspace(calls: Calls) -> None:
    first, second = calls(), calls()
    assert (first.zeros, first.scratch) == (second.zeros, second.scratch)
    assert first.zeros and first.scratch


def test_streams_and_devices_never_share(calls: Calls) -> None:
    owners = []
    for calls.device, calls.stream in ((0, 7), (0, 8), (1, 7), (1, 8)):
        owners.append(calls())
    assert len({owner.zeros for owner in owners}) == 4
    assert len({owner.scratch for owner in owners}) == 4


def test_scratch_grows_in_stream_order_and_counters_stay(calls: Calls) -> None:
    small, large, small_again = calls(6), calls(4096), calls(6)
    assert calls.driver.freed == [(small.scratch, 7)]
    assert small.zeros == large.zeros == small_again.zeros
    assert large.scratch == small_again.scratch != small.scratch


def test_captured_calls_have_counters_of_their_own_and_no_memset(calls: Calls) -> None:
    eager = calls()
    calls.capturing = True
    captured = [calls(), calls()]
    calls.capturing = False
    assert calls().zeros == eager.zeros
    assert len({eager.zeros, *(call.zeros for call in captured)}) == 3
    assert all(call.scratch != eager.scratch for call in captured)
    assert len(calls.driver.zeroed) == 1  # the slab, once, outside the graph


def test_mailboxes_are_shared_by_what_one_stream_captures(driver: FakeDriver) -> None:
    workspaces, size = Workspaces(), 1 << 17
    first = workspaces.of_capture(0, 7, size)
    assert workspaces.of_capture(0, 7, size) == workspaces.of_capture(0, 7, size // 2) == first
    owners = {first, workspaces.of_capture(0, 7, 2 * size)}  # it has grown
    owners |= {workspaces.of_capture(0, 8, size), workspaces.of_capture(1, 7, size)}
    driver.capture_id = 2
    owners |= {workspaces.of_capture(0, 7, size)}
    # The driver need not say which capture it is.
    driver.capture_info = cuda.CUresult.CUDA_ERROR_LOSSY_QUERY
    owners |= {workspaces.of_capture(0, 7, size), workspaces.of_capture(0, 7, size)}
    driver.capture_info = cuda.CUresult.CUDA_SUCCESS
    driver.capture_status = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED
    owners |= {workspaces.of_capture(0, 7, size)}
    assert len(owners) == 8
    assert len(driver.zeroed) == 8
    zeroed = sorted(driver.zeroed)
    assert all(at + long <= after for (at, long), (after, _) in pairwise(zeroed))


def test_layouts_that_kernels_cannot_read_are_copied(calls: Calls) -> None:
    x = tensors()[1]
    sideways = x.t().contiguous().t()
    call = calls(x=sideways)
    assert call.tensors[0] != sideways.data_ptr()
    assert call.tensors[1] == call.given.dy.data_ptr()


# ---- Options -------------------------------------------------------------------------------------


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@pytest.mark.parametrize(
    ("options", "change", "dw_mode"),
    [
        (Options(), {}, 0),
        (Options(need_dx=False), {}, 0),
        (Options(need_dw=False), {}, 0),
        (Options(), {"weight": None}, 0),
        (Options(dw_dtype=torch.float32), {}, 1),
        (Options(), {"dw_out": torch.zeros(1024)}, 1),
        (Options(accumulate=True), {"dw_out": torch.zeros(1024)}, 2),
        (Options(), {"dw_out": torch.zeros(1024).bfloat16()}, 0),
    ],
)
def test_kernel_gets_what_the_options_ask_for(
    calls: Calls, options: Options, change: dict[str, Any], dw_mode: int
) -> None:
    call = calls(options=options, **change)
    given, (dx, dw) = call.given, call.results
    inputs = (given.x, given.dy, given.rstd, given.weight)
    assert call.tensors == (*map(address, inputs), address(dx), address(dw), 0, 0)
    assert call.dw_mode == dw_mode
    assert (dx is None) is not options.need_dx
    assert (dw is None) is (not options.need_dw or given.weight is None)
    if dw is not None:
        assert dw.dtype == (torch.float32 if dw_mode else torch.bfloat16)
        assert given.dw_out is None or dw is given.dw_out


def test_residual_of_another_dtype_has_an_output_of_its_own(calls: Calls) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        dresidual = torch.zeros(6, 1024, dtype=dtype)
        call = calls(dresidual=dresidual)
        dx, _, third = call.results
        assert (dx.dtype, third.dtype) == (torch.bfloat16, dtype)
        assert call.tensors[6] == dresidual.data_ptr()
        assert call.tensors[7] == (0 if third is dx else third.data_ptr())
        assert (third is dx) is (dtype is torch.bfloat16)


def test_without_dw_there_is_no_second_kernel(calls: Calls) -> None:
    calls.kernel = LoadedKernel(b"cubin", replace(SEPARATE, cluster=1))
    assert calls(options=Options(need_dw=False)).sum is None
    call = calls()
    assert call.sum.arguments[1] == address(call.results[1])


def test_quick_call_leaves_unaligned_addresses_to_others(calls: Calls) -> None:
    calls.quick = True
    aligned = calls()
    launches = len(calls.driver.launches)
    odd = torch.empty(6 * 1024 + 1, dtype=torch.bfloat16)[1:].view(6, 1024)
    given = aligned.given
    (call,) = calls._made.values()
    assert call.quick(given.dy, odd, given.rstd, given.weight) is None
    assert len(calls.driver.launches) == launches


def test_refused_launch_is_an_error_of_the_call(calls: Calls) -> None:
    calls()
    calls.driver.status = cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match="launching example"):
        calls()


def test_threads_on_one_stream_do_not_mix_their_arguments(calls: Calls) -> None:
    """Both threads pack into the block of one signature and stream."""
    calls()
    launched = calls.driver.cuLaunchKernelEx
    seen: list[tuple[int, ...]] = []

    def slow_launch(config: Any, function: str, parameters: int, extra: int) -> Any:
        threading.Event().wait(0.002)  # lets the other thread run
        seen.append(read_arguments(function, parameters)[:2])
        return launched(config, function, parameters, extra)

    calls.driver.cuLaunchKernelEx = slow_launch  # type: ignore[method-assign]
    calls._made.clear()
    wanted: list[tuple[int, int]] = []
    kept = []

    def work() -> None:
        for _ in range(5):
            dy, x, *_ = tensors()
            kept.append((dy, x))
            wanted.append((x.data_ptr(), dy.data_ptr()))
            calls(dy=dy, x=x)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(wanted)


def test_scratch_is_retried_after_pytorch_gave_back_its_cache(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]
    allocate = calls.driver.cuMemAllocAsync
    monkeypatch.setattr(torch.cuda, "empty_cache", full.clear)

    def allocate_if_free(size: int, stream: int) -> tuple[Any, ...]:
        if full:
            return cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        return allocate(size, stream)

    monkeypatch.setattr(calls.driver, "cuMemAllocAsync", allocate_if_free)
    assert calls().scratch


# ---- From arguments to a kernel ------------------------------------------------------------------


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> Callable[..., Package]:
    """Makes a package of some kernels; its device is as the fake driver has it."""

    def make(*specs: KernelSpec) -> Package:
        tuned = tuple(entry(4096, spec) for spec in specs)
        table = Table(TABLE.target, tuned, (generic(4096, 16), generic(4096, 2)))
        (tmp_path / "table.json").write_text(json.dumps(table.to_json()))
        made = Package(tmp_path)
        monkeypatch.setattr(made, "_kernel", lambda kernel: LoadedKernel(b"cubin", kernel.spec))
        return made

    here = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    return make


def served_by(package: Package, options: Options = PLAIN, **change: Any) -> Any:
    """The spec of the kernel that serves a call, or the name of what composes it."""
    dy, x, rstd, weight = tensors(4096)
    given = Arguments(**{"dy": dy, "x": x, "rstd": rstd, "weight": weight, **change})
    call = package._with_kernel(given, options, 0)
    return call if isinstance(call, str) else getattr(call, "kernel", call)


def test_compiled_options_are_used_where_they_were_tuned(package: Any) -> None:
    plain, offset = SPEC, replace(SPEC, name="offset", offset=True)
    both = replace(SPEC, name="both", offset=True, residual="bf16")
    residual = replace(SPEC, name="residual", residual="bf16")
    wide = replace(SPEC, name="wide", residual="fp32")
    made = package(plain, offset, both, residual, wide)
    rows = tensors(4096)[1]

    def name(options: Options = PLAIN, **change: Any) -> str:
        return served_by(made, options, **change).spec.name

    assert name() == "example"
    assert name(Options(weight_offset=1.0)) == "offset"
    assert name(dresidual=rows) == "residual"
    assert name(dresidual=rows.float()) == "wide"
    assert name(Options(weight_offset=1.0), dresidual=rows) == "both"
    # Nothing was tuned for an offset and an fp32 residual: the offset stays in the kernel.
    composed = served_by(made, Options(weight_offset=1.0), dresidual=rows.float())
    assert add_residual in [cell.cell_contents for cell in composed.__closure__]


@pytest.mark.parametrize(
    ("options", "change", "by"),
    [
        (Options(weight_offset=1.0), {}, offset_in_weight),
        (PLAIN, {"dresidual": torch.zeros(4096, 1024)}, add_residual),
        (Options(accumulate=True), {"dw_out": torch.zeros(1024).bfloat16()}, dw_elsewhere),
    ],
)
def test_options_that_nobody_tuned_are_composed(
    package: Any, options: Options, change: Any, by: Any
) -> None:
    composed = served_by(package(SPEC), options, **change)
    assert by in [cell.cell_contents for cell in composed.__closure__]


def test_weight_per_head_is_a_call_per_head(package: Any) -> None:
    x = torch.zeros(16, 4, 1024).bfloat16()
    change = {"x": x, "dy": x, "weight": x[0], "rstd": torch.zeros(64)}
    composed = served_by(package(SPEC), **change)
    assert per_head in [cell.cell_contents for cell in composed.__closure__]


def test_unaligned_rows_get_narrow_vectors_and_no_kernel_is_a_reason(package: Any) -> None:
    made = package(SPEC)
    odd = torch.empty(4096 * 1024 + 1, dtype=torch.bfloat16)[1:].view(4096, 1024)
    assert served_by(made, x=odd).spec.vector_bytes == 2
    assert served_by(made, weight=torch.empty(1025).bfloat16()[1:]).spec.vector_bytes == 2
    assert "no fallback kernel serves it" in served_by(made, weight=torch.zeros(1024))
    assert served_by(made, weight=None).spec.name == "example"


# ---- PyTorch's own kernel ------------------------------------------------------------------------


def test_aten_gets_the_arguments_of_its_schema() -> None:
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        pytest.skip("this PyTorch has no aten::_fused_rms_norm_backward")
    seen = []

    def kernel(dy: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
        seen.append((list(shape), tuple(rstd.shape), list(mask)))
        return reference_backward(dy, x, rstd, weight)

    dy, x, rstd, weight = tensors(6, 8)
    given = (dy.view(2, 3, 8), x.view(2, 3, 8), rstd.flatten())
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm_backward", kernel, "CPU")
        dx, dw = aten_call(PLAIN)(*given, weight)
        assert aten_call(Options(need_dw=False))(*given, weight)[1] is None
        assert aten_call(PLAIN)(*given, None)[1] is None
    assert seen[0] == ([8], (2, 3, 1), [True, True])
    assert [mask for _, _, mask in seen[1:]] == [[True, False]] * 2
    assert (dx.shape, dw.shape) == ((2, 3, 8), (8,))


def test_launch_numbers_are_computed_once() -> None:
    plan = Launch(132, 132, 132, 0, counters=33, zeroed=5, scratch=10)
    assert (plan.zeroed_offset, plan.scratch_offset, plan.workspace_bytes) == (256, 384, 424)


def test_lazily_negated_tensors_are_read_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read memory, where such a view has the numbers of what it is a view of."""
    emit_package([], [], find_target("h200"), tmp_path)
    package = Package(tmp_path)
    seen: list[tuple[Any, ...]] = []

    def serve(self: Any, *_: Any) -> Any:
        return lambda *tensors: seen.append(tensors)

    monkeypatch.setattr(Package, "_prepare", serve)
    monkeypatch.setattr(type(package._norms), "_prepare", serve)
    dy, x, rstd, weight = tensors(6)
    negated = [torch._neg_view(tensor) for tensor in (dy, x, rstd, weight)]
    package.rmsnorm_backward(*negated)
    package._norms(negated[1], negated[3], residual=negated[0])
    (backward, forward) = seen
    reads = (*backward[:4], forward[0], forward[1], forward[4])
    for read, base in zip(reads, (dy, x, rstd, weight, x, weight, dy), strict=True):
        assert not read.is_neg()
        assert torch.equal(read, -base)
    with pytest.raises(ValueError, match="dw_out is a lazily negated view"):
        package.rmsnorm_backward(dy, x, rstd, weight, dw_out=torch._neg_view(weight.clone()))
