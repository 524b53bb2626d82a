"""Calls that the entry points recognise are served as those that they do not.

On CPU tensors: what serves a signature is a stand-in that refuses every other signature, and the
calls that had to be prepared are counted.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from normforge.api import Package
from normforge.serve.call import formula
from normforge.serve.call_cache import _MOST_RECENT as _MOST
from normforge.serve.call_cache import CallCache
from normforge.serve.forward import Forward
from normforge.serve.kernels import source_of
from normforge.serve.options import Arguments, Options
from normforge.table import MAX_ALIGNMENT
from tests.support.entry_points import (
    aten_on_cpu,
    routing_on_cpu,
    same,
    write_layer_norm_package,
    write_package,
)
from tests.support.native import in_threads

Tensors = tuple[Any, ...]
Keywords = dict[str, Any]


def facts(tensor: torch.Tensor | None) -> Any:
    """Return the facts by which a kernel is chosen."""
    if tensor is None:
        return None
    address = tensor.data_ptr() % MAX_ALIGNMENT
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, address


class Own:
    """Serves one signature: tensors with the facts of those that it was made for."""

    def __init__(self, options: Options, *tensors: Any) -> None:
        self.options, self.facts = options, tuple(map(facts, tensors))
        whole = all(t is not None for t in tensors[:4]) and tensors[4:6] == (None, None)
        self.quick = self._quick if whole else None

    def __call__(self, *tensors: Any) -> Tensors:
        assert tuple(map(facts, tensors)) == self.facts
        assert not any(tensor is not None and tensor.is_neg() for tensor in tensors)
        weight, mean = tensors[3], tensors[6]
        sums = weight if weight is None or mean is None else torch.stack((weight, weight))
        return tensors[1], sums

    def _quick(self, *tensors: Any) -> Tensors | None:
        if any(tensors[i].data_ptr() % MAX_ALIGNMENT for i in (0, 1, 3)):
            return None
        return self(*tensors[:4], None, None, tensors[4], None)


class EntryPoint:
    """A way to make a call. arguments of a call: its tensors, None where there is none; keywords.

    write: makes its package. names: of the tensors. options: that the call takes, one at a time.
    prepared: how many calls were prepared.
    """

    write: Callable[[Path], Any] = staticmethod(write_package)
    names: tuple[str, ...] = ("dy", "x", "rstd", "weight", "dresidual", "dw_out")
    options: tuple[Keywords, ...] = ()
    prepared = 0

    def call(self, *tensors: Any, **options: Any) -> None:
        raise NotImplementedError

    def around(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def known_after(self, *tensors: Any, **options: Any) -> bool:
        """Make the call, and say whether it was recognised."""
        before = self.prepared
        self.call(*tensors, **options)
        return self.prepared == before

    def count(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            self.prepared += 1
            return prepare(*given)

        return counted


class TheForward(EntryPoint):
    names = ("x", "weight", "residual")

    def __init__(self, package: Package) -> None:
        self.forward = forward_on_cpu(package.folder)
        self.forward._prepare = self.count(self._prepare)  # type: ignore[method-assign]

    @staticmethod
    def _prepare(*tensors: Any) -> Any:
        def told(x: Any, weight: Any, residual: Any) -> Any:
            *_, at = facts(x)
            shapes = [tensor is not None and facts(tensor)[:-1] for tensor in (x, weight, residual)]
            # One kernel reads x and residual by vectors of one size.
            return shapes, at | (facts(residual) or [0])[-1], (facts(weight) or [0])[-1]

        wanted = told(*tensors)

        def serve(x: Any, weight: Any, eps: Any, offset: Any, residual: Any) -> Any:
            assert told(x, weight, residual) == wanted
            assert not x.is_neg()
            assert (eps, offset) == (1e-6, 0.5)  # no part of a signature
            return x, None

        return serve

    def call(self, *tensors: Any, **options: Any) -> None:
        x, weight, residual = tensors
        self.forward(x, weight, 1e-6, 0.5, residual)


OPTIONS: tuple[Keywords, ...] = (
    {"need_dx": False},
    {"need_dw": False},
    {"accumulate": True},
    {"dw_dtype": torch.float32},
    {"weight_offset": 1.0},
)


class Backward(EntryPoint):
    options = OPTIONS

    def __init__(self, package: Any) -> None:
        self.package = package
        package._find = self.count(package._find)  # type: ignore[method-assign]

    def call(self, *tensors: Any, **options: Any) -> None:
        dy, x, rstd, weight, dresidual, dw_out = tensors
        self.package.rmsnorm_backward(
            dy, x, rstd, weight, dresidual=dresidual, dw_out=dw_out, **options
        )


class Composed(Backward):
    """`rmsnorm_backward` as compositions call it, past the list of recent calls."""

    def call(self, *tensors: Any, **options: Any) -> None:
        self.package._run(Arguments(*tensors), Options(**options))


class Installed(EntryPoint):
    names = ("dy", "x", "rstd", "weight")

    def __init__(self, package: Any) -> None:
        self.package = package
        package._find = self.count(package._find)

    def call(self, *tensors: Any, **options: Any) -> None:
        dy, x, rstd, weight = tensors
        with torch.no_grad():
            torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], rstd, weight, [True, True])

    def around(self) -> AbstractContextManager[Any]:
        return routing_on_cpu(self.package).installed()


class LayerNorm(Backward):
    write = staticmethod(write_layer_norm_package)
    names = (*EntryPoint.names, "mean")
    options = OPTIONS[:-1]

    def call(self, *tensors: Any, **options: Any) -> None:
        dy, x, rstd, weight, dresidual, dw_out, mean = tensors
        more = {"dresidual": dresidual, "dw_out": dw_out, **options}
        self.package.layer_norm_backward(dy, x, mean, rstd, weight, **more)


class InstalledLayerNorm(Installed):
    write = staticmethod(write_layer_norm_package)
    names = ("dy", "x", "rstd", "weight", "mean")

    def call(self, *tensors: Any, **options: Any) -> None:
        dy, x, rstd, weight, mean = tensors
        backward, shape = torch.ops.aten.native_layer_norm_backward, x.shape[-1:]
        with torch.no_grad():
            backward(dy, x, shape, mean, rstd, weight, weight, [True, True, True])


ENTRY_POINTS: tuple[type[Any], ...] = (
    TheForward,
    Backward,
    Composed,
    Installed,
    LayerNorm,
    InstalledLayerNorm,
)
BACKWARDS = (Backward, LayerNorm)


def forward_on_cpu(folder: Path) -> Forward:
    """A forward that keeps calls on the CPU too."""
    forward = Forward(source_of(folder, "rmsnorm_backward"))
    for calls in forward._calls.values():
        calls._device = ""
    return forward


def a_package(folder: Path, write: Callable[[Path], Any] = write_package) -> Any:
    """A package whose calls are recognised and served by an `Own` each, on the CPU."""
    package = write(folder)
    package._calls._device = ""
    package._find = lambda given, options: Own(options, *vars(given).values())
    return package


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return a_package(tmp_path)


@pytest.fixture(params=ENTRY_POINTS)
def entry_point(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EntryPoint]:
    made: EntryPoint = request.param(a_package(tmp_path, request.param.write))
    with aten_on_cpu(), made.around():
        yield made


def tensors_of(entry_point: EntryPoint, M: int = 6, **changes: Any) -> Tensors:
    plain = {
        **{"dy": torch.zeros(M, 64), "x": torch.zeros(M, 64), "rstd": torch.zeros(M, 1)},
        **{"weight": torch.zeros(64), "mean": torch.zeros(M, 1)},
    } | changes
    return tuple(plain.get(name) for name in entry_point.names)


def shifted(*shape: int) -> torch.Tensor:
    """Zeros at an odd address."""
    return torch.zeros(torch.Size(shape).numel() + 1)[1:].view(shape)


# Every attribute of every tensor, one at a time. (Some of these calls the real checks would refuse:
# a call that is wrong must not be recognised either.)
ROWS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: torch.zeros(7, 64),
    "columns": lambda: torch.zeros(6, 128),
    "dimensions": lambda: torch.zeros(2, 3, 64),
    "row stride": lambda: torch.zeros(6, 72)[:, :64],
    "one row repeated": lambda: torch.zeros(64).expand(6, 64),
    "columns apart": lambda: torch.zeros(64, 6).T,
    "dtype": lambda: torch.zeros(6, 64).bfloat16(),
    "device": lambda: torch.zeros(6, 64, device="meta"),
    "alignment": lambda: shifted(6, 64),
    "requires_grad": lambda: torch.zeros(6, 64).requires_grad_(),
    "type": lambda: torch.nn.Parameter(torch.zeros(6, 64), requires_grad=False),
    "dispatch keys": lambda: torch._neg_view(torch.zeros(6, 64)),
}
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "length": lambda: torch.zeros(65),
    "dimensions": lambda: torch.zeros(1, 64),
    "stride": lambda: torch.zeros(128)[::2],
    "dtype": lambda: torch.zeros(64).half(),
    "device": lambda: torch.zeros(64, device="meta"),
    "alignment": lambda: shifted(64),
    "requires_grad": lambda: torch.zeros(64).requires_grad_(),
    "type": lambda: torch.nn.Parameter(torch.zeros(64)),
}
RSTD: dict[str, Callable[[], torch.Tensor]] = {
    "shape": lambda: torch.zeros(6),
    "stride": lambda: torch.zeros(6, 2)[:, :1],
    "dtype": lambda: torch.zeros(6, 1).double(),
    "device": lambda: torch.zeros(6, 1, device="meta"),
    "requires_grad": lambda: torch.zeros(6, 1).requires_grad_(),
}
CHANGES: dict[str, dict[str, Callable[[], Any]]] = {
    "x": ROWS,
    "dy": ROWS,
    "rstd": RSTD,
    "weight": OTHERS | {"none": lambda: None},
    "residual": {"given": lambda: torch.zeros(6, 64)},
    "dresidual": {"given": lambda: torch.zeros(6, 64)},
    "dw_out": {"given": lambda: torch.zeros(2, 64)},
    "mean": RSTD,
}


def changes_of(entry_point: EntryPoint, base: Tensors) -> Iterator[tuple[str, Tensors, Keywords]]:
    """`base` with one thing changed, by name."""
    for i, name in enumerate(entry_point.names):
        # Tensors that `base` has and a plain call has not change as rows and weights do.
        plain = ("residual", "dresidual", "dw_out")
        kinds = CHANGES[name]
        if name in plain and base[i] is not None:
            kinds = {"none": lambda: None, **(OTHERS if name == "dw_out" else ROWS)}
        for what, make in kinds.items():
            if isinstance(entry_point, Installed) and what in ("device", "dispatch keys", "none"):
                continue  # the dispatcher refuses or resolves these, or wants no gradient of it
            yield f"{name}: {what}", (*base[:i], make(), *base[i + 1 :]), {}
    for option in entry_point.options:
        yield str(option), base, option


@pytest.mark.parametrize("whole", [False, True], ids=["plain", "all tensors"])
@pytest.mark.parametrize("late", [False, True], ids=["recent", "late"])
def test_call_that_differs_in_one_thing_is_not_recognised(
    entry_point: EntryPoint, late: bool, whole: bool
) -> None:
    """Neither by the checks that are tried in turn, nor where a shape's calls are looked for."""
    more = {"residual": torch.zeros(6, 64), "dresidual": torch.zeros(6, 64)}
    base = tensors_of(entry_point, **({**more, "dw_out": torch.zeros(2, 64)} if whole else {}))
    if late:
        for M, _ in itertools.product(range(10, 10 + _MOST), range(3)):
            entry_point.call(*tensors_of(entry_point, M, **(change_rows(M, more) if whole else {})))
    for _ in range(2):
        entry_point.call(*base)
    assert entry_point.known_after(*base)
    seen = 0
    for what, tensors, call_options in changes_of(entry_point, base):
        known = entry_point.known_after(*tensors, **call_options)
        # A lazily negated view is resolved, and then it is of the base's kind.
        assert known is what.endswith("dispatch keys"), what
        entry_point.call(*base)  # a key keeps the last few kinds only
        assert entry_point.known_after(*base), what
        seen += 1
    assert seen > 20


