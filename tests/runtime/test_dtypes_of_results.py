"""`out_dtype` and `residual_dtype`: results in other dtypes, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generator.paths import GENERATED
from normforge.api import Package
from normforge.frontends.batch_invariant import BatchInvariantPackage
from tests.support.entry_points import leaf, randn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [(BF16, FP32), (FP16, FP32), (FP32, BF16), (BF16, FP16)])
def test_y_is_computed_in_the_wider_dtype(
    package: Package, dtype: torch.dtype, out: torch.dtype, compiled: bool
) -> None:
    x, weight = leaf(6, 16, dtype=dtype), leaf(16, dtype=dtype, seed=1)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return package.rms_norm(x, weight, 1e-6, out_dtype=out)

    run = torch.compile(norm, fullgraph=True, backend="aot_eager") if compiled else norm
    y = run(x, weight)
    wide = [each.detach().float().requires_grad_() for each in (x, weight)]
    wanted = package.rms_norm(*wide, 1e-6)
    assert y.dtype == out and torch.equal(y, wanted.to(out))
    dy = randn(6, 16, dtype=out, seed=9)
    found = torch.autograd.grad(y, (x, weight), dy)
    expected = torch.autograd.grad(wanted, wide, dy.float())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and torch.equal(one, other.to(dtype))


@pytest.mark.parametrize("out", [None, BF16, FP32])
def test_stream_is_rounded_to_its_own_dtype(package: Package, out: torch.dtype | None) -> None:
    x, residual = leaf(6, 16, dtype=BF16), leaf(6, 16, dtype=BF16, seed=1)
    weight = leaf(16, dtype=BF16, seed=2)
    y, h = package.rms_norm(x, weight, 1e-6, residual=residual, residual_dtype=FP32, out_dtype=out)
    exact = x.detach().float() + residual.detach().float()
    assert torch.equal(h, exact) and y.dtype == (out or BF16)
    wanted = package.rms_norm(exact, weight.detach().float(), 1e-6)
    assert torch.equal(y, wanted.to(y.dtype))
    dh = randn(6, 16, seed=3)
    dx, dresidual = torch.autograd.grad(h, (x, residual), dh)
    assert torch.equal(dx, dh.to(BF16)) and torch.equal(dresidual, dh.to(BF16))


def test_bias_is_added_before_y_is_narrowed(package: Package) -> None:
    x, weight, bias = randn(6, 16), randn(16, seed=1), randn(16, seed=2)
    wanted = (package.rms_norm(x, weight, 1e-6) + bias).to(BF16)
    assert torch.equal(package.rms_norm(x, weight, 1e-6, bias=bias, out_dtype=BF16), wanted)


def test_own_dtypes_change_nothing(package: Package) -> None:
    x, weight = randn(6, 16, dtype=BF16), randn(16, dtype=BF16, seed=1)
    wanted = package.rms_norm(x, weight, 1e-6, residual=x)
    found = package.rms_norm(x, weight, 1e-6, residual=x, out_dtype=BF16, residual_dtype=BF16)
    assert all(map(torch.equal, found, wanted))


def test_what_cannot_be_had_is_said(package: Package) -> None:
    x = randn(6, 16)
    with pytest.raises(TypeError, match=r"out_dtype must be one of .*, got torch\.int8"):
        package.rms_norm(x, out_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"residual_dtype must be one of .*, got fp32"):
        package.rms_norm(x, residual=x, residual_dtype="fp32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="residual_dtype needs a residual"):
        package.rms_norm(x, residual_dtype=FP32)
    with pytest.raises(ValueError, match=r"bfloat16 cannot hold the residual, torch\.float32"):
        package.rms_norm(x, residual=x, residual_dtype=BF16)


@pytest.mark.parametrize("options", [{"out_dtype": FP32}, {"residual_dtype": FP32}])
def test_what_a_norm_refuses_it_refuses_with_them(package: Package, options: Any) -> None:
    x = randn(6, 16)
    residual = {"residual": x.int()} if "residual_dtype" in options else {}
    for wrong in (x.int(), [1.0]) if not residual else (x,):
        with pytest.raises(TypeError) as plain:
            package.rms_norm(wrong, **residual)
        with pytest.raises(TypeError) as found:
            package.rms_norm(wrong, **residual, **options)
        assert str(found.value) == str(plain.value)
    with pytest.raises(TypeError, match=r"must be one of .*, got torch\.float8_e4m3fn"):
        package.rms_norm(x, **dict.fromkeys(options, torch.float8_e4m3fn))


def test_they_can_be_traced_by_fx(package: Package) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
            return package.rms_norm(x, residual=residual, out_dtype=FP32, residual_dtype=FP32)

    x, residual = randn(6, 16, dtype=BF16), randn(6, 16, dtype=BF16, seed=1)
    for one, other in zip(
        torch.fx.symbolic_trace(Block())(x, residual), Block()(x, residual), strict=True
    ):
        assert one.dtype == FP32
        torch.testing.assert_close(one, other)


def test_batch_invariant_norms_have_them_too() -> None:
    invariant = BatchInvariantPackage(GENERATED / "h200" / "rmsnorm_invariant_backward")
    x = randn(6, 1024, dtype=BF16)
    assert torch.equal(invariant.rms_norm(x, out_dtype=FP32), invariant.rms_norm(x.float()))
    with pytest.raises(ValueError, match="with `matches`, y has x's dtype"):
        invariant.rms_norm(x, matches="vllm-triton3.6", out_dtype=FP32)
