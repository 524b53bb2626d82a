"""The check of batch invariance, on stand-ins for kernels: one that deserves it, and some that do
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.verify import batch_invariance
from generator.evaluate.verify.batch_invariance import LEAST_ROWS, check_batch_invariance
from generator.operations.rmsnorm_backward import Inputs, make_cancelling, make_inputs
from generator.problem import Problem
from normforge.launch.kernel_arguments import DW_ADDED, DW_IN_FP32
from normforge.spec import CHUNK_ROWS, KernelSpec, Launch
from tests.support.fake_driver import SPEC, TWO_KERNELS

N = 16
KERNEL: Any = SimpleNamespace(
    spec=replace(
        SPEC,
        **{"N": N, "dtype": "fp32", "partial_columns": N, "partial_stride": N, **TWO_KERNELS},
        **{"run_rows": 8, "group_rows": 64, "leaves": "both", "rows_per_cta": 2},
    )
)


def rows_of(M: int) -> Inputs:
    problem = Problem(M, N, "fp32", "fp32")
    device = torch.device("cpu")
    return make_cancelling(problem, make_inputs(problem, device))


class Honest:
    """Stands in for a kernel: dx by rows, dw by chunks of rows that are added one after another."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []

    def dx(self, products: torch.Tensor, launch: Launch) -> torch.Tensor:
        return products

    def chunk(self, products: torch.Tensor, launch: Launch) -> torch.Tensor:
        return products.sum(0)

    def dw(self, start: torch.Tensor, chunks: list[torch.Tensor]) -> torch.Tensor:
        for chunk in chunks:
            start = start + chunk
        return start

    def __call__(
        self,
        kernel: Any,
        launch: Launch,
        inputs: Inputs,
        outputs: dict[str, torch.Tensor],
        workspace: torch.Tensor,
        dw_mode: int,
    ) -> None:
        x, dy, dw = inputs.x, inputs.dy, outputs["dw"]
        products = (dy * x * inputs.rstd[:, None]).contiguous()
        outputs["dx"].copy_(self.dx(products, launch))
        start = dw.clone() if dw_mode == DW_ADDED else torch.zeros_like(dw)
        chunks = [self.chunk(part, launch) for part in products.split(CHUNK_ROWS)]
        dw.copy_(self.dw(start, chunks))
        self.calls.append(
            SimpleNamespace(rows=len(x), grid=launch.grid, strides=(x.stride(0), dy.stride(0)))
        )
        self.calls[-1].mode = dw_mode


class DxOfTheGrid(Honest):
    def dx(self, products: torch.Tensor, launch: Launch) -> torch.Tensor:
        return products * (1 + launch.grid % 7 * 2.0**-22)


class DxOfTheNeighbours(Honest):
    """Two rows at once, the second of which gets another rounding."""

    def dx(self, products: torch.Tensor, launch: Launch) -> torch.Tensor:
        products[1::2] *= 1 + 2.0**-22
        return products


class DwOfTheGrid(Honest):
    """The CTAs' sums, one after another."""

    def chunk(self, products: torch.Tensor, launch: Launch) -> torch.Tensor:
        parts = [products[c :: launch.grid].sum(0) for c in range(launch.grid)]
        return torch.stack(parts).cumsum(0)[-1]


class DwOfPairsOfChunks(Honest):
    """A dw that is the same whatever the grid, but not what micro-batches add up to."""

    def dw(self, start: torch.Tensor, chunks: list[torch.Tensor]) -> torch.Tensor:
        return start + super().dw(torch.zeros_like(start), chunks[::-1])


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The check of a stand-in."""

    def run(stand_in: Honest, M: int = 18000, **options: Any) -> str:
        monkeypatch.setattr(batch_invariance, "run_rows", stand_in)
        return check_batch_invariance(KERNEL, rows_of(M), **options)

    return run


@pytest.mark.parametrize("M", [1, 500, 4096, 18000])
def test_kernel_whose_bits_depend_on_the_rows_alone_passes(
    check: Callable[..., str], M: int
) -> None:
    assert check(Honest(), M) == ""


@pytest.mark.parametrize(
    ("stand_in", "says"),
    [
        (DxOfTheGrid, "SMs is not that of the whole batch"),
        (DxOfTheNeighbours, "SMs is not that of the whole batch"),
        (DwOfTheGrid, "is not that on"),
        (DwOfPairsOfChunks, "is not that of micro-batches, cut at"),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_bits_that_depend_on_more_are_found(
    check: Callable[..., str], stand_in: type[Honest], says: str, seed: int
) -> None:
    """The cases of the finals find them, whatever the seed."""
    fault = check(stand_in(), seed=seed)
    assert fault.startswith("dx of rows" if "whole batch" in says else "dw of rows")
    assert says in fault


def test_batches_differ_in_rows_grids_and_strides_and_some_are_divided(
    check: Callable[..., str],
) -> None:
    honest = Honest()
    assert check(honest) == ""
    whole, *parts = honest.calls
    assert whole.rows == 18000 and whole.mode == DW_IN_FP32
    assert len({part.rows for part in parts}) > 5 and min(part.rows for part in parts) < 100
    assert len({part.grid for part in parts}) > 8
    assert len({part.strides for part in parts}) > 1
    added = [part for part in parts if part.mode == DW_ADDED]
    assert len(added) >= 4
    # All micro-batches of a batch but its last are whole chunks.
    assert sum(part.rows % CHUNK_ROWS == 0 for part in added) >= len(added) / 2


def test_batches_of_whole_chunks_are_cut_inside(
    check: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut at the end would make a batch of no rows."""

    class OfTwoChunks(Random):
        def uniform(self, a: float, b: float) -> float:
            return log2(2 * CHUNK_ROWS - 0.5)

    monkeypatch.setattr(batch_invariance, "Random", OfTwoChunks)
    honest = Honest()
    assert check(honest) == ""
    _, *parts = honest.calls
    assert {part.rows for part in parts} == {CHUNK_ROWS, 2 * CHUNK_ROWS}


def test_every_tensor_of_rows_is_repeated() -> None:
    rows = replace(rows_of(3), dresidual=torch.randn(3, N))
    for name, tensor in vars(batch_invariance._repeated(rows, 2)).items():
        given = getattr(rows, name)
        if isinstance(given, torch.Tensor):
            of_rows = name != "weight"
            assert torch.equal(tensor, torch.cat([given, given]) if of_rows else given), name


def test_few_rows_are_repeated_until_there_are_several_chunks(check: Callable[..., str]) -> None:
    honest = Honest()
    assert check(honest, 500) == ""
    assert honest.calls[0].rows >= LEAST_ROWS > 4 * CHUNK_ROWS
    assert any(part.mode == DW_ADDED for part in honest.calls)


def test_workspace_is_what_a_kernel_finds_it_to_be(check: Callable[..., str]) -> None:
    """Zeros for the counters, and nothing to rely on behind them."""

    class Looks(Honest):
        seen = 0

        def __call__(self, kernel: Any, launch: Launch, *given: Any) -> None:
            workspace = given[2]
            assert len(workspace) == launch.workspace_bytes
            assert not workspace[: launch.scratch_offset].any()
            assert (workspace[launch.scratch_offset :] == 0xFF).all()
            self.seen += 1
            super().__call__(kernel, launch, *given)

    looks = Looks()
    assert check(looks, 3000) == ""
    assert looks.seen


def test_only_kernels_of_runs_are_checked() -> None:
    def candidate(spec: KernelSpec) -> Candidate:
        return Candidate(b"", spec)

    assert candidate(KERNEL.spec).batch_invariant
    assert not candidate(SPEC).batch_invariant
