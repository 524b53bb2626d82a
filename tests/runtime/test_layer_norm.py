"""LayerNorm's package: gradients on the CPU, what reaches the driver, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generator.package.files import KernelFiles, write_package
from generator.runtime.frontends import layer_norm as front_end
from generator.runtime.frontends.layer_norm import LayerNormPackage
from generator.runtime.launch.loaded_kernel import LoadedKernel
from generator.runtime.spec import plan_launch
from generator.runtime.table import Table
from tests.support.fake_driver import SPEC, TARGET, FakeDevice, FakeDriver, entry, tensors

KERNEL = replace(SPEC, operation="layernorm_backward", columns=2048, partial_stride=2048)
GRAD = torch.float32, torch.bfloat16, torch.float16, torch.float64
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 4e-3, torch.float64: 1e-12}


@pytest.fixture
def package(tmp_path: Path) -> LayerNormPackage:
    write_package(tmp_path, KernelFiles(tmp_path, 132), Table(TARGET, (entry(6, KERNEL),)), None)
    return LayerNormPackage(tmp_path)


def close(found: torch.Tensor | None, exact: torch.Tensor | None, dtype: torch.dtype) -> bool:
    assert found is not None
    assert exact is not None
    limit = TOLERANCE[dtype] * float(exact.abs().max())
    return bool((found.double() - exact).abs().max() <= limit)


@pytest.mark.parametrize("dtype", GRAD)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_gradients_are_those_of_pytorch_in_float64(
    package: LayerNormPackage, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    if dtype == torch.float64:
        weight_dtype = None
    norm = package.LayerNorm((3, 16), dtype=weight_dtype or dtype)
    exact = torch.nn.LayerNorm((3, 16), dtype=torch.float64)
    torch.manual_seed(1)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    exact.load_state_dict({name: value.double() for name, value in norm.state_dict().items()})
    x = (3 + torch.randn(5, 3, 16)).to(dtype).requires_grad_()
    wide = x.detach().double().requires_grad_()
    dy = torch.randn(5, 3, 16).to(dtype)
    y = norm(x)
    assert y.dtype == dtype
    y.backward(dy)
    exact(wide).backward(dy.double())
    assert close(x.grad, wide.grad, dtype)
    assert close(norm.weight.grad, exact.weight.grad, norm.weight.dtype)
    assert close(norm.bias.grad, exact.bias.grad, norm.bias.dtype)


@pytest.mark.parametrize("affine", [False, True])
def test_only_what_is_wanted_is_there(package: LayerNormPackage, affine: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    bias = torch.zeros(8, requires_grad=True)
    weight = torch.ones(8) if affine else None
    package.layer_norm(x, weight, bias).square().sum().backward()
    y = torch.nn.functional.layer_norm(x.detach(), (8,))
    assert bias.grad is not None
    assert torch.allclose(bias.grad, (2 * y).sum(0), atol=1e-5)
    mean, rstd = torch.zeros(4), torch.ones(4)
    none = package.layer_norm_backward(x, x, mean, rstd, None, need_dx=False)
    assert none == (None, None, None)
    dx, dw, db = package.layer_norm_backward(x, x, mean, rstd, torch.ones(8), need_dw=False)
    assert dx is not None
    assert (dw, db) == (None, None)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("mean", torch.zeros(5), "mean must be like rstd"),
        ("mean", torch.zeros(4, dtype=torch.bfloat16), "mean must be like rstd"),
        ("mean", None, "mean must be a torch.Tensor"),
        ("weight", torch.ones(4, 8), "weight must have shape"),
        ("dy", torch.zeros(4, 9), "dy must have x's shape"),
    ],
)
def test_arguments_that_do_not_fit_are_one_sentence(
    package: LayerNormPackage, name: str, value: Any, error: str
) -> None:
    x = torch.randn(4, 8)
    given: dict[str, Any] = {"dy": x, "x": x, "mean": torch.zeros(4), "rstd": torch.ones(4)}
    with pytest.raises((TypeError, ValueError), match=error):
        package.layer_norm_backward(**{**given, name: value})


@pytest.mark.parametrize("capturing", [False, True])
def test_the_kernel_gets_every_tensor_and_its_mean(
    package: LayerNormPackage,
    driver: FakeDriver,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    capturing: bool,
) -> None:
    monkeypatch.setattr(front_end, "raw_stream", lambda index: 7)
    monkeypatch.setattr(front_end, "is_capturing", lambda: capturing)
    dy, x, rstd, weight = tensors()
    mean = torch.randn(6)
    package._kernels.get = lambda kernel: LoadedKernel(b"cubin", kernel.spec)  # type: ignore[method-assign]
    kernel = package._find_kernel(front_end.Arguments(dy, x, rstd, weight), 0)
    assert isinstance(kernel, LoadedKernel)
    dx, dw, db = package._launch(kernel, dy, x, mean, rstd, weight, True, True)
    assert dx is not None
    assert dw is not None
    assert db is not None
    (seen,) = driver.launches
    launch = plan_launch(KERNEL, 6)
    assert (seen.function, seen.grid, seen.stream) == ("layernorm_backward", launch.grid, 7)
    given = (x, dy, rstd, weight, dx, dw)
    assert seen.arguments[:8] == (*(tensor.data_ptr() for tensor in given), 0, 0)
    assert seen.arguments[-1] == mean.data_ptr()
    assert seen.arguments[11] == 6
    assert db.data_ptr() == dw.data_ptr() + 1024 * 2  # the kernel writes dbeta behind dgamma
    if not capturing:
        package._launch(kernel, dy, x, mean, rstd, weight, True, True)
        assert driver.launches[1].arguments[8:11] == seen.arguments[8:11]  # one workspace


def test_what_has_no_kernel_is_pytorchs_and_said_once(package: LayerNormPackage) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    _, mean, rstd = torch.native_layer_norm(x, (8,), weight, weight, 1e-5)
    right = package.layer_norm_backward(x, x, mean, rstd, weight)
    with pytest.warns(UserWarning, match="PyTorch's own kernel"):
        found = package._without_kernel("no kernel", x, x, mean, rstd, weight, True, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package._without_kernel("no kernel", x, x, mean, rstd, weight, True, True)
    for one, other in zip(found, right, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, atol=1e-5)
