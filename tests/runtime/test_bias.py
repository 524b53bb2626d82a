"""The bias of `RMSNorm` and `rms_norm`: the norm as it is, and a sum by PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from generator.paths import GENERATED
from normforge.api import Package
from normforge.frontends.batch_invariant import BatchInvariantPackage
from tests.support.entry_points import leaf, randn, same

BF16 = torch.bfloat16
REFUSED = "batch-invariant norms have no bias"


@pytest.fixture(scope="module")
def invariant() -> BatchInvariantPackage:
    return BatchInvariantPackage(GENERATED / "h200" / "rmsnorm_invariant_backward")


def gradients(y: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y, leaves, randn(*y.shape, dtype=y.dtype, seed=9))


def filled(norm: Any) -> Any:
    """The module with other parameters than at first."""
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data.copy_(randn(*parameter.shape, dtype=parameter.dtype, seed=seed))
    return norm


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "scale", "of_bias"),
    [((6, 16), (16,), (16,)), ((2, 3, 16), (3, 16), (3, 16)), ((2, 3, 16), (3, 16), (16,))],
)
def test_bias_is_added_and_nothing_else_changes(
    package: Package, dtype: torch.dtype, shape: Any, scale: Any, of_bias: Any
) -> None:
    x, weight = leaf(*shape, dtype=dtype), leaf(*scale, dtype=dtype, seed=1)
    bias = leaf(*of_bias, dtype=torch.float32, seed=2)
    plain = package.rms_norm(x, weight, 1e-6)
    y = package.rms_norm(x, weight, 1e-6, bias=bias)
    assert y.dtype == dtype and torch.equal(y, plain + bias.to(dtype))
    dx, dw, db = gradients(y, x, weight, bias)
    assert same((dx, dw), gradients(plain, x, weight))
    dy = randn(*shape, dtype=dtype, seed=9)
    unit = torch.finfo(dtype).eps
    exact = dy.double().reshape(-1, *of_bias).sum(0)
    assert db.dtype == torch.float32 and torch.allclose(db.double(), exact, rtol=unit, atol=unit)


def test_residual_keeps_its_sum(package: Package) -> None:
    x, residual, weight, bias = (
        leaf(*s, seed=i) for i, s in enumerate([(6, 16)] * 2 + [(16,)] * 2)
    )
    wanted, stream = package.rms_norm(x, weight, residual=residual)
    y, h = package.rms_norm(x, weight, residual=residual, bias=bias)
    assert torch.equal(y, wanted + bias) and torch.equal(h, stream)
    assert torch.equal(gradients(h, residual)[0], gradients(stream, residual)[0])


@pytest.mark.parametrize("options", [{}, {"main_grad": True}, {"weight_offset": 1.0}])
@pytest.mark.parametrize("sizes", [(16,), (2, 16)])
def test_module(package: Package, sizes: Any, options: Any) -> None:
    norm = filled(package.RMSNorm(sizes, bias=True, **options))
    norm.weight.main_grad = torch.zeros(sizes)
    plain = package.RMSNorm(sizes, weight_offset=norm.weight_offset)
    plain.load_state_dict({"weight": norm.weight.detach()})
    x = leaf(6, *sizes)
    wanted, y = plain(x) + norm.bias, norm(x)
    assert torch.equal(y, wanted)
    assert torch.equal(*(gradients(each, norm.bias)[0] for each in (y, wanted)))
    residual = randn(6, *sizes, seed=4)
    (y, h), (wanted, stream) = norm(x, residual), plain(x, residual)
    assert torch.equal(y, wanted + norm.bias) and torch.equal(h, stream)


def test_module_is_saved_copied_and_shown(package: Package) -> None:
    norm = package.RMSNorm(16, bias=True)
    assert not norm.bias.any() and norm.bias.dtype == norm.weight.dtype
    assert sorted(norm.state_dict()) == ["bias", "weight"]
    assert "bias=True" in repr(norm) and "bias" not in repr(package.RMSNorm(16))
    filled(norm)
    other = package.RMSNorm(16, bias=True)
    other.load_state_dict(norm.state_dict())
    x = randn(6, 16)
    for again in (other, copy.deepcopy(norm)):
        assert torch.equal(again(x), norm(x))
    norm.reset_parameters()
    assert not norm.bias.any() and (norm.weight == 1).all()
    for none in (package.RMSNorm(16), package.RMSNorm(16, elementwise_affine=False, bias=True)):
        assert none.bias is None and "bias" not in none.state_dict()
        assert torch.isfinite(none(x)).all()
    meta = package.RMSNorm(16, bias=True, device="meta", dtype=BF16)
    assert meta.bias.is_meta and meta.bias.dtype == BF16
    with pytest.raises(RuntimeError, match="bias"):
        package.RMSNorm(16).load_state_dict(norm.state_dict())


def test_module_of_a_time_before_the_bias_runs(package: Package) -> None:
    norm = package.RMSNorm((2, 8))
    del norm._parameters["bias"]
    assert norm(randn(3, 2, 8)).shape == (3, 2, 8) and norm.reset_parameters() is None
    assert "bias" not in repr(norm)


def test_bias_that_a_module_is_given_later_is_added(package: Package) -> None:
    norm, x = package.RMSNorm(16), randn(6, 16)
    plain = norm(x)
    norm.bias = torch.nn.Parameter(randn(16, seed=3))
    assert torch.equal(norm(x), plain + norm.bias)
    norm.bias = None
    assert torch.equal(norm(x), plain)


def test_what_does_not_fit_is_named(package: Package) -> None:
    x, weight = randn(6, 16), randn(16)
    with pytest.raises(ValueError, match=r"bias must have shape \(16,\), got \(1,\)"):
        package.rms_norm(x, weight, bias=randn(1))
    with pytest.raises(ValueError, match=r"bias must have shape \(16,\), got \(6, 16\)"):
        package.rms_norm(x, None, bias=x)
    with pytest.raises(ValueError, match="bias is on meta and x on cpu"):
        package.rms_norm(x, weight, bias=weight.to("meta"))
    for bias, kind in (([0.0] * 16, "list"), (weight.int(), "int32"), (weight.cfloat(), "complex")):
        with pytest.raises(TypeError, match=f"a tensor of a floating dtype, got .*{kind}"):
            package.rms_norm(x, weight, bias=bias)


def test_batch_invariant_norms_have_none(
    invariant: BatchInvariantPackage, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of PyTorch's sum over rows depend on their number."""
    x, weight = randn(6, 1024), randn(1024)
    with pytest.raises(ValueError, match=REFUSED):
        invariant.rms_norm(x, weight, bias=weight)
    with pytest.raises(ValueError, match=REFUSED):
        invariant.RMSNorm(1024, bias=True)
    monkeypatch.setattr(package.RMSNorm, "_invariant_class", lambda: invariant.RMSNorm)
    with pytest.raises(ValueError, match=REFUSED):
        package.RMSNorm(1024, bias=True, batch_invariant=True)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_compiled_and_under_autocast(package: Package, dtype: torch.dtype) -> None:
    norm = filled(package.RMSNorm(16, bias=True))
    x = leaf(6, 16, dtype=dtype)
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", BF16):
        assert norm(x).dtype == dtype
        assert torch.equal(compiled(x), norm(x))
    leaves = (x, norm.weight, norm.bias)
    for one, two in zip(gradients(compiled(x), *leaves), gradients(norm(x), *leaves), strict=True):
        assert torch.equal(one, two)


def test_whoever_watches_gets_an_answer(package: Package) -> None:
    norm = filled(package.RMSNorm(16, bias=True))
    x = leaf(6, 16)
    wanted = norm(x).detach()
    (dx,) = torch.autograd.grad(norm(x).square().sum(), x, create_graph=True)
    assert torch.isfinite(torch.autograd.grad(dx.sum(), norm.bias)[0]).all()
    assert torch.allclose(torch.func.vmap(norm)(x), wanted, atol=1e-6)
    assert torch.allclose(torch.fx.symbolic_trace(torch.nn.Sequential(norm))(x), wanted, atol=1e-6)
    with torch.inference_mode():
        assert torch.equal(norm(x), wanted)
