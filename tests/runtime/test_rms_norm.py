"""`rms_norm` and RMSNorm on the CPU, with autograd.

The formula serves every call, so what is tested is all that lies around the kernels.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from normforge.api import Package
from normforge.frontends import rms_norm
from tests.support.entry_points import aten_on_cpu, grads, leaf, randn, same, spied


@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_function_agrees_with_pytorch(
    package: Package, dtype: torch.dtype, eps: float | None
) -> None:
    x, weight = leaf(3, 5, 16, dtype=dtype), leaf(16, dtype=dtype, seed=1)
    y = package.rms_norm(x, weight, eps)
    with aten_on_cpu():
        wanted = functional.rms_norm(x, (16,), weight, eps)
        wanted_grads = grads(wanted, x, weight)
    tolerance = 4 * torch.finfo(dtype).eps
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert torch.allclose(y, wanted, rtol=tolerance, atol=tolerance)
    found = grads(y, x, weight)
    torch.testing.assert_close(found, wanted_grads, rtol=tolerance, atol=16 * tolerance)


@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_residual_stream_gets_both_gradients(
    package: Package, residual_dtype: torch.dtype, how: str
) -> None:
    x, residual = leaf(4, 16, dtype=torch.bfloat16), leaf(4, 16, dtype=residual_dtype, seed=1)
    weight = leaf(16, dtype=torch.bfloat16, seed=2)
    rms_norm: Any = package.rms_norm
    if how == "compiled":
        rms_norm = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    y, stream = rms_norm(x, weight, 1e-6, weight_offset=1.0, residual=residual)
    assert (y.dtype, stream.dtype) == (torch.bfloat16, residual_dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
    h = wide[0] + wide[1]
    wanted = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * (wide[2] + 1)
    wanted_grads = grads(torch.cat([wanted, h]), *wide)
    found = grads(torch.cat([y, stream]).double(), x, residual, weight)
    for got, expected, given in zip(found, wanted_grads, (x, residual, weight), strict=True):
        assert got.dtype == given.dtype
        assert (got.double() - expected).norm() / expected.norm() < 2**-6


def test_unused_results_of_the_residual_form(package: Package) -> None:
    x, residual, weight = leaf(4, 8), leaf(4, 8, seed=1), leaf(8, seed=2)
    y, stream = package.rms_norm(x, weight, residual=residual)
    dx, dresidual = grads(stream, x, residual)
    assert torch.equal(dx, dresidual)
    y, stream = package.rms_norm(x, weight, residual=residual)
    only_y = grads(y, x, residual, weight)
    assert torch.equal(only_y[0], only_y[1])


@pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_only_the_gradients_that_are_asked_for_are_computed(
    package: Package, wants: tuple[bool, bool], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = (
        randn(*shape, seed=i).requires_grad_(want)
        for i, (shape, want) in enumerate(zip([(4, 8), (8,)], wants, strict=True))
    )
    rms_norm: Any = package.rms_norm
    if how == "compiled":
        rms_norm = torch.compile(rms_norm, backend="aot_eager", fullgraph=True)
    needs = lambda _, options: (options.need_dx, options.need_dw)  # noqa: E731
    direct = spied(monkeypatch, package._norm, "run", needs)
    by_operator = spied(monkeypatch, package.ops, "_backward", needs)
    y = rms_norm(x, weight)
    assert y.requires_grad == any(wants)
    if any(wants):
        y.sum().backward()
    assert [t.grad is not None for t in (x, weight)] == list(wants)
    assert direct + by_operator == [wants] * any(wants)


def test_nothing_that_wants_a_gradient_makes_no_node(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = randn(4, 16), randn(16, seed=1)
    wanted = [package.rms_norm(x, weight), *package.rms_norm(x, weight, residual=x)]
    for node in (rms_norm.EagerNorm, rms_norm.EagerAddNorm):
        monkeypatch.setattr(node, "apply", lambda *_: pytest.fail("a node was made"))
    found = [package.rms_norm(x, weight), *package.rms_norm(x, weight, residual=x)]
    assert same(found, wanted) and not any(t.requires_grad for t in wanted)
    for given in ((leaf(4, 16), weight, None), (x, leaf(16), None), (x, weight, leaf(4, 16))):
        with pytest.raises(pytest.fail.Exception, match="a node was made"):
            package.rms_norm(given[0], given[1], residual=given[2])


def test_expanded_gradient_is_not_wrong(package: Package) -> None:
    x, weight = leaf(4, 8), leaf(8, seed=1)
    y = package.rms_norm(x, weight)
    summed = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    assert same(summed, torch.autograd.grad(y, (x, weight), torch.ones(4, 8)))


def test_second_derivatives_are_served(package: Package) -> None:
    """Second derivatives of `rms_norm` alone are in runtime/test_native_node.py, for both of its
    nodes."""
    x, residual = (leaf(3, 6, dtype=torch.float64, seed=seed) for seed in (0, 2))
    weight = leaf(6, dtype=torch.float64, seed=1)

    def add(x: Any, weight: Any, residual: Any) -> Any:
        return package.rms_norm(x, weight, 1e-5, residual=residual)

    def norm(x: Any, weight: Any) -> Any:
        return package.ops.rms_norm(x, weight, 1e-5, 1.0, package.name)[0]

    assert torch.autograd.gradgradcheck(add, (x, weight, residual))
    assert torch.autograd.gradcheck(norm, (x, weight))
    assert torch.autograd.gradgradcheck(norm, (x, weight))


def test_backward_operator_refuses_to_be_differentiated(package: Package) -> None:
    x, weight = leaf(3, 6), leaf(6, seed=1)
    dx = package.ops.rms_norm_backward(
        x, x, torch.ones(3), weight, None, None, 0.0, True, True, package.name
    )[0]
    with pytest.raises(RuntimeError, match="differentiate the norm"):
        dx.sum().backward()


def test_per_head_weight(package: Package) -> None:
    x, weight = leaf(2, 5, 3, 16), leaf(3, 16, seed=1)
    y = package.rms_norm(x, weight, 1e-6)
    heads = [package.rms_norm(x[:, :, h], weight[h], 1e-6) for h in range(3)]
    assert torch.allclose(y, torch.stack(heads, 2))
    both = grads(y, x, weight), grads(torch.stack(heads, 2), x, weight)
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"\(16,\) or \(3, 16\), got \(2, 16\)"):
        package.rms_norm(x, weight[:2])


def test_wide_weight_keeps_the_dtype_of_the_rows(package: Package) -> None:
    x, weight = leaf(4, 8, dtype=torch.bfloat16), leaf(8, seed=1)
    y = package.rms_norm(x, weight)
    assert y.dtype == torch.bfloat16
    dx, dw = grads(y, x, weight)
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32)
    narrow = leaf(8, dtype=torch.bfloat16, seed=1)
    assert grads(package.rms_norm(leaf(4, 8), narrow), narrow)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_missing_eps_is_pytorchs(package: Package, dtype: torch.dtype) -> None:
    """The eps is that of fp32 for narrower rows too. The rows are so small that it shows."""
    x = (1e-3 * randn(4, 64)).to(dtype)
    assert torch.equal(package.rms_norm(x), functional.rms_norm(x, (64,)))


def test_module_takes_the_place_of_pytorchs(package: Package) -> None:
    theirs = torch.nn.RMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(theirs.weight)
    mine = package.RMSNorm(16, eps=1e-5)
    mine.load_state_dict(theirs.state_dict())
    assert isinstance(mine, torch.nn.RMSNorm)
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    x = randn(3, 16)
    assert torch.allclose(mine(x), theirs(x), atol=1e-6)
    assert "weight_offset" not in repr(mine)
    again = copy.deepcopy(mine)
    assert torch.equal(again(x), mine(x))


@pytest.mark.parametrize("shape", [(16,), (3, 16)])
@pytest.mark.parametrize("affine", [True, False])
def test_module_normalises_over_its_shape(
    package: Package, shape: tuple[int, ...], affine: bool
) -> None:
    mine = package.RMSNorm(shape, 1e-5, elementwise_affine=affine)
    theirs = torch.nn.RMSNorm(shape, 1e-5, elementwise_affine=affine)
    x = leaf(5, 3, 16)
    assert torch.allclose(mine(x), theirs(x), atol=1e-6)
    y, stream = mine(x, x.detach())
    assert torch.allclose(stream, 2 * x)
    assert y.shape == x.shape


@pytest.mark.parametrize(
    ("shape", "given"),
    [((16,), (4, 8)), ((3, 16), (5, 6, 8)), ((3, 16), (16, 3)), ((3, 16), (48,)), ((16,), ())],
)
@pytest.mark.parametrize("affine", [True, False])
def test_module_refuses_other_shapes_as_pytorchs_does(
    package: Package, shape: tuple[int, ...], given: tuple[int, ...], affine: bool
) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        torch.nn.RMSNorm(shape, elementwise_affine=affine)(torch.ones(given))
    mine = package.RMSNorm(shape, elementwise_affine=affine)
    with pytest.raises(ValueError, match="must"):
        mine(torch.ones(given))
    with pytest.raises(ValueError, match="must"):
        mine(torch.ones(given), torch.ones(given))


def test_module_with_an_offset_starts_as_the_identity(package: Package) -> None:
    gemma = package.RMSNorm(16, weight_offset=1.0)
    assert torch.equal(gemma.weight, torch.zeros(16))
    x = randn(3, 16)
    assert torch.allclose(gemma(x), torch.nn.RMSNorm(16)(x), atol=1e-6)
    assert "weight_offset=1.0" in repr(gemma)


def test_offset_needs_a_weight(package: Package) -> None:
    """y would be twice what the module with a weight begins with."""
    with pytest.raises(ValueError, match="weight_offset is added to a weight"):
        package.RMSNorm(16, weight_offset=1.0, elementwise_affine=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_weight_is_of_a_floating_dtype(package: Package, dtype: torch.dtype) -> None:
    x, weight = randn(4, 16), torch.ones(16, dtype=dtype)
    for call in (package.rms_norm, package.rmsnorm_forward):
        with pytest.raises(TypeError, match="must be of a floating dtype, got"):
            call(x, weight)


@pytest.mark.parametrize("how", ["function", "module"])
@pytest.mark.parametrize("grad", [True, False])
def test_traced_scripts_are_pytorchs_own(
    package: Package, how: str, grad: bool, tmp_path: Path
) -> None:
    """A kernel's results would be constants of the script, and a node of ours not to be saved."""
    x, weight = randn(4, 16), randn(16, seed=1)
    norm = package.RMSNorm(16)
    norm.weight = torch.nn.Parameter(weight)
    run = norm if how == "module" else lambda x: package.rms_norm(x, weight)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(run, x)
        other = randn(4, 16, seed=2)
        assert torch.allclose(traced(other), package.rms_norm(other, weight), atol=1e-6)
    calls = {node.kind() for node in traced.inlined_graph.nodes()}
    assert not {kind for kind in calls if "Python" in kind or "normforge" in kind}, calls
    traced.save(str(tmp_path / "norm.pt"))
    assert torch.equal(torch.jit.load(str(tmp_path / "norm.pt"))(other), traced(other))


