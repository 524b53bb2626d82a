"""A device for the native path: PyTorch's tensors of the CPU, a driver made of callbacks."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from normforge.api import Package
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.launch.workspace import PER_THREAD
from normforge.operations import LAYERNORM_FORWARD
from normforge.operations.formula import evaluate
from normforge.serve.reference import reference_backward, reference_forward
from normforge.spec import FORWARD_KERNELS
from tests.support.entry_points import equal_bits, leaf
from tests.support.fake_driver import FakeDriver, ForwardArguments, read_arguments
from tests.support.patience import patience


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
        thread.join(patience(60))
        assert not thread.is_alive()
    if errors:
        raise errors[0]


NOBODY = (0, 0, 0, 0)
"""A driver for packages whose calls are never launched: they serve CUDA tensors, and get none."""


AnyPackage = Package | LayerNormPackage
OPERATIONS = ("rmsnorm_backward", "layernorm_backward")
"""The operations that packages with a native path are of."""
rms_norm_only = pytest.mark.parametrize("operation", OPERATIONS[:1], indirect=True)
layer_norm_only = pytest.mark.parametrize("operation", OPERATIONS[1:], indirect=True)


@pytest.fixture(params=OPERATIONS, name="operation")
def both_norms(request: pytest.FixtureRequest) -> str:
    """The operation of the packages of `make`, in a file whose tests are of either norm."""
    name: str = request.param
    return name


def started(package: Any, module: Any, driver: Any = NOBODY, on_cpu: bool = False) -> Any:
    package._start_native(module, driver, on_cpu)
    return package


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
        self.square_rstd = False  # the kernels do it in fp32, which may overflow
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
        return cuda.CUresult.CUDA_SUCCESS, Function(_FUNCTIONS.index(name.decode()) + 1)

    def cuLaunchKernelEx(  # noqa: N802
        self, config: Any, function: Any, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        name = _FUNCTIONS[int(function) - 1]
        status = super().cuLaunchKernelEx(config, name, parameters, extra)
        if status[0] == 0:
            self._compute(name, parameters)
        return status

    def cuMemAllocAsync(self, size: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        if self.full:
            return cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        status, address = super().cuMemAllocAsync(size, stream)
        self.allocated[int(address)] = (size, stream)
        return status, address

    def _compute(self, name: str, parameters: int) -> None:
        compute(name, parameters)
        if self.square_rstd and name == NAMES[0]:
            given = read_arguments(name, parameters)
            squares = at_address(given.rstd, given.rows, dtype=torch.float32).square()
            at_address(given.dx, given.rows, given.columns)[squares.isinf()] = torch.inf

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
        name = _FUNCTIONS[function - 1]
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
            self._compute(name, parameters)
        self.between()
        return 0


def attributes_of(config: int) -> set[int]:
    """Return the attributes that a CUlaunchConfig has."""
    first, count = (ctypes.c_uint64.from_address(config + at).value for at in (40, 48))
    kinds = range(first, first + 72 * (count & 0xFFFFFFFF), 72)
    return {ctypes.c_int.from_address(at).value for at in kinds}


class Function(int):
    """A handle; FakeDriver takes names."""


NAMES = ("rmsnorm_backward", "sum_partials")
_FUNCTIONS = (*NAMES, *FORWARD_KERNELS, "layernorm_backward", LAYERNORM_FORWARD.name)
_started = threading.local()


def compute(name: str, parameters: int) -> None:
    """Compute what a kernel does, in bf16. The main one of a backward computes both, and the second
    one, which has to follow it, puts dw in place again."""
    given = read_arguments(name, parameters)
    if name in FORWARD_KERNELS:
        compute_forward(given)
        return
    if name == LAYERNORM_FORWARD.name:
        compute_layer_norm(given)
        return
    if name == "sum_partials":
        of_call = (given.scratch, given.sums)
        assert _started.last[:2] == of_call, "the main kernel of the same call comes first"
        at_address(given.sums, given.columns)[:] = _started.last[2]
        return
    size = given.rows, given.columns
    dy, x = at_address(given.dy, *size, given.dy_stride), at_address(given.x, *size, given.x_stride)
    saved = {
        each: at_address(getattr(given, each), given.rows, dtype=torch.float32)
        for each in ("rstd", "mean")
        if hasattr(given, each)
    }
    found = reference_backward(dy, x, weight=at_address(given.weight, given.columns), **saved)
    dx, dw = found[0], found[1].flatten()  # type: ignore[union-attr]
    if given.dx:
        at_address(given.dx, *size)[:] = dx
    if given.dw and given.dw_mode == 0:
        at_address(given.dw, dw.numel())[:] = dw
    _started.last = (given.scratch, given.dw, dw)


def compute_forward(given: ForwardArguments) -> None:
    size = given.rows, given.columns
    x, step = at_address(given.x, *size, given.x_stride), given.residual_stride
    other = at_address(given.residual, *size, step) if given.residual else None
    scale = at_address(given.weight, given.columns) if given.weight else None
    found = reference_forward(x, scale, given.eps, given.weight_offset, other)
    at_address(given.y, *size)[:] = found[0]
    at_address(given.rstd, given.rows, dtype=torch.float32)[:] = found[1].view(-1)
    if given.residual_out:
        at_address(given.residual_out, *size)[:] = found[2]


def compute_layer_norm(given: Any) -> None:
    size = given.rows, given.columns
    tensors: dict[str, Any] = {"x": at_address(given.x, *size, given.x_stride), "eps": given.eps}
    for name in ("weight", "bias"):
        address = getattr(given, name)
        tensors[name] = at_address(address, given.columns) if address else None
    found = evaluate(LAYERNORM_FORWARD, tensors)
    at_address(given.y, *size)[:] = found["y"]
    for name in ("mean", "rstd"):
        statistic = at_address(getattr(given, name), given.rows, dtype=torch.float32)
        statistic[:] = found[name].view(-1)


def at_address(
    address: int, count: int, columns: int = 1, stride: int = 1, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A vector; with `columns` so many rows, `stride` elements apart."""
    stride = columns if stride == 1 else stride
    size = (count - 1) * stride + columns
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat if columns == 1 else flat.as_strided((count, columns), (stride, 1))


