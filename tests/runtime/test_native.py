"""The C++ fast path: its node behaves as the one in Python, and what it launches is what Python
would have launched. The extension is the real one; on the CPU the driver is made of callbacks."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import struct
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from generator.operations.rmsnorm_backward import make_inputs
from generator.package.emit import emit_package
from generator.problem import Problem
from generator.runtime import api as api_module
from generator.runtime.api import Package
from generator.runtime.launch import binding as binding_module
from generator.runtime.launch import driver as driver_module
from generator.runtime.launch import launch as launch_module
from generator.runtime.launch import workspace as workspace_module
from generator.runtime.launch.launch import LaunchError, LoadedKernel
from generator.runtime.launch.workspace import PER_THREAD
from generator.runtime.native import native
from generator.runtime.serve import call as call_module
from generator.runtime.serve import server as serve_module
from generator.runtime.serve.call_cache import _MOST
from generator.runtime.serve.checks import check_arguments
from generator.runtime.serve.reference import reference_backward
from generator.runtime.spec import KernelSpec
from generator.runtime.table import TABLE, Table
from generator.target import Target
from tests.runtime.test_recognised import facts
from tests.runtime.test_runtime import SEPARATE, SPEC, FakeDriver, entry, generic, read_arguments
from tests.support.entry_points import Training, equal_bits, leaf, make_entry_point, write_package
from tests.support.samples import compiled_fallbacks, planted_entry

Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The extension, built once for all workers of a run."""
    try:
        native._compiler(), native._arguments()
    except RuntimeError as error:
        pytest.skip(str(error))
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    with pytest.MonkeyPatch.context() as patch, (shared / "native.lock").open("w") as lock:
        if "TORCH_EXTENSIONS_DIR" not in os.environ:
            patch.setenv("TORCH_EXTENSIONS_DIR", str(shared))
        fcntl.flock(lock, fcntl.LOCK_EX)
        return native.load(native.build())


# ---- The node ------------------------------------------------------------------------------------

NOBODY = (0, 0, 0, 0)
"""A driver for packages whose calls are never launched: they serve CUDA tensors, and get none."""


def started(package: Package, module: Any, driver: Any = NOBODY, on_cpu: bool = False) -> Package:
    package._native.start(package._forward, package._gradients, module, driver, on_cpu)
    return package


@pytest.fixture(params=["python", "native"])
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Package:
    """The formula serves everything; with and without the node in C++. What is true of one has to
    be true of the other."""
    made = write_package(tmp_path / "package")
    if request.param == "native":
        started(made, request.getfixturevalue("module"))
    return made


@pytest.fixture
def both(tmp_path: Path, module: Any) -> tuple[Package, Package]:
    """The same without and with the node in C++."""
    return write_package(tmp_path / "one"), started(write_package(tmp_path / "two"), module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_trace_gets_the_node_that_it_can_see(both: tuple[Package, Package]) -> None:
    """What the C++ node computes by a kernel would be a constant of the traced module."""

    def fail(*_: Any) -> Any:
        raise AssertionError("the C++ node was traced")

    package = both[1]
    package._native.norm = fail
    x, other = leaf(6, 16), leaf(6, 16, seed=5)
    with pytest.raises(AssertionError, match="was traced"):
        package.rms_norm(x, x[0])
    norm = package.RMSNorm(16)
    traced = torch.jit.trace(norm, (x,), check_trace=False)
    assert torch.equal(traced(other), torch.nn.functional.rms_norm(other, (16,), norm.weight))


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "bf16": lambda: {"x": leaf(6, 16, dtype=torch.bfloat16), "weight": leaf(16).bfloat16()},
    "fp32 weight": lambda: {"x": leaf(6, 16, dtype=torch.half)},
    "float64": lambda: {"x": leaf(6, 16, dtype=torch.float64), "weight": leaf(16).double()},
    "weight of a third dtype": lambda: {"weight": leaf(16, dtype=torch.half)},
    "no weight": lambda: {"weight": None},
    "offset": lambda: {"weight_offset": 1.0},
    "eps": lambda: {"eps": 0.5},
    "whole eps": lambda: {"eps": 1},
    "weight per head": lambda: {"x": leaf(2, 3, 16), "weight": leaf(3, 16)},
    "no rows": lambda: {"x": leaf(0, 16)},
    "only x": lambda: {"weight": leaf(16).detach()},
    "only weight": lambda: {"x": leaf(6, 16).detach()},
    "neither": lambda: {"x": leaf(6, 16).detach(), "weight": leaf(16).detach()},
    "strided rows": lambda: {"x": leaf(6, 32)[:, :16]},
}


def outcome(package: Package, dy: Any = None, **change: Any) -> list[Any]:
    given = {"x": leaf(6, 16), "weight": leaf(16, seed=1)} | change
    leaves = [t for t in (given["x"], given["weight"]) if t is not None and t.requires_grad]
    y = package.rms_norm(**given)
    assert y.requires_grad is bool(leaves)
    if not leaves:
        return [y]
    dy = leaf(*y.shape, dtype=y.dtype, seed=2).detach() if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("name", CALLS)
def test_node_gives_the_bits_of_the_one_in_python(both: Any, name: str) -> None:
    one, two = (outcome(package, **CALLS[name]()) for package in both)
    assert equal_bits(one, two)


def test_node_in_c_has_its_name(both: Any) -> None:
    names = [package.rms_norm(leaf(2, 8), None).grad_fn.name() for package in both]
    assert "EagerNorm" in names[0] and "Norm" in names[1] and names[0] != names[1]


@pytest.mark.parametrize(
    "dy",
    [
        torch.ones(()).expand(6, 16),
        torch.ones(6, 16, dtype=torch.float64),
        torch.ones(16, 6).T,
        torch._neg_view(torch.ones(6, 16)),
        TwoTensor(torch.ones(6, 16), torch.ones(6, 16)),
    ],
    ids=["repeated", "wider", "turned", "negative", "subclass"],
)
def test_gradient_of_any_kind_is_taken(both: Any, dy: torch.Tensor) -> None:
    if dy.dtype != torch.float32:  # autograd casts it
        assert equal_bits(*(outcome(package, dy=dy.float()) for package in both))
    one, two = (outcome(package, dy=dy.to(torch.float32)) for package in both)
    if isinstance(dy, TwoTensor):
        assert all(isinstance(grad, TwoTensor) for grad in (*one[1:], *two[1:]))
        one, two = ([one[0], *(g.a for g in one[1:])], [two[0], *(g.a for g in two[1:])])
    assert equal_bits(one, two)


def test_only_some_gradients_of_a_graph(package: Package) -> None:
    x, weight = leaf(6, 16), leaf(16, seed=1)
    y = package.rms_norm(x, weight, 1e-6).sum()
    dx, dw = torch.autograd.grad(y, (x, weight), retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], dx)
    assert torch.equal(torch.autograd.grad(y, weight)[0], dw)


def test_second_derivatives(package: Package) -> None:
    x, weight = leaf(3, 6, dtype=torch.float64), leaf(6, dtype=torch.float64, seed=1)
    for offset in (0.0, 1.0):

        def norm(x: Any, weight: Any, offset: float = offset) -> Any:
            return package.rms_norm(x, weight, 1e-5, weight_offset=offset)

        assert torch.autograd.gradgradcheck(norm, (x, weight))


