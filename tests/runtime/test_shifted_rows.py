"""Kernels for rows that are no whole vectors serve calls whose rows lie one behind the other,
from an aligned address on. All others get the kernels that there are for any rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normforge.api import Package
from normforge.serve import server
from normforge.serve.options import PLAIN, Arguments, dx_elsewhere, may_overwrite_dy
from normforge.spec import plan_launch
from normforge.table import Table, misfit
from tests.support.fake_driver import SPEC, TARGET, entry, fallback

N = 1023
ODD = replace(SPEC, name="odd", N=N, partial_columns=N, partial_stride=1024, producer=True)
KERNEL = entry(4096, ODD)
TABLE = Table(TARGET, (replace(KERNEL, N=N),), (fallback(4096, 2), fallback(4096, 16)))
BF16 = torch.bfloat16


@given(
    M=st.integers(1, 5000),
    width=st.sampled_from([1023, 1022, 1020, 4095, 33, 1024]),
    dtype=st.sampled_from(["bf16", "fp32"]),
    teams=st.integers(1, 8),
    ctas=st.integers(8, 140),
    even=st.booleans(),
)
def test_all_rows_of_a_team_begin_at_the_same_place(
    M: int, width: int, dtype: str, teams: int, ctas: int, even: bool
) -> None:
    facts: Any = {"N": width, "dtype": dtype, "rows_per_cta": teams, "even_grid": even}
    spec = replace(ODD, sms=ctas, **facts)
    grid = plan_launch(spec, M).grid
    assert 1 <= grid <= ctas
    assert (grid - 1) * teams < M, "the first team of every CTA has a row"
    if grid * teams < M:
        row_bytes = width * (4 if dtype == "fp32" else 2)
        assert grid * teams * row_bytes % 16 == 0
        assert grid > ctas - spec.grid_step or even


def test_a_grid_is_what_it_was_for_whole_vectors() -> None:
    for M in (1, 131, 132, 264, 265, 1000):
        assert plan_launch(SPEC, M).grid == min(132, -(-M // 2))
    assert SPEC.row_period == SPEC.grid_step == 1
    assert replace(SPEC, N=4096, exact=False, vector_bytes=2).row_period == 1


def test_a_grid_that_cannot_be_a_multiple_is_refused() -> None:
    spec = replace(ODD, sms=7, rows_per_cta=1)
    assert (spec.row_period, spec.grid_step, ODD.grid_step) == (8, 8, 4)
    assert plan_launch(spec, 7).grid == 7, "no team has a second row"
    with pytest.raises(ValueError, match="odd needs 8 CTAs at once, and fewer fit"):
        plan_launch(spec, 8)


def view(rows: int, stride: int = N, start: int = 0) -> torch.Tensor:
    """Rows in aligned memory; start: elements from its beginning."""
    memory = torch.zeros(rows * stride + 64, dtype=BF16)
    first = -(memory.data_ptr() // 2) % 16 + start
    return memory[first:].as_strided((rows, N), (stride, 1), memory[first:].storage_offset())


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.setattr(server, "foreign_device", lambda target, device: "")
    kernels = SimpleNamespace(backward=TABLE, loaded=SimpleNamespace(get=lambda kernel: kernel))
    return Package(lambda device: kernels)  # type: ignore[arg-type,return-value]


def served(package: Package, x: torch.Tensor, dy: torch.Tensor, **more: Any) -> Any:
    M = x.numel() // N
    weight = more.pop("weight", torch.ones(N, dtype=BF16))
    given = Arguments(dy, x, torch.ones(M), weight, **more)
    return package._with_kernel(given, PLAIN, 0)


@pytest.mark.parametrize("start", [0, 8, 16, 1, 2, 4])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_the_first_rows_have_to_be_aligned(package: Package, which: str, start: int) -> None:
    tensors = {"x": view(4096), "dy": view(4096), which: view(4096, start=start)}
    call = served(package, **tensors)
    assert call.kernel.spec.name == ("odd" if start % 8 == 0 else "example")
    assert call.kernel.spec.exact is (start % 8 == 0)


@pytest.mark.parametrize("stride", [N + 1, N + 8, 2 * N, 1024 + 7])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_rows_have_to_lie_one_behind_the_other(package: Package, which: str, stride: int) -> None:
    tensors = {"x": view(64), "dy": view(64), which: view(64, stride)}
    assert not served(package, **tensors).kernel.spec.exact


def test_copies_lie_one_behind_the_other(package: Package) -> None:
    across = torch.zeros(N, 4096, dtype=BF16).t()
    call = served(package, view(4096), across)
    assert call.copy is not None and call.copy.dy
    assert call.kernel.spec.name == "odd"


@pytest.mark.parametrize("which", ["x", "dy"])
def test_packed_and_repeated_rows_get_other_kernels(package: Package, which: str) -> None:
    whole = view(4096).view(1024, 4, N)
    packed = view(6144).view(1024, 6, N)[:, :4]
    repeated = view(1).view(1, 1, N).expand(1024, 4, N)
    for other in (packed, repeated):
        tensors = {"x": whole, "dy": whole, which: other}
        assert not served(package, **tensors).kernel.spec.exact


def test_an_unaligned_weight_is_served(package: Package) -> None:
    """It is loaded element by element."""
    weight = view(2, start=1)[0]
    assert served(package, view(4096), view(4096), weight=weight).kernel.spec.name == "odd"


def test_dx_goes_over_dy_by_way_of_a_copy(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of rows brings elements of neighbouring ones, which other CTAs may have written."""
    composed = []
    monkeypatch.setattr(package, "_composed", lambda compose, options: composed.append(compose))
    x, dy, apart = view(4096), view(4096), view(4096)
    assert served(package, x, dy, dx_out=apart).kernel.spec.name == "odd" and not composed
    served(package, x, dy, dx_out=dy)
    served(package, x, dy, dx_out=view(4096, start=4))
    assert composed == [dx_elsewhere, dx_elsewhere]
    config = {"pipeline": "producer"}
    assert may_overwrite_dy(config) and not may_overwrite_dy(config, ODD.row_period)


def test_what_is_said_of_a_kernel_that_does_not_fit() -> None:
    choice = TABLE.choose(4096, N, "bf16", "bf16", alignment=2, first_alignment=8)
    assert choice.how == "fallback"
    assert "needs rows one behind the other, the first at a multiple of 16 bytes" in choice.reason
    assert TABLE.choose(4096, N, "bf16", "bf16", alignment=2, first_alignment=16).how == "tuned"
    assert TABLE.choose(4096, N, "bf16", "bf16").how == "tuned"
    assert TABLE.choose(4096, N, "bf16", "bf16", alignment=2).how == "fallback"
    assert misfit(ODD, N, 2, 2, 32) == "" and misfit(ODD, N - 1, 2, 2, 32)
    assert misfit(ODD, N, 32, 32), "where nobody says that they lie one behind the other"
