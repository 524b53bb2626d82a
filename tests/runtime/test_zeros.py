"""Zeroed memory that kernels count in: whose it is, and who may take it."""

from __future__ import annotations

import itertools

import pytest
import torch
from cuda.bindings import driver as cuda

from normforge.launch.driver import LaunchError
from normforge.launch.workspace import LINE, SLAB, Zeros
from tests.support.fake_driver import FakeDriver


def test_zeroed_lines_are_disjoint_whole_and_zeroed_before_use(driver: FakeDriver) -> None:
    zeros = Zeros()
    sizes = [8, 128, 129, 0, SLAB - LINE, 3 * SLAB, 4]
    taken = [(zeros.take(size), -(-size // LINE) * LINE) for size in sizes]
    assert taken[3][0] == 0
    taken.remove(taken[3])
    for at, size in taken:
        assert at % LINE == 0
        assert any(slab <= at and at + size <= slab + long for slab, long in driver.zeroed)
    taken.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))


def test_one_thread_at_a_time_takes_zeroed_lines(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them would count in the same words."""
    zeros, new = Zeros(), Zeros._new

    def locked(self: Zeros, size: int) -> int:
        assert self._lock.locked()
        return new(self, size)

    monkeypatch.setattr(Zeros, "_new", locked)
    assert zeros.take(LINE) != zeros.take(LINE)
    assert not zeros._lock.locked()


def test_a_capture_empties_no_cache_for_memory(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch frees blocks by a call that would end the capture."""
    full = (cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    driver.cuMemAlloc = lambda size: full  # type: ignore[method-assign]
    monkeypatch.setattr("normforge.launch.workspace.is_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("it was emptied"))
    with pytest.raises(LaunchError, match=f"allocating {SLAB} bytes"):
        Zeros().take(LINE)