def test_graph_is_kept_on_request_and_freed_otherwise(package: Package) -> None:
    x, weight = leaf(6, 16), leaf(16)
    y = package.rms_norm(x, weight).sum()
    first = torch.autograd.grad(y, (x, weight), retain_graph=True)
    assert equal_bits(list(first), list(torch.autograd.grad(y, (x, weight))))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, (x, weight))


@pytest.mark.parametrize("changed", ["x", "weight"])
def test_saved_tensor_that_was_changed_is_an_error(package: Package, changed: str) -> None:
    given = {"x": leaf(6, 16), "weight": leaf(16)}
    y = package.rms_norm(**given)
    with torch.no_grad():
        given[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_saved_tensors_go_through_hooks(package: Package) -> None:
    packed, unpacked = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.double()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor.shape)
        return tensor.float()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = outcome(package)
    assert packed == unpacked == [(6, 16), (16,), (6, 1)]
    assert equal_bits(found, outcome(package))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(package: Package, reentrant: bool) -> None:
    x, weight = leaf(6, 16), leaf(16)

    def block(x: torch.Tensor) -> torch.Tensor:
        return package.rms_norm(package.rms_norm(x, weight, 1e-6), weight, 1e-6)

    wanted = torch.autograd.grad(block(x).sum(), (x, weight))
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert equal_bits([x.grad, weight.grad], list(wanted))  # type: ignore[list-item]


def test_trainings_have_the_same_bits(both: Any) -> None:
    runs = [Training(*make_entry_point(package, "2")).train(4) for package in both]
    assert equal_bits(*runs)


def test_forward_errors_are_those_of_python(both: Any) -> None:
    for given in (("x", None), (None, None), (torch.ones(4, 8), torch.ones(3)), (1.0, None)):
        errors = []
        for package in both:
            with pytest.raises((TypeError, ValueError)) as caught:
                package.rms_norm(*given)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("anomaly", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
def test_backward_errors_are_python_s_own(
    tmp_path: Path, module: Any, anomaly: bool, threaded: bool
) -> None:
    class OddError(Exception):
        pass

    error = OddError("planted")

    def gradients(*_: Any) -> Any:
        raise error

    package = write_package(tmp_path)
    package._gradients = gradients  # type: ignore[assignment]
    started(package, module)
    context = torch.autograd.set_detect_anomaly(anomaly, check_nan=False)
    with warnings.catch_warnings(), context, torch.autograd.set_multithreading_enabled(threaded):
        warnings.simplefilter("ignore")  # anomaly mode says where the forward was
        y = package.rms_norm(leaf(2, 8), leaf(8))
        with pytest.raises(OddError) as caught:
            y.sum().backward()
    assert caught.value is error


@pytest.mark.parametrize("wrong", [(1.0, None), [None, None], (None,)])
def test_wrong_results_of_the_fallback_are_errors(tmp_path: Path, module: Any, wrong: Any) -> None:
    package = write_package(tmp_path)
    package._gradients = lambda *_: wrong  # type: ignore[assignment, method-assign]
    y = started(package, module).rms_norm(leaf(2, 8), leaf(8))
    with pytest.raises(TypeError, match=r"tensor|two results"):
        y.sum().backward()


def test_nan_is_found_by_anomaly_mode(package: Package) -> None:
    x = leaf(2, 8)
    with pytest.warns(UserWarning), torch.autograd.detect_anomaly():
        y = package.rms_norm(x, None)
        with pytest.raises(RuntimeError, match="returned nan values"):
            y.backward(torch.full((2, 8), float("nan")))


def test_backward_in_many_threads_through_one_graph(package: Package) -> None:
    x, weight = leaf(6, 16), leaf(16)
    y = package.rms_norm(x, weight).sum()
    wanted = list(torch.autograd.grad(y, (x, weight), retain_graph=True))
    found: list[list[torch.Tensor]] = []

    def again() -> list[torch.Tensor]:
        return list(torch.autograd.grad(y, (x, weight), retain_graph=True))

    def work() -> None:
        found.extend(again() for _ in range(20))

    in_threads([work] * 4)
    assert len(found) == 80 and all(equal_bits(one, wanted) for one in found)


def in_threads(works: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # shown below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("weightless", [False, True])
def test_compiled_autograd(package: Package, weightless: bool) -> None:
    """Twice with other numbers, so that a compiled graph is used again."""

    def step(eps: float, offset: float) -> list[torch.Tensor]:
        x, weight = leaf(6, 16), None if weightless else leaf(16, seed=1)
        package.rms_norm(x, weight, eps, weight_offset=offset).square().sum().backward()
        return [t.grad for t in (x, weight) if t is not None and t.grad is not None]

    counters = torch._dynamo.utils.counters
    counters.clear()
    settings = ((1e-6, 0.0), (0.5, 0.0), (0.5, 1.0))
    wanted = [step(*numbers) for numbers in settings]
    for numbers, expected in zip(settings, wanted, strict=True):
        before = counters["compiled_autograd"]["captures"]
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            found = step(*numbers)
        assert counters["compiled_autograd"]["captures"] >= max(before, 1)
        assert len(found) == 2 - weightless
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["compile", "func", "fake", "no_grad", "inference"])
def test_other_ways_go_past_the_node(package: Package, how: str) -> None:
    x, weight = leaf(6, 16), leaf(16, seed=1)
    wanted = outcome(package)
    norm = package.rms_norm
    if how == "compile":
        y = torch.compile(norm, backend="aot_eager", fullgraph=True)(x, weight)
    elif how == "func":
        dy = leaf(6, 16, seed=2).detach()
        dx = torch.func.grad(lambda x: (norm(x, weight) * dy).sum())(x)
        torch.testing.assert_close(dx, wanted[1])
        return
    elif how == "fake":
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            assert norm(torch.empty(6, 16), torch.empty(16)).shape == (6, 16)
        return
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            y = norm(x, weight)
        assert not y.requires_grad
    assert torch.equal(y.detach(), wanted[0])


# ---- What is launched ----------------------------------------------------------------------------


class Machine(FakeDriver):
    """A device in this process. Python's driver calls and the native ones come here, and a launch
    computes dx and dw by the formula: of the main kernel, or of the second where there is one.

    launches: what Python launched; native: what C++ did. What C++ is told: stream, device,
    capturing; errors: the questions that are refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.native: list[SimpleNamespace] = []
        self.stream, self.device, self.capturing = 7, 0, False
        self.errors: set[str] = set()
        self.refuse_native = 0  # launches
        self.full = self.idle = False  # no memory is left; native kernels do nothing
        self.allocated: dict[int, tuple[int, int]] = {}
        self.between: Callable[[], None] = lambda: None
        self.local = threading.local()
        self.kept: list[Any] = []
        of = ctypes.CFUNCTYPE
        number, pointer = ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
        entries = (
            of(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(pointer))(self._stream),
            of(ctypes.c_int, number)(self._device),
            of(ctypes.c_int, pointer, number)(self._is_capturing),
            of(ctypes.c_int, pointer, pointer, pointer, pointer)(self._launch),
        )
        self.kept.append(entries)
        self.addresses = [ctypes.cast(entry, pointer).value for entry in entries]

    def here(self) -> int:
        return getattr(self.local, "stream", self.stream)

    def cuModuleGetFunction(self, module: bytes, name: bytes) -> tuple[Any, ...]:  # noqa: N802
        return cuda.CUresult.CUDA_SUCCESS, Function(NAMES.index(name.decode()) + 1)

    def cuLaunchKernelEx(  # noqa: N802
        self, config: Any, function: Any, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        name = NAMES[int(function) - 1]
        status = super().cuLaunchKernelEx(config, name, parameters, extra)
        if status[0] == 0:
            compute(name, parameters)
        return status

    def cuMemAllocAsync(self, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        if self.full:
            return cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        status, address = super().cuMemAllocAsync(size, stream)
        self.allocated[int(address)] = (size, stream)
        return status, address

    def _stream(self, device: int, at: Any) -> int:
        at[0] = self.here()
        return "stream" in self.errors

    def _device(self, at: Any) -> int:
        at[0] = self.device
        return "device" in self.errors

    def _is_capturing(self, stream: int, at: Any) -> int:
        at[0] = self.capturing
        return "capturing" in self.errors

    def _launch(self, config: int, function: int, parameters: int, extra: Any) -> int:
        assert extra is None
        if self.refuse_native:
            self.refuse_native -= 1
            return 1
        name = NAMES[function - 1]
        numbers = (ctypes.c_uint * 7).from_address(config)
        stream = ctypes.c_uint64.from_address(config + 32)
        self.native.append(
            SimpleNamespace(
                function=name,
                grid=numbers[0],
                block=numbers[3],
                smem=numbers[6],
                stream=stream.value,
                attributes=attributes_of(config),
                arguments=read_arguments(name, parameters),
                thread=threading.get_ident(),
            )
        )
        if not self.idle:
            compute(name, parameters)
        self.between()
        return 0


def attributes_of(config: int) -> set[int]:
    """Which attributes a CUlaunchConfig has."""
    first, count = (ctypes.c_uint64.from_address(config + at).value for at in (40, 48))
    kinds = range(first, first + 72 * (count & 0xFFFFFFFF), 72)
    return {ctypes.c_int.from_address(at).value for at in kinds}


class Function(int):
    """A handle; FakeDriver takes names."""


NAMES = ("rmsnorm_backward", "sum_partials")
_started = threading.local()


def compute(name: str, parameters: int) -> None:
    """What a kernel does, in bf16. The main one computes both, and the second one, which has to
    follow it, puts dw in place again."""
    arguments = read_arguments(name, parameters)
    if name == "sum_partials":
        scratch, dw, _, columns, _ = arguments
        assert _started.last[:2] == (scratch, dw), "the main kernel of the same call comes first"
        at_address(dw, columns)[:] = _started.last[2]
        return
    x, dy, rstd, weight, dx, dw, _, _, _, _, scratch, rows, x_stride, dy_stride, *_ = arguments
    *_, columns, _, mode, _ = arguments
    given = [at_address(at, rows, columns, step) for at, step in ((dy, dy_stride), (x, x_stride))]
    scales = at_address(rstd, rows, dtype=torch.float32), at_address(weight, columns)
    found_dx, found_dw = reference_backward(*given, *scales)
    if dx:
        at_address(dx, rows, columns)[:] = found_dx
    if dw and mode == 0:
        at_address(dw, columns)[:] = found_dw
    _started.last = (scratch, dw, found_dw)


def at_address(
    address: int, count: int, columns: int = 1, stride: int = 1, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A vector; with `columns` so many rows, `stride` elements apart."""
    stride = columns if stride == 1 else stride
    size = (count - 1) * stride + columns
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat if columns == 1 else flat.as_strided((count, columns), (stride, 1))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for user in (driver_module, launch_module, workspace_module, binding_module):
        monkeypatch.setattr(user, "cuda_driver", lambda: made)
    monkeypatch.setattr(workspace_module, "is_capturing", lambda: False)
    for user in (call_module, native):
        monkeypatch.setattr(user, "raw_stream", lambda device: made.here())
        monkeypatch.setattr(user, "current_device", lambda: 0)
        monkeypatch.setattr(user, "is_capturing", lambda: made.capturing)
    monkeypatch.setattr(
        call_module,
        "empty_strided",
        lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype),
    )
    monkeypatch.setattr(serve_module, "_facts", facts)
    here = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    return made


