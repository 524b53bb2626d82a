"""Norms that a model writes out: which of them `inductor_backend` and `route` recognise."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from normforge.api import Package
from normforge.frontends.graph_pass import (
    graph_modules,
    make_backend,
    route,
)
from tests.support.entry_points import (
    Training,
    equal_bits,
    grads,
    needs_whole_forward,
    randn,
)
from tests.support.norm_classes import (
    NORM_CLASSES,
    GemmaRMSNorm,
    L2Norm,
    LlamaRMSNorm,
    MetaRMSNorm,
    Olmo2RMSNorm,
)

EPS = 1e-5


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(package: Package, function: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A function whose graphs of Dynamo are searched for norms and then run as they are, and the
    graphs."""
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(route(module, package.ops, written_out_only=True))
        return module

    return torch.compile(function, backend=backend, fullgraph=True, **options), graphs


def calls(module: Any) -> list[Any]:
    """Return what a graph and those in it call, without getitems."""
    nodes = (node for each in graph_modules(module) for node in each.graph.nodes)
    names = {"call_function", "call_method"}
    return [n.target for n in nodes if n.op in names and n.target is not operator.getitem]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * randn(*shape, seed=3)).to(dtype).requires_grad_()


def kind_of(norm: Any, dtype: torch.dtype = torch.float32) -> Any:
    return norm().to(dtype)


def exact(norm: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """y and the gradients in float64."""
    wide, x = copy.deepcopy(norm).double(), x.detach().double().requires_grad_()
    xhat = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    scale = 1.0 + wide.weight if type(norm) is GemmaRMSNorm else wide.weight
    y = xhat if type(norm) is L2Norm else xhat * scale
    return [y, *grads(y, *leaves_of(wide, x))]


def leaves_of(norm: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [x] if isinstance(norm, L2Norm) else [x, norm.weight]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", NORM_CLASSES)
def test_written_out_norms_are_one_operator(package: Package, kind: Any, dtype: Any) -> None:
    norm, x = kind_of(kind, dtype), rows(2, 3, 16, dtype=dtype)
    run, graphs = compiled(package, norm)
    y = run(x)
    assert [calls(graph) for graph in graphs] == [[package.ops.rms_norm]]
    assert y.dtype == dtype
    found = [y, *grads(y, *leaves_of(norm, x))]
    unit = torch.finfo(dtype).eps
    for mine, wanted in zip(found, exact(norm, x), strict=True):
        torch.testing.assert_close(mine.double(), wanted, rtol=2 * unit, atol=10 * unit)
    offset = float(kind is GemmaRMSNorm)
    weight = None if kind is L2Norm else norm.weight
    assert torch.equal(y, package.rms_norm(x, weight, EPS, weight_offset=offset))


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_and_eps_may_be_dynamic(package: Package, dynamic: bool | None) -> None:
    norm = kind_of(LlamaRMSNorm)
    run, graphs = compiled(package, norm, dynamic=dynamic)
    for count in (5, 7, 11):
        x = rows(count, 16)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), norm(x), rtol=1e-5, atol=1e-5)
    (graph,) = graphs
    assert [each for each in calls(graph) if each != "item"] == [package.ops.rms_norm]


def test_fp32_weight_of_narrow_rows(package: Package) -> None:
    """Llama's norm then gives fp32: what is replaced ends before the product. Gemma's rounds."""
    x = rows(4, 16, dtype=torch.bfloat16)
    for kind, more in ((LlamaRMSNorm, [operator.mul]), (GemmaRMSNorm, []), (Olmo2RMSNorm, [])):
        torch._dynamo.reset()
        norm = kind_of(kind)
        run, graphs = compiled(package, norm)
        y, wanted = run(x), norm(x)
        assert calls(graphs[0]) == [package.ops.rms_norm, *more]
        assert y.dtype == wanted.dtype
        assert torch.equal(y, wanted)


