"""The C++ node of `rms_norm` behaves as the one in Python. The extension is the real one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from normforge.torch_internals import without_inference
from tests.support.entry_points import (
    Swallowed,
    Training,
    equal_bits,
    leaf,
    write_layer_norm_package,
    write_package,
)
from tests.support.native import (
    OPERATIONS,
    both_norms,
    in_threads,
    layer_norm_only,
    module_of,
    norm,
    outcome,
    rms_norm_only,
    started,
)

Tensors = tuple[torch.Tensor, ...]


operation = both_norms


@pytest.fixture
def write(operation: str) -> Callable[[Path], Any]:
    """Writes a package without kernels."""
    return write_layer_norm_package if operation == OPERATIONS[1] else write_package


@pytest.fixture(params=["python", pytest.param("native", marks=pytest.mark.slow)])
def package(request: pytest.FixtureRequest, write: Any, tmp_path: Path) -> Any:
    """The formula serves everything; with and without the node in C++. What is true of one has to
    be true of the other."""
    made = write(tmp_path / "package")
    if request.param == "native":
        started(made, request.getfixturevalue("module"))
    return made


@pytest.fixture
def both(tmp_path: Path, write: Any, module: Any) -> tuple[Any, Any]:
    """Return one package without and one with the node in C++."""
    return write(tmp_path / "one"), started(write(tmp_path / "two"), module)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_trace_gets_the_node_that_it_can_see(both: tuple[Any, Any]) -> None:
    """A kernel's results in the C++ node would be constants of the traced module."""

    def fail(*_: Any) -> Any:
        raise AssertionError("the C++ node was traced")

    package = both[1]
    package._native.norm = fail
    x, other = leaf(6, 16), leaf(6, 16, seed=5)
    with pytest.raises(AssertionError, match="was traced"):
        norm(package, x, x[0])
    mine = module_of(package, 16)
    traced = torch.jit.trace(mine, (x,), check_trace=False)
    theirs = type(mine).__mro__[2]  # PyTorch's
    assert torch.equal(traced(other), theirs.forward(mine, other))


def test_gradient_that_nobody_computed_leaves_the_weight_without_one(package: Any) -> None:
    norm = module_of(package, 16)
    Swallowed.apply(norm(leaf(4, 16))).sum().backward()
    assert norm.weight.grad is None


