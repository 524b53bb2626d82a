"""A CUDA driver and a device on the CPU: what the driver is given is recorded in order."""

# ruff: noqa: N802 (the fake driver has the names of the real one)

from __future__ import annotations

import ctypes
import struct
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from cuda.bindings import driver as cuda

from normforge.frontends import package
from normforge.launch import binding, driver, forward_call, graph_end, loaded_kernel, workspace
from normforge.launch.kernel_arguments import argument_layout
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.launch.workspace import Workspaces
from normforge.native import plans
from normforge.operations import RowOperation, Signature, signature_of
from normforge.serve import call, row_calls, rows
from normforge.serve.call import KernelCall
from normforge.serve.call_cache import CallCache
from normforge.serve.layout import read_layout
from normforge.serve.options import PLAIN, Arguments, Options
from normforge.spec import FORWARD_KERNELS, SUM_KERNEL, KernelSpec, plan_launch
from normforge.table import Kernel, Table, Tuned

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
    partial_columns=1024,
    partial_stride=1024,
    slice_columns=32,
    batch_rows=1,
    rows_per_cta=2,
    cluster=1,
    dependent=False,
    levels=1,
    ctas_per_sm=1,
    even_grid=False,
    sms=132,
    way="slices",
)
TARGET = {"name": "h200", "title": "H200", "arch": "sm_90a", "sms": 132}
TWO_KERNELS: dict[str, Any] = {"strategy": "separate", "way": "second_kernel"}
SEPARATE = replace(SPEC, name="two_kernels", **TWO_KERNELS, dependent=True, cluster=2)
LAYER_NORM = {"operation": "layernorm_backward", "partial_columns": 2048, "partial_stride": 2048}
"""The facts in which a kernel of LayerNorm of the same row length differs."""


class SumArguments(NamedTuple):
    """The arguments of a second kernel."""

    scratch: int
    sums: int
    partials: int
    columns: int
    dw_mode: int
    group: int


class ForwardArguments(NamedTuple):
    """The arguments of a forward."""

    x: int
    residual: int
    weight: int
    y: int
    rstd: int
    residual_out: int
    eps: float
    weight_offset: float
    rows: int
    x_stride: int
    x_outer: int
    residual_stride: int
    columns: int
    x_inner: int


_FORWARD = struct.Struct("@6Q2f4qiI")


OF_GROUPS = ("group_factor", "period_factor", "period", "wide_groups", "together")


def argument_names(signature: Signature) -> tuple[str, ...]:
    """The arguments of a main kernel in their order; test_argument_layout.py compares them with the
    structure in the kernel's source."""
    return (
        *(tensor.name for tensor in signature.leading),
        "counters",
        "zeroed",
        "scratch",
        "rows",
        *(f"{tensor.name}_stride" for tensor in signature.strided),
        *(f"{tensor.name}_gap" for tensor in signature.in_heads),
        "gaps",
        "columns",
        "group",
        "dw_mode",
        "weight_offset",
        *(tensor.name for tensor in (*signature.behind, *signature.numbers)),
        *(OF_GROUPS if signature.groups else ()),
    )


@cache
def _main_arguments(operation: str) -> tuple[struct.Struct, Any]:
    """The structure that the main kernel of a backward takes, and a tuple that has its names."""
    signature = signature_of(operation)
    return argument_layout(signature).main, namedtuple("Arguments", argument_names(signature))


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
        self.user_objects: Any = cuda.CUresult.CUDA_SUCCESS
        self.owned: dict[int, list[Any]] = {}  # user objects of graphs
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
                keep=config,  # it owns the memory of the attributes
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
            self.capture_id,
            [],
            [],
            0,
        )

    def cuUserObjectCreate(
        self, value: int, destroy: int, references: int, flags: int
    ) -> tuple[Any, ...]:
        assert (references, flags) == (1, 1)
        return self.user_objects, (value, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroy))

    def cuGraphRetainUserObject(
        self, graph: int, owned: Any, count: int, flags: int
    ) -> tuple[Any, ...]:
        assert (count, flags) == (1, 1)
        self.owned.setdefault(graph, []).append(owned)
        return (self.user_objects,)

    def end_graph(self, graph: int) -> None:
        """A graph is destroyed, and all that was instantiated from it, and no launch runs."""
        for value, destroy in self.owned.pop(graph):
            destroy(value)

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


