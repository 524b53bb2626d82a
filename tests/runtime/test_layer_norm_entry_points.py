"""LayerNorm's package under what watches operators, `install` and `graph_pass`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.graph_pass import Decompositions, find_norms, route, tag
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.frontends.layer_norm_operators import LayerNormOperators
from normforge.frontends.library import namespace
from normforge.frontends.operators import Operators
from normforge.serve.warn_once import WarnOnce
from tests.support.entry_points import (
    aten_on_cpu,
    filled,
    grads,
    leaf,
    randn,
    routing_on_cpu,
    same,
    spied,
    write_layer_norm_package,
    write_package,
)

ATEN = torch.ops.aten


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> LayerNormPackage:
    return write_layer_norm_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def rms_package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_package(tmp_path_factory.mktemp("rms"))


# ---- Operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_step_is_one_operator_with_the_bits_of_the_eager_one(
    package: LayerNormPackage, dynamic: bool, residual: bool
) -> None:
    norm, graphs = filled(package.LayerNorm(16, dtype=torch.bfloat16)), []

    def backend(module: Any, inputs: Any) -> Any:
        def keep(graph: Any, _: Any) -> Any:
            graphs.append({str(n.target) for n in graph.graph.nodes if n.op == "call_function"})
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep)(module, inputs)

    def step(x: Any, other: Any) -> Any:
        if not residual:
            return norm(x)
        y, h = norm(x, other)
        return torch.cat((y, h))

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    x, h = leaf(4, 16, dtype=torch.bfloat16), leaf(4, 16, dtype=torch.bfloat16, seed=1)
    leaves = (x, *([h] * residual), norm.weight, norm.bias)
    assert same(grads(compiled(x, h), *leaves), grads(step(x, h), *leaves))
    longer = leaf(7, 16, dtype=torch.bfloat16, seed=3)
    assert torch.equal(compiled(longer, longer), step(longer, longer))
    named = [{t.split(".")[-2] for t in graph if "normforge" in t} for graph in graphs]
    assert named[:2] == [{"layer_norm"}, {"layer_norm_backward"}]
    assert not any("native_layer_norm" in target for graph in graphs for target in graph)


def test_compiled_backward_writes_its_buffer(package: LayerNormPackage) -> None:
    dy, x, weight = randn(4, 16), randn(4, 16, seed=1), randn(16, seed=2)
    mean, rstd = torch.zeros(4, 1), torch.rand(4, 1)

    def step(buffer: torch.Tensor) -> Any:
        options: Any = {"dresidual": dy.double(), "dw_out": buffer, "accumulate": True}
        return package.layer_norm_backward(dy, x, mean, rstd, weight, **options)

    buffers = torch.ones(2, 16), torch.ones(2, 16)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert same(compiled(buffers[0]), step(buffers[1]))
    assert same(*buffers) and not torch.equal(buffers[0], torch.ones(2, 16))


def test_inductor_runs_the_operator(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This one and the next compile code. Inductor is stricter where the environment has CI."""
    monkeypatch.setenv("CI", "true")
    norm, x = filled(package.LayerNorm(16)), leaf(4, 16)
    compiled = torch.compile(norm, fullgraph=True)
    leaves = (x, norm.weight, norm.bias)
    assert same(grads(compiled(x), *leaves), grads(norm(x), *leaves))