def made_in_inference_mode(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return leaf(*shape, seed=3).detach()


@rms_norm_only
def test_rows_from_inference_mode_train_a_weight(package: Any) -> None:
    """PyTorch's norm does so on the CPU."""
    x, other = made_in_inference_mode(6, 16), made_in_inference_mode(16)
    training = {
        "alone": lambda x, w: package.rms_norm(x, w),
        "residual": lambda x, w: package.rms_norm(leaf(6, 16), w, residual=x)[0],
        "operator": lambda x, w: package.rmsnorm_forward(x, w)[0],
    }
    for name, train in training.items():
        found, wanted = leaf(16), leaf(16)
        train(x, found).square().sum().backward()
        train(x.clone(), wanted).square().sum().backward()
        assert torch.equal(found.grad, wanted.grad), name
    rows = leaf(6, 16)
    package.rms_norm(rows, other).sum().backward()
    assert rows.grad is not None
    norm = package.RMSNorm(16, main_grad=True)
    norm.weight.main_grad = torch.zeros(16)
    norm(x).sum().backward()
    assert norm.weight.main_grad.any()


def test_another_error_of_a_node_stays_as_it_is() -> None:
    """It stays also where what raised it sees every function of PyTorch."""

    class Refusing(TorchFunctionMode):
        def __torch_function__(self, *_: Any) -> Any:
            raise RuntimeError("of the mode")

    error, x = RuntimeError("of a node"), torch.ones(2)
    with pytest.raises(RuntimeError) as raised, Refusing():
        without_inference(error, x, None, 1e-6)
    assert raised.value is error


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


OF_LAYER_NORM: dict[str, Callable[[], dict[str, Any]]] = {
    "no bias": lambda: {"bias": None},
    "bias alone": lambda: {"weight": None},
    "only bias": lambda: {"x": leaf(6, 16).detach(), "weight": leaf(16).detach()},
    "bias alone wants a gradient": lambda: {"x": leaf(6, 16).detach(), "weight": None},
    "frozen bias": lambda: {"bias": leaf(16).detach()},
    "nothing but rows": lambda: {"weight": None, "bias": None},
    "wide bias": lambda: {"x": leaf(6, 16, dtype=torch.half)},
    "tiny eps": lambda: {"eps": 1e-30},
}
OF_RMS_NORM = ("offset", "weight per head")


@pytest.mark.parametrize("name", [*CALLS, *OF_LAYER_NORM])
def test_node_gives_the_bits_of_the_one_in_python(both: Any, name: str, operation: str) -> None:
    of_one = OF_LAYER_NORM if operation == OPERATIONS[0] else OF_RMS_NORM
    if name in of_one:
        pytest.skip(f"{operation} has no such call")
    one, two = (outcome(package, **(CALLS | OF_LAYER_NORM)[name]()) for package in both)
    assert equal_bits(one, two)


def test_node_in_c_has_its_name(both: Any) -> None:
    results = [norm(package, leaf(2, 8), None) for package in both]  # results hold the nodes
    names = [y.grad_fn.name() for y in results]
    assert "Eager" in names[0] and "Norm" in names[1] and "Eager" not in names[1]


@layer_norm_only
def test_autocast_changes_nothing_but_the_forward_of_pytorch(both: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        one, two = (outcome(package) for package in both)
    assert equal_bits(one, two) and one[0].dtype == torch.float32


@layer_norm_only
def test_eps_has_to_be_a_number(package: Any) -> None:
    for call in (package.layer_norm, package.layer_norm_forward):
        with pytest.raises(TypeError, match="eps must be a number, got None"):
            call(leaf(2, 8), None, None, None)


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


def test_only_some_gradients_of_a_graph(package: Any) -> None:
    x, weight = leaf(6, 16), leaf(16, seed=1)
    y = norm(package, x, weight).sum()
    dx, dw = torch.autograd.grad(y, (x, weight), retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], dx)
    assert torch.equal(torch.autograd.grad(y, weight)[0], dw)


def test_second_derivatives(package: Any) -> None:
    x, weight = leaf(3, 6, dtype=torch.float64), leaf(6, dtype=torch.float64, seed=1)
    if not hasattr(package, "rms_norm"):
        bias = leaf(6, dtype=torch.float64, seed=2)
        assert torch.autograd.gradgradcheck(partial(norm, package), (x, weight, bias))
        return
    for offset in (0.0, 1.0):

        def of_rms(x: Any, weight: Any, offset: float = offset) -> Any:
            return package.rms_norm(x, weight, 1e-5, weight_offset=offset)

        assert torch.autograd.gradgradcheck(of_rms, (x, weight))


def test_graph_is_kept_on_request_and_freed_otherwise(package: Any) -> None:
    x, weight = leaf(6, 16), leaf(16)
    y = norm(package, x, weight).sum()
    first = torch.autograd.grad(y, (x, weight), retain_graph=True)
    assert equal_bits(list(first), list(torch.autograd.grad(y, (x, weight))))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, (x, weight))


@pytest.mark.parametrize("changed", ["x", "weight"])
def test_saved_tensor_that_was_changed_is_an_error(package: Any, changed: str) -> None:
    given = {"x": leaf(6, 16), "weight": leaf(16)}
    y = norm(package, **given)
    with torch.no_grad():
        given[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_saved_tensors_go_through_hooks(package: Any) -> None:
    packed, unpacked = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.double()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor.shape)
        return tensor.float()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = outcome(package)
    assert packed == unpacked == [(6, 16), (16,), *[(6, 1)] * (1 + hasattr(package, "layer_norm"))]
    assert equal_bits(found, outcome(package))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(package: Any, reentrant: bool) -> None:
    x, weight = leaf(6, 16), leaf(16)

    def block(x: torch.Tensor) -> torch.Tensor:
        return norm(package, norm(package, x, weight), weight)

    wanted = torch.autograd.grad(block(x).sum(), (x, weight))
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert equal_bits([x.grad, weight.grad], list(wanted))  # type: ignore[list-item]


def test_trainings_have_the_same_bits(both: Any) -> None:
    runs = [Training(partial(module_of, package), False).train(4) for package in both]
    assert equal_bits(*runs)


def test_forward_errors_are_those_of_python(both: Any) -> None:
    for given in (("x", None), (None, None), (torch.ones(4, 8), torch.ones(3)), (1.0, None)):
        errors = []
        for package in both:
            with pytest.raises((TypeError, ValueError)) as caught:
                norm(package, *given)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]


