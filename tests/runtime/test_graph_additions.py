"""Additions in graphs that `route` and `inductor_backend` fold into norms, and those that stay: of
a stream before a norm or behind its backward, and of a stream and a norm's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

from generator.paths import REPOSITORY
from normforge.api import Package
from normforge.frontends.additions import fold_additions
from normforge.frontends.graph_pass import make_backend, route
from normforge.frontends.norm_add import NormAndAdd
from normforge.operations import RMSNORM_ADD_FORWARD
from normforge.serve.kernels import source_of
from tests.support.entry_points import Training, needs_whole_forward, randn, write_package
from tests.support.graph_steps import (
    ATEN,
    METAS,
    N,
    Step,
    additions,
    check_routed,
    given,
    marked,
    norm,
    results,
    trace,
)
from tests.support.layer_classes import model_of, step
from tests.support.norm_add import Kernels

pytestmark = pytest.mark.usefixtures("aten")


def backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
    return ATEN._fused_rms_norm_backward(dy, x, [16], rstd, w, [True, True])


def with_gradients(use: Step) -> Step:
    """Return a step with a backward, of whose dx and dw, and of r, `use` makes something."""
    return lambda x, r, g, w: use(*backward(g, x, w), r)


def block(x: Any, r: Any, g: Any, w: Any) -> Any:
    """A training step of two norms on a stream."""
    x, r, w = leaves = [each.detach().requires_grad_() for each in (x, r, w)]
    h = x + r
    h = h + norm(h, w).tanh()
    return h, *torch.autograd.grad(norm(h, w) * g + h, leaves, torch.ones_like(h))


FOLDED: dict[str, tuple[Step, int]] = {
    "the stream goes on": (lambda x, r, g, w: (norm(h := x + r, w), h, h.sin()), 1),
    "the sum is used before": (lambda x, r, g, w: (h := x + r).sin() * g * norm(h, w), 1),
    "the weight comes after": (lambda x, r, g, w: (norm(h := x + r, w.exp()), h), 1),
    "twice the same": (lambda x, r, g, w: norm(x + x, w), 1),
    "two norms of a sum": (lambda x, r, g, w: norm(h := x + r, w) + norm(h, None) * g, 1),
    "the gradient of the stream": (with_gradients(lambda dx, dw, r: (r + dx, dw)), 1),
    "the gradient comes first": (with_gradients(lambda dx, dw, r: ((dx + r).sin(), dw)), 1),
    "a training step": (block, 4),
}
"""Steps, and how many of their additions become part of norms."""
BOTH = ["the stream goes on", "the gradient of the stream"]


@needs_whole_forward
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", FOLDED)
def test_additions_become_part_of_norms(package: Package, name: str, mode: str) -> None:
    step, folded = FOLDED[name]
    check_routed(package, trace(step, mode), folded, rows=4 if mode == "fake" else 12)


@needs_whole_forward
def test_nodes_of_a_folded_sum_keep_what_tracing_knew(package: Package) -> None:
    module = trace(FOLDED["the stream goes on"][0])
    (sum_,) = additions(module)
    sum_.meta["stack_trace"] = "model.py, line 7"
    before = dict(sum_.meta)
    route(module, package.ops)
    (total,) = (node for node in module.graph.nodes if node.args[1:] == (2,))
    assert total.meta == before
    shapes = [(each.shape, each.dtype) for each in total.args[0].meta["val"]]
    assert shapes == [((4, 16), torch.float32), ((4, 1), torch.float32), ((4, 16), torch.float32)]


# ---- What is left alone --------------------------------------------------------------------------


def transposed(x: Any, r: Any, g: Any, w: Any) -> Any:
    """The stream is as PyTorch lays it out: its transpose is contiguous."""
    x, r = (each.reshape(2, 2, 16).transpose(0, 1).contiguous() for each in (x, r))
    h = x.transpose(0, 1) + r.transpose(0, 1)
    return norm(h, w), h.transpose(0, 1).view(4, 16)


def term_changes(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    x.add_(1)
    return norm(h, w)


def weight_changes(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    w.mul_(2)
    return norm(h, w), h


def wider_gradient(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g.bfloat16(), x.bfloat16(), w.bfloat16())
    return r + dx, dw


LEFT: dict[str, Step] = {
    "a row for all": lambda x, r, g, w: norm(x + w, w),
    "a matrix of one row": lambda x, r, g, w: norm(x + r[:1], w),
    "a number": lambda x, r, g, w: norm(x + 1.5, w),
    "a factor": lambda x, r, g, w: norm(torch.add(x, r, alpha=2), w),
    "two dtypes": lambda x, r, g, w: norm(x.bfloat16() + r, w),
    "transposed": transposed,
    "the sum is the weight, too": lambda x, r, g, w: norm(h := w + r[0], h),
    "the weight needs the sum": lambda x, r, g, w: norm(h := x + r, h.sum(0)),
    "a term changes": term_changes,
    "the sum changes": lambda x, r, g, w: norm((x + r).mul_(2), w),
    "the weight changes": weight_changes,
    "the gradient is used twice": with_gradients(lambda dx, dw, r: (r + dx, dx.sin(), dw)),
    "the gradient is returned": with_gradients(lambda dx, dw, r: (r + dx, dx, dw)),
    "the other term comes later": with_gradients(lambda dx, dw, r: (dx + r.sin(), dw)),
    "the other term needs the backward": with_gradients(
        lambda dx, dw, r: dx + dw.expand(4, 16).contiguous()
    ),
    "the other term changes": with_gradients(lambda dx, dw, r: (dx + r.mul_(2), dw)),
    "a gradient with itself": with_gradients(lambda dx, dw, r: (dx + dx, dw)),
    "a wider gradient": wider_gradient,
    "a gradient with a factor": with_gradients(lambda dx, dw, r: (torch.add(r, dx, alpha=2), dw)),
}


@needs_whole_forward
@pytest.mark.parametrize("name", LEFT)
def test_other_additions_stay(package: Package, name: str) -> None:
    check_routed(package, trace(LEFT[name]), 0)


@needs_whole_forward
def test_a_backward_that_adds_a_gradient_takes_no_second_one(package: Package) -> None:
    def twice(x: Any, r: Any, g: Any, w: Any) -> Any:
        dx, dw = backward(g, x, w)[:2]
        return (dx + r) + x, dw

    module, inputs = trace(twice), given(seed=9)
    wanted = module(*inputs)
    for _ in range(2):  # the second pass sees what the first one has made
        route(module, package.ops)
        assert len(additions(module)) == 1
    torch.testing.assert_close(results(module(*inputs)), results(wanted), atol=1e-5, rtol=1e-5)


@needs_whole_forward
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("meta", METAS)
def test_additions_of_another_stream_or_region_stay(
    package: Package, name: str, meta: dict[str, Any]
) -> None:
    check_routed(package, marked(trace(FOLDED[name][0]), meta), 0)


@needs_whole_forward
@pytest.mark.parametrize("name", BOTH)
def test_nothing_is_folded_where_tracing_left_no_values(package: Package, name: str) -> None:
    module = trace(FOLDED[name][0])
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    check_routed(package, module, 0)


@needs_whole_forward
@pytest.mark.parametrize("effect", ["streams::wait_stream", "higher order"])
def test_nothing_is_folded_over_an_effect(package: Package, effect: str) -> None:
    """An operator without results, and a call that is no operator."""
    module = trace(FOLDED["the stream goes on"][0])
    (fused,) = (n for n in module.graph.nodes if n.target is ATEN._fused_rms_norm.default)
    with torch.library._scoped_library("normforge_effect", "DEF") as library:
        library.define("wait(int stream) -> ()")
        library.impl("wait", lambda stream: None, "CompositeExplicitAutograd")
        target = torch.ops.normforge_effect.wait.default if ":" in effect else abs
        with module.graph.inserting_before(fused):
            module.graph.call_function(target, (3,))
        module.recompile()
        check_routed(package, module, 0)


# ---- Numbers -------------------------------------------------------------------------------------


def test_norms_of_another_package_are_left_alone(package: Package, tmp_path: Path) -> None:
    other = write_package(tmp_path / "other")

    def step(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        y, rstd = package.rmsnorm_forward(x + residual, weight)
        dx, _ = package.rmsnorm_backward(y, x, rstd, weight)
        return dx + residual

    rows = randn(4, 16)
    graph = make_fx(step, tracing_mode="fake")(rows, rows.clone(), randn(16, seed=1)).graph
    assert fold_additions(graph, other.ops) == 0
    assert fold_additions(graph, package.ops) == 2


def test_sum_after_a_backward_is_rounded_once(package: Package) -> None:
    step, inputs = FOLDED["the gradient of the stream"][0], given(torch.bfloat16, seed=5)
    module = trace(step, dtype=torch.bfloat16)
    exact = step(*(each.double() for each in inputs))[0]
    twice = module(*inputs)[0]
    once = route(module, package.ops)(*inputs)[0]
    assert torch.equal(once, exact.bfloat16())
    assert not torch.equal(twice, once)


# ---- inductor_backend ----------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message.split("; ")[1] for message in caplog.messages if "additions" in message]


@needs_whole_forward
def test_backend_folds_and_keeps_sizes_dynamic(
    package: Package, caplog: pytest.LogCaptureFixture, own_cache: None
) -> None:
    def layer(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> Any:
        h = x + r
        return norm(h, w), h

    compiled = torch.compile(layer, backend=make_backend(package.ops), fullgraph=True)
    with caplog.at_level("INFO"), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (4, 6, 9):
            x, r, g, w = (each.repeat(rows, 1) if each.dim() > 1 else each for each in given())
            x, r, w = leaves = [each.requires_grad_() for each in (x, r, w)]
            for each in (x, r):
                torch._dynamo.mark_dynamic(each, 0)
            y, h = compiled(*leaves)
            found = y, h, *torch.autograd.grad([y, h], leaves, [g, x.detach()])
            y, h = layer(*leaves)
            wanted = y, h, *torch.autograd.grad([y, h], leaves, [g, x.detach()])
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert told(caplog) == ["additions folded: 1", "additions folded: 1"]


@needs_whole_forward
@pytest.mark.slow
def test_training_through_the_backend_is_that_of_eager_code(
    package: Package, caplog: pytest.LogCaptureFixture, own_cache: None
) -> None:
    def make(width: int) -> torch.nn.RMSNorm:
        return torch.nn.RMSNorm(width, eps=1e-6)

    backend = make_backend(package.ops)
    with caplog.at_level("INFO"):
        compiled = Training(make, False, wrap=lambda model: torch.compile(model, backend=backend))
        found = compiled.train(3)
    # Of five norms on the stream, the first has nothing added in the forward (Inductor drops the
    # zeros), and the last no second gradient in the backward.
    assert told(caplog) == ["additions folded: 4", "additions folded: 4"]
    torch.testing.assert_close(found, Training(make, False).train(3), atol=1e-4, rtol=1e-4)


# ---- Sums behind a norm --------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path) -> Package:
    return write_package(tmp_path / "package")


@pytest.fixture
def kernels(served: Package, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(served, monkeypatch)


def step_of_training(x: Any, r: Any, g: Any, w: Any) -> Any:
    x, r, w = leaves = [each.detach().requires_grad_() for each in (x, r, w)]
    h = r + norm(x, w)
    return h, *torch.autograd.grad(h + norm(h.tanh(), w) * g, leaves, torch.ones_like(h))


def post_norm(x: Any, r: Any, g: Any, w: Any) -> Any:
    return r + norm(x, w)


def post_norm_and_next(x: Any, r: Any, g: Any, w: Any) -> Any:
    """Gemma's order: the sum goes through another norm, which it would be folded into, too."""
    return (h := r + norm(x, w)), norm(h, w)