def test_fp32_rows_between_casts(package: Package) -> None:
    """A stream that is wide for others too has norms in fp32."""
    norm = kind_of(LlamaRMSNorm)

    def layer(x: torch.Tensor) -> Any:
        wide = x.float()
        return norm(wide), wide.sin()

    run, graphs = compiled(package, layer)
    x = rows(4, 16, dtype=torch.bfloat16)
    y, other = run(x)
    assert calls(graphs[0]) == ["float", package.ops.rms_norm, "sin"]
    torch.testing.assert_close(y, norm(x.float()), rtol=1e-5, atol=1e-5)
    assert torch.equal(other, x.float().sin())


@pytest.mark.parametrize("dynamic", [None, True])
def test_transposed_heads(package: Package, dynamic: bool | None) -> None:
    """The result lies as the heads do, which a view of it needs."""
    norm = kind_of(GemmaRMSNorm)

    def heads(x: torch.Tensor) -> Any:
        return norm(x.view(2, -1, 3, 16).transpose(1, 2))

    def step(x: torch.Tensor) -> Any:
        return heads(x).transpose(1, 2).view(-1, 16)

    run, graphs = compiled(package, step, dynamic=dynamic)
    x = rows(2 * 5 * 3, 16)
    torch._dynamo.mark_dynamic(x, 0) if dynamic else None
    y, wanted = run(x), step(x)
    asked = [each for each in calls(graphs[0]) if isinstance(each, torch._ops.OpOverload)]
    permute = torch.ops.aten.permute.default
    assert asked == [permute, package.ops.rms_norm, permute]
    assert "rsqrt" not in str(calls(graphs[0]))
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    for a, b in zip(grads(y, x, norm.weight), grads(wanted, x, norm.weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_transposed_heads_of_make_fx(package: Package) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        return SPELLINGS["square"](x.transpose(0, 1), w)

    x, w = randn(5, 4, 16), randn(16, seed=1)
    module = route(make_fx(step, tracing_mode="fake")(x, w), package.ops)
    y, wanted = module(x, w), step(x, w)
    assert calls(module).count(package.ops.rms_norm) == 1
    assert y.stride() == wanted.stride()
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


SPELLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "power": lambda x, w: w * (x * torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + EPS)),
    "square": lambda x, w: (x * (EPS + x.square().mean(dim=[-1], keepdim=True)).rsqrt()) * w,
    "product": lambda x, w: torch.mul(w, (x * x).mean((-1,), True).add(EPS).rsqrt().mul(x)),
    "functions": lambda x, w: torch.mul(
        torch.mul(x, torch.rsqrt(torch.add(torch.pow(x, 2).mean(1, keepdim=True), EPS))), w
    ),
    "offset on the right": lambda x, w: (
        (x * torch.rsqrt(torch.square(x).mean(-1, True) + EPS)) * (w + 0.5)
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("traced", ["dynamo", "make_fx"])
def test_spellings(package: Package, name: str, traced: str) -> None:
    step, x, w = SPELLINGS[name], rows(4, 16).detach(), randn(16, seed=1)
    run: Any
    if traced == "dynamo":
        run, graphs = compiled(package, step)
    else:
        run = route(make_fx(step, tracing_mode="fake")(x, w), package.ops)
        graphs = [run]
    torch.testing.assert_close(run(x, w), step(x, w), rtol=1e-5, atol=1e-5)
    assert calls(graphs[0]) == [package.ops.rms_norm]


@pytest.mark.parametrize("kind", NORM_CLASSES)
def test_route_recognises_them_before_autograd_only(
    package: Package, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    module = kind_of(kind, torch.bfloat16)
    x, w = rows(4, 16, dtype=torch.bfloat16).detach(), module.weight.detach()

    def norm(x: torch.Tensor, w: torch.Tensor) -> Any:
        return functional_call(module, {"weight": w}, x)

    def forward(x: torch.Tensor, w: torch.Tensor) -> Any:
        h = x + x.sin()
        return norm(h, w), h

    def training(x: torch.Tensor, w: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(norm(x, w).float().square().sum(), x)

    graph = make_fx(forward, tracing_mode="symbolic")(x, w)
    with caplog.at_level("INFO"):
        y, h = route(graph, package.ops)(x, w)
    assert calls(graph) == [torch.ops.aten.sin.default, package.ops.add_rms_norm]
    assert torch.equal(h, x + x.sin())
    torch.testing.assert_close(y, norm(h, w), rtol=2**-7, atol=2**-7)
    told = [message for message in caplog.messages if message.startswith("gave")]
    assert told == [
        f"gave 0 RMSNorm nodes and 1 written-out ones to {package.name}; additions folded: 1",
    ]
    joint = make_fx(training, tracing_mode="fake")(x, w)
    before = str(joint.graph)
    assert str(route(joint, package.ops).graph) == before


# ---- What is left alone --------------------------------------------------------------------------


def xhat_is_used(x: Any, w: Any) -> Any:
    x = x.bfloat16()
    wide = x.float()
    xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (w * xhat).to(x.dtype), xhat.sin()


def mean_is_used(x: Any, w: Any) -> Any:
    mean = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(mean + EPS)), mean


def rstd_is_returned(x: Any, w: Any) -> Any:
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return w * (x * rstd), rstd


def cube(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + EPS))


def other_power(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + EPS))


def columns(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + EPS))