def change_rows(M: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = {name: torch.zeros(M, 64) for name in tensors}
    return {**rows, "dw_out": torch.zeros(2, 64)}


def test_calls_of_many_kinds_are_recognised_in_turn(entry_point: EntryPoint) -> None:
    kinds = [tensors_of(entry_point, M) for M in range(1, 3 * _MOST)]
    kinds += [
        tensors_of(entry_point, M, weight=torch.nn.Parameter(torch.zeros(64))) for M in range(1, 6)
    ]
    for call_options in [{}, *entry_point.options[-1:]]:
        for _, tensors in itertools.product(range(2), kinds):
            entry_point.call(*tensors, **call_options)
        for _, tensors in itertools.product(range(40), kinds):  # the list is renewed on the way
            assert entry_point.known_after(*tensors, **call_options)


@pytest.mark.parametrize("kind", ENTRY_POINTS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(picks=st.lists(st.integers(0, 10**6), min_size=30, max_size=150))
def test_every_call_is_served_as_its_own_in_any_order(
    kind: type[Any], picks: list[int], tmp_path: Path
) -> None:
    """Lists are renewed and tables cleared all the time. An `Own` refuses other calls."""
    entry_point = kind(a_package(tmp_path, kind.write))
    with pytest.MonkeyPatch.context() as patch, aten_on_cpu(), entry_point.around():
        patch.setattr("normforge.serve.call_cache._MOST_KEYS", 5)
        patch.setattr("normforge.serve.call_cache._MISSES_TO_FORGET", 3)
        kinds: list[tuple[Tensors, Keywords]] = [
            (tensors_of(entry_point, M), {}) for M in range(1, 15)
        ]
        kinds += [
            (tensors, call_options)
            for _, tensors, call_options in changes_of(entry_point, tensors_of(entry_point))
        ]
        for pick in picks:
            tensors, call_options = kinds[pick % len(kinds)]
            for _ in range(1 + pick % 3):
                entry_point.call(*tensors, **call_options)


QUICK = [made for made in ENTRY_POINTS if made is not Composed]


@pytest.mark.parametrize("entry_point", QUICK, indirect=True)
def test_recent_calls_are_found_by_the_first_checks_alone(
    entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [tensors_of(entry_point, M) for M in range(1, 1 + _MOST)]
    for _, tensors in itertools.product(range(2), kinds):
        entry_point.call(*tensors)
    monkeypatch.delattr(CallCache, "find")
    for tensors in kinds:
        assert entry_point.known_after(*tensors)


@pytest.mark.parametrize("kind", BACKWARDS)
def test_calls_of_the_formula_off_the_gpu_are_not_kept(tmp_path: Path, kind: type[Any]) -> None:
    entry_point = kind(kind.write(tmp_path))
    for _ in range(3):
        assert not entry_point.known_after(*tensors_of(entry_point))


def test_threads_are_served_each_with_its_own(
    entry_point: EntryPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normforge.serve.call_cache._MOST_KEYS", 30)
    monkeypatch.setattr("normforge.serve.call_cache._MISSES_TO_FORGET", 3)

    def work(first: int) -> None:
        for _, M in itertools.product(range(20), range(first, first + 2 * _MOST)):
            entry_point.call(*tensors_of(entry_point, M))

    in_threads([partial(work, 1 + 5 * i) for i in range(4)])


@pytest.mark.parametrize("kind", BACKWARDS)
def test_autograd_gets_the_gradients_of_the_formula_for_many_kinds(
    tmp_path: Path, kind: type[Any]
) -> None:
    package = kind.write(tmp_path)
    package._calls._device = ""
    entry_point, functional = kind(package), torch.nn.functional  # counts
    for step in range(4):
        before = entry_point.prepared
        for M in range(1, 2 * _MOST):
            x = torch.randn(M, 32, requires_grad=True)
            weight = torch.randn(32, requires_grad=True)
            dy = torch.randn(M, 32)
            if kind is LayerNorm:
                mine = package.layer_norm(x, weight, eps=1e-6)
                y = functional.layer_norm(x, (32,), weight, eps=1e-6)
            else:
                mine = package.rms_norm(x, weight, 1e-6)
                y = functional.rms_norm(x, (32,), weight, 1e-6)
            found = torch.autograd.grad(mine, (x, weight), dy)
            torch.testing.assert_close(
                found, torch.autograd.grad(y, (x, weight), dy), rtol=1e-4, atol=1e-5
            )
        assert (entry_point.prepared == before) is (step >= 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_call_that_pytorch_serves_is_pytorchs_under_install_too(
    package: Package, mode: Any
) -> None:
    """Taken for one that the package serves, it would be routed to itself without end. (In
    inference mode the checks of both entry points see the same dispatch keys.)"""
    package._find = lambda given, options: "nothing was tuned"  # type: ignore[method-assign]
    calls: list[str] = []
    entry_point = Installed(package)
    with aten_on_cpu(calls), mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = tensors_of(entry_point)
        for _ in range(4):
            package.rmsnorm_backward(*tensors)
        with entry_point.around():
            for _ in range(4):
                entry_point.call(*tensors)
                package.rmsnorm_backward(*tensors)
    assert calls == ["backward"] * 12


def test_layer_norm_that_pytorch_serves_is_pytorchs_under_install_too(tmp_path: Path) -> None:
    package = a_package(tmp_path, write_layer_norm_package)
    package._find = lambda given, options: "nothing was tuned"
    entry_point = InstalledLayerNorm(package)
    tensors = tensors_of(entry_point)
    dy, x, rstd, weight, mean = tensors
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for around in (nullcontext, entry_point.around):
            with around():
                for _ in range(4):
                    entry_point.call(*tensors)
                    assert len(package.layer_norm_backward(dy, x, mean, rstd, weight)) == 3
    assert not package._calls.recent


@pytest.mark.parametrize("asks", ["x", "dy"])
@pytest.mark.parametrize("kind", BACKWARDS)
def test_known_call_whose_gradient_is_wanted_refuses_it(
    tmp_path: Path, asks: str, kind: type[Any]
) -> None:
    """The checks see that a tensor requires a gradient, and not whether that counts."""

    def find(given: Arguments, options: Options) -> Any:
        found: Any = formula(options)
        found.quick = lambda dy, x, rstd, weight, mean: found(
            *vars(Arguments(dy, x, rstd, weight, mean=mean)).values()
        )
        return found

    package = a_package(tmp_path, kind.write)
    package._find = find
    backward = package.rmsnorm_backward if kind is Backward else package.layer_norm_backward
    tensors = {"dy": torch.randn(6, 64), "x": torch.randn(6, 64), "rstd": torch.ones(6, 1)}
    given = known = (*tensors.values(), torch.ones(64))
    if kind is LayerNorm:
        mean = torch.zeros(6, 1)
        given, known = (*given[:2], mean, *given[2:]), (*known, mean)
    tensors[asks].requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            wanted = backward(*given)
    assert package._calls.find_recent(known) is not None
    for _ in range(3):
        results = backward(*given)
        assert same(results, wanted)
        with pytest.raises(RuntimeError, match="differentiate the norm"):
            sum(result.sum() for result in results).backward()
    with torch.no_grad():
        assert not any(result.requires_grad for result in backward(*given))


@pytest.mark.parametrize("entry_point", [TheForward, Composed, *BACKWARDS], indirect=True)
def test_what_is_no_tensor_is_named_though_others_are_known(entry_point: EntryPoint) -> None:
    for M in range(1, 2 * _MOST):
        for _ in range(3):
            entry_point.call(*tensors_of(entry_point, M))
    for name in {"x", "weight", "mean"} & {*entry_point.names}:
        for wrong in ([1.0], 1.0, *([None] if name == "mean" else [])):
            with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got"):
                entry_point.call(*tensors_of(entry_point, **{name: wrong}))


def test_fake_tensors_of_symbolic_shape_are_served_beside_known_calls(package: Package) -> None:
    """No table can hold their shape."""
    forward = forward_on_cpu(package.folder)
    for M in range(1, 2 * _MOST):
        for _ in range(3):
            forward(torch.zeros(M, 64))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    x = mode.from_tensor(torch.zeros(6, 64), symbolic_context=context)
    with mode:
        y, rstd = forward(x)
    assert isinstance(x.shape[0], torch.SymInt)
    assert (y.shape, rstd.shape) == (x.shape, (*x.shape[:-1], 1))
