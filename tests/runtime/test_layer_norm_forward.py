"""LayerNorm whose forward is a kernel: on the CPU, with and without what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional

from normforge.frontends.layer_norm import LayerNormPackage
from normforge.frontends.layer_norm_forward import LayerNormKernels
from normforge.operations import LAYERNORM_FORWARD
from normforge.operations.formula import evaluate
from normforge.serve.collect import Recorder, collecting
from tests.support.entry_points import grads, leaf, write_layer_norm_package

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
N, EPS = 16, 1e-3


class Kernels:
    """Stand in for a package of the forward: its formula, rounded once, on the CPU. calls: the
    tensors of those that it served, by name; why: what it says where it serves none."""

    def __init__(self, package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        self.why = ""
        may = lambda _, x: x.dtype != FP64 and x.numel() > 0  # noqa: E731
        monkeypatch.setattr(LayerNormKernels, "may_serve", may)
        monkeypatch.setattr(package._kernels.server, "by_kernel", self.serve)

    def serve(self, given: dict[str, Any]) -> dict[str, torch.Tensor] | str:
        if self.why:
            return self.why
        self.calls.append(given)
        with torch.no_grad():
            found = evaluate(LAYERNORM_FORWARD, given)
        return {**found, "y": found["y"].to(given["x"].dtype)}


@pytest.fixture
def package(tmp_path: Path) -> LayerNormPackage:
    return write_layer_norm_package(tmp_path / "package")


@pytest.fixture
def kernels(package: LayerNormPackage, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(package, monkeypatch)


def drawn(dtype: torch.dtype, scale: torch.dtype | None = None) -> list[torch.Tensor]:
    """x, weight and bias."""
    kinds = [((3, 5, N), dtype), ((N,), scale or dtype), ((N,), scale or dtype)]
    return [leaf(*shape, dtype=of, seed=i) for i, (shape, of) in enumerate(kinds)]


def results(norm: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> list[torch.Tensor]:
    y = norm(*given)
    return [y, *grads(y, *given)]


def eager(x: Any, weight: Any = None, bias: Any = None) -> torch.Tensor:
    return functional.layer_norm(x, (N,), weight, bias, EPS)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, FP64])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("how", ["eager", "compiled", "module"])
def test_results_and_gradients_are_those_of_float64(
    package: LayerNormPackage, kernels: Kernels, how: str, wide: bool, dtype: torch.dtype
) -> None:
    def norm(*given: torch.Tensor) -> torch.Tensor:
        return package.layer_norm(*given, EPS)

    given = drawn(dtype, FP32 if wide and dtype != FP64 else None)
    run: Callable[..., torch.Tensor] = norm
    if how == "compiled":
        torch._dynamo.reset()
        run = torch.compile(norm, backend="aot_eager", fullgraph=True)
    if how == "module":
        module = package.LayerNorm(N, eps=EPS, dtype=given[1].dtype)

        def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.func.functional_call(
                module, {"weight": weight, "bias": bias}, (x,)
            )
            return y

    found = results(run, given)
    exact = results(eager, [one.detach().double().requires_grad_() for one in given])
    tolerance = 4 * torch.finfo(dtype).eps
    for one, other, like in zip(found, exact, [given[0], *given], strict=True):
        assert (one.dtype, one.shape) == (like.dtype, like.shape)
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=16 * tolerance)
    assert len(kernels.calls) == (dtype != FP64)
    for call in kernels.calls:
        assert {call[name].dtype for name in ("weight", "bias")} == {given[1].dtype}


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_without_gradients_it_is_the_kernels_too(
    package: LayerNormPackage, kernels: Kernels, dtype: torch.dtype
) -> None:
    given = drawn(dtype)
    with torch.no_grad():
        y = package.layer_norm(*given, EPS)
    assert len(kernels.calls) == 1
    assert torch.equal(y, package.layer_norm(*given, EPS))
    kernels.why = "no kernel serves it"
    with torch.no_grad():
        torch.testing.assert_close(package.layer_norm(*given, EPS), eager(*given))
    torch.testing.assert_close(package.layer_norm(*given, EPS), eager(*given))
    assert len(kernels.calls) == 2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_weight_and_bias_may_be_left_out(
    package: LayerNormPackage, kernels: Kernels, weighted: bool, biased: bool
) -> None:
    x, weight, bias = drawn(FP32)
    given = (x, weight if weighted else None, bias if biased else None)
    y = package.layer_norm(*given, EPS)
    torch.testing.assert_close(y, eager(*given))
    leaves = [one for one in given if one is not None]
    wanted = grads(eager(*given), *leaves)
    torch.testing.assert_close(grads(y, *leaves), wanted)
    assert len(kernels.calls) == 1


def test_a_weight_and_a_bias_of_two_dtypes_are_fp32_for_the_kernel(
    package: LayerNormPackage, kernels: Kernels
) -> None:
    x, weight, _ = drawn(BF16)
    bias = leaf(N, seed=2)
    y = package.layer_norm(x, weight, bias, EPS)
    (call,) = kernels.calls
    assert (call["weight"].dtype, call["bias"].dtype) == (FP32, FP32)
    torch.testing.assert_close(y, eager(x.float(), weight.float(), bias).bfloat16())
    found = grads(y, weight, bias)
    assert [one.dtype for one in found] == [BF16, FP32]


@pytest.mark.parametrize("stream", [BF16, FP32])
def test_the_norm_of_a_sum_is_that_of_the_residual_stream(
    package: LayerNormPackage, kernels: Kernels, stream: torch.dtype
) -> None:
    x, weight, bias = drawn(BF16)
    r = leaf(3, 5, N, dtype=stream, seed=3)
    y, h = package.layer_norm(x, weight, bias, EPS, residual=r)
    (call,) = kernels.calls
    assert torch.equal(call["x"], h) and h.dtype == stream and y.dtype == BF16
    exact = eager(h.double(), weight.double(), bias.double())
    torch.testing.assert_close(y, exact.bfloat16())
    dx, dr = grads(y.sum() + h.sum(), x, r)
    assert (dx.dtype, dr.dtype) == (BF16, stream)


def test_transforms_and_second_derivatives_are_pytorchs(
    package: LayerNormPackage, kernels: Kernels
) -> None:
    given = [one.detach() for one in drawn(FP32)]

    def loss(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda x: norm(x, *given[1:]).square().sum()

    def ours(*tensors: torch.Tensor) -> torch.Tensor:
        return package.layer_norm(*tensors, EPS)

    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        found, wanted = (transform(loss(norm))(given[0]) for norm in (ours, eager))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
    assert kernels.calls == []
    x = given[0].clone().requires_grad_()
    twice = []
    for norm in (ours, eager):
        (first,) = torch.autograd.grad(loss(norm)(x), x, create_graph=True)
        twice += torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scale", [None, FP32, BF16])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_mean_and_rstd_of_narrow_rows_are_not_rounded(
    package: LayerNormPackage, dtype: torch.dtype, scale: torch.dtype | None
) -> None:
    """Whoever computes the norm: PyTorch's kernel rounds them on the CPU."""
    x = (3 + torch.randn(7, N)).to(dtype)
    shared = [] if scale is None else [torch.rand(N).to(scale) for _ in range(2)]
    y, mean, rstd = package.layer_norm_forward(x, *shared, eps=EPS)
    assert (y.dtype, mean.dtype, rstd.dtype) == (dtype, FP32, FP32)
    rows = x.double()
    torch.testing.assert_close(mean.double(), rows.mean(-1, True), rtol=1e-6, atol=0)
    exact = (rows.var(-1, correction=0, keepdim=True) + EPS).rsqrt()
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("device", "dtype", "count", "served"),
    [
        ("cuda", BF16, 2, True),
        ("cuda", FP16, 2, True),
        ("cuda", FP32, 2, True),
        ("cuda", FP64, 2, False),
        ("cuda", torch.float8_e4m3fn, 2, False),
        ("cuda", BF16, 0, False),
        ("cpu", BF16, 2, False),
    ],
)
def test_kernels_are_for_rows_of_three_dtypes_on_a_gpu(
    package: LayerNormPackage, device: str, dtype: torch.dtype, count: int, served: bool
) -> None:
    x: Any = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype, numel=lambda: count * N)
    assert not package._kernels.may_serve(x)  # it has no kernels
    package._kernels.by(lambda: cast(Any, lambda index: None))
    assert package._kernels.may_serve(x) is served
    package._kernels.by(lambda: "they are gone")
    assert not package._kernels.may_serve(x)
    assert package._kernels.server.missing == "they are gone"


def test_a_graph_of_a_package_that_is_not_here_is_pytorchs(package: LayerNormPackage) -> None:
    x, weight, bias = (one.detach() for one in drawn(FP32))
    operator = package.operators.layer_norm.v2
    y, mean, rstd, _ = operator(x, None, weight, bias, EPS, "nobody has this name")
    torch.testing.assert_close(y, eager(x, weight, bias))
    assert mean.shape == rstd.shape == (3, 5, 1)


def test_calls_are_counted_for_the_tuner(
    package: LayerNormPackage, kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path / "shapes.yaml")
    monkeypatch.setattr(collecting, "recorder", recorder)
    x, weight, bias = drawn(BF16)
    package.layer_norm(x, weight, bias)
    monkeypatch.setattr(LayerNormKernels, "may_serve", lambda _, x: False)
    with torch.no_grad():
        package.layer_norm(x)
        package.layer_norm(x, None, bias.float())
    recorder.stop()
    said = (tmp_path / "shapes.yaml").read_text()
    assert said.endswith("layernorm_forward:\n    15x16:bf16: 2\n    15x16:bf16:fp32: 1\n")