def everything(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean((0, 1), keepdim=True) + EPS))


def one_number(x: Any, w: Any) -> Any:
    x = x.sum()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def other_rows(x: Any, w: Any) -> Any:
    return w * (x.cos() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def eps_for_each_row(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + w[:1]))


def no_eps(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))


def scaled_eps(x: Any, w: Any) -> Any:
    return w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1.0, alpha=1e-3)))


def other_narrow_result(x: Any, w: Any) -> Any:
    x = x.half().float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()


def narrow_sum(x: Any, w: Any) -> Any:
    x = x.bfloat16()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS), x


def narrow_mean(x: Any, w: Any) -> Any:
    mean = x.pow(2).mean(-1, keepdim=True, dtype=torch.float64).float()
    return x * torch.rsqrt(mean + EPS)


def wide(x: Any, w: Any) -> Any:
    x = x.double()
    return w.double() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


def narrowed(x: Any, w: Any) -> Any:
    """Compute the norm of float64 rows in fp32."""
    narrow = x.double().float()
    xhat = narrow * torch.rsqrt(narrow.pow(2).mean(-1, keepdim=True) + EPS)
    return xhat.to(torch.float64)


def rows_change_in_between(x: Any, w: Any) -> Any:
    x = x.sin()
    mean = x.pow(2).mean(-1, keepdim=True)
    x.add_(1)
    return w * (x * torch.rsqrt(mean + EPS))


def in_place(x: Any, w: Any) -> Any:
    x = x.sin()
    x *= torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return w * x


def without_gradient(x: Any, w: Any) -> Any:
    with torch.no_grad():
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return w * (x * rstd)


def rows_with_gaps(x: Any, w: Any) -> Any:
    """The columns are what is contiguous, in the result as well."""
    x = x.reshape(16, 4).t()
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS))


LEFT = (
    xhat_is_used,
    mean_is_used,
    rstd_is_returned,
    cube,
    other_power,
    columns,
    everything,
    one_number,
    other_rows,
    eps_for_each_row,
    no_eps,
    scaled_eps,
    other_narrow_result,
    narrow_sum,
    narrow_mean,
    wide,
    narrowed,
    rows_change_in_between,
    in_place,
    without_gradient,
    rows_with_gaps,
)


@pytest.mark.parametrize("step", LEFT)
def test_what_is_not_quite_a_norm_stays(package: Package, step: Any) -> None:
    run, graphs = compiled(package, step)
    x, w = rows(4, 16), randn(16, seed=1).abs()
    found, wanted = run(x, w), step(x, w)
    assert package.ops.rms_norm not in calls(graphs[0])
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [
        (randn(1), torch.float32),
        (randn(4, 16), torch.float32),
        (randn(16).bfloat16(), torch.float32),
        (randn(16).double(), torch.float32),
        (randn(16).half(), torch.bfloat16),
    ],
)
def test_products_with_what_is_no_weight_stay(package: Package, weight: Any, dtype: Any) -> None:
    """The rest is a norm without a weight."""

    def step(x: torch.Tensor) -> Any:
        wide = x.float()
        xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * xhat.to(x.dtype)

    run, graphs = compiled(package, step)
    x = rows(4, 16, dtype=dtype)
    found, wanted = run(x), step(x)
    assert calls(graphs[0]) == [package.ops.rms_norm, operator.mul]
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_weights_of_a_batch_stay(package: Package) -> None:
    """The operator has no rule for a batch of them, and PyTorch would call it for each."""
    step = torch.vmap(SPELLINGS["power"], (None, 0))
    run, graphs = compiled(package, step)
    x, weights = rows(4, 16), randn(3, 16, seed=1)
    torch.testing.assert_close(run(x, weights), step(x, weights), rtol=1e-5, atol=1e-5)
    assert calls(graphs[0]).count(operator.mul) == 1


