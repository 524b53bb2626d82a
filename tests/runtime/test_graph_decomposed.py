"""Norms that a model writes out: which of them `inductor_backend` and `route` recognise."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from normforge.api import Package
from normforge.frontends.graph_pass import make_backend, route
from normforge.frontends.graph_values import graph_modules
from tests.support.entry_points import Training, equal_bits, grads, needs_whole_forward, randn
from tests.support.graph_steps import results
from tests.support.norm_classes import (
    NORM_CLASSES,
    GemmaRMSNorm,
    L2Norm,
    LlamaRMSNorm,
    MetaRMSNorm,
    Olmo2RMSNorm,
)

EPS = 1e-5
pytestmark = pytest.mark.usefixtures("fresh")


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
    wide = [each.double() for each in found]
    torch.testing.assert_close(wide, exact(norm, x), rtol=2 * unit, atol=10 * unit)
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
    found, exact = (grads(one, x, norm.weight) for one in (y, wanted))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


def test_transposed_heads_of_make_fx(package: Package) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        return SPELLINGS["square"](x.transpose(0, 1), w)

    x, w = randn(5, 4, 16), randn(16, seed=1)
    module = route(make_fx(step, tracing_mode="fake")(x, w), package.ops)
    y, wanted = module(x, w), step(x, w)
    assert calls(module).count(package.ops.rms_norm) == 1
    assert y.stride() == wanted.stride()
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)


def mean_of(x: Any) -> Any:
    return x.pow(2).mean(-1, keepdim=True) + EPS


SPELLINGS: dict[str, Callable[[Any, Any], Any]] = {
    "power": lambda x, w: w * (x * torch.rsqrt(torch.mean(x**2, dim=-1, keepdim=True) + EPS)),
    "square": lambda x, w: (x * (EPS + x.square().mean(dim=[-1], keepdim=True)).rsqrt()) * w,
    "product": lambda x, w: torch.mul(w, (x * x).mean((-1,), True).add(EPS).rsqrt().mul(x)),
    "functions": lambda x, w: torch.mul(
        torch.mul(x, torch.rsqrt(torch.add(torch.pow(x, 2).mean(1, keepdim=True), EPS))), w
    ),
    "power of the mean": lambda x, w: w * (x * torch.pow(mean_of(x), -0.5)),
    "one over the root": lambda x, w: w * (x * (1.0 / torch.sqrt(mean_of(x)))),
    "reciprocal of the root": lambda x, w: mean_of(x).sqrt().reciprocal() * x * w,
    "over the root": lambda x, w: w * (x / torch.sqrt(mean_of(x))),
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
        f"gave 0 RMSNorm nodes and 1 written-out ones to {package.name}; additions folded: 1"
    ]
    joint = make_fx(training, tracing_mode="fake")(x, w)
    before = str(joint.graph)
    assert str(route(joint, package.ops).graph) == before


# ---- What is left alone --------------------------------------------------------------------------


def rstd_of(power: torch.Tensor, dims: Any = -1, eps: Any = EPS) -> torch.Tensor:
    return torch.rsqrt(power.mean(dims, keepdim=True) + eps)


def xhat_is_used(x: Any, w: Any) -> Any:
    x = x.bfloat16()
    wide = x.float()
    xhat = wide * rstd_of(wide.pow(2))
    return (w * xhat).to(x.dtype), xhat.sin()


def mean_is_used(x: Any, w: Any) -> Any:
    mean = x.pow(2).mean(-1, keepdim=True)
    return w * (x * torch.rsqrt(mean + EPS)), mean


def narrow_mean(x: Any, w: Any) -> Any:
    mean = x.pow(2).mean(-1, keepdim=True, dtype=torch.float64).float()
    return x * torch.rsqrt(mean + EPS)


def narrowed(x: Any, w: Any) -> Any:
    """Compute the norm of float64 rows in fp32."""
    narrow = x.double().float()
    return (narrow * rstd_of(narrow.pow(2))).to(torch.float64)


def rows_change_in_between(x: Any, w: Any) -> Any:
    x = x.sin()
    mean = x.pow(2).mean(-1, keepdim=True)
    x.add_(1)
    return w * (x * torch.rsqrt(mean + EPS))


def in_place(x: Any, w: Any) -> Any:
    x = x.sin()
    x *= rstd_of(x.pow(2))
    return w * x


def without_gradient(x: Any, w: Any) -> Any:
    with torch.no_grad():
        rstd = rstd_of(x.pow(2))
    return w * (x * rstd)


def unweighted(x: Any) -> Any:
    return x * rstd_of(x.pow(2))


LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "xhat is used": xhat_is_used,
    "the mean is used": mean_is_used,
    "rstd is returned": lambda x, w: (w * (x * (rstd := rstd_of(x.pow(2)))), rstd),
    "the third power": lambda x, w: w * (x * rstd_of(x.pow(3).abs())),
    "the fourth power": lambda x, w: w * (x * rstd_of(x.pow(4))),
    "columns": lambda x, w: w * (x * rstd_of(x.pow(2), 0)),
    "another root": lambda x, w: w * (x * torch.pow(mean_of(x), -0.25)),
    "two over the root": lambda x, w: w * (x * (2.0 / torch.sqrt(mean_of(x)))),
    "x over the reciprocal root": lambda x, w: w * (x / torch.rsqrt(mean_of(x))),
    "x over a power": lambda x, w: w * (x / mean_of(x).pow(-0.5)),
    "x over one over the root": lambda x, w: w * (x / (1.0 / torch.sqrt(mean_of(x)))),
    "the root over x": lambda x, w: w * (torch.sqrt(mean_of(x)) / x),
    "times the root": lambda x, w: w * (x * torch.sqrt(mean_of(x))),
    "the root under one is returned": lambda x, w: (
        w * (x * (1.0 / (root := torch.sqrt(mean_of(x))))),
        root,
    ),
    "the root is returned": lambda x, w: (w * (x / (root := torch.sqrt(mean_of(x)))), root),
    "everything": lambda x, w: w * (x * rstd_of(x.pow(2), (0, 1))),
    "one number": lambda x, w: unweighted(x.sum()),
    "other rows": lambda x, w: w * (x.cos() * rstd_of(x.pow(2))),
    "an eps for each row": lambda x, w: w * (x * rstd_of(x.pow(2), eps=w[:1])),
    "no eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "a scaled eps": lambda x, w: (
        w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1.0, alpha=1e-3)))
    ),
    "another narrow result": lambda x, w: unweighted(x.half().float()).bfloat16(),
    "a narrow sum": lambda x, w: (unweighted(narrow := x.bfloat16()), narrow),
    "a narrow mean": narrow_mean,
    "float64": lambda x, w: w.double() * unweighted(x.double()),
    "narrowed": narrowed,
    "rows change in between": rows_change_in_between,
    "in place": in_place,
    "without a gradient": without_gradient,
    # The columns are what is contiguous, in the result as well.
    "rows with gaps": lambda x, w: w * unweighted(x.reshape(16, 4).t()),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_quite_a_norm_stays(package: Package, name: str) -> None:
    run, graphs = compiled(package, LEFT[name])
    x, w = rows(4, 16), randn(16, seed=1).abs()
    found, wanted = run(x, w), LEFT[name](x, w)
    assert package.ops.rms_norm not in calls(graphs[0])
    assert equal_bits(results(found), results(wanted))


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


def test_a_result_that_is_rounded_to_another_dtype_is_rounded(package: Package) -> None:
    def step(x: torch.Tensor) -> Any:
        return unweighted(x).half().float()

    run, graphs = compiled(package, step)
    found = run(x := rows(4, 16))
    assert package.ops.rms_norm in calls(graphs[0])
    assert torch.equal(found, found.half().float())
    torch.testing.assert_close(found, step(x), rtol=2**-10, atol=2**-10)


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


class Sharded(torch.Tensor):
    """Stands in for a DTensor, which has operators of its own."""


def lose_values(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        node.meta.clear()


def shard(graph: torch.fx.Graph) -> None:
    next(iter(graph.nodes)).meta["val"] = torch.empty(4, 16).as_subclass(Sharded)


def leave_to_inductor(graph: torch.fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["custom"] = {"compile_with_inductor": {}}


def run_a_part_elsewhere(graph: torch.fx.Graph) -> None:
    calls = [node for node in graph.nodes if node.op == "call_function"]
    calls[2].meta["custom"] = {"stream": 1}


@pytest.mark.parametrize("change", [lose_values, shard, leave_to_inductor, run_a_part_elsewhere])
def test_norms_of_other_nodes_stay(package: Package, change: Any) -> None:
    module = make_fx(SPELLINGS["power"], tracing_mode="fake")(rows(4, 16).detach(), randn(16))
    change(module.graph)
    before = str(module.graph)
    assert str(route(module, package.ops, written_out_only=True).graph) == before


# ---- Models --------------------------------------------------------------------------------------


def written_itself(x: torch.Tensor, norm: Any) -> torch.Tensor:
    y = norm(x)
    x.mul_(2.0)
    return y + x


def written_as_a_view(x: torch.Tensor, norm: Any) -> torch.Tensor:
    flat = x.view(-1)
    y = norm(x)
    flat[:3] = 0.0
    return y + x


def written_by_another_name(x: torch.Tensor, norm: Any) -> torch.Tensor:
    same = x.add_(1.0)
    y = norm(x)
    same *= 2.0
    return y + x


def written_by_its_first_name(x: torch.Tensor, norm: Any) -> torch.Tensor:
    same = x.add_(1.0)
    y = norm(same)
    x *= 2.0
    return y + same


def written_behind_a_squeeze(x: torch.Tensor, norm: Any) -> torch.Tensor:
    more = x.unsqueeze(0)
    y = norm(more.squeeze(0))
    more.data.mul_(2.0)
    return y + more[0]


def activated_in_place(x: torch.Tensor, norm: Any) -> torch.Tensor:
    y = norm(x)
    return y + torch.nn.functional.silu(x, inplace=True)


def written_as_a_whole(x: torch.Tensor, norm: Any) -> torch.Tensor:
    """Only a part of the rows that are written to is normalized."""
    y = norm(x[:1])
    x.mul_(2.0)
    return y + x


def written_before(x: torch.Tensor, norm: Any) -> torch.Tensor:
    x.mul_(2.0)
    return norm(x) + x


def result_is_written(x: torch.Tensor, norm: Any) -> torch.Tensor:
    y = norm(x)
    z = y * 2.0
    z.add_(1.0)
    return z + x


WRITERS: dict[Any, bool] = {
    **dict.fromkeys((written_itself, written_as_a_view, written_by_another_name), False),
    **dict.fromkeys((written_by_its_first_name, written_behind_a_squeeze), False),
    **dict.fromkeys((activated_in_place,), False),
    **{written_as_a_whole: False, written_before: True, result_is_written: True},
}


@pytest.mark.parametrize("function", WRITERS, ids=lambda f: f.__name__)
def test_rows_that_are_written_behind_their_norm_are_not_saved(
    package: Package, function: Any
) -> None:
    """Eager code saves narrow rows as a copy in fp32, so that they may be written to."""
    norm, x = kind_of(LlamaRMSNorm, torch.bfloat16), rows(2, 3, 16, dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = function(x * 1.0, norm)
        return y

    wanted = [step(x), *grads(step(x), x, norm.weight)]
    run, graphs = compiled(package, step)
    found = [run(x), *grads(run(x), x, norm.weight)]
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert (package.ops.rms_norm in calls(graphs[0])) is WRITERS[function]
    with torch.no_grad():
        torch.testing.assert_close(run(x), wanted[0], rtol=0.02, atol=0.02)
    assert package.ops.rms_norm in calls(graphs[-1])  # nothing is saved


def test_norms_inside_checkpointed_layers(package: Package) -> None:
    norm, x = kind_of(LlamaRMSNorm), rows(4, 16)

    def layer(x: torch.Tensor) -> Any:
        return checkpoint(lambda x: norm(x).sin(), x, use_reentrant=False)

    run, graphs = compiled(package, layer)
    y, wanted = run(x), layer(x)
    assert package.ops.rms_norm in calls(graphs[0])
    assert "rsqrt" not in str(calls(graphs[0]))
    found, exact = (grads(one, x, norm.weight) for one in (y, wanted))
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@needs_whole_forward
@pytest.mark.slow
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
def test_training_through_the_backend_is_that_of_eager_code(
    package: Package, kind: Any, caplog: pytest.LogCaptureFixture, own_cache: None
) -> None:
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
    torch.testing.assert_close(found, eager, atol=1e-4, rtol=1e-4)
