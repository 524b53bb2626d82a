"""Norms whose eps is so small that dx of a kernel may overflow get their gradients elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import layer_norm, rms_norm

from generator.paths import GENERATED
from normforge import rms_norm_gated, rms_norm_rope
from normforge.api import Package
from normforge.frontends import gated_node, rope_node
from normforge.frontends.batch_invariant import BatchInvariantPackage
from normforge.frontends.graph_pass import find_norms, has_tiny_eps, route
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.operations import GATED, ROTATED
from normforge.serve.options import PLAIN, SMALLEST_EPS, Arguments, FormulaOptions
from normforge.serve.server import Server
from normforge.table import MAX_ALIGNMENT
from tests.support.entry_points import (
    leaf,
    needs_whole_forward,
    randn,
    same,
    write_layer_norm_package,
    write_package,
)
from tests.support.library_functions import Kernels
from tests.support.native import Machine, Watch

N = 16


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Questions for a kernel, of packages that are made from here on. The formula then serves."""
    questions: list[str] = []
    find = Server._find

    def quick(self: Any, *_: Any) -> None:
        questions.append("quick")

    def spy(self: Any, given: Any, options: Any) -> Any:
        questions.append("any")
        return find(self, given, options)

    monkeypatch.setattr(Server, "_quick", quick)
    monkeypatch.setattr(Server, "_find", spy)
    return questions


def into_main_grad(package: Package, x: Any, w: Any, eps: float) -> Any:
    norm = package.RMSNorm(N, eps, main_grad=True)
    norm.weight.main_grad = torch.zeros(N)
    return norm(x) * w


def watched(package: Package, x: Any, w: Any, eps: float) -> Any:
    with Watch():
        return package.rms_norm(x, w, eps)


def compiled(package: Package, x: Any, w: Any, eps: float) -> Any:
    return torch.compile(lambda x, w: package.rms_norm(x, w, eps), backend="aot_eager")(x, w)