@pytest.mark.slow
def test_backend_routes_plain_norms_to_the_operator(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = filled(nn.LayerNorm(16)), leaf(4, 16)
    asked = spied(monkeypatch, package.ops, "_backward")
    routed = torch.compile(plain, backend=package.inductor_backend(), fullgraph=True)
    found, wanted = (grads(norm(x), x, plain.weight, plain.bias) for norm in (routed, plain))
    assert len(asked) == 1
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_operators_pass_opcheck(package: LayerNormPackage) -> None:
    x, residual = leaf(4, 6, 16), leaf(4, 6, 16, seed=1)
    weight, bias = leaf(16, seed=2), leaf(16, seed=3)
    name = package.name

    def check(operator: Any, given: tuple[Any, ...]) -> None:
        place = 9 if operator is package.ops.layer_norm_backward else len(given)
        torch.library.opcheck(operator, (*given[:place], name, *given[place:]))

    check(package.ops.layer_norm, (x, None, weight, bias, 1e-5))
    check(package.ops.layer_norm, (x, residual.bfloat16(), weight, None, 1e-5))
    check(package.ops.layer_norm, (x, None, None, bias, 1e-5))
    turned = [one.detach().mT.contiguous().mT for one in (x, residual)]  # the sum lies as they do
    check(package.ops.layer_norm, (turned[0], None, weight, bias, 1e-5))
    check(package.ops.layer_norm, (*turned, weight, bias, 1e-5))
    dy, plain, rstd = randn(4, 6, 16, seed=3), x.detach(), torch.rand(4, 6, 1)
    backward = package.ops.layer_norm_backward
    scale = weight.detach()
    check(backward, (dy, plain, rstd, scale, None, None, 0.0, True, True, rstd))
    check(backward, (dy, plain, rstd, scale, dy.double(), None, 0.0, True, False, rstd))
    check(backward, (dy, plain, rstd, None, None, None, 0.0, False, False, rstd))
    narrow = [t.bfloat16() for t in (dy, plain)]
    scale = scale.bfloat16()
    check(backward, (*narrow, rstd, scale, None, torch.float32, 0.0, True, True, rstd))


def test_operator_tries_the_quick_call_with_the_mean(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (randn(4, 16), randn(4, 16, seed=1), torch.rand(4, 1), randn(16), torch.rand(4, 1))
    seen: list[Any] = []
    quick = lambda *tensors: seen.append(tensors) or (torch.ones(4, 16), torch.ones(2, 16))  # noqa: E731
    monkeypatch.setattr(package.ops, "_quick", quick)
    dx, sums, none = package.ops.layer_norm_backward(
        *given[:4], None, None, 0.0, True, True, package.name, given[4]
    )
    assert same(list(seen[0]), list(given))
    assert (dx.sum(), sums.sum(), none.shape) == (64, 32, (0,))


# ---- install -------------------------------------------------------------------------------------


def train_once(norm: Any) -> list[torch.Tensor]:
    x = leaf(4, 16)
    return grads(norm(x), x, *norm.parameters())


def served_by(package: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool, bool]]:
    """The calls that a package is asked for, and whether it serves each."""
    calls: list[tuple[bool, bool, bool]] = []
    route = package._route

    def watch(dy: Any, x: Any, rstd: Any, weight: Any, dx: bool, dw: bool, *mean: Any) -> Any:
        results = route(dy, x, rstd, weight, dx, dw, *mean)
        calls.append((dx, dw, results is not None))
        return results

    monkeypatch.setattr(package, "_route", watch)
    return calls


def test_existing_model_is_routed_while_installed_only(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = served_by(package, monkeypatch)
    norm, entry_point = filled(nn.LayerNorm(16)), routing_on_cpu(package)
    wanted = train_once(norm)
    with entry_point.installed():
        found = train_once(norm)
        assert served == [(True, True, True)]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert same(train_once(norm), wanted)
    assert len(served) == 1


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("weight", "bias"), ("x",)])
def test_gradients_that_nobody_wants(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch, frozen: tuple[str, ...]
) -> None:
    served = served_by(package, monkeypatch)
    given = {"x": leaf(4, 16), "weight": leaf(16, seed=1), "bias": leaf(16, seed=2)}
    for name in frozen:
        given[name].requires_grad_(False)
    leaves = [given[name] for name in given if name not in frozen]

    def step() -> list[torch.Tensor]:
        y = functional.layer_norm(given["x"], (16,), given["weight"], given["bias"])
        return grads(y, *leaves)

    wanted = step()
    with routing_on_cpu(package).installed():
        found = step()
    assert served == [("x" not in frozen, frozen != ("weight", "bias"), True)]
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", [[True, False, True], [False, True, False], [True, True, True]])
def test_results_are_those_of_the_mask(package: LayerNormPackage, mask: list[bool]) -> None:
    x, weight, _ = inputs()
    _, mean, rstd = ATEN.native_layer_norm(x, [16], weight, weight, 1e-5)
    given = (x.cos(), x, [16], mean, rstd, weight, weight, mask)
    wanted = ATEN.native_layer_norm_backward(*given)
    with routing_on_cpu(package).installed():
        found = ATEN.native_layer_norm_backward(*given)
    assert [result is not None for result in found] == mask
    for one, other, asked in zip(found, wanted, mask, strict=True):
        assert not asked or torch.allclose(one, other, atol=1e-5)


