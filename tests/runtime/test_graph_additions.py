"""Additions of a residual stream that `route` and `inductor_backend` fold into norms: which, and
which they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import rms_norm

from normforge.api import Package
from normforge.frontends.additions import fold_additions
from normforge.frontends.graph_pass import make_backend, route
from tests.support.entry_points import (
    Training,
    needs_whole_forward,
    randn,
    write_package,
)

ATEN = torch.ops.aten
Step = Callable[..., Any]


pytestmark = pytest.mark.usefixtures("aten")


def norm(x: torch.Tensor, w: torch.Tensor | None) -> torch.Tensor:
    return rms_norm(x, (16,), w, 1e-5)


def backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Any:
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True))
    return ATEN._fused_rms_norm_backward(dy, x, [16], rstd, w, [True, True])


# Every step takes x, r and g of one shape, and w, a row of it.
def stream_goes_on(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    return norm(h, w), h, h.sin()


def sum_is_used_before(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    before = h.sin() * g
    return norm(h, w) * before


def weight_comes_after(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    return norm(h, w.exp()), h


def twice_the_same(x: Any, r: Any, g: Any, w: Any) -> Any:
    return norm(x + x, w)


def two_norms_of_a_sum(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    return norm(h, w) + norm(h, None) * g


def gradient_of_stream(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return r + dx, dw


def gradient_comes_first(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return (dx + r).sin(), dw


def block(x: Any, r: Any, g: Any, w: Any) -> Any:
    """A training step of two norms on a stream."""
    x, r, w = leaves = [each.detach().requires_grad_() for each in (x, r, w)]
    h = x + r
    h = h + norm(h, w).tanh()
    return h, *torch.autograd.grad(norm(h, w) * g + h, leaves, torch.ones_like(h))


FOLDED: dict[Step, int] = {
    **dict.fromkeys((stream_goes_on, sum_is_used_before, weight_comes_after, twice_the_same), 1),
    two_norms_of_a_sum: 1,
    **dict.fromkeys((gradient_of_stream, gradient_comes_first), 1),
    block: 4,
}


def given(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    return [randn(*s, dtype=dtype, seed=seed + i) for i, s in enumerate([(4, 16)] * 3 + [(16,)])]


def trace(step: Step, mode: str = "fake", dtype: torch.dtype = torch.float32) -> Any:
    return make_fx(step, tracing_mode=mode)(*given(dtype))


def additions(module: torch.fx.GraphModule) -> int:
    return sum(node.target is ATEN.add.Tensor for node in module.graph.nodes)


def check(package: Package, module: torch.fx.GraphModule, folded: int, sizes: int = 4) -> None:
    """A graph, routed, has so many additions fewer, and computes the same."""
    inputs = [each.repeat(sizes // 4, 1) if each.dim() > 1 else each for each in given(seed=9)]
    copies = [each.clone() for each in inputs]
    wanted, before = module(*inputs), additions(module)
    found = route(module, package.ops)(*copies)
    assert before - additions(module) == folded
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@needs_whole_forward
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("step", FOLDED)
def test_additions_become_part_of_norms(package: Package, step: Step, mode: str) -> None:
    module = trace(step, mode)
    check(package, module, FOLDED[step], 4 if mode == "fake" else 12)


@needs_whole_forward
def test_nodes_of_a_folded_sum_keep_what_tracing_knew(package: Package) -> None:
    module = trace(stream_goes_on)
    (sum_,) = (node for node in module.graph.nodes if node.target is ATEN.add.Tensor)
    sum_.meta["stack_trace"] = "model.py, line 7"
    before = dict(sum_.meta)
    route(module, package.ops)
    (total,) = (node for node in module.graph.nodes if node.args[1:] == (2,))
    assert total.meta == before
    shapes = [(each.shape, each.dtype) for each in total.args[0].meta["val"]]
    assert shapes == [((4, 16), torch.float32), ((4, 1), torch.float32), ((4, 16), torch.float32)]


# ---- What is left alone --------------------------------------------------------------------------


def broadcast(x: Any, r: Any, g: Any, w: Any) -> Any:
    return norm(x + w, w)


def one_row_added(x: Any, r: Any, g: Any, w: Any) -> Any:
    return norm(x + r[:1], w)


def number_added(x: Any, r: Any, g: Any, w: Any) -> Any:
    return norm(x + 1.5, w)


def factor(x: Any, r: Any, g: Any, w: Any) -> Any:
    return norm(torch.add(x, r, alpha=2), w)


def promoted(x: Any, r: Any, g: Any, w: Any) -> Any:
    return norm(x.bfloat16() + r, w)


def transposed(x: Any, r: Any, g: Any, w: Any) -> Any:
    """The stream is as PyTorch lays it out: its transpose is contiguous."""
    x, r = (each.reshape(2, 2, 16).transpose(0, 1).contiguous() for each in (x, r))
    h = x.transpose(0, 1) + r.transpose(0, 1)
    return norm(h, w), h.transpose(0, 1).view(4, 16)


def its_own_weight(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = w + r[0]
    return norm(h, h)


def user_and_weight_between(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    return norm(h, h.sum(0))


def term_changes(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    x.add_(1)
    return norm(h, w)


def sum_changes(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    h.mul_(2)
    return norm(h, w)


def weight_changes(x: Any, r: Any, g: Any, w: Any) -> Any:
    h = x + r
    w.mul_(2)
    return norm(h, w), h


def gradient_is_used_twice(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return r + dx, dx.sin(), dw


def gradient_is_returned(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return r + dx, dx, dw


def other_term_comes_later(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return dx + r.sin(), dw


def other_term_needs_the_backward(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return dx + dw.expand(4, 16).contiguous()


def other_term_changes(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    r.mul_(2)
    return dx + r, dw


def gradient_with_itself(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return dx + dx, dw


def wider_gradient(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g.bfloat16(), x.bfloat16(), w.bfloat16())
    return r + dx, dw


def gradient_with_factor(x: Any, r: Any, g: Any, w: Any) -> Any:
    dx, dw = backward(g, x, w)
    return torch.add(r, dx, alpha=2), dw


LEFT = (
    broadcast,
    one_row_added,
    number_added,
    factor,
    promoted,
    transposed,
    its_own_weight,
    user_and_weight_between,
    term_changes,
    sum_changes,
    weight_changes,
    gradient_is_used_twice,
    gradient_is_returned,
    other_term_comes_later,
    other_term_needs_the_backward,
    other_term_changes,
    gradient_with_itself,
    wider_gradient,
    gradient_with_factor,
)


@needs_whole_forward
@pytest.mark.parametrize("step", LEFT)
def test_other_additions_stay(package: Package, step: Step) -> None:
    check(package, trace(step), 0)


@needs_whole_forward
@pytest.mark.parametrize("step", [stream_goes_on, gradient_of_stream])
@pytest.mark.parametrize(
    "meta",
    [
        {"custom": {"stream": 1}},
        {"custom": {"compile_with_inductor": {}}},
        {"recompute": 1},
        {"partitioner_tag": "is_backward"},
    ],
)
def test_additions_of_another_stream_or_region_stay(
    package: Package, step: Step, meta: dict[str, Any]
) -> None:
    module = trace(step)
    for node in module.graph.nodes:
        if node.target is ATEN.add.Tensor:
            node.meta.update(meta)
    check(package, module, 0)


@needs_whole_forward
@pytest.mark.parametrize("step", [stream_goes_on, gradient_of_stream])
def test_nothing_is_folded_where_tracing_left_no_values(package: Package, step: Step) -> None:
    module = trace(step)
    for node in module.graph.nodes:
        node.meta.pop("val", None)
    check(package, module, 0)


@needs_whole_forward
@pytest.mark.parametrize("effect", ["streams::wait_stream", "higher order"])
def test_nothing_is_folded_over_an_effect(package: Package, effect: str) -> None:
    """An operator without results, and a call that is no operator."""
    module = trace(stream_goes_on)
    (fused,) = (n for n in module.graph.nodes if n.target is ATEN._fused_rms_norm.default)
    with torch.library._scoped_library("normforge_effect", "DEF") as library:
        library.define("wait(int stream) -> ()")
        library.impl("wait", lambda stream: None, "CompositeExplicitAutograd")
        target = torch.ops.normforge_effect.wait.default if ":" in effect else abs
        with module.graph.inserting_before(fused):
            module.graph.call_function(target, (3,))
        module.recompile()
        check(package, module, 0)


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
    module = trace(gradient_of_stream, dtype=torch.bfloat16)
    inputs = given(torch.bfloat16, seed=5)
    exact = gradient_of_stream(*(each.double() for each in inputs))[0]
    twice = module(*inputs)[0]
    once = route(module, package.ops)(*inputs)[0]
    assert torch.equal(once, exact.bfloat16())
    assert not torch.equal(twice, once)


# ---- inductor_backend ----------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message.split("; ")[1] for message in caplog.messages if "additions" in message]


@needs_whole_forward
def test_backend_folds_and_keeps_sizes_dynamic(
    package: Package,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

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
            found = torch.autograd.grad([y, h], leaves, [g, x.detach()])
            wanted = torch.autograd.grad(layer(*leaves), leaves, [g, x.detach()])
            for a, b in zip((y, h, *found), (*layer(*leaves), *wanted), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert told(caplog) == ["additions folded: 1", "additions folded: 1"]


@needs_whole_forward
@pytest.mark.slow
def test_training_through_the_backend_is_that_of_eager_code(
    package: Package,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def make(width: int) -> torch.nn.RMSNorm:
        return torch.nn.RMSNorm(width, eps=1e-6)

    backend = make_backend(package.ops)
    with caplog.at_level("INFO"):
        compiled = Training(make, False, wrap=lambda model: torch.compile(model, backend=backend))
        found = compiled.train(3)
    # Of five norms on the stream, the first has nothing added in the forward (Inductor drops the
    # zeros), and the last no second gradient in the backward.
    assert told(caplog) == ["additions folded: 4", "additions folded: 4"]
    for a, b in zip(found, Training(make, False).train(3), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
