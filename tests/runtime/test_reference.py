"""The formula in PyTorch, and PyTorch's own kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from normforge.serve.call import aten_call
from normforge.serve.options import PLAIN, Options
from normforge.serve.reference import reference_backward
from tests.support.entry_points import randn, write_package
from tests.support.fake_driver import tensors

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [
        *((dtype, None) for dtype in DTYPES),
        *((dtype, torch.float32) for dtype in DTYPES if dtype != torch.float32),
    ],
)
def test_formula_agrees_with_autograd_in_float64(dtype: torch.dtype, weight: Any) -> None:
    dy, x, rstd, scale = tensors(64, 96, dtype, weight)
    dx, dw = reference_backward(dy, x, rstd, scale)
    wide = [t.double().requires_grad_() for t in (x, scale)]
    y = torch.nn.functional.rms_norm(wide[0], (96,), wide[1], eps=1e-6)
    y.backward(dy.double())
    assert (dx.dtype, dw.dtype) == (x.dtype, scale.dtype)
    for got, leaf in ((dx, wide[0]), (dw, wide[1])):
        assert leaf.grad is not None
        # One rounding to the output's dtype, and fp32 in the middle (rstd is fp32 throughout).
        bound = 2e-6 + torch.finfo(got.dtype).eps
        error = (got.double() - leaf.grad).abs() / (1 + leaf.grad.abs())
        assert error.max() < bound


def test_aten_gets_the_arguments_of_its_schema() -> None:
    if not hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        pytest.skip("this PyTorch has no aten::_fused_rms_norm_backward")
    seen = []

    def kernel(dy: Any, x: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
        seen.append((list(shape), tuple(rstd.shape), list(mask)))
        return reference_backward(dy, x, rstd, weight)

    dy, x, rstd, weight = tensors(6, 8)
    given = (dy.view(2, 3, 8), x.view(2, 3, 8), rstd.flatten())
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm_backward", kernel, "CPU")
        dx, dw = aten_call(PLAIN)(*given, weight)
        assert aten_call(Options(need_dw=False))(*given, weight)[1] is None
        assert aten_call(PLAIN)(*given, None)[1] is None
    assert seen[0] == ([8], (2, 3, 1), [True, True])
    assert [mask for _, _, mask in seen[1:]] == [[True, False]] * 2
    assert (dx.shape, dw.shape) == ((2, 3, 8), (8,))


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradient_of_tiny_rows_is_finite(tmp_path: Path, create_graph: bool) -> None:
    """The square of rstd overflows there. Kernels multiply by it: docs/adopting.md."""
    package = write_package(tmp_path)
    x, weight = (randn(4, 64) * 1e-20).requires_grad_(), randn(64, seed=1)
    dy = randn(4, 64, seed=2)
    (dx,) = torch.autograd.grad(package.rms_norm(x, weight, 0.0), x, dy, create_graph=create_graph)
    wide = x.detach().double().requires_grad_()
    y = torch.nn.functional.rms_norm(wide, (64,), weight.double(), 0.0)
    (wanted,) = torch.autograd.grad(y, wide, dy.double())
    assert wanted.abs().max() > 1e19
    assert torch.allclose(dx.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
