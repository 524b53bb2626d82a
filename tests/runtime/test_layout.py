"""Facts about the addresses of a call's rows, and the tensors that are copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normforge.launch.row_layout import RowLayout
from normforge.launch.workspace import StreamWorkspace, Zeros
from normforge.serve.layout import Layout, read_layout
from normforge.serve.options import Arguments
from normforge.spec import Launch
from tests.support.fake_driver import FakeDriver

N = 64
BF16 = torch.bfloat16


def strided(shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A view into aligned memory; start: elements from its beginning."""
    memory = torch.zeros(1 << 14, dtype=BF16)
    first = -(memory.data_ptr() // 2) % 16
    return memory[first:].as_strided(shape, strides, memory[first:].storage_offset() + start)


def layout_of(x: torch.Tensor, dy: torch.Tensor) -> tuple[Layout, int]:
    """The layout, and the power of two that divides all addresses and steps."""
    rows = x.numel() // N
    return read_layout(Arguments(dy, x, torch.ones(rows), torch.ones(N, dtype=BF16)))


@pytest.mark.parametrize("start", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_the_address_of_either_tensor_counts(which: str, start: int) -> None:
    given = {"x": strided((6, N), (N, 1)), "dy": strided((6, N), (N, 1))}
    given[which] = strided((6, N), (N, 1), start)
    assert layout_of(**given)[1] == (2 * start or 32)


@pytest.mark.parametrize("gap", [1, 4, 16])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_every_step_between_rows_counts(which: str, gap: int) -> None:
    """Steps are between rows, and between the heads of one token and the next."""
    for strides in ((3 * (N + gap), N + gap, 1), (3 * N + gap, N, 1)):
        given: dict[str, Any] = dict.fromkeys(("x", "dy"), strided((2, 3, N), (3 * N, N, 1)))
        given[which] = strided((2, 3, N), strides)
        layout, alignment = layout_of(**given)
        assert alignment == 2 * gap
        assert not any(layout.copy)


def test_rows_that_are_stepped_through_in_two_ways_are_copied_once() -> None:
    x = strided((2, 3, 4, N), (3 * 5 * N, 5 * N, N, 1))  # a gap behind every 4 rows
    dy = strided((2, 3, 4, N), (13 * N, 4 * N, N, 1))  # behind every 12
    layout, _ = layout_of(x, dy)
    assert layout.copy[:2] == (True, False)
    assert layout.strided["x"] == RowLayout(N, 4, 5 * N)
    assert layout.strided["dy"] == RowLayout(N, 4, 4 * N)
    dense = strided((2, 3, 4, N), (12 * N, 4 * N, N, 1))
    assert layout_of(x, dense)[0].copy[:2] == (False, False), "it goes along with any"


def test_counters_and_scratch_grow_with_the_launch(driver: FakeDriver) -> None:
    own = StreamWorkspace(7, Zeros())

    def fit(counters: int, scratch: int) -> tuple[int, int]:
        launch = Launch(1, 1, 1, 0, counters=counters, zeroed=0, scratch=scratch, partials=1)
        own.fit(launch)
        at, end = own.zeros, own.zeros + launch.scratch_offset
        assert any(slab <= at and end <= slab + size for slab, size in driver.zeroed)
        assert own.scratch_words >= scratch
        return own.zeros, own.scratch

    small = fit(10, 100)
    assert fit(10, 100) == fit(5, 50) == small
    more_counters = fit(40_000, 100)
    assert more_counters[0] != small[0] and more_counters[1] == small[1]
    more_scratch = fit(10, 5000)
    assert more_scratch[0] == more_counters[0] and more_scratch[1] != small[1]
