"""`rmsnorm_backward(dx_out=...)` without a GPU: what it refuses, who writes it, and that dx has the
bits of a call without it, also where dx is written over dy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.kernels.knobs import KNOBS
from normforge.api import Package
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.serve.call import KernelCall
from normforge.serve.options import (
    PLAIN,
    Arguments,
    Options,
    add_residual,
    composition,
    dx_elsewhere,
    may_overwrite_dy,
    per_head,
)
from normforge.serve.reference import reference_backward
from normforge.table import Table
from tests.support.entry_points import leaf, randn, spied, write_package
from tests.support.fake_driver import SPEC, TARGET, Calls, FakeDriver, entry, tensors

BF16 = torch.bfloat16


def arguments(*shape: int, dtype: torch.dtype = BF16, **change: Any) -> dict[str, Any]:
    """Return the arguments of a call with a weight."""
    dy, x, weight = (
        randn(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[1:]))
    )
    rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    rstd = rstd if dtype == torch.float64 else rstd.float()
    return {"dy": dy, "x": x, "rstd": rstd, "weight": weight[..., :]} | change


def equal(found: Any, wanted: Any) -> bool:
    return len(found) == len(wanted) and all(
        (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(found, wanted, strict=True)
    )


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp32": {"dtype": torch.float32},  # the formula reads this dy in place
    "float64": {"dtype": torch.float64},
    "no weight": {"weight": None},
    "no dw": {"need_dw": False},
    "offset": {"weight_offset": 1.0},
    "residual": {"dresidual": randn(6, 16, dtype=BF16, seed=5)},
    "wide residual": {"dresidual": randn(6, 16, seed=5)},
    "dw in fp32": {"dw_dtype": torch.float32},
    "no rows": {"rows": 0},
}


@pytest.mark.parametrize("over_dy", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_dx_goes_where_it_is_told(package: Package, case: str, over_dy: bool) -> None:
    change = dict(CASES[case])
    rows = change.pop("rows", 6)
    given = arguments(rows, 16, dtype=change.pop("dtype", BF16)) | change
    wanted = package.rmsnorm_backward(**given)
    dx_out = given["dy"] if over_dy else torch.full_like(given["x"], torch.nan)
    found = package.rmsnorm_backward(**given, dx_out=dx_out)
    assert found[0] is dx_out and equal(found, wanted)
    assert len(found) == 2 or (found[2] is dx_out) == (wanted[2] is wanted[0])


@pytest.mark.parametrize("over_dy", [False, True])
def test_weight_per_head_and_a_sum_that_is_added_to(package: Package, over_dy: bool) -> None:
    given, totals = arguments(2, 3, 16), [torch.ones(3, 16) for _ in range(2)]
    wanted = package.rmsnorm_backward(**given, dw_out=totals[0], accumulate=True)
    dx_out = given["dy"] if over_dy else torch.empty_like(given["x"])
    found = package.rmsnorm_backward(**given, dw_out=totals[1], accumulate=True, dx_out=dx_out)
    assert found[0] is dx_out and found[1] is totals[1] and equal(found, wanted)


def test_dx_out_that_does_not_fit_is_named(package: Package) -> None:
    given = arguments(6, 16)
    x = given["x"]
    for dx_out, error, sentence in (
        (torch.empty(6, 16), TypeError, r"dx_out must have x's dtype torch\.bfloat16"),
        (torch.empty_like(x)[:5], ValueError, r"x's shape \(6, 16\), got \(5, 16\)"),
        (torch.empty(16, 6, dtype=BF16).t(), ValueError, r"must be contiguous, got strides \(1"),
        (torch._neg_view(torch.empty_like(x)), ValueError, "lazily negated view"),
        (torch.empty_like(x, device="meta"), ValueError, "dx_out is on meta and x on cpu"),
        (3.0, TypeError, r"dx_out must be a torch\.Tensor, got float"),
    ):
        with pytest.raises(error, match=sentence):
            package.rmsnorm_backward(**given, dx_out=dx_out)
    with pytest.raises(ValueError, match="dx_out is given, but dx is not computed"):
        package.rmsnorm_backward(**given, dx_out=torch.empty_like(x), need_dx=False)
    with pytest.raises(RuntimeError, match=r"dx_out requires a gradient.*dx_out\.detach"):
        package.rmsnorm_backward(**given, dx_out=leaf(6, 16, dtype=BF16))


def test_overlap_is_refused_though_the_call_is_known(package: Package) -> None:
    """Addresses are no part of a signature."""
    package._calls._device = ""
    rows = torch.zeros(13, 16, dtype=BF16)
    wide = torch.zeros(6, 4 * 16, dtype=BF16)
    given = arguments(6, 16, x=rows[:6].fill_(1.0), dresidual=rows.new_zeros(6, 16))
    given["dw_out"] = torch.zeros(16)
    for dx_out in (rows[6:12], rows[7:], given["dy"]):
        package.rmsnorm_backward(**given, dx_out=dx_out)
    for name, tensor in given.items():
        place = torch.zeros(96, dtype=BF16)
        lies = place.view(torch.float32) if tensor.dtype == torch.float32 else place
        moved = lies[: tensor.numel()].view(tensor.shape).copy_(tensor)
        dx_out = place.view(6, 16)
        if name == "dy":
            assert package.rmsnorm_backward(**given | {name: moved}, dx_out=dx_out)[0] is dx_out
            continue
        with pytest.raises(ValueError, match=f"dx_out overlaps {name}, which must keep"):
            package.rmsnorm_backward(**given | {name: moved}, dx_out=dx_out)
    for dy, dx_out in (
        (rows[6:12], rows[7:]),  # partly
        (rows[7:], rows[6:12]),
        (wide[:, :16], wide.view(24, 16)[:6]),  # from the same address on, with other strides
        (rows[6:7].expand(6, 16), rows[6:12]),
    ):
        with pytest.raises(ValueError, match="overlaps dy but is not dy"):
            package.rmsnorm_backward(**given | {"dy": dy}, dx_out=dx_out)


@pytest.mark.parametrize("gap", [0, 8])
@pytest.mark.parametrize("behind", [False, True])
def test_overlap_by_one_element_is_refused(package: Package, gap: int, behind: bool) -> None:
    """dx_out lies before or behind x, whose rows may have gaps."""
    buffer = torch.zeros(1000, dtype=BF16)
    x = buffer.as_strided((6, 16), (16 + gap, 1), 300).fill_(1.0)
    given, first, end = arguments(6, 16, x=x), 300, 300 + 5 * (16 + gap) + 16
    for inside in (1, 0):
        start = end - inside if behind else first - 6 * 16 + inside
        dx_out = buffer[start : start + 6 * 16].view(6, 16)
        if inside:
            with pytest.raises(ValueError, match="dx_out overlaps x, which must keep"):
                package.rmsnorm_backward(**given, dx_out=dx_out)
        else:
            package.rmsnorm_backward(**given, dx_out=dx_out)


def test_calls_over_dy_and_apart_are_prepared_each_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write_package(tmp_path)
    package._calls._device = ""
    prepared = spied(monkeypatch, package, "_find")
    given = arguments(6, 16)
    odd = torch.empty(6 * 16 + 1, dtype=BF16)[1:].view(6, 16)
    for times in range(2):
        package.rmsnorm_backward(**given)
        # A check of tensors tells one object given twice from two, but not two of one memory.
        for dx_out in (given["dy"].clone(), given["dy"].detach(), odd):
            package.rmsnorm_backward(**given, dx_out=dx_out)
        assert len(prepared) == 4, times


def test_compiled_code_copies_dx(package: Package) -> None:
    def step(dy: Any, x: Any, rstd: Any, weight: Any, dx_out: Any) -> Any:
        dx, dw = package.rmsnorm_backward(dy * 1, x, rstd, weight, dx_out=dx_out)
        return dx + 0, dw

    def over_dy(dy: Any, x: Any, rstd: Any, weight: Any) -> Any:
        return package.rmsnorm_backward(dy, x, rstd, weight, dx_out=dy)[1]

    given = arguments(4, 8, dtype=torch.float32)
    wanted = package.rmsnorm_backward(**given)
    dx_out = torch.full((4, 8), torch.nan)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert equal(compiled(*given.values(), dx_out), wanted) and torch.equal(dx_out, wanted[0])
    with pytest.raises(Exception, match="dx_out must have x's shape"):
        compiled(*given.values(), torch.zeros(5, 8))
    dw = torch.compile(over_dy, backend="aot_eager", fullgraph=True)(*given.values())
    assert equal((given["dy"], dw), wanted)


# ---- Which kernel writes it ----------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["any", "any with mean"], indirect=True)
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("over_dy", [False, True])
def test_kernel_writes_to_the_address_of_dx_out(
    calls: Calls, over_dy: bool, capturing: bool
) -> None:
    calls.device.capturing = capturing
    dx_out = tensors()[0]
    versions = dx_out._version
    call = calls(**({"dy": dx_out} if over_dy else {}), dx_out=dx_out)
    assert call.results[0] is dx_out and call.arguments.dx == dx_out.data_ptr()
    assert (call.arguments.dy == dx_out.data_ptr()) is over_dy
    assert dx_out._version == versions + 1
    assert calls().arguments.dx != dx_out.data_ptr()


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: FakeDriver
) -> Callable[..., Any]:
    """Return what serves a call by a package whose kernel has this pipeline: the kernel's call, or
    the function that composes it."""
    here = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: here)

    def serve(pipeline: str, options: Options = PLAIN, **change: Any) -> Any:
        tuned = entry(4096)
        config = {"pipeline": pipeline} if pipeline else {}
        tuned = replace(tuned, kernel=replace(tuned.kernel, config=config))
        (tmp_path / "table.json").write_text(json.dumps(Table(TARGET, (tuned,), ()).to_json()))
        package = Package(tmp_path)
        loaded = package._source(None).loaded
        monkeypatch.setattr(loaded, "get", lambda k: LoadedKernel(b"cubin", k.spec))
        names = ("dy", "x", "rstd", "weight")
        given = Arguments(**(dict(zip(names, tensors(4096), strict=True)) | change))
        call: Any = package._with_kernel(given, options, 0)
        if isinstance(call, KernelCall):
            return "kernel"
        return next(f for cell in call.__closure__ if callable(f := cell.cell_contents))

    return serve


@pytest.mark.parametrize(
    ("pipeline", "over_dy", "by"),
    [
        *((pipeline, False, "kernel") for pipeline in ("async", "bulk", "direct", "")),
        *((pipeline, True, "kernel") for pipeline in ("async", "bulk")),
        *((pipeline, True, dx_elsewhere) for pipeline in ("direct", "")),
    ],
)
def test_direct_loads_never_read_what_the_kernel_writes(
    served: Any, pipeline: str, over_dy: bool, by: Any
) -> None:
    dy = tensors(4096)[0]
    dx_out = dy if over_dy else torch.empty_like(dy)
    assert served(pipeline, dy=dy, dx_out=dx_out) is by
    assert served(pipeline, dy=dy) == "kernel"


def test_dx_out_that_no_kernel_may_write_is_copied_to(served: Any) -> None:
    odd = torch.empty(4096 * 1024 + 1, dtype=BF16)[1:].view(4096, 1024)
    assert served("async", dx_out=odd) is dx_elsewhere
    heads = torch.zeros(16, 4, 1024).bfloat16()
    change = {"x": heads, "dy": heads, "weight": heads[0], "rstd": torch.zeros(64)}
    assert served("async", **change) is per_head
    assert served("async", **change, dx_out=torch.empty_like(heads)) is dx_elsewhere
    # The composition hands it on, so that no further memory is needed.
    residual = torch.zeros(4096, 1024)
    assert served("async", dresidual=residual, dx_out=odd) is add_residual


@pytest.mark.parametrize("over_dy", [False, True])
@pytest.mark.parametrize("place", ["", "odd"])
@pytest.mark.parametrize("residual", [None, BF16, torch.float32])
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("options", [Options(), Options(weight_offset=1.0)])
def test_compositions_give_the_bits_of_a_call_without_dx_out(
    over_dy: bool, place: str, residual: torch.dtype | None, heads: bool, options: Options
) -> None:
    """Around a stand-in for a kernel without options, which spoils dy where dx goes over it."""

    def backward(inner: Arguments, asked: Options) -> Any:
        compose = composition(inner, asked, SPEC, over_dy=not place)
        if compose is not None:
            return compose(backward, inner, asked)
        assert inner.dresidual is None and not asked.weight_offset
        return reference_backward(**vars(inner), **vars(asked))

    given = Arguments(**arguments(*((2, 3, 16) if heads else (6, 16))))
    if residual:
        given = replace(given, dresidual=randn(*given.x.shape, dtype=residual, seed=7))
    shift = 1 if place else 0
    memory = torch.empty(given.x.numel() + shift, dtype=BF16)[shift:].view(given.x.shape)
    given = replace(given, dy=memory.copy_(given.dy)) if over_dy else given
    wanted = backward(given, options)
    found = backward(replace(given, dx_out=memory), options)
    assert found[0] is memory and equal(found, wanted)
    if residual == BF16:  # no second tensor has the same numbers
        assert wanted[2] is wanted[0] and found[2] is memory


def test_pipelines_are_those_of_the_kernels_that_there_are() -> None:
    """Each one that the search space has is either argued for or excluded."""
    pipelines = KNOBS["pipeline"].domain
    assert pipelines == ("bulk", "direct", "async", "producer")
    may = [may_overwrite_dy({"pipeline": name}) for name in pipelines]
    assert may == [True, False, True, True]