def rows(M: int = 6, N: int = 1024, seed: int = 0) -> torch.Tensor:
    return torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(M: int = 6, **change: Any) -> dict[str, Any]:
    """Return dy, x, rstd and weight."""
    x = rows(M)
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    given = {"dy": rows(M, seed=1), "x": x, "rstd": rstd, "weight": rows(1, seed=2)[0]}
    return given | change


def mean_of(rstd: Any) -> Any:
    """A mean like an rstd, also one that does not fit. It need not be that of rows."""
    return rstd / 2 if isinstance(rstd, torch.Tensor) else torch.zeros(6, 1)


def by_backward(package: Any, dy: Any, x: Any, rstd: Any, weight: Any, **options: Any) -> Any:
    if isinstance(package, LayerNormPackage):
        return package.layer_norm_backward(dy, x, mean_of(rstd), rstd, weight, **options)
    return package.rmsnorm_backward(dy, x, rstd, weight, **options)


def norm(package: Any, x: Any, weight: Any, bias: Any = None, eps: float = 1e-6) -> Any:
    """Return y of a norm, of which LayerNorm alone has a bias."""
    if isinstance(package, LayerNormPackage):
        return package.layer_norm(x, weight, bias, eps)
    return package.rms_norm(x, weight, eps)


def module_of(package: Any, width: int) -> Any:
    """The package's module of a width."""
    return (getattr(package, "LayerNorm", None) or package.RMSNorm)(width, eps=1e-6)