NORMS: dict[str, Callable[..., Any]] = {
    "plain": lambda p, x, w, eps: p.rms_norm(x, w, eps),
    "residual": lambda p, x, w, eps: sum(p.rms_norm(x, w, eps, residual=x.detach())),
    "offset": lambda p, x, w, eps: p.rms_norm(x, w, eps, weight_offset=1.0),
    "no weight": lambda p, x, w, eps: p.rms_norm(x, None, eps) * w,
    "per head": lambda p, x, w, eps: p.rms_norm(x.view(3, 2, N), torch.stack((w, 2 * w)), eps),
    "main_grad": into_main_grad,
    "watched": watched,
    "compiled": compiled,
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("mode", [nullcontext, Watch])
def test_no_kernel_is_asked_for_gradients(
    name: str, mode: Any, asked: list[str], tmp_path: Path
) -> None:
    """Kernels are asked at the least eps that they serve, which shows that the questions would be
    seen."""
    package = write_package(tmp_path)

    def gradients(eps: float) -> Any:
        torch._dynamo.reset()
        asked.clear()
        leaves = x, w = leaf(6, N), leaf(N, seed=1)
        y = NORMS[name](package, x, w, eps)
        with mode():
            return torch.autograd.grad(y, leaves, randn(*y.shape, seed=2))

    found = gradients(SMALLEST_EPS)
    assert asked
    assert same(gradients(SMALLEST_EPS * 0.99), found) and not asked
    assert same(gradients(0.0), found) and not asked


@pytest.mark.parametrize("way", ["eager", "watched", "residual"])
def test_the_same_of_layer_norm(way: str, asked: list[str], tmp_path: Path) -> None:
    package = write_layer_norm_package(tmp_path)

    def gradients(eps: float) -> Any:
        asked.clear()
        leaves = x, w, b = leaf(6, N), leaf(N, seed=1), leaf(N, seed=2)
        with Watch() if way == "watched" else nullcontext():
            other = randn(6, N, seed=3) if way == "residual" else None
            y = package.layer_norm(x, w, b, eps, residual=other)
            y = y if other is None else sum(y)
            return torch.autograd.grad(y, leaves, randn(6, N, seed=4))

    found = gradients(SMALLEST_EPS)
    assert asked
    assert same(gradients(0.0), found) and not asked


def gated(x: Any, w: Any, eps: float) -> Any:
    return rms_norm_gated(x, x.detach(), w, eps)


def rotated(x: Any, w: Any, eps: float) -> Any:
    return rms_norm_rope(x, w, torch.ones(6, N), torch.zeros(N), eps)


@pytest.mark.parametrize("norm", [gated, rotated])
def test_the_same_of_functions_of_the_library(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    for served, names in ((gated_node, GATED), (rope_node, ROTATED)):
        functions = served.SERVED("*/gated" if served is gated_node else "*/rope")
        monkeypatch.setattr(functions, "_servers", {name: Kernels(name, seen) for name in names})
    x, w = leaf(6, 2, N), leaf(N, seed=1)
    for eps, calls in ((SMALLEST_EPS * 0.99, 0), (SMALLEST_EPS, 1)):
        y = norm(x, w, eps)
        seen.clear()
        torch.autograd.grad(y.sum(), (x, w))
        assert len(seen) == calls


@pytest.mark.parametrize("native", [False, True])
def test_dx_of_tiny_rows_is_finite(
    native: bool, make: Callable[..., Package], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The square of rstd overflows in the fake kernels as it does in the real ones."""
    machine.square_rstd = True
    package = make(on=native)
    x, w, dy = (1e-20 * randn(6, 1024)).bfloat16(), randn(1024, seed=1), randn(6, 1024, seed=2)
    leaves = x, w = x.requires_grad_(), w.bfloat16().requires_grad_()
    assert all(t.data_ptr() % MAX_ALIGNMENT == 0 for t in leaves)

    def gradients(eps: float) -> Any:
        return torch.autograd.grad(package.rms_norm(x, w, eps), leaves, dy.bfloat16())

    for _ in range(4):
        assert gradients(1e-6)[0].isfinite().all()
    launched = len(machine.native), len(machine.launches)
    assert launched[0] > 0 if native else launched[1] > 0
    wide = x.detach().double().requires_grad_()
    wanted = torch.autograd.grad(rms_norm(wide, (1024,), w.double(), 0.0), wide, dy.double())[0]
    for _ in range(4):
        dx, dw = gradients(0.0)
        assert torch.allclose(dx.double(), wanted, rtol=0.02, atol=float(wanted.abs().max()) / 100)
        assert dw.isfinite().all()
    rstd = torch.rsqrt(x.detach().float().square().mean(-1))
    dx, _ = package.rmsnorm_backward(dy.bfloat16(), x.detach(), rstd, w.detach())
    assert not dx.isfinite().all(), "the fake kernel is as large as the real ones"


def test_batch_invariant_norms_refuse_it() -> None:
    package = BatchInvariantPackage(GENERATED / "h200" / "rmsnorm_invariant_backward")
    on_gpu: Any = SimpleNamespace(is_cuda=True)
    given = Arguments(on_gpu, on_gpu, on_gpu, None)
    with pytest.raises(RuntimeError, match="no kernel serves an eps below 1e-29, and the bits of"):
        package._run(given, FormulaOptions())
    assert FormulaOptions() != PLAIN


# ---- Graphs --------------------------------------------------------------------------------------


def step_of_rms_norm(x: Any, w: Any, dy: Any, eps: float) -> Any:
    y, rstd = torch.ops.aten._fused_rms_norm(x, [N], w, eps)
    return y, torch.ops.aten._fused_rms_norm_backward(dy, x, [N], rstd, w, [True, True])


def step_of_layer_norm(x: Any, w: Any, dy: Any, eps: float) -> Any:
    y, mean, rstd = torch.ops.aten.native_layer_norm(x, [N], w, w, eps)
    backward = torch.ops.aten.native_layer_norm_backward
    return y, *backward(dy, x, [N], mean, rstd, w, w, [True, True, True])


@pytest.mark.usefixtures("aten")
@pytest.mark.parametrize(
    ("step_of", "write"),
    [
        pytest.param(step_of_rms_norm, write_package, marks=needs_whole_forward),
        (step_of_layer_norm, write_layer_norm_package),
    ],
)
def test_backwards_in_graphs_stay_pytorchs(step_of: Any, write: Any, tmp_path: Path) -> None:
    operators = write(tmp_path).ops
    given = randn(6, N), randn(N, seed=1), randn(6, N, seed=2)
    for eps, left in ((SMALLEST_EPS, False), (0.0, True)):
        graph = route(make_fx(partial(step_of, eps=eps))(*given), operators).graph
        backward = [n for n in find_norms(graph, operators) if "backward" in str(n.target)]
        assert bool(backward) is left


@pytest.mark.parametrize(
    ("norm", "layer_class", "write"),
    [
        (lambda x, w, eps: rms_norm(x, (N,), w, eps), torch.nn.RMSNorm, write_package),
        (
            lambda x, w, eps: layer_norm(x, (N,), w, eps=eps),
            torch.nn.LayerNorm,
            write_layer_norm_package,
        ),
    ],
)
def test_graphs_before_autograd_show_it(
    norm: Any, layer_class: Any, write: Any, tmp_path: Path
) -> None:
    package: Package | LayerNormPackage = write(tmp_path)
    found: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.append(has_tiny_eps(graph, package.ops))
        return graph

    for eps in (SMALLEST_EPS, 0.0):
        layer = layer_class(N, eps)
        for function in (lambda x, w, eps=eps: norm(x, w, eps), lambda x, w, m=layer: m(x)):
            torch._dynamo.reset()
            torch.compile(function, backend=backend)(randn(6, N), randn(N, seed=1))
    assert found == [False, False, True, True]
