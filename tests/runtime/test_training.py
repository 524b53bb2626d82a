"""Training through each entry point on the CPU: the same bits twice, and as accurate as PyTorch.

tests/runtime/test_gpu_training.py has the same on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from normforge.api import Package
from normforge.serve.reference import reference_backward
from tests.support.accuracy import RESULTS, Case, cases, check, exact
from tests.support.entry_points import (
    ENTRY_POINTS,
    INSTALL,
    Training,
    aten_on_cpu,
    equal_bits,
    norm_of,
    routing_on_cpu,
)

STRICT: dict[str, Any] = {"fused": True, "chain": 1}
"""The formula rounds once, and leaves the order of additions to PyTorch."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_two_trainings_have_the_same_bits(package: Package, entry_point: str, how: str) -> None:
    norm, fused = norm_of(package, entry_point)
    wrap = compiled if how == "compiled" else (lambda model: model)
    routed = routing_on_cpu(package).installed() if entry_point == INSTALL else nullcontext()
    with aten_on_cpu(), routed:
        runs = [Training(norm, fused, wrap=wrap).train() for _ in range(2)]
        other = Training(norm, fused, wrap=wrap, seed=1).train(2)
    assert equal_bits(*runs)
    assert float(runs[0][19]) < float(runs[0][0])
    assert not torch.equal(other[0], runs[0][0]), "the comparison would see a difference"


def test_entry_points_agree_with_pytorch(package: Package) -> None:
    wanted = Training(lambda width: torch.nn.RMSNorm(width, eps=1e-6), False).train()
    for entry_point in ENTRY_POINTS:
        norm, fused = norm_of(package, entry_point)
        found = Training(norm, fused).train()
        for a, b in zip(found, wanted, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), entry_point


@settings(max_examples=60)
@given(case=cases())
def test_errors_are_at_most_those_of_pytorch(package: Package, case: Case) -> None:
    check(case, package.rmsnorm_backward, **STRICT)


WORSE = 1.25
"""Noise, in the error that is there: about 1.6 times the error in all."""


def noisy(name: str) -> Any:
    """The formula with noise on one result."""
    generator = torch.Generator().manual_seed(1)

    def backward(*tensors: Any, **options: Any) -> Any:
        results = dict(zip(RESULTS, reference_backward(*tensors, **options), strict=False))
        given = dict(zip(("dy", "x", "rstd", "weight"), tensors, strict=True))
        dx, dw = exact(given | {"dresidual": options["dresidual"]}, options["weight_offset"])
        wanted = {"dx": dx, "dw": dw, "dresidual_out": dx}[name]
        result = results[name]
        assert result is not None
        size = WORSE * (result.double() - wanted).square().mean().sqrt()
        noise = torch.randn(result.shape, generator=generator) * size
        results[name] = (result.double() + noise).to(result.dtype)
        return tuple(results.values())

    return backward


@pytest.mark.parametrize("options", [(0.0, ""), (1.0, "bf16"), (0.0, "fp32")], ids=str)
@pytest.mark.parametrize(("wide_weight", "N"), [(False, 64), (True, 512)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_larger_errors_are_noticed(
    dtype: str, wide_weight: bool, options: tuple[float, str], N: int
) -> None:
    """The bound above would otherwise hold for anything."""
    case = Case(100, N, dtype, wide_weight, True, *options, seed=1)
    check(case, reference_backward, **STRICT)
    for name in RESULTS if case.residual else RESULTS[:2]:
        with pytest.raises(AssertionError, match=f"error of {name}:"):
            check(case, noisy(name), **STRICT)


def no_residual(dx: Any, dw: Any, third: Any) -> Any:
    return dx, dw, torch.zeros_like(third)


def rounded_twice(dx: Any, dw: Any, third: Any) -> Any:
    return dx, dw, dx.to(third.dtype)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (no_residual, "dresidual_out"),
        (rounded_twice, "dresidual_out"),
        (lambda dx, dw, third: (third.to(dx.dtype) * 1.01, dw, third), "dx"),
        (lambda dx, dw, third: (dx, dw[:-1], third), None),
        (lambda dx, dw, third: (dx, dw), None),
    ],
    ids=["nothing", "rounded twice", "scaled", "too short", "missing"],
)
def test_wrong_results_are_noticed(fault: Any, name: str | None) -> None:
    def backward(*tensors: Any, **options: Any) -> Any:
        return fault(*reference_backward(*tensors, **options))

    case = Case(100, 512, "bf16", False, True, 0.0, "fp32", seed=1)
    with pytest.raises(AssertionError, match=name and f"error of {name}:"):
        check(case, backward, **STRICT)


def test_residual_may_be_added_to_a_rounded_dx_only_where_that_is_allowed() -> None:
    def composed(*tensors: Any, dresidual: Any, **options: Any) -> Any:
        dx, dw = reference_backward(*tensors, **options)
        assert dx is not None
        third = (dx.float() + dresidual).to(dresidual.dtype)
        return third.to(dx.dtype), dw, third

    for residual in ("bf16", "fp32"):
        case = Case(100, 512, "bf16", False, True, 0.0, residual, seed=1)
        check(case, composed)
        with pytest.raises(AssertionError, match="error of d"):
            check(case, composed, **STRICT)
