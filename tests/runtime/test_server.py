"""Arguments of a call lead to the kernel, the composition or the operator that serves it: the one
decision between fused and composed, for every option and kind of kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.package.emit import emit_package
from generator.target import find_target
from normforge.api import Package
from normforge.launch.loaded_kernel import LoadedKernel
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
from normforge.serve.reference import reference_backward
from normforge.serve.server import Server
from normforge.spec import KernelSpec
from normforge.table import Table
from tests.support.fake_driver import SPEC, TABLE, FakeDriver, entry, fallback, tensors


@pytest.fixture
def package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> Callable[..., Package]:
    """Makes a package of some kernels; its device is as the fake driver has it."""

    def make(*specs: KernelSpec) -> Package:
        tuned = tuple(entry(4096, spec) for spec in specs)
        table = Table(TABLE.target, tuned, (fallback(4096, 16), fallback(4096, 2)))
        (tmp_path / "table.json").write_text(json.dumps(table.to_json()))
        made = Package(tmp_path)
        loaded = made._source(None).loaded
        monkeypatch.setattr(loaded, "get", lambda k: LoadedKernel(b"cubin", k.spec))
        return made

    here = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)
    return make


def served_by(package: Package, options: Options = PLAIN, **change: Any) -> Any:
    """The spec of the kernel that serves a call, or the name of what composes it."""
    dy, x, rstd, weight = tensors(4096)
    given = Arguments(**{"dy": dy, "x": x, "rstd": rstd, "weight": weight, **change})
    call = package._with_kernel(given, options, 0)
    return call if isinstance(call, str) else getattr(call, "kernel", call)


def test_compiled_options_are_used_where_they_were_tuned(package: Any) -> None:
    plain, offset = SPEC, replace(SPEC, name="offset", offset=True)
    both = replace(SPEC, name="both", offset=True, residual="bf16")
    residual = replace(SPEC, name="residual", residual="bf16")
    wide = replace(SPEC, name="wide", residual="fp32")
    made = package(plain, offset, both, residual, wide)
    rows = tensors(4096)[1]

    def name(options: Options = PLAIN, **change: Any) -> str:
        return served_by(made, options, **change).spec.name

    assert name() == "example"
    assert name(Options(weight_offset=1.0)) == "offset"
    assert name(dresidual=rows) == "residual"
    assert name(dresidual=rows.float()) == "wide"
    assert name(Options(weight_offset=1.0), dresidual=rows) == "both"
    # Nothing was tuned for an offset and an fp32 residual: the offset stays in the kernel.
    composed = served_by(made, Options(weight_offset=1.0), dresidual=rows.float())
    assert add_residual in [cell.cell_contents for cell in composed.__closure__]


@pytest.mark.parametrize(
    ("options", "change", "by"),
    [
        (Options(weight_offset=1.0), {}, offset_in_weight),
        (PLAIN, {"dresidual": torch.zeros(4096, 1024)}, add_residual),
        (Options(accumulate=True), {"dw_out": torch.zeros(1024).bfloat16()}, dw_elsewhere),
    ],
)
def test_options_that_nobody_tuned_are_composed(
    package: Any, options: Options, change: Any, by: Any
) -> None:
    composed = served_by(package(SPEC), options, **change)
    assert by in [cell.cell_contents for cell in composed.__closure__]


def test_weight_per_head_is_a_call_per_head(package: Any) -> None:
    x = torch.zeros(16, 4, 1024).bfloat16()
    change = {"x": x, "dy": x, "weight": x[0], "rstd": torch.zeros(64)}
    composed = served_by(package(SPEC), **change)
    assert per_head in [cell.cell_contents for cell in composed.__closure__]


@pytest.mark.parametrize("stream", [None, torch.float32])
def test_gradients_of_heads_lie_as_the_heads(stream: torch.dtype | None) -> None:
    """Whatever is before them, also of another residual stream's dtype."""

    def backward(given: Arguments, _: Options) -> Any:
        known = (given.dy, given.x, given.rstd, given.weight)
        return reference_backward(*known, dresidual=given.dresidual)

    x, dy = (torch.randn(2, 4, 4, 8, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    x, dy = x.bfloat16(), dy.bfloat16()
    weight = torch.linspace(-1, 2, 32).view(4, 8).bfloat16()
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    residual = None if stream is None else dy.to(stream).flip(1)
    found = per_head(backward, Arguments(dy, x, rstd, weight, residual), PLAIN)
    dx, dw, *third = found
    assert dx is not None and dw is not None and dx.shape == x.shape and dw.shape == weight.shape
    for h in range(4):
        given = Arguments(
            *(dy[:, :, h], x[:, :, h], rstd[:, :, h], weight[h]),
            dresidual=None if residual is None else residual[:, :, h],
        )
        wanted = backward(given, PLAIN)
        assert torch.equal(dx[:, :, h], wanted[0]) and torch.equal(dw[h], wanted[1])
        for one, other in zip(third, wanted[2:], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one[:, :, h], other)


def test_unaligned_rows_get_narrow_vectors_and_no_kernel_is_a_reason(package: Any) -> None:
    made = package(SPEC)
    odd = torch.empty(4096 * 1024 + 1, dtype=torch.bfloat16)[1:].view(4096, 1024)
    assert served_by(made, x=odd).spec.vector_bytes == 2
    assert served_by(made, weight=torch.empty(1025).bfloat16()[1:]).spec.vector_bytes == 2
    assert "no fallback kernel serves it" in served_by(made, weight=torch.zeros(1024))
    assert served_by(made, weight=None).spec.name == "example"


def test_lazily_negated_tensors_are_read_as_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels read memory, where such a view has the numbers of what it is a view of."""
    emit_package([], [], find_target("h200"), tmp_path)
    package = Package(tmp_path)
    seen: list[tuple[Any, ...]] = []

    def serve(self: Any, *_: Any) -> Any:
        return lambda *tensors: seen.append(tensors)

    monkeypatch.setattr(Package, "_prepare", serve)
    monkeypatch.setattr(type(package._forward), "_prepare", serve)
    dy, x, rstd, weight = tensors(6)
    negated = [torch._neg_view(tensor) for tensor in (dy, x, rstd, weight)]
    package.rmsnorm_backward(*negated)
    package._forward(negated[1], negated[3], residual=negated[0])
    (backward, forward) = seen
    reads = (*backward[:4], forward[0], forward[1], forward[4])
    for read, base in zip(reads, (dy, x, rstd, weight, x, weight, dy), strict=True):
        assert not read.is_neg()
        assert torch.equal(read, -base)
    with pytest.raises(ValueError, match="dw_out is a lazily negated view"):
        package.rmsnorm_backward(dy, x, rstd, weight, dw_out=torch._neg_view(weight.clone()))


# ---- Options -------------------------------------------------------------------------------------


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


@pytest.mark.filterwarnings("ignore:nothing like it was tuned")
@pytest.mark.parametrize("routed", [True, False])
def test_what_is_left_to_pytorch_under_install_is_served_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, routed: bool
) -> None:
    """Calls of one signature are kept apart, in either order."""
    monkeypatch.setattr(Server, "_find", lambda *_: "nothing like it was tuned")
    monkeypatch.setattr(Server, "_has_aten", False, raising=False)
    server = Server(lambda _: pytest.fail("no kernel is looked for"))
    server._calls._device = ""  # on the CPU, too
    given = Arguments(*tensors(6))
    for way in (routed, not routed) * 2:
        results: Any = server._run(given, PLAIN, routed=way)
        assert results is None if way else results[0].shape == given.x.shape
