"""The one decision between fused and composed, for every option and kind of kernel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normforge.serve import checks
from normforge.serve.checks import check_arguments, foreign_device
from normforge.serve.options import (
    PLAIN,
    Arguments,
    Options,
    add_residual,
    composition,
    dw_elsewhere,
    offset_in_weight,
    per_head,
)
from normforge.serve.server import Server
from tests.support.fake_driver import SPEC, tensors

N = 1024
FP32, BF16 = torch.float32, torch.bfloat16
STRIDED = torch.zeros(2 * N)[::2]
UNALIGNED = torch.zeros(N + 2)[2:]  # its address is off by 8 bytes
OFFSET, RESIDUAL = replace(SPEC, offset=True), replace(SPEC, residual="bf16")


def given(weight_dtype: torch.dtype = BF16, **change: Any) -> Arguments:
    dy, x, rstd, weight = tensors(6, N, BF16, weight_dtype)
    return Arguments(**({"dy": dy, "x": x, "rstd": rstd, "weight": weight} | change))


@pytest.mark.parametrize(
    ("change", "options", "spec", "expected"),
    [
        ({}, PLAIN, SPEC, None),
        ({}, PLAIN, None, None),
        ({"weight": torch.zeros(6, N)}, PLAIN, SPEC, per_head),
        # A weight offset is compiled in or goes into an fp32 weight.
        ({}, Options(weight_offset=1.0), SPEC, offset_in_weight),
        ({}, Options(weight_offset=1.0), None, offset_in_weight),
        ({}, Options(weight_offset=1.0), OFFSET, None),
        ({"dw_out": torch.zeros(N, dtype=BF16)}, Options(weight_offset=1.0), SPEC, dw_elsewhere),
        ({"dw_out": torch.zeros(N)}, Options(weight_offset=1.0), SPEC, offset_in_weight),
        # A residual is read by a kernel that was compiled for its dtype.
        ({"dresidual": torch.zeros(6, N, dtype=BF16)}, PLAIN, SPEC, add_residual),
        ({"dresidual": torch.zeros(6, N, dtype=BF16)}, PLAIN, RESIDUAL, None),
        ({"dresidual": torch.zeros(6, N)}, PLAIN, RESIDUAL, add_residual),
        # Kernels write whole float4s: contiguous, at multiples of 16 bytes.
        ({"dw_out": torch.zeros(N, dtype=BF16)}, PLAIN, SPEC, None),
        ({"dw_out": torch.zeros(N, dtype=BF16)}, PLAIN, None, dw_elsewhere),
        ({"dw_out": torch.zeros(N)}, PLAIN, SPEC, None),
        ({"dw_out": torch.zeros(N)}, Options(accumulate=True), SPEC, None),
        ({"dw_out": torch.zeros(N, dtype=BF16)}, Options(accumulate=True), SPEC, dw_elsewhere),
        ({"dw_out": STRIDED}, PLAIN, SPEC, dw_elsewhere),
        ({"dw_out": UNALIGNED}, PLAIN, SPEC, dw_elsewhere),
        ({"dw_out": torch.zeros(N + 4, dtype=BF16)[4:]}, PLAIN, SPEC, dw_elsewhere),
        ({"dw_out": UNALIGNED}, Options(accumulate=True), SPEC, dw_elsewhere),
    ],
)
def test_what_the_kernel_lacks_is_composed(
    change: Any, options: Options, spec: Any, expected: Any
) -> None:
    assert composition(given(**change), options, spec) is expected


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_dw_that_no_kernel_writes_is_stored_or_added(accumulate: bool) -> None:
    dw = torch.arange(4, dtype=FP32)
    out = torch.full((4,), 10.0, dtype=BF16)
    asked: list[Options] = []

    def backward(inner: Arguments, options: Options) -> Any:
        asked.append(options)
        return None, dw

    own = Options(accumulate=accumulate)
    _, found = dw_elsewhere(backward, given(dw_out=out), own)
    assert found is out
    assert out.tolist() == [10.0 * accumulate + i for i in range(4)]
    assert asked == [Options(dw_dtype=FP32)]


@pytest.mark.parametrize("shape", [(2, N // 2), (1, N), (N, 1), (N + 1,), (N - 1,)])
def test_a_dw_out_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    """One with as many elements is, too: nobody knows which way they would lie."""
    with pytest.raises(ValueError, match=r"dw_out must have the weight's shape \(1024,\)"):
        check_arguments(given(dw_out=torch.zeros(shape)), PLAIN)
    check_arguments(given(dw_out=torch.zeros(N)), PLAIN)


def test_kernels_of_another_gpu_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(major=9, minor=0, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    assert foreign_device({"arch": "sm_90a", "title": "NVIDIA H200"}, 0) == ""
    said = foreign_device({"arch": "sm_100a", "title": "NVIDIA GB200"}, 0)
    assert "NVIDIA GB200 (sm_100a)" in said and "do not run on H200" in said


def test_a_driver_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch then serves its GPU, as on one without kernels."""
    here = SimpleNamespace(major=9, minor=0, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    monkeypatch.setattr(checks, "driver_version", lambda: 12080)
    said = foreign_device({"arch": "sm_90a", "title": "NVIDIA H200"}, 0)
    assert said.startswith("the NVIDIA driver is for CUDA 12.8, and these kernels need one")
    assert said.endswith("install version 580 or newer")
    monkeypatch.setattr(checks, "driver_version", lambda: 13000)
    assert foreign_device({"arch": "sm_90a", "title": "NVIDIA H200"}, 0) == ""


@pytest.mark.parametrize("wanting", [(), ("dy",), ("x",), ("dy", "x"), ("weight",)])
@pytest.mark.parametrize("centred", [False, True])
def test_a_second_derivative_is_not_the_quick_calls(
    wanting: tuple[str, ...], centred: bool
) -> None:
    """It has none; a weight whose gradient is wanted is what every backward has."""
    server = object.__new__(Server)
    dy, x, rstd, weight = tensors(6)
    results = (dy, weight)
    cache = SimpleNamespace(find_recent=lambda given: lambda *arguments: results)
    server._calls = cache  # type: ignore[assignment]
    server._native = SimpleNamespace(learn=None)  # type: ignore[assignment]
    for name, tensor in (("dy", dy), ("x", x), ("weight", weight)):
        tensor.requires_grad_(name in wanting)
    served = not {"dy", "x"} & set(wanting)
    given = (dy, x, rstd, weight, *([rstd.clone()] if centred else []))
    assert server._quick(*given) is (results if served else None)
    with torch.no_grad():
        assert server._quick(*given) is results