def read_arguments(function: str, parameters: int) -> Any:
    """Return what the driver would copy, given the kernels' parameters, as a tuple with names: one
    structure of the main kernel (tensors, workspace, extent), six of the second one."""
    if function != SUM_KERNEL:
        form, made = _FORWARD, ForwardArguments
        if function not in FORWARD_KERNELS:
            form, made = _main_arguments(function)
        (address,) = struct.unpack("Q", ctypes.string_at(parameters, 8))
        return made(*form.unpack(ctypes.string_at(address, form.size)))
    formats = "QQiiii"
    addresses = struct.unpack(f"{len(formats)}Q", ctypes.string_at(parameters, 8 * len(formats)))
    return SumArguments(
        *(
            struct.unpack(code, ctypes.string_at(address, struct.calcsize(code)))[0]
            for code, address in zip(formats, addresses, strict=True)
        )
    )


class ComputingDriver(FakeDriver):
    """Does what a kernel does from the arguments of its launch."""

    def cuLaunchKernelEx(
        self, config: Any, function: str, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        self.compute(function, read_arguments(function, parameters))
        return super().cuLaunchKernelEx(config, function, parameters, extra)

    def compute(self, function: str, args: Any) -> None:
        raise NotImplementedError


def at_address(address: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers in memory, as a tensor that writes there."""
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def rows_at(
    args: Any, name: str, dtype: torch.dtype = torch.float32, gap: int = 0
) -> list[torch.Tensor]:
    """The rows of a tensor of a launch; gap: the numbers between one packed group and the next."""
    address, stride = getattr(args, name), getattr(args, f"{name}_stride")
    starts = [i * stride + (i * args.gaps >> 32) * gap for i in range(args.rows)]
    return [at_address(address + at * dtype.itemsize, args.columns, dtype) for at in starts]


def stand_in(monkeypatch: pytest.MonkeyPatch, fake: FakeDriver) -> None:
    """Put a fake in the place of the driver, everywhere."""
    for user in (binding, driver, forward_call, graph_end, loaded_kernel, workspace):
        monkeypatch.setattr(user, "cuda_driver", lambda: fake)
    monkeypatch.setattr(workspace, "is_capturing", lambda: False)


class FakeDevice:
    """Stands in for the device about which PyTorch is asked. CPU tensors are as good as its own.

    stream: the raw handle of the current stream; a thread that sets `local.stream` has its own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.device, self.capturing = 7, 0, False
        self.local = threading.local()
        use_device(monkeypatch, self, current_device=lambda: self.device)

    def here(self) -> int:
        return getattr(self.local, "stream", self.stream)


def use_device(
    monkeypatch: pytest.MonkeyPatch, state: Any, current_device: Callable[[], int]
) -> None:
    """Let the runtime ask `state` (`here()` and `capturing`) what it asks PyTorch."""
    for user in (package, call, forward_call, plans):
        monkeypatch.setattr(user, "raw_stream", lambda device: state.here())
    for user in (call, forward_call, plans):
        monkeypatch.setattr(user, "current_device", current_device)
        monkeypatch.setattr(user, "is_capturing", lambda: state.capturing)
    for user in (call, forward_call):
        monkeypatch.setattr(user, "empty_strided", empty_on_cpu)
    here = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)


def use_row_servers(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    """Let operations over rows take CPU tensors, as if they lay on a device."""
    for name, answer in (
        ("current_device", lambda: 0),
        ("raw_stream", lambda index: device.here()),
        ("is_capturing", lambda: device.capturing),
        ("empty_strided", empty_on_cpu),
    ):
        monkeypatch.setattr(rows, name, answer)
    monkeypatch.setattr(row_calls, "CallCache", _cache_of_any_device)


def _cache_of_any_device() -> CallCache:
    made = CallCache()
    made._device = ""
    return made


def row_server(operation: RowOperation, *entries: Tuned) -> Any:
    """A server of an operation that has these kernels."""
    loaded = {one.kernel.spec: LoadedKernel(b"cubin", one.kernel.spec) for one in entries}
    kernels = SimpleNamespace(
        backward=Table(TARGET, entries, ()),
        loaded=SimpleNamespace(get=lambda kernel: loaded[kernel.spec]),
    )
    return rows.RowServer(operation, lambda index: kernels)  # type: ignore[arg-type, return-value]


def empty_on_cpu(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def entry(M: int, spec: KernelSpec = SPEC, **changes: Any) -> Tuned:
    kernel = Kernel(f"k{M}", "", replace(spec, **changes))
    return Tuned(M, spec.N, spec.dtype, spec.weight_dtype, "measured", kernel, {})


def fallback(N: int, vector_bytes: int, least: int = 1) -> Kernel:
    spec = replace(SPEC, N=N, exact=False, vector_bytes=vector_bytes, **TWO_KERNELS)
    spec = replace(spec, least=least)
    return Kernel(f"any{N}_{vector_bytes}", "", spec)


TABLE = Table(
    TARGET,
    (entry(1024), entry(4096), entry(65536)),
    (fallback(4096, 2), fallback(1024, 2), fallback(4096, 16), fallback(1024, 16, 129)),
)


def tensors(
    M: int = 6, N: int = 1024, dtype: torch.dtype = torch.bfloat16, weight: Any = None
) -> tuple[torch.Tensor, ...]:
    """Return dy, x, rstd, weight with a true rstd."""
    generator = torch.Generator().manual_seed(M * N)
    x = torch.randn(M, N, generator=generator).to(dtype)
    dy = torch.randn(M, N, generator=generator).to(dtype)
    scale = (1 + 0.1 * torch.randn(N, generator=generator)).to(weight or dtype)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    return dy, x, rstd, scale


class Calls:
    """Calls of one kernel on CPU tensors. quick: by the quick call, where there is one; centred:
    with a mean, as LayerNorm's are."""

    def __init__(
        self, driver: FakeDriver, device: FakeDevice, quick: bool = False, centred: bool = False
    ) -> None:
        self.driver, self.device, self.quick, self.centred = driver, device, quick, centred
        self.workspaces = Workspaces()
        self.take(SPEC)
        self._made: dict[Any, KernelCall] = {}

    def take(self, spec: KernelSpec) -> None:
        """Use this kernel from now on."""
        spec = replace(spec, **LAYER_NORM) if self.centred else spec  # type: ignore[arg-type]
        self.kernel = LoadedKernel(b"cubin", spec)

    def plain(self, M: int = 6) -> dict[str, torch.Tensor]:
        """The tensors of a call without options, in the order in which a quick call takes them."""
        names = ("dy", "x", "rstd", "weight", "mean")
        given = dict(zip(names, tensors(M), strict=False))
        return given | ({"mean": torch.zeros(M, 1)} if self.centred else {})

    def dw(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return zeros of the shape of dw."""
        return torch.zeros((2, 1024) if self.centred else (1024,), dtype=dtype)

    def serve(self, call: KernelCall, given: Arguments) -> Any:
        """The results of a call that `call` was made for."""
        results = None
        if self.quick and call.quick is not None:
            results = call.quick(given.dy, given.x, given.rstd, given.weight, given.mean)
        return call(*vars(given).values()) if results is None else results

    def __call__(self, M: int = 6, options: Options = PLAIN, **change: Any) -> Any:
        given = Arguments(**(self.plain(M) | change))
        layout, _ = read_layout(given)
        spec = self.kernel.spec
        # One call object per signature, as the package keeps them.
        kinds = tuple(
            (name, tensor is not None and tensor.dtype) for name, tensor in change.items()
        )
        index = self.device.device
        key = (index, spec, options, str(layout), kinds)
        if key not in self._made:
            self._made[key] = KernelCall(
                kernel=self.kernel,
                launch=plan_launch(spec, layout.rows),
                device=index,
                given=given,
                options=options,
                layout=layout,
                workspaces=self.workspaces,
            )
        results = self.serve(self._made[key], given)
        launched = {seen.function: seen for seen in self.driver.launches}
        seen, signature = launched[spec.operation], signature_of(spec.operation)
        return SimpleNamespace(
            zeros=seen.arguments.counters,
            scratch=seen.arguments.scratch,
            seen=seen,
            arguments=seen.arguments,
            tensors={t.name: getattr(seen.arguments, t.name) for t in signature.leading},
            dw_mode=seen.arguments.dw_mode,
            mean=seen.arguments.mean if self.centred else None,
            sum=launched.get("sum_partials"),
            results=results,
            given=given,
        )