def stream_comes_later(x: Any, r: Any, g: Any, w: Any) -> Any:
    y = norm(x, w)
    return r.sin() * g + y


SUMS: dict[str, Step] = {
    "post norm": post_norm,
    "other order": lambda x, r, g, w: norm(x, None) + r,
    "the stream comes later": stream_comes_later,
    "the weight is computed": lambda x, r, g, w: r + norm(x.sin(), w.exp()),
    "post norm and the next": post_norm_and_next,
    "two post norms": lambda x, r, g, w: norm(x, w) + norm(r, w),
    "a training step": step_of_training,
}
"""Steps of which one addition becomes part of a norm."""


@needs_whole_forward
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_become_part_of_norms(served: Package, kernels: Kernels, name: str, mode: str) -> None:
    rows = 4 if mode == "fake" else 12
    check_routed(served, trace(SUMS[name], mode), 1, sums=1, rows=rows)
    assert kernels.calls == [0.0]


@needs_whole_forward
def test_a_sum_is_rounded_once(served: Package, kernels: Kernels) -> None:
    inputs, module = given(torch.bfloat16), trace(post_norm, dtype=torch.bfloat16)
    exact = post_norm(*(each.double() for each in inputs))
    twice = module(*inputs)
    assert torch.equal(route(module, served.ops)(*inputs), exact.bfloat16())
    assert not torch.equal(twice, exact.bfloat16())