@pytest.fixture
def make(machine: Machine, module: Any, tmp_path: Path) -> Callable[..., Package]:
    """Makes a package whose kernels run on the fake device, native path on."""
    numbers = itertools.count()

    def make(spec: KernelSpec = SPEC, on: bool = True) -> Package:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        target = {"name": "h200", "title": "H200", "arch": "sm_90a", "sms": 132}
        table = Table(target, (entry(4096, spec),), (generic(4096, 16), generic(4096, 2)))
        (folder / TABLE).write_text(json.dumps(table.to_json()))
        package = Package(folder)
        loaded: dict[Any, LoadedKernel] = {}
        package._kernel = lambda kernel: loaded.setdefault(  # type: ignore[method-assign]
            kernel, LoadedKernel(b"cubin", kernel.spec)
        )
        formula = package._find

        def find(given: Any, options: Any) -> Any:
            check_arguments(given, options)
            if given.x.dtype == torch.bfloat16 and given.x.numel():
                return package._with_kernel(given, options, 0)
            return formula(given, options)

        package._find = find  # type: ignore[method-assign]
        package._known._device = ""
        return started(package, module, machine.addresses, on_cpu=True) if on else package

    return make


def rows(M: int = 6, N: int = 1024, seed: int = 0) -> torch.Tensor:
    return torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(M: int = 6, **change: Any) -> dict[str, Any]:
    """dy, x, rstd and weight."""
    x = rows(M)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    given = {"dy": rows(M, seed=1), "x": x, "rstd": rstd, "weight": rows(1, seed=2)[0]}
    return given | change


