"""An eps that is no float, and weights of other dtypes than x's, as PyTorch's norms take them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import normforge.layernorm as layernorm
from normforge.api import Package
from normforge.torch_internals import float_of
from tests.support.entry_points import grads, leaf, randn

NUMBERS = [np.float32(1e-2), np.float64(1e-2), torch.tensor(1e-2), np.array(1e-2), 1]


def norms(package: Package, eps: Any) -> dict[str, Any]:
    weight = randn(16, seed=1)
    return {
        "rms_norm": lambda x: package.rms_norm(x, weight, eps),
        "RMSNorm": package.RMSNorm(16, eps=eps),
        "rmsnorm_forward": lambda x: package.rmsnorm_forward(x, weight, eps)[0],
        "layer_norm": lambda x: layernorm.layer_norm(x, weight, None, eps),
    }


@pytest.mark.parametrize("eps", NUMBERS, ids=lambda eps: type(eps).__name__)
@pytest.mark.parametrize("name", ["rms_norm", "RMSNorm", "rmsnorm_forward", "layer_norm"])
def test_an_eps_is_any_number(package: Package, name: str, eps: Any) -> None:
    torch.compiler.reset()
    x = leaf(4, 16)
    plain, norm = norms(package, float(eps))[name], norms(package, eps)[name]
    wanted = [plain(x), *grads(plain(x), x)]
    for run in (norm, torch.compile(norm, backend="aot_eager")):
        assert all(map(torch.equal, [run(x), *grads(run(x), x)], wanted))


@pytest.mark.parametrize("eps", NUMBERS, ids=lambda eps: type(eps).__name__)
def test_an_eps_becomes_a_number_of_python(eps: Any) -> None:
    """One of NumPy that is derived from float does, too: some versions of Dynamo make a tensor of
    it."""
    assert type(float_of(eps)) in (float, int)
    assert float_of(eps) == eps


@pytest.mark.parametrize("name", ["rms_norm", "RMSNorm", "rmsnorm_forward", "layer_norm"])
def test_an_eps_that_is_no_number_is_refused(package: Package, name: str) -> None:
    with pytest.raises(TypeError, match="eps must be a number or None, got str: '1e-6'"):
        norms(package, "1e-6")[name](leaf(4, 16))


@pytest.mark.parametrize("eps", [torch.tensor(1e-6, requires_grad=True), torch.tensor([1e-6])])
def test_an_eps_that_is_no_single_number_is_refused(package: Package, eps: Any) -> None:
    with pytest.raises(TypeError, match="eps must be a number"):
        package.rms_norm(leaf(4, 16), None, eps)


@pytest.mark.parametrize(
    ("dtype", "other", "size"),
    [(torch.float16, torch.bfloat16, 1e6), (torch.bfloat16, torch.float16, 1e-7)],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_keeps_its_range_and_its_digits(
    package: Package, dtype: torch.dtype, other: torch.dtype, size: float, compiled: bool
) -> None:
    """A weight beyond the range of x's dtype, and rows that make up for it."""
    weight = torch.full((16,), size, dtype=other).requires_grad_()
    x = randn(4, 16).mul(1e-6 if size > 1 else 1.0).to(dtype).requires_grad_()
    eps = 1.0

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = package.rms_norm(x, weight, eps)
        return y

    y = (torch.compile(norm, backend="aot_eager") if compiled else norm)(x, weight)
    wanted = functional.rms_norm(x.float(), (16,), weight.float(), eps).to(dtype)
    assert y.dtype == dtype
    assert wanted.abs().max() > 0
    for one, two in zip(
        [y, *grads(y, x, weight)], [wanted, *grads(wanted, x, weight)], strict=True
    ):
        assert one.dtype == two.dtype
        torch.testing.assert_close(one, two, rtol=2**-6, atol=1e-6)