@pytest.mark.parametrize("anomaly", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
@rms_norm_only
def test_backward_errors_are_python_s_own(
    tmp_path: Path, module: Any, operation: str, anomaly: bool, threaded: bool
) -> None:
    class OddError(Exception):
        pass

    error = OddError("planted")

    def gradients(*_: Any) -> Any:
        raise error

    package = write_package(tmp_path)
    package._norm.gradients = gradients  # type: ignore[assignment]
    started(package, module)
    context = torch.autograd.set_detect_anomaly(anomaly, check_nan=False)
    with warnings.catch_warnings(), context, torch.autograd.set_multithreading_enabled(threaded):
        warnings.simplefilter("ignore")  # anomaly mode says where the forward was
        y = package.rms_norm(leaf(2, 8), leaf(8))
        with pytest.raises(OddError) as caught:
            y.sum().backward()
    assert caught.value is error


@rms_norm_only
@pytest.mark.parametrize("wrong", [(1.0, None), [None, None], (None,)])
def test_wrong_results_of_the_fallback_are_errors(
    tmp_path: Path, module: Any, operation: str, wrong: Any
) -> None:
    package = write_package(tmp_path)
    package._norm.gradients = lambda *_: wrong  # type: ignore[assignment, method-assign]
    y = started(package, module).rms_norm(leaf(2, 8), leaf(8))
    with pytest.raises(TypeError, match=r"tensor|2 results"):
        y.sum().backward()


def test_nan_is_found_by_anomaly_mode(package: Any) -> None:
    x = leaf(2, 8)
    with pytest.warns(UserWarning), torch.autograd.detect_anomaly():
        y = norm(package, x, None)
        with pytest.raises(RuntimeError, match="returned nan values"):
            y.backward(torch.full((2, 8), float("nan")))


def test_backward_in_many_threads_through_one_graph(package: Any) -> None:
    x, weight = leaf(6, 16), leaf(16)
    y = norm(package, x, weight).sum()
    wanted = list(torch.autograd.grad(y, (x, weight), retain_graph=True))
    found: list[list[torch.Tensor]] = []

    def again() -> list[torch.Tensor]:
        return list(torch.autograd.grad(y, (x, weight), retain_graph=True))

    def work() -> None:
        found.extend(again() for _ in range(20))

    in_threads([work] * 4)
    assert len(found) == 80 and all(equal_bits(one, wanted) for one in found)


@pytest.mark.parametrize("weightless", [False, True])
def test_compiled_autograd(package: Any, weightless: bool) -> None:
    """Twice with other numbers, so that a compiled graph is used again."""

    offsets = hasattr(package, "rms_norm")

    def step(eps: float, offset: float) -> list[torch.Tensor]:
        x, weight = leaf(6, 16), None if weightless else leaf(16, seed=1)
        bias = None if offsets else leaf(16, seed=3)
        if offsets:
            y = package.rms_norm(x, weight, eps, weight_offset=offset)
        else:
            y = package.layer_norm(x, weight, bias, eps)
        y.square().sum().backward()
        return [t.grad for t in (x, weight, bias) if t is not None and t.grad is not None]

    counters = torch._dynamo.utils.counters
    counters.clear()
    settings = ((1e-6, 0.0), (0.5, 0.0), (0.5, 1.0))
    wanted = [step(*numbers) for numbers in settings]
    for numbers, expected in zip(settings, wanted, strict=True):
        before = counters["compiled_autograd"]["captures"]
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            found = step(*numbers)
        assert counters["compiled_autograd"]["captures"] >= max(before, 1)
        assert len(found) == 2 - weightless + (not offsets)
        torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("how", ["compile", "func", "fake", "no_grad", "inference"])
def test_other_ways_go_past_the_node(package: Any, how: str) -> None:
    x, weight = leaf(6, 16), leaf(16, seed=1)
    wanted = outcome(package, **({} if hasattr(package, "rms_norm") else {"bias": None}))
    norm = getattr(package, "rms_norm", None) or package.layer_norm
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


def test_batched_gradients(package: Any) -> None:
    leaves = leaf(6, 16), leaf(16, seed=1)
    y, vectors = norm(package, *leaves), torch.randn(3, 6, 16)
    found = torch.autograd.grad(y, leaves, vectors, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(y, leaves, v, retain_graph=True) for v in vectors]
    for one, *others in zip(found, *each, strict=True):
        assert torch.allclose(one, torch.stack(others), atol=1e-5)