@needs_whole_forward
def test_nodes_keep_what_tracing_knew(served: Package, kernels: Kernels) -> None:
    module = trace(post_norm)
    (total,) = additions(module)
    total.meta["stack_trace"] = "model.py, line 7"
    before = dict(total.meta)
    route(module, served.ops)
    (fused,) = (n for n in module.graph.nodes if n.target is served.ops.rms_norm_and_add)
    (y,) = (node for node in fused.users if node.args[1] == 0)
    assert y.meta == before
    assert [value.shape for value in fused.meta["val"]] == [(4, N), (4, 1)]


# ---- What stays ----------------------------------------------------------------------------------


def with_result(use: Step) -> Step:
    """Return a step with a norm, of whose y, and of r, `use` makes something."""
    return lambda x, r, g, w: use(norm(x, w), r)


def statistic_comes_before(x: Any, r: Any, g: Any, w: Any) -> Any:
    y, rstd = ATEN._fused_rms_norm(x, [N], w, 1e-5)
    return r * rstd + y


def rows_change(x: Any, r: Any, g: Any, w: Any) -> Any:
    y = norm(x, w)
    x.mul_(2)
    return r + y


def transposed_sum(x: Any, r: Any, g: Any, w: Any) -> Any:
    """PyTorch lays the sum out as the stream: its transpose is contiguous."""
    x, r = (each.reshape(2, 2, N).transpose(0, 1) for each in (x, r))
    return r + functional.rms_norm(x, (N,), w, 1e-5).transpose(0, 1).contiguous().transpose(0, 1)