def by_autograd(package: Any, dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
    """Compute the gradients by autograd; rstd is computed by the forward."""
    given = [t if t.requires_grad else t.detach().requires_grad_() for t in (x, weight)]
    if isinstance(package, LayerNormPackage):
        given.append(given[1].detach().clone().requires_grad_())
    return torch.autograd.grad(norm(package, *given), given, dy)


def call_operator(package: Any, dy: Any, x: Any, rstd: Any, weight: Any, *options: Any) -> Any:
    """Call the operator as compiled code does."""
    call = (dy, x, rstd, weight, *(options or (None, None, 0.0, True, True)), package.name)
    if isinstance(package, LayerNormPackage):
        return package.ops.layer_norm_backward(*call, mean_of(rstd))
    return package.ops.rms_norm_backward(*call)


def by_operator(package: Any, dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
    dx, dw, none = call_operator(package, dy, x, rstd, weight)
    assert none.shape == (0,) and none.dtype == x.dtype
    return dx, *(dw if isinstance(package, LayerNormPackage) else (dw,))


EntryPoint = Callable[..., Any]
entry_points = pytest.mark.parametrize("entry_point", [by_backward, by_autograd, by_operator])


def learned(package: Any, entry_point: EntryPoint = by_autograd, M: int = 6) -> None:
    """Make calls enough that the next one like them is native."""
    for _ in range(4):
        entry_point(package, **inputs(M))


def who_served(machine: Machine, call: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return how many kernels C++ and Python launched for a call, and its results."""
    before = len(machine.native), len(machine.launches)
    results = call()
    return len(machine.native) - before[0], len(machine.launches) - before[1], results


def attempt(machine: Machine, call: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many kernels C++ launched for a call, and its results, or its error in words."""
    try:
        by_cpp, _, results = who_served(machine, call)
    except (TypeError, ValueError, RuntimeError) as error:
        return 0, (type(error), str(error))
    return by_cpp, [getattr(t, "a", t).detach() for t in results if t is not None]


def alike(one: Any, other: Any, names: tuple[str, str] = ("", "")) -> bool:
    """Say whether two attempts had the same bits, or the same error of packages of these names."""
    if isinstance(one, list):
        return equal_bits(one, other)
    mine, theirs = (
        (kind, said.replace(name, ""))
        for (kind, said), name in zip((one, other), names, strict=True)
    )
    return bool(mine == theirs)


STATES: dict[str, dict[str, Any]] = {
    "capturing": {"capturing": True},
    "another device": {"device": 1},
    "another stream": {"stream": 8},
    "the stream of each thread": {"stream": PER_THREAD},
    **{f"{name} refused": {"errors": {name}} for name in ("stream", "device", "capturing")},
    "a mode": {},
}
"""States of the machine, or of PyTorch, in which nothing is launched natively."""


@contextmanager
def in_state(machine: Machine, name: str) -> Iterator[None]:
    before = {key: getattr(machine, key) for key in STATES[name]}
    vars(machine).update(STATES[name])
    try:
        with Watch() if name == "a mode" else nullcontext():
            yield
    finally:
        vars(machine).update(before)


def check_launches(
    machine: Machine, found: list[SimpleNamespace], wanted: list[SimpleNamespace]
) -> None:
    """Assert that launches are equal but for the tensors, which others were allocated, and the
    workspace: counters that were zeroed, scratch that was allocated and not freed, both of one
    stream and of nobody in Python."""
    for one, two in zip(found, wanted, strict=True):
        for name in ("function", "grid", "block", "smem", "stream"):
            assert getattr(one, name) == getattr(two, name), name
        assert one.attributes == {int(kind) for kind in two.attributes}
    main, python = found[0].arguments, wanted[0].arguments
    if "mean" in main._fields:  # of each call's own
        python = python._replace(mean=main.mean)
    numbers = main._fields.index("rows")
    assert main[numbers:] == python[numbers:]
    counters, zeroed, scratch = main.counters, main.zeroed, main.scratch
    assert zeroed - counters == python.zeroed - python.counters
    if zeroed:
        assert any(at <= counters < zeroed <= at + size for at, size in machine.zeroed)
    assert scratch in machine.allocated, "scratch that nobody allocated"
    assert all(scratch != freed for freed, _ in machine.freed), "scratch that was freed"
    for other in machine.launches:
        if other.function in OPERATIONS:
            theirs = other.arguments
            shared = scratch == theirs.scratch or 0 != counters == theirs.counters
            assert not shared, "memory of a call through Python"
    for second in found[1:]:
        theirs = wanted[1].arguments._replace(scratch=scratch, sums=main.dw)
        assert second.arguments == theirs


def installed_natively(name: str = "_fused_rms_norm_backward") -> bool:
    """Return True if this backward of PyTorch for CUDA is the kernel in C++ of some package."""
    dump = torch._C._dispatch_dump_table(f"aten::{name}")
    lines = [line for line in dump.splitlines() if line.startswith("CUDA: ")]
    return any("installed.h" in line for line in lines)


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def shifted(*shape: int) -> torch.Tensor:
    """Return the values at an odd address."""
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
    "x of another dtype": lambda: inputs(x=rows().half()),
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


def leaves(package: Any) -> dict[str, Any]:
    given = inputs()
    found = {name: given[name].requires_grad_() for name in ("x", "weight")}
    if isinstance(package, LayerNormPackage):
        found["bias"] = rows(1, seed=3)[0].requires_grad_()
    return found


_LEAVES = ("x", "weight", "bias")


def outcome(package: Any, dy: Any = None, **change: Any) -> list[Any]:
    given = {"x": leaf(6, 16), "weight": leaf(16, seed=1)} | change
    centred = isinstance(package, LayerNormPackage)
    if centred:
        given.setdefault("bias", leaf(16, seed=3))
    leaves = [t for name, t in given.items() if name in _LEAVES and t is not None]
    leaves = [t for t in leaves if t.requires_grad]
    y = package.layer_norm(**given) if centred else package.rms_norm(**given)
    assert y.requires_grad is bool(leaves)
    if not leaves:
        return [y]
    dy = leaf(*y.shape, dtype=y.dtype, seed=2).detach() if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]