def test_weights_with_a_rounded_offset_stay(package: Package) -> None:
    """1 + w in bf16 is another weight than 1 + w in fp32."""

    class Rounded(MetaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._norm(x.float()).type_as(x) * (1.0 + self.weight)

    norm, x = kind_of(Rounded, torch.bfloat16), rows(4, 16, dtype=torch.bfloat16)
    run, graphs = compiled(package, norm)
    assert torch.equal(run(x), norm(x))
    assert calls(graphs[0]) == [package.ops.rms_norm, operator.add, operator.mul]


def test_graphs_without_values_stay(package: Package) -> None:
    step = SPELLINGS["power"]
    module = make_fx(step, tracing_mode="fake")(rows(4, 16).detach(), randn(16))
    for node in module.graph.nodes:
        node.meta.clear()
    before = str(module.graph)
    assert str(route(module, package.ops, written_out_only=True).graph) == before


def test_norms_of_sharded_rows_stay(package: Package) -> None:
    class Sharded(torch.Tensor):
        """Stands in for a DTensor, which has operators of its own."""

    module = make_fx(SPELLINGS["power"], tracing_mode="fake")(rows(4, 16).detach(), randn(16))
    (x, _) = (node for node in module.graph.nodes if node.op == "placeholder")
    x.meta["val"] = torch.empty(4, 16).as_subclass(Sharded)
    before = str(module.graph)
    assert str(route(module, package.ops, written_out_only=True).graph) == before


@pytest.mark.parametrize("mark", [{"compile_with_inductor": {}}, {"stream": 1}])
def test_norms_with_marks_of_others_stay(package: Package, mark: dict[str, Any]) -> None:
    """All of one is for Inductor, or a part of it runs on another stream."""
    module = make_fx(SPELLINGS["power"], tracing_mode="fake")(rows(4, 16).detach(), randn(16))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    for node in nodes if "stream" not in mark else nodes[2:3]:
        node.meta["custom"] = mark
    before = str(module.graph)
    assert str(route(module, package.ops, written_out_only=True).graph) == before


# ---- Models --------------------------------------------------------------------------------------


def test_norms_inside_checkpointed_layers(package: Package) -> None:
    norm, x = kind_of(LlamaRMSNorm), rows(4, 16)

    def layer(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: norm(x).sin(), x, use_reentrant=False)

    run, graphs = compiled(package, layer)
    y, wanted = run(x), layer(x)
    assert package.ops.rms_norm in calls(graphs[0])
    assert "rsqrt" not in str(calls(graphs[0]))
    for a, b in zip(grads(y, *leaves_of(norm, x)), grads(wanted, x, norm.weight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@needs_whole_forward
@pytest.mark.slow
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_training_through_the_backend_is_that_of_eager_code(
    package: Package,
    kind: Any,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backend = make_backend(package.ops)

    def train(**how: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        return Training(kind, False, **how).train(3)

    with caplog.at_level("INFO"):
        found = train(wrap=lambda model: torch.compile(model, backend=backend))
    told = [message.split(package.name) for message in caplog.messages]
    sentence = "gave 0 RMSNorm nodes{} to "
    assert [sentence.format(" and 9 written-out ones"), "; additions folded: 0"] in told
    assert told.count([sentence.format(""), "; additions folded: 4"]) == 2
    eager = train()
    assert not equal_bits(found, eager)
    for a, b in zip(found, eager, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