@pytest.mark.parametrize(("affine", "offset"), [(True, 0.0), (True, 1.0), (False, 0.0)])
def test_symbolic_traces_call_pytorchs_function(
    package: Package, affine: bool, offset: float
) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = package.RMSNorm(16, 1e-5, affine, weight_offset=offset)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.norm(x.sin())
            y, stream = self.norm(y, x)
            return y.cos() + stream

    model = Model()
    graph = torch.fx.symbolic_trace(model)
    assert [n.target for n in graph.graph.nodes].count(functional.rms_norm) == 2
    x = randn(4, 16)
    assert torch.allclose(graph(x), model(x), atol=1e-5)


def test_what_is_no_tensor_is_named(package: Package) -> None:
    for call in (package.rms_norm, package.rmsnorm_forward):
        with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
            call([1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_forward_with_rstd_and_backward_are_a_norm(package: Package, dtype: torch.dtype) -> None:
    """docs/adopting.md shows this: an autograd function of the user's own."""
    x, weight, dy = randn(4, 6, 16, dtype=dtype), randn(16, dtype=dtype, seed=1), randn(4, 6, 16)
    y, rstd = package.rmsnorm_forward(x, weight, 1e-6, weight_offset=1.0)
    dx, dw = package.rmsnorm_backward(dy.to(dtype), x, rstd, weight, weight_offset=1.0)
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    wanted = package.rms_norm(*leaves, 1e-6, weight_offset=1.0)
    assert torch.equal(y, wanted)
    assert same((dx, dw), torch.autograd.grad(wanted, leaves, dy.to(dtype)))
    assert rstd.shape == (4, 6, 1)
    assert rstd.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    y, rstd, stream = package.rmsnorm_forward(x, weight, 1e-6, residual=x)
    wanted, total = package.rms_norm(x, weight, 1e-6, residual=x)
    assert torch.equal(y, wanted)
    assert torch.equal(stream, total)


def test_forward_with_rstd_has_a_gradient_where_one_is_wanted(package: Package) -> None:
    x, weight = leaf(4, 16), leaf(16, seed=1)
    y, rstd = package.rmsnorm_forward(x, weight)
    assert not rstd.requires_grad
    assert same(grads(y, x, weight), grads(package.rms_norm(x, weight), x, weight))
    compiled = torch.compile(package.rmsnorm_forward, backend="aot_eager", fullgraph=True)
    assert same(compiled(x, weight), (y, rstd))