def entry_point_1(package: Package, dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
    return package.rmsnorm_backward(dy, x, rstd, weight)


def entry_point_2(package: Package, dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
    """rstd is computed by the forward."""
    x, weight = (t if t.requires_grad else t.detach().requires_grad_() for t in (x, weight))
    return torch.autograd.grad(package.rms_norm(x, weight, 1e-6), (x, weight), dy)


EntryPoint = Callable[..., Any]
entry_points = pytest.mark.parametrize("entry_point", [entry_point_1, entry_point_2])


def learned(package: Package, entry_point: EntryPoint = entry_point_2, M: int = 6) -> None:
    """Calls enough that the next one like them is native."""
    for _ in range(4):
        entry_point(package, **inputs(M))


def who_served(machine: Machine, call: Callable[[], Any]) -> tuple[int, int, Any]:
    """How many kernels C++ and Python launched for a call, and its results."""
    before = len(machine.native), len(machine.launches)
    results = call()
    return len(machine.native) - before[0], len(machine.launches) - before[1], results


@entry_points
@pytest.mark.parametrize("spec", [SPEC, SEPARATE], ids=["one kernel", "two kernels"])
def test_native_launch_is_that_of_python_in_memory_of_its_own(
    machine: Machine, make: Any, entry_point: EntryPoint, spec: KernelSpec
) -> None:
    package, reference = make(spec), make(spec, on=False)
    learned(package, entry_point)
    given, kernels = inputs(), 1 + (spec is SEPARATE)
    native_kernels, by_python, results = who_served(machine, lambda: entry_point(package, **given))
    assert (native_kernels, by_python) == (kernels, 0)
    learned(reference, entry_point)
    none, by_python, wanted = who_served(machine, lambda: entry_point(reference, **given))
    assert (none, by_python) == (0, kernels)
    assert equal_bits(list(results), list(wanted))
    check_launches(machine, machine.native[-kernels:], machine.launches[-kernels:])
    main = machine.native[-kernels].arguments
    assert main[4:6] == tuple(t.data_ptr() for t in results)
    assert (main[0], main[1], main[3]) == tuple(given[n].data_ptr() for n in ("x", "dy", "weight"))


def check_launches(
    machine: Machine, found: list[SimpleNamespace], wanted: list[SimpleNamespace]
) -> None:
    """Equal but for the tensors, which others were allocated, and the workspace: counters that were
    zeroed, scratch that was allocated and not freed, both of one stream and of nobody in Python."""
    for one, two in zip(found, wanted, strict=True):
        for name in ("function", "grid", "block", "smem", "stream"):
            assert getattr(one, name) == getattr(two, name), name
        assert one.attributes == {int(kind) for kind in two.attributes}
    main, python = found[0].arguments, wanted[0].arguments
    assert main[11:] == python[11:]
    counters, zeroed, scratch = main[8:11]
    assert zeroed - counters == python[9] - python[8]
    if zeroed:
        assert any(at <= counters < zeroed <= at + size for at, size in machine.zeroed)
    assert scratch in machine.allocated, "scratch that nobody allocated"
    assert all(scratch != freed for freed, _ in machine.freed), "scratch that was freed"
    for other in machine.launches:
        if other.function == NAMES[0]:
            shared = scratch == other.arguments[10] or 0 != counters == other.arguments[8]
            assert not shared, "memory of a call through Python"
    for second in found[1:]:
        assert second.arguments[:2] == (scratch, main[5])
        assert second.arguments[2:] == wanted[1].arguments[2:]


def test_planted_scratch_of_somebody_else_is_noticed(machine: Machine, make: Any) -> None:
    """The check of all tests here sees a plan with a wrong address."""
    package, reference = make(SEPARATE), make(SEPARATE, on=False)
    learned(package)
    learned(reference)
    plans = package._native.learn.__self__
    theirs = reference._workspaces.of_stream(0, 7).scratch
    for wrong, message in ((theirs, "memory of a call"), (12345, "nobody allocated")):
        plans._store.set_scratch(0, 7, wrong)
        entry_point_2(package, **inputs())
        entry_point_2(reference, **inputs())
        with pytest.raises(AssertionError, match=message):
            check_launches(machine, machine.native[-2:], machine.launches[-2:])


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def shifted(*shape: int) -> torch.Tensor:
    """Values at an odd address."""
    size = torch.Size(shape).numel()
    return torch.cat([rows(1, 1)[0], rows(1, size)[0]])[1:].view(shape)


def spread(M: int, N: int) -> torch.Tensor:
    return torch.cat([rows(M, N)] * 2, 1)[:, :N]


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "other rows": lambda: inputs(7),
    "x shifted": lambda: inputs(x=shifted(6, 1024)),
    "dy shifted": lambda: inputs(dy=shifted(6, 1024)),
    "weight shifted": lambda: inputs(weight=shifted(1024)),
    "x spread": lambda: inputs(x=spread(6, 1024)),
    "dy spread": lambda: inputs(dy=spread(6, 1024)),
    "dy repeated": lambda: inputs(dy=rows(1)[0].expand(6, 1024)),
    "x turned": lambda: inputs(x=rows(1024, 6).T),
    "x wants a gradient": lambda: inputs(x=rows().requires_grad_()),
    "dy wants a gradient": lambda: inputs(dy=rows(seed=1).requires_grad_()),
    "dy negative": lambda: inputs(dy=torch._neg_view(rows(seed=1))),
    "dy a subclass": lambda: inputs(dy=TwoTensor(rows(seed=1), rows(seed=1))),
    "dy of another dtype": lambda: inputs(dy=rows(seed=1).half()),
    "dy of another shape": lambda: inputs(dy=rows(5)),
    "half": lambda: inputs(x=rows().half(), dy=rows().half(), weight=rows(1)[0].half()),
    "fp32 weight": lambda: inputs(weight=rows(1, seed=2)[0].float()),
    "one row at an odd stride": lambda: {
        **inputs(1),
        "x": rows(1, 2000).as_strided((1, 1024), (1500, 1)),
    },
    "weight of other length": lambda: inputs(weight=rows(1, 512)[0]),
    "weight per row": lambda: inputs(weight=rows(seed=2)),
    "no weight": lambda: inputs(weight=None),
    "rstd of other length": lambda: inputs(rstd=torch.ones(5)),
    "rstd of another dtype": lambda: inputs(rstd=torch.ones(6).bfloat16()),
    "rstd spread": lambda: inputs(rstd=torch.ones(12)[::2]),
    "rstd no tensor": lambda: inputs(rstd=1.0),
    "dy no tensor": lambda: inputs(dy=None),
}


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize("name", OTHERS)
def test_call_that_differs_in_one_thing_is_left_to_python(
    machine: Machine, make: Any, name: str
) -> None:
    package, never = make(), make(on=False)
    learned(package, entry_point_1)
    learned(package, entry_point_1, 1)
    assert who_served(machine, lambda: entry_point_1(package, **inputs()))[:2] == (1, 0)
    outcomes = []
    for one in (package, never):
        given = OTHERS[name]()
        try:
            by_cpp, _, results = who_served(
                machine, lambda one=one, given=given: entry_point_1(one, **given)
            )
            assert by_cpp == 0
            outcomes.append([getattr(t, "a", t) for t in results if t is not None])
        except (TypeError, ValueError, RuntimeError) as error:
            outcomes.append(str(error))
    if isinstance(outcomes[0], str):
        assert outcomes[0] == outcomes[1].replace(never.ops.namespace, package.ops.namespace)
    else:
        assert equal_bits(*outcomes)
    assert who_served(machine, lambda: entry_point_1(package, **inputs()))[:2] == (1, 0)


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize(
    "call_options",
    [
        {"weight_offset": 1.0},
        {"need_dx": False},
        {"need_dw": False},
        {"dw_dtype": torch.float32},
        {"dw_out": torch.zeros(1024)},
        {"dresidual": rows()},
    ],
    ids=lambda call_options: next(iter(call_options)),
)
def test_options_are_left_to_python(
    machine: Machine, make: Any, call_options: dict[str, Any]
) -> None:
    package = make()
    learned(package, entry_point_1)
    call = lambda: package.rmsnorm_backward(**inputs(), **call_options)  # noqa: E731
    assert who_served(machine, call)[0] == 0


def leaves() -> dict[str, Any]:
    given = inputs()
    return {"x": given["x"].requires_grad_(), "weight": given["weight"].requires_grad_()}


def partly(package: Package, wanted: str) -> Any:
    given = leaves()
    y = package.rms_norm(**given, eps=1e-6)
    return torch.autograd.grad(y, given[wanted], inputs()["dy"])


def twice(package: Package) -> Any:
    given = leaves()
    y = package.rms_norm(**given, eps=1e-6)
    return torch.autograd.grad(y, tuple(given.values()), inputs()["dy"], create_graph=True)


def offset(package: Package) -> Any:
    given = leaves()
    y = package.rms_norm(**given, eps=1e-6, weight_offset=1.0)
    return torch.autograd.grad(y, tuple(given.values()), inputs()["dy"])


@pytest.mark.filterwarnings("ignore:nothing like")
@pytest.mark.parametrize(
    "call",
    [lambda p: partly(p, "x"), lambda p: partly(p, "weight"), twice, offset],
    ids=["only dx", "only dw", "create_graph", "offset"],
)
def test_node_leaves_other_call_options_to_python(machine: Machine, make: Any, call: Any) -> None:
    package = make()
    learned(package)
    assert who_served(machine, lambda: call(package))[0] == 0
    assert who_served(machine, lambda: entry_point_2(package, **inputs()))[:2] == (1, 0)


def state(machine: Machine, name: str) -> Any:
    """Puts the machine, or PyTorch, into a state in which nothing is launched natively."""
    if name == "capturing":
        machine.capturing = True
    elif name == "another device":
        machine.device = 1
    elif name == "another stream":
        machine.stream = 8
    elif name.endswith("refused"):
        machine.errors = {name.split()[0]}
    return Watch() if name == "mode" else nullcontext()


STATES = (
    *("capturing", "another device", "another stream", "mode"),
    *("stream refused", "device refused", "capturing refused"),
)


@entry_points
@pytest.mark.parametrize("name", STATES)
def test_state_of_the_machine_is_asked(
    machine: Machine, make: Any, entry_point: EntryPoint, name: str
) -> None:
    package = make()
    learned(package, entry_point)
    _, _, wanted = who_served(machine, lambda: entry_point(package, **inputs()))
    with state(machine, name):
        by_cpp, by_python, results = who_served(machine, lambda: entry_point(package, **inputs()))
    assert (by_cpp, by_python) == (0, 1)
    assert equal_bits(list(results), list(wanted))
    machine.capturing, machine.device, machine.stream, machine.errors = False, 0, 7, set()
    assert who_served(machine, lambda: entry_point(package, **inputs()))[:2] == (1, 0)


def test_mode_that_watches_the_backward_alone_sees_it(machine: Machine, make: Any) -> None:
    package = make()
    learned(package)
    given = leaves()
    y = package.rms_norm(**given, eps=1e-6)
    with Watch() as watch:
        by_cpp, by_python, _ = who_served(
            machine, lambda: torch.autograd.grad(y, tuple(given.values()), inputs()["dy"])
        )
    assert (by_cpp, by_python) == (0, 1)
    assert any("rms_norm_backward" in name for name in watch.seen)


def test_nothing_is_learned_during_a_capture_or_on_the_per_thread_stream(
    machine: Machine, make: Any
) -> None:
    package = make()
    for machine.stream, machine.capturing in ((7, True), (PER_THREAD, False)):
        learned(package)
        learned(package)
        assert machine.native == []
    machine.stream = 7
    learned(package)
    assert len(machine.native) > 0


def test_shapes_of_the_same_rows_share_a_plan(machine: Machine, make: Any) -> None:
    package = make()
    learned(package, entry_point_1)
    given = inputs()
    cube = {name: given[name].view(2, 3, -1) for name in ("dy", "x", "rstd")}
    by_cpp, by_python, (dx, dw) = who_served(
        machine, lambda: entry_point_1(package, **cube, weight=given["weight"])
    )
    assert (by_cpp, by_python) == (1, 0)
    wanted = entry_point_1(package, **given)
    assert dx.shape == (2, 3, 1024) and equal_bits([dx.view(6, 1024), dw], list(wanted))


def test_scratch_that_grew_is_that_of_every_plan(machine: Machine, make: Any) -> None:
    package = make(SEPARATE)
    learned(package)
    small = machine.native[-2].arguments[10]
    learned(package, M=4096)
    by_cpp, _, _ = who_served(machine, lambda: entry_point_2(package, **inputs(4096)))
    assert by_cpp == 2
    large = machine.native[-2].arguments[10]
    assert (small, 7) in machine.freed and large != small
    by_cpp, _, _ = who_served(machine, lambda: entry_point_2(package, **inputs()))
    assert by_cpp == 2
    assert machine.native[-2].arguments[10] == machine.native[-1].arguments[0] == large
    needed = machine.allocated[large][0]
    assert needed >= 4 * 1024 * machine.native[-3].arguments[2], "room for all partial rows"


def test_scratch_that_was_lost_leaves_calls_to_python_until_there_is_new(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = make(SEPARATE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    learn = package._native.learn

    def learn_without_memory(call: Any) -> None:
        machine.full = True
        learn(call)
        machine.full = False

    learned(package)
    assert who_served(machine, lambda: entry_point_2(package, **inputs()))[:2] == (2, 0)
    package._native.learn = learn_without_memory
    learned(package, M=4096)  # the block of before was freed for a larger one, which there is not
    for M in (6, 4096):
        assert who_served(machine, lambda M=M: entry_point_2(package, **inputs(M)))[:2] == (0, 2)
    package._native.learn = learn
    learned(package, M=7)
    for M, by_cpp in ((6, 2), (7, 2), (4096, 0)):
        assert who_served(machine, lambda M=M: entry_point_2(package, **inputs(M)))[0] == by_cpp


@pytest.mark.parametrize("failures", [1, 2])
def test_scratch_that_comes_back_has_room_for_the_largest_plan(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """However small the call is that brings it back, and however often it failed to come."""
    package = make(SEPARATE)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    learn = package._native.learn
    learned(package, M=16)
    needed = machine.allocated[machine.native[-2].arguments[10]][0]

    def learn_without_memory(call: Any) -> None:
        machine.full = True
        learn(call)
        machine.full = False

    package._native.learn = learn_without_memory
    for M in (4096, 2048)[:failures]:
        learned(package, M=M)
    assert who_served(machine, lambda: entry_point_2(package, **inputs(16)))[:2] == (0, 2)
    package._native.learn = learn
    learned(package, M=2)
    assert who_served(machine, lambda: entry_point_2(package, **inputs(16)))[:2] == (2, 0)
    assert machine.allocated[machine.native[-2].arguments[10]][0] >= needed


@pytest.fixture
def warming(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`warmup` on the fake device."""
    for name, answer in (("is_available", True), ("current_device", 0), ("device", nullcontext())):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(api_module, "raw_stream", lambda device: machine.here())
    on_cpu = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **how: on_cpu(*size, **how))


@pytest.mark.usefixtures("warming")
def test_warmup_takes_the_memory_that_native_launches_need(machine: Machine, make: Any) -> None:
    machine.stream = 8  # the current stream of native launches, and of what is warmed up
    cold, warm = make(SEPARATE), make(SEPARATE)
    warm.warmup([(4096, 1024, "bf16"), (6, 1024, "bf16")])
    for package, takes in ((warm, False), (cold, True)):
        before = len(machine.allocated), len(machine.zeroed)
        learned(package, M=4096)
        assert who_served(machine, lambda p=package: entry_point_2(p, **inputs(4096)))[:2] == (2, 0)
        assert ((len(machine.allocated), len(machine.zeroed)) != before) is takes
    warm.warmup([(6, 1024, "bf16")])
    assert who_served(machine, lambda: entry_point_2(warm, **inputs(4096)))[:2] == (2, 0)


@pytest.mark.usefixtures("warming")
def test_warmup_without_memory_for_native_launches_leaves_them_what_they_had(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    package = make(SEPARATE)
    learned(package)
    plans = package._native.learn.__self__
    workspace = plans._workspaces.of_stream(0, 7)
    most, allocate = 4 * workspace.scratch_words, machine.cuMemAllocAsync
    asked: list[int] = []

    def little(size: int, stream: int) -> tuple[Any, ...]:
        machine.full = size > most and size in asked  # there was room for Python's block
        asked.append(size)
        return allocate(size, stream)

    machine.cuMemAllocAsync = little  # type: ignore[method-assign]
    package.warmup([(4096, 1024, "bf16"), (6, 1024, "bf16")])
    assert max(map(asked.count, asked)) > 1, "some memory was refused"
    assert who_served(machine, lambda: entry_point_2(package, **inputs()))[:2] == (2, 0)
    learned(package, M=4096)
    assert who_served(machine, lambda: entry_point_2(package, **inputs(4096)))[:2] == (0, 2)
    machine.cuMemAllocAsync = allocate  # type: ignore[method-assign]
    package.warmup([(4096, 1024, "bf16")])
    learned(package, M=4095)
    assert who_served(machine, lambda: entry_point_2(package, **inputs(4095)))[:2] == (2, 0)


def test_learning_that_fails_does_not_fail_the_call(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("planted")

    package = make(SEPARATE)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    entry_point_2(package, **inputs())
    machine.full = True  # for the workspace of the native path: Python's is there
    learned(package)
    assert who_served(machine, lambda: entry_point_2(package, **inputs()))[:2] == (0, 2)


def test_other_threads_run_while_a_launch_waits_for_the_driver(module: Any) -> None:
    """A launch that is C's usleep, whose first argument is the address of a configuration."""
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    device, stream = (ctypes.c_int(0), ctypes.c_void_p(7))
    of = ctypes.CFUNCTYPE
    number, pointer = ctypes.POINTER(ctypes.c_int), ctypes.c_void_p

    def give_stream(index: int, at: Any) -> int:
        at[0] = stream.value
        return 0

    def give_zero(at: Any) -> int:
        at[0] = device.value
        return 0

    entries = (
        of(ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(pointer))(give_stream),
        of(ctypes.c_int, number)(give_zero),
        of(ctypes.c_int, pointer, number)(lambda stream, at: give_zero(at)),
    )
    driver = [ctypes.cast(entry, pointer).value for entry in entries] + [usleep]
    store = module.Store(tuple(driver), True, lambda *_: None, lambda *_: None)
    store.set_scratch(0, 7, 4096)
    words = struct.pack
    store.add(
        *(0, 7, 6, 1024, torch.bfloat16, torch.bfloat16, bytes(256), words("Q", 80)),
        *((300_000, 1, words("Q", 0)), (0, 0, b"")),
    )
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.wait(0.01):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        given = inputs()
        before = ticks[0]
        assert store.backward(*(given[name] for name in ("dy", "x", "rstd", "weight"))) is not None
        assert ticks[0] - before >= 5
    finally:
        done.set()
        thread.join()


def test_refused_launch_is_done_by_python_and_is_its_error(machine: Machine, make: Any) -> None:
    package = make()
    learned(package)
    machine.refuse_native = 1
    by_cpp, by_python, _ = who_served(machine, lambda: entry_point_2(package, **inputs()))
    assert (by_cpp, by_python) == (0, 1)
    machine.refuse_native = 1
    machine.status = cuda.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(LaunchError, match="launching example"):
        entry_point_2(package, **inputs())


@entry_points
def test_threads_on_one_stream_do_not_mix(
    machine: Machine, make: Any, entry_point: EntryPoint
) -> None:
    """Both kernels of a call follow each other (`compute` looks), with the call's own tensors."""
    package = make(SEPARATE)
    learned(package, entry_point)
    machine.between = lambda: threading.Event().wait(0.001) and None  # lets other threads run
    wanted = list(entry_point(package, **inputs()))

    def work() -> None:
        for _ in range(10):
            assert equal_bits(list(entry_point(package, **inputs())), wanted)

    before = len(machine.native)
    in_threads([work] * 3)
    pairs = machine.native[before:]
    assert len(pairs) == 60
    for main, second in zip(pairs[::2], pairs[1::2], strict=True):
        assert (main.function, second.function) == NAMES
        assert main.thread == second.thread and main.arguments[5] == second.arguments[1]


@entry_points
def test_threads_on_streams_of_their_own_share_nothing(
    machine: Machine, make: Any, entry_point: EntryPoint
) -> None:
    package = make()

    def work(stream: int) -> None:
        machine.local.stream = stream
        learned(package, entry_point)
        for M in (6, 4096, 6):
            learned(package, entry_point, M)

    in_threads([lambda stream=stream: work(stream) for stream in (11, 12, 13)])  # type: ignore[misc]
    mains = [one for one in machine.native if one.function == NAMES[0]]
    assert {one.stream for one in mains} == {11, 12, 13}
    for one, other in itertools.combinations(mains, 2):
        if one.stream != other.stream:
            assert one.arguments[8] != other.arguments[8]
            assert one.arguments[10] != other.arguments[10]


def test_tangent_of_a_gradient_is_not_dropped(machine: Machine, make: Any) -> None:
    """Forward mode over the backward, by either node: no kernel, and what PyTorch's norm gives."""
    tangent = rows(seed=3)
    for package in (make(), make(on=False)):
        learned(package)
        given = inputs()
        dy, x, weight = given["dy"], given["x"].requires_grad_(), given["weight"].requires_grad_()
        mine = package.rms_norm(x, weight, 1e-6)
        found = []
        for y in (mine, torch.nn.functional.rms_norm(x.double(), (1024,), weight.double(), 1e-6)):
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(dy.to(y.dtype), tangent.to(y.dtype))
                by_cpp, by_python, results = who_served(
                    machine, partial(torch.autograd.grad, y, (x, weight), dual)
                )
                assert (by_cpp, by_python) == (0, 0)
                parts = [torch.autograd.forward_ad.unpack_dual(each).tangent for each in results]
                found.append([part.double() for part in parts])
        for part, reference in zip(*found, strict=True):
            torch.testing.assert_close(part, reference, rtol=0.02, atol=0.05)


def test_growing_while_other_threads_launch(machine: Machine, make: Any) -> None:
    """No native launch uses scratch that was freed before it."""
    package = make(SEPARATE)
    learned(package)

    def launch() -> None:
        for _ in range(150):
            entry_point_2(package, **inputs())

    def grow() -> None:
        for M in (64, 128, 256, 512, 1024, 2048, 4096):
            learned(package, M=M)

    seen: list[tuple[int, list[int]]] = []
    machine.between = lambda: seen.append(
        (
            machine.native[-1].arguments[10 if machine.native[-1].function == NAMES[0] else 0],
            [at for at, _ in machine.freed],
        )
    )
    in_threads([launch, launch, grow])
    assert len({scratch for scratch, _ in seen}) > 2
    assert all(scratch not in freed for scratch, freed in seen)


def test_number_of_plans_is_bounded(
    machine: Machine, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_MOST_PLANS", 3)
    package = make()
    for M in range(1, 9):
        learned(package, M=M)
    served = [
        who_served(machine, lambda M=M: entry_point_2(package, **inputs(M)))[0] for M in range(1, 9)
    ]
    assert served == [1] * 3 + [0] * 5


def test_packages_have_plans_of_their_own(machine: Machine, make: Any) -> None:
    one, two = make(), make(replace(SPEC, threads=128))
    learned(one)
    assert who_served(machine, lambda: entry_point_2(two, **inputs()))[0] == 0
    learned(two)
    blocks = []
    for package in (one, two):
        entry_point_2(package, **inputs())
        blocks.append(machine.native[-1].block)
    assert blocks == [256, 128]


@pytest.mark.parametrize("name", ["x spread", "dy spread", "dy repeated"])
def test_strided_calls_teach_nothing(machine: Machine, make: Any, name: str) -> None:
    """Their strides would be taken for those of dense calls."""
    package, never = make(), make(on=False)
    for _ in range(4):
        entry_point_1(package, **OTHERS[name]())
    for _ in range(5):
        found = entry_point_1(package, **inputs())
    assert len(machine.native) > 0
    assert equal_bits(list(found), list(entry_point_1(never, **inputs())))


def test_more_kinds_than_the_entry_points_try_in_turn_are_learned(
    machine: Machine, make: Any
) -> None:
    package = make()
    shapes = range(1, 3 * _MOST)
    for _, M in itertools.product(range(4), shapes):
        entry_point_2(package, **inputs(M))
    for M in shapes:
        assert who_served(machine, lambda M=M: entry_point_2(package, **inputs(M)))[:2] == (1, 0)


def test_entry_points_teach_each_other(machine: Machine, make: Any) -> None:
    package = make()
    learned(package, entry_point_1)
    assert who_served(machine, lambda: entry_point_2(package, **inputs()))[:2] == (1, 0)


def test_results_in_deterministic_mode_are_not_filled(machine: Machine, make: Any) -> None:
    """What Python allocates is not either; a kernel writes all of it."""
    package = make()
    learned(package)
    machine.idle = True
    torch.use_deterministic_algorithms(True)
    try:
        by_cpp, _, results = who_served(machine, lambda: entry_point_1(package, **inputs()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert by_cpp == 1
    assert not any(result.isnan().all() for result in results)


def test_native_launch_in_a_graph_of_compiled_autograd(machine: Machine, make: Any) -> None:
    package = make()
    wanted = [entry_point_2(package, **inputs()) for _ in range(4)][-1]
    for _ in range(2):
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            given = leaves()
            y = package.rms_norm(**given, eps=1e-6)
            by_cpp, by_python, _ = who_served(machine, lambda y=y: y.backward(inputs()["dy"]))
        assert by_cpp + by_python == 1
        assert equal_bits([given["x"].grad, given["weight"].grad], list(wanted))
    torch._dynamo.reset()


def test_hooks_replays_and_threads_of_a_native_backward(machine: Machine, make: Any) -> None:
    package = make(SEPARATE)
    learned(package)
    given = leaves()
    y = package.rms_norm(**given, eps=1e-6)
    dy = inputs()["dy"]

    def again(keep: bool = True) -> list[torch.Tensor]:
        return list(torch.autograd.grad(y, tuple(given.values()), dy, retain_graph=keep))

    by_cpp, by_python, wanted = who_served(machine, again)
    assert (by_cpp, by_python) == (2, 0)
    in_threads([lambda: [again() for _ in range(10)]] * 3)  # type: ignore[list-item]
    with torch.autograd.set_multithreading_enabled(False):
        by_cpp, _, found = who_served(machine, lambda: again(False))
    assert by_cpp == 2 and equal_bits(found, wanted)
    with pytest.raises(RuntimeError, match="a second time"):
        again()
    with torch.autograd.graph.save_on_cpu():
        by_cpp, _, found = who_served(machine, lambda: list(entry_point_2(package, **inputs())))
    assert equal_bits(found, wanted)


# ---- Build and load ------------------------------------------------------------------------------


def test_nothing_is_built_or_loaded_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("build", "load", "_driver_addresses"):
        monkeypatch.delattr(native, name)
    package = write_package(tmp_path)
    assert vars(package._native).keys() >= {"norm", "backward", "learn"}
    outcome(package)
    assert package._native.norm is package._native.backward is package._native.learn is None


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA")
def test_without_cuda_it_says_so(tmp_path: Path) -> None:
    package = write_package(tmp_path)
    with pytest.raises(RuntimeError, match=r"needs CUDA, and PyTorch .* is built without"):
        package.use_native()
    outcome(package)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def script(path: Path, content: str) -> str:
    path.write_text(f"#!/bin/sh\n{content}\n")
    path.chmod(0o755)
    return str(path)


def test_missing_compiler_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(
        RuntimeError, match="needs a C\\+\\+ compiler, and there is no no-such-comp"
    ):
        native.build()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"there is no c\+\+, g\+\+ or clang\+\+: install one"):
        native.build()


def test_missing_headers_are_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    with pytest.raises(RuntimeError, match=r"/nowhere/Python.h, which is missing: install the dev"):
        native.build()


def test_words_of_the_compiler_are_passed_on(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "CXX", script(tmp_path / "cc", "echo native.cpp:1: error: planted >&2; exit 1")
    )
    with pytest.raises(RuntimeError, match=r"could not compile .*native.cpp: .*planted \(set CXX"):
        native.build()
    assert list((cache / "normforge").iterdir()) == []


def test_folder_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="set TORCH_EXTENSIONS_DIR to a folder"):
        native.build()


def test_damaged_build_is_said(tmp_path: Path) -> None:
    (tmp_path / "native_0.so").write_bytes(b"no library")
    with pytest.raises(RuntimeError, match=r"could not load .*native_0.so .*: remove it"):
        native.load(tmp_path / "native_0.so")


def test_builds_at_the_same_time_leave_one_whole_file(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that writes slowly: nobody sees half a file. Another one makes another file."""
    slow = 'for last; do :; done; printf abc > "$last"; sleep 0.2; printf def >> "$last"'
    monkeypatch.setenv("CXX", script(tmp_path / "cc", slow))
    found: list[tuple[Path, bytes]] = []

    def work() -> None:
        path = native.build()
        found.append((path, path.read_bytes()))

    in_threads([work] * 4)
    ((path, content),) = set(found)
    assert content == b"abcdef" and list((cache / "normforge").iterdir()) == [path]
    monkeypatch.setenv("CXX", script(tmp_path / "cc", "exit 1"))
    assert native.build() == path  # no compiler ran
    monkeypatch.setenv("CXX", script(tmp_path / "dd", slow))
    assert native.build() != path
    assert native.build(("-O1",)) not in (path, native.build())


def test_extension_that_is_loaded_again_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    again = native.load(Path(module.__file__))
    assert again.Store is not module.Store and "normforge_native" not in sys.modules
    packages = [
        started(write_package(tmp_path / str(i)), loaded)
        for i, loaded in enumerate((module, again))
    ]
    assert equal_bits(*(outcome(package) for package in packages))


def test_starting_it_again_changes_nothing(tmp_path: Path, module: Any) -> None:
    package = write_package(tmp_path)
    seen = []

    def work() -> None:
        started(package, module)
        seen.append((package._native.norm, package._native.backward))

    in_threads([work] * 8)
    assert len(set(seen)) == 1


# ---- On a GPU ------------------------------------------------------------------------------------

TUNED = (
    *(
        ("68x1024:bf16", "column_slices"),
        ("777x1024:bf16", "separate"),
        ("68x1024:fp16", "mailbox"),
    ),
    *(("68x1024:fp32", "separate"), ("68x1024:bf16:fp32", "column_slices")),
)


@pytest.fixture(scope="module")
def on_gpu(here: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a few tuned shapes and the fallback kernels."""
    folder = tmp_path_factory.mktemp("native") / "rmsnorm_backward"
    entries = [planted_entry(shape, here, strategy=strategy) for shape, strategy in TUNED]
    emit_package(entries, compiled_fallbacks(here), here, folder)
    return folder


class Pair:
    """The same package without and with the native path. fallbacks: how many backwards of nodes in
    C++ went to Python."""

    def __init__(self, folder: Path) -> None:
        self.python, self.native = Package(folder), Package(folder)
        self.fallbacks = 0
        gradients = self.native._gradients

        def counted(*given: Any) -> Any:
            self.fallbacks += 1
            return gradients(*given)

        self.native._gradients = counted  # type: ignore[method-assign]
        self.native.use_native()


@pytest.fixture
def pair(on_gpu: Path) -> Pair:
    return Pair(on_gpu)


def gpu_inputs(shape: str, seed: int = 0) -> Any:
    problem = Problem.parse(shape)
    made = make_inputs(problem, torch.device("cuda", 0))
    generator = torch.Generator("cuda").manual_seed(seed)
    dy = torch.randn(made.dy.shape, device="cuda", generator=generator).to(made.dy.dtype)
    return made.x.requires_grad_(), made.weight.requires_grad_(), dy


def steps(package: Package, shape: str, count: int = 6, seed: int = 0) -> list[torch.Tensor]:
    x, weight, dy = gpu_inputs(shape, seed)
    results: list[torch.Tensor] = []
    for _ in range(count):
        results += torch.autograd.grad(package.rms_norm(x, weight, 1e-6), (x, weight), dy)
    return results


GPU_SHAPES = (
    *("68x1024:bf16", "777x1024:bf16", "68x1024:fp16", "68x1024:fp32", "68x1024:bf16:fp32"),
    *("70x1024:bf16", "3001x1024:bf16", "100000x1024:bf16", "1x1024:bf16"),
    *("500x768:bf16", "500x1001:fp16", "500x768:fp32", "500x768:bf16:fp32"),
)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_gpu_native_launches_give_the_bits_of_python(pair: Pair, shape: str) -> None:
    wanted = steps(pair.python, shape)
    found = steps(pair.native, shape)
    assert equal_bits(found, wanted)
    before = pair.fallbacks
    assert before < 6, "not one backward was native"
    assert equal_bits(steps(pair.native, shape), wanted) and pair.fallbacks == before
    x, weight, dy = gpu_inputs(shape)
    rstd = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6)
    given = (dy, x.detach(), rstd, weight.detach())
    assert pair.native._native.backward is not None
    direct = pair.native._native.backward(*given)
    assert direct is not None
    assert equal_bits(list(direct), list(pair.python.rmsnorm_backward(*given)))


@pytest.mark.gpu
def test_gpu_scratch_grows_under_plans_that_are_in_use(pair: Pair) -> None:
    for shape in ("68x1024:bf16", "777x1024:bf16", "100000x1024:bf16", "500x768:bf16") * 2:
        assert equal_bits(steps(pair.native, shape), steps(pair.python, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_two_streams_in_two_threads(pair: Pair, shape: str) -> None:
    wanted = [steps(pair.python, shape, 1, seed) for seed in range(2)]
    torch.cuda.synchronize()
    found: dict[int, list[torch.Tensor]] = {}

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[seed] = steps(pair.native, shape, 200, seed)
            torch.cuda.current_stream().synchronize()

    in_threads([lambda seed=seed: work(seed) for seed in range(2)])  # type: ignore[misc]
    assert pair.fallbacks < 50
    for seed in range(2):
        assert equal_bits(found[seed], wanted[seed] * 200)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_two_devices_in_turn(pair: Pair, shape: str) -> None:
    """The current device stays the first one; each has streams, plans and scratch of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, {torch.cuda.device_count()} is here")
    wanted = [result.cpu() for result in steps(pair.python, shape, 1)]
    here = gpu_inputs(shape)
    there = [t.detach().to("cuda:1").requires_grad_(t.requires_grad) for t in here]
    for _ in range(8):
        for x, weight, dy in (here, there):
            grads = torch.autograd.grad(pair.native.rms_norm(x, weight, 1e-6), (x, weight), dy)
            rstd = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6)
            given = (dy, x.detach(), rstd, weight.detach())
            direct = pair.native.rmsnorm_backward(*given)
            assert torch.cuda.current_device() == 0
            assert {result.device for result in (*grads, *direct)} == {x.device}
            assert equal_bits([result.cpu() for result in grads], wanted)
            assert equal_bits(list(direct), list(pair.python.rmsnorm_backward(*given)))
    assert pair.fallbacks < 8


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_native_and_python_calls_mix_on_one_stream(pair: Pair, shape: str) -> None:
    """`rmsnorm_backward` with an option goes through Python in between, on the same stream."""
    x, weight, dy = gpu_inputs(shape)
    rstd = torch.rsqrt(x.detach().float().square().mean(-1, keepdim=True) + 1e-6)
    wanted = steps(pair.python, shape, 1)
    wide = pair.python.rmsnorm_backward(dy, x, rstd, weight, dw_dtype=torch.float32)
    results: list[torch.Tensor] = []
    mixed: list[Any] = []
    for _ in range(100):
        results += torch.autograd.grad(pair.native.rms_norm(x, weight, 1e-6), (x, weight), dy)
        mixed += pair.native.rmsnorm_backward(dy, x, rstd, weight, dw_dtype=torch.float32)
    assert equal_bits(results, wanted * 100) and equal_bits(mixed, list(wide) * 100)
    assert pair.fallbacks < 10


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["68x1024:bf16", "777x1024:bf16"])
def test_gpu_captured_backward_goes_through_python(pair: Pair, shape: str) -> None:
    x, weight, dy = gpu_inputs(shape)

    def backward() -> list[torch.Tensor]:
        return list(torch.autograd.grad(pair.native.rms_norm(x, weight, 1e-6), (x, weight), dy))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = [backward() for _ in range(5)][-1]
    torch.cuda.current_stream().wait_stream(side)
    before, graph = pair.fallbacks, torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        captured = backward()
    assert pair.fallbacks == before + 1
    for _ in range(3):
        for result in captured:
            result.fill_(float("nan"))
        graph.replay()
        assert equal_bits(captured, wanted)
    with torch.cuda.stream(side):
        assert equal_bits(backward(), wanted)
    assert pair.fallbacks == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("threaded", [False, True])
def test_gpu_graph_that_is_kept_is_gone_through_again(pair: Pair, threaded: bool) -> None:
    x, weight, dy = gpu_inputs("777x1024:bf16")
    steps(pair.native, "777x1024:bf16")
    before = pair.fallbacks
    with torch.autograd.set_multithreading_enabled(threaded):
        y = pair.native.rms_norm(x, weight, 1e-6)
        one, two = (torch.autograd.grad(y, (x, weight), dy, retain_graph=True) for _ in range(2))
    assert equal_bits(list(one), list(two))
    assert equal_bits(list(one), steps(pair.python, "777x1024:bf16", 1))
    assert pair.fallbacks == before


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_gpu_trainings_have_the_same_bits(
    pair: Pair, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The QK-norms are on slices and go through Python, the norms of the hidden size do not."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes = {"width": 1024, "heads": 8, "tokens": 32}
    torch.use_deterministic_algorithms(deterministic)
    try:
        runs = [
            Training(*make_entry_point(package, "2"), "cuda", torch.bfloat16, **sizes).train(8)
            for package in (pair.python, pair.native)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert equal_bits(*runs)
    assert 0 < pair.fallbacks < 8 * 9