OTHER_SUMS: dict[str, Step] = {
    "the result is used": with_result(lambda y, r: (r + y, y.sin())),
    "the result is returned": with_result(lambda y, r: (r + y, y)),
    "twice the result": with_result(lambda y, r: y + y),
    "a factor": with_result(lambda y, r: torch.add(r, y, alpha=2)),
    "one row": with_result(lambda y, r: r[:1] + y),
    "two dtypes": lambda x, r, g, w: r + norm(x.bfloat16(), w.bfloat16()),
    "the statistic comes before": statistic_comes_before,
    "the rows change": rows_change,
    "transposed": transposed_sum,
}


@needs_whole_forward
@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_sums_stay(served: Package, kernels: Kernels, name: str) -> None:
    check_routed(served, trace(OTHER_SUMS[name]), 0)


@needs_whole_forward
@pytest.mark.parametrize("meta", METAS)
def test_sums_of_another_stream_or_region_stay(
    served: Package, kernels: Kernels, meta: dict[str, Any]
) -> None:
    check_routed(served, marked(trace(post_norm), meta), 0)


@needs_whole_forward
def test_sums_stay_where_no_kernel_adds(
    package: Package, served: Package, kernels: Kernels
) -> None:
    """In a package without the operation, and for rows that it has no kernel for. The sum then
    belongs to the next norm, if there is one."""
    kernels.why = "another length of rows"
    for each in (package, served):
        check_routed(each, trace(post_norm), 0)
        check_routed(each, trace(post_norm_and_next), 1)
    assert kernels.asked == [False] * 2
    assert kernels.calls == []


def test_a_pass_knows_the_rows_that_kernels_add() -> None:
    """The committed package for the H200 is asked with fakes, which need no GPU."""
    name = RMSNORM_ADD_FORWARD.name
    source = source_of(REPOSITORY / "generated" / "h200" / name, name)
    added = NormAndAdd(lambda: source, lambda *_: ())
    none = NormAndAdd(lambda: "there is no package", lambda *_: ())

    def ask(width: int, offset: bool = False, device: str = "cuda", which: Any = added) -> bool:
        with FakeTensorMode():
            x = torch.empty(4, 4096, width, dtype=torch.bfloat16, device=device)
            return bool(which.serves(x, x.new_empty(width), offset))

    assert ask(4096)
    assert not ask(100)
    assert not ask(4096, device="cpu")
    assert not ask(4096, which=none)
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):  # sizes that nobody knows are not fixed
        size, other = (environment.create_unbacked_symint() for _ in range(2))
        rows, weight = (
            torch.empty(*shape, dtype=torch.bfloat16, device="cuda")
            for shape in ((4096, 4096), (size,))
        )
        assert not added.serves(rows, weight, False)
        assert not added.serves(rows.new_empty(4, other), weight, False)
    # A kernel of fp32 weights serves the sum of weight and offset.
    fp32 = source(None).backward.choose(16384, 4096, "bf16", "fp32").kernel
    assert ask(4096, offset=True) == (fp32 is not None)


# ---- Models of transformers ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "offset"), [("Olmo2", 0.0), ("Gemma2", 1.0), ("Gemma3", 1.0)])
@pytest.mark.usefixtures("own_cache", "fresh")
def test_post_norms_of_transformers(
    served: Package, kernels: Kernels, name: str, offset: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A step through the backend has the loss and the gradients of eager code, and the kernel of
    the sum behind attention and feed-forward of each layer, without a graph break."""
    model, ids = model_of(name), torch.randint(1, 32, (2, 9))
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.3, 0.3)
    wanted = step(model, ids)
    compiled = torch.compile(model, backend=make_backend(served.ops), fullgraph=True)
    with caplog.at_level("INFO"):
        found = step(compiled, ids)
    assert kernels.calls == [offset] * 4
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    told = [message for message in caplog.messages if "additions folded" in message]
    assert [message.rpartition(": ")[2] for message in told][:2] == ["0", "4"]