def test_routing_serves_second_derivatives_by_pytorch(package: LayerNormPackage) -> None:
    wide = torch.float64
    leaves = [leaf(3, 6, dtype=wide), leaf(6, dtype=wide, seed=1), leaf(6, dtype=wide, seed=2)]

    def penalty() -> list[torch.Tensor]:
        y = functional.layer_norm(leaves[0], (6,), *leaves[1:])
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))

    wanted = penalty()
    with routing_on_cpu(package).installed():
        found = penalty()
    torch.testing.assert_close(found, wanted)


def test_what_is_not_served_has_the_bits_of_pytorch(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = served_by(package, monkeypatch)
    x, weight, bias = leaf(4, 3, 16), leaf(16, seed=1), leaf(16, seed=2)
    steps = {
        "a bias alone": lambda: grads(functional.layer_norm(x, (16,), None, bias), x, bias),
        "two dimensions": lambda: grads(
            functional.layer_norm(x, (3, 16), weight.expand(3, 16)), x, weight
        ),
        "narrow statistics": lambda: grads(
            functional.layer_norm(x.bfloat16(), (16,), weight.bfloat16(), bias.bfloat16()), x, bias
        ),
    }
    for what, step in steps.items():
        wanted = step()
        with routing_on_cpu(package).installed():
            assert same(step(), wanted), what
    assert served == [(True, True, False)]  # the narrow one is served
    monkeypatch.setattr(package, "warn", WarnOnce())
    monkeypatch.setattr(package, "_find", lambda given, options: "nothing was tuned")
    norm = filled(nn.LayerNorm(16))
    wanted = train_once(norm)
    told = pytest.warns(UserWarning, match="nothing was tuned; using PyTorch's own kernel")
    with routing_on_cpu(package).installed(), told:
        assert same(train_once(norm), wanted)


def test_packages_of_both_norms_are_installed_at_once(
    package: LayerNormPackage, rms_package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = [served_by(each, monkeypatch) for each in (package, rms_package)]
    with aten_on_cpu():
        one, two = routing_on_cpu(package), routing_on_cpu(rms_package)
        one.install()
        two.install()
        train_once(nn.LayerNorm(16))
        assert list(map(len, seen)) == [1, 0]
        other = write_layer_norm_package(tmp_path)
        with pytest.raises(RuntimeError, match="uninstall it first"):
            routing_on_cpu(other).install()
        one.uninstall()
        monkeypatch.setattr(rms_package, "_quick", lambda *_: None)
        train_once(nn.RMSNorm(16))
        assert list(map(len, seen)) == [1, 1]
        two.uninstall()


# ---- graph_pass ----------------------------------------------------------------------------------


def step_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
    """A training step: LayerNorms with a weight and a bias, with a weight, with neither."""
    leaves = [given.detach().requires_grad_() for given in (x, weight, bias)]
    x, weight, bias = leaves
    y = functional.layer_norm(x, (16,), weight, bias)
    y = functional.layer_norm(torch.tanh(y), (16,))
    y = functional.layer_norm(y + x, (16,), weight)
    return torch.autograd.grad(y.square().mean() + y.sin().sum(), leaves)


def masked(mask: list[bool], shape: tuple[int, ...] = (16,)) -> Any:
    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        if len(shape) > 1:
            weight, bias = (given.expand(shape) for given in (weight, bias))
        _, mean, rstd = ATEN.native_layer_norm(x, shape, weight, bias, 1e-5)
        return ATEN.native_layer_norm_backward(x.cos(), x, shape, mean, rstd, weight, bias, mask)

    return step


def inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
    return randn(4, 16, seed=seed), randn(16, seed=seed + 1), randn(16, seed=seed + 2)


def backwards(module: torch.fx.GraphModule) -> int:
    name = "native_layer_norm_backward"
    return sum(name in str(norm.target) for norm in find_norms(module.graph, LayerNormOperators))


@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
def test_every_backward_is_routed_and_the_numbers_stay(
    package: LayerNormPackage, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = make_fx(step_of, tracing_mode=mode)(*inputs())
    assert len(find_norms(module.graph, LayerNormOperators)) == 6
    wanted = module(*inputs(3))
    with caplog.at_level("INFO"):
        rewrite = package.graph_pass()
        assert rewrite(module, inputs()) is module
    assert rewrite.__name__ == "normforge_route_layernorm"
    told = [message for message in caplog.messages if "nodes" in message]
    # x's gradient of `y + x` is added to that of the first norm.
    assert told == [f"gave 3 LayerNorm nodes to {package.name}; additions folded: 1"]
    assert len(find_norms(module.graph, LayerNormOperators)) == 3  # the forward is PyTorch's
    torch.testing.assert_close(module(*inputs(3)), wanted, atol=1e-4, rtol=1e-4)
    if mode != "real":
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is ATEN.select.int:
                row, both = node.meta["val"], node.args[0].meta["val"]
                assert (both.shape, both.dtype) == ((2, *row.shape), row.dtype)


@pytest.fixture
def with_forward(tmp_path: Path) -> LayerNormPackage:
    """A package that has kernels of the forward, which serve no rows of the CPU."""
    package = write_layer_norm_package(tmp_path)
    package._kernels.by(lambda: cast(Any, lambda device: None))
    return package


def forwards(module: torch.fx.GraphModule) -> int:
    return len(find_norms(module.graph, LayerNormOperators)) - backwards(module)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forwards_are_routed_where_the_package_has_them(
    package: LayerNormPackage, with_forward: LayerNormPackage, dtype: torch.dtype
) -> None:
    given = [one.to(dtype) for one in inputs(3)]
    module = make_fx(step_of, tracing_mode="fake")(*given)
    wanted = module(*given)
    assert forwards(route(make_fx(step_of, tracing_mode="fake")(*given), package.ops)) == 3
    with_forward.graph_pass()(module)
    assert find_norms(module.graph, LayerNormOperators) == []
    torch.testing.assert_close(module(*given), wanted, atol=1e-4, rtol=1e-4)
    norms = [n for n in module.graph.nodes if n.target is with_forward.ops.layer_norm]
    assert [norm.args[-2:] for norm in norms] == [(1e-5, with_forward.name)] * 3
    assert [value.dtype for value in norms[0].meta["val"]] == [dtype] * 4


def test_forwards_that_the_operator_does_not_take_stay(with_forward: LayerNormPackage) -> None:
    def norm(x: Any, *scales: Any, shape: tuple[int, ...] = (16,)) -> Any:
        return ATEN.native_layer_norm(x, shape, *scales, 1e-5)

    x, weight, bias = inputs()
    steps: dict[str, tuple[Any, list[Any]]] = {
        "two dimensions": (lambda x: norm(x, None, None, shape=(4, 16)), [x]),
        "narrow statistics": (norm, [one.bfloat16() for one in (x, weight, bias)]),
        "statistics of an unknown dtype": (norm, [x, weight, bias]),
    }
    for what, (step, given) in steps.items():
        module = make_fx(step, tracing_mode="fake")(*given)
        if "unknown" in what:
            for node in module.graph.nodes:
                node.meta.pop("val", None)
        assert forwards(route(module, with_forward.ops)) == 1, what
    everything = torch.fx.Graph()
    made = everything.call_function(
        ATEN.native_layer_norm.default, (everything.placeholder("x"), [16], None, None, 1e-5)
    )
    made.meta["val"] = (x, x, x)
    everything.output(made)
    module = torch.fx.GraphModule(torch.nn.Module(), everything)
    assert forwards(route(module, with_forward.ops)) == 1, "somebody takes three results"


def test_the_backend_leaves_the_forward_to_inductor(with_forward: LayerNormPackage) -> None:
    kept = Decompositions(with_forward.ops)
    assert ATEN.native_layer_norm.default in kept
    assert ATEN.native_layer_norm_backward.default not in kept


@pytest.mark.parametrize("mask", [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
def test_masks_of_a_graph(
    package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch, mask: list[Any]
) -> None:
    mask = list(map(bool, mask))
    module = make_fx(masked(mask), tracing_mode="fake")(*inputs())
    wanted = module(*inputs(3))
    asked = spied(monkeypatch, package.ops, "_backward", lambda _, o: (o.need_dx, o.need_dw))
    found = route(module, package.ops)(*inputs(3))
    assert backwards(module) == 0
    assert asked == [(mask[0], mask[1] or mask[2])]
    assert [result is not None for result in wanted] == mask
    for one, other in zip(found, wanted, strict=True):
        assert one is other is None or torch.allclose(one, other, atol=1e-5)


def test_what_the_operator_does_not_take_stays(package: LayerNormPackage) -> None:
    everything = [True, True, True]
    steps = {
        "two dimensions": (masked(everything, (4, 16)), inputs()),
        "narrow statistics": (masked(everything), [given.bfloat16() for given in inputs()]),
        "a bias alone": (
            lambda x, w, b: masked([True, False, True])(x, None, b),  # type: ignore[arg-type]
            inputs(),
        ),
    }
    for what, (step, given) in steps.items():
        module = route(make_fx(step, tracing_mode="fake")(*given), package.ops)
        assert backwards(module) == 1, what


def test_nested_modules_marks_and_other_norms(
    package: LayerNormPackage, rms_package: Package
) -> None:
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("x", "w", "b")]
    graph.output(graph.call_module("called", tuple(given)))
    inner = make_fx(step_of, tracing_mode="fake")(*inputs())
    module = torch.fx.GraphModule({"called": inner}, graph)
    route(tag(module, Operators), rms_package.ops)  # RMSNorm's pass leaves everything
    assert backwards(inner) == 3
    assert package.graph_pass("tag")(module) is module
    marked = [n for n in inner.graph.nodes if "compile_with_inductor" in n.meta.get("custom", {})]
    assert {*find_norms(inner.graph, package.ops)} <= {*marked}
    route(module, package.ops)
    assert backwards(inner) == 0
    for node in inner.graph.nodes:
        if namespace in str(node.target) or node.target is ATEN.select.int:
            assert "compile_with_inductor" not in node.meta["custom"]


def test_a_tensor_that_is_on_its_way_is_served(package: LayerNormPackage) -> None:
    x = AsyncCollectiveTensor(torch.randn(4, 16))
    y = package.layer_norm(x, leaf(16), leaf(16))
    assert "Native" not in type(y.grad_fn).__name__
    wanted = package.layer_norm(x.elem, torch.ones(16), torch.zeros(16))
    assert y.shape == wanted.shape


def test_a_bias_of_fp32_takes_nothing_off_a_weight_of_float64(package: LayerNormPackage) -> None:
    x = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    weight = (torch.randn(16, dtype=torch.float64) / 3).requires_grad_()
    bias = torch.zeros(16, requires_grad=True)
    dy = torch.randn(6, 16).double()
    package.layer_norm(x, weight, bias).backward(dy)
    (wanted,) = torch.autograd.grad(torch.nn.functional.layer_norm(x, (16,), weight), x, dy)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-12, atol=1e-12)
