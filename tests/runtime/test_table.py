"""The choices of a package's table."""

from __future__ import annotations

from typing import Any

import pytest

from normforge.table import Table, runs_on
from tests.support.fake_driver import TABLE, entry


@pytest.mark.parametrize(
    ("M", "N", "how", "file"),
    [
        (4096, 1024, "tuned", "k4096"),
        (4097, 1024, "nearest", "k4096"),
        (129, 1024, "nearest", "k1024"),
        (128, 1024, "fallback", "any1024_16"),
        (1, 1024, "fallback", "any1024_16"),
        (2048, 1024, "nearest", "k1024"),  # 4096 is as far: the smaller one wins
        (16383, 1024, "nearest", "k4096"),
        (20000, 1024, "nearest", "k65536"),
        (10**9, 1024, "nearest", "k65536"),
        (4096, 512, "fallback", "any1024_16"),
        (4096, 2048, "fallback", "any4096_16"),
        (4096, 513, "fallback", "any1024_2"),
        (4096, 1025, "fallback", "any4096_2"),
        (4096, 4104, "none", None),
        (4096, 128, "fallback", "any4096_16"),  # the other one takes no rows that short
    ],
)
def test_choice_by_shape(M: int, N: int, how: str, file: str | None) -> None:
    choice = TABLE.choose(M, N, "bf16", "bf16")
    assert (choice.how, choice.kernel and choice.kernel.file) == (how, file)


def test_few_rows_have_kernels_for_few_rows() -> None:
    """One that was tuned for few, else a fallback kernel, else the nearest there is."""
    few, many = entry(30), entry(4096)
    table = Table(TABLE.target, (few, many), TABLE.fallback)

    def chosen(table: Table, M: int) -> tuple[str, Any]:
        choice = table.choose(M, 1024, "bf16", "bf16")
        return choice.how, choice.kernel and choice.kernel.file

    assert chosen(table, 30) == ("tuned", "k30")
    assert chosen(table, 8) == chosen(table, 128) == ("nearest", "k30")
    assert chosen(table, 7) == ("fallback", "any1024_16"), "a quarter of what it was tuned for"
    near = Table(TABLE.target, (entry(192), many), TABLE.fallback)
    assert chosen(near, 128) == chosen(near, 49) == ("nearest", "k192")
    without = Table(TABLE.target, (many,), TABLE.fallback)
    assert chosen(without, 3) == ("fallback", "any1024_16")
    reason = without.choose(3, 1024, "bf16", "bf16").reason
    assert reason.startswith("3x1024:bf16 was not tuned, and the nearest M, 4096, is far;")
    alone = Table(TABLE.target, (many,), ())
    assert chosen(alone, 3) == ("nearest", "k4096")
    assert alone.choose(3, 1024, "bf16", "bf16").tuned is many
    unaligned = without.choose(3, 1024, "bf16", "bf16", alignment=8)
    assert unaligned.how == "fallback" and "k4096 needs" in unaligned.reason


def test_choice_depends_on_the_dtypes() -> None:
    assert TABLE.choose(4096, 1024, "bf16", "fp32").how == "none"
    assert TABLE.choose(4096, 1024, "fp16", "fp16").how == "none"


@pytest.mark.parametrize("places", [{"alignment": 8}, {"weight_alignment": 8}])
def test_unaligned_rows_or_weights_get_a_kernel_with_narrow_vectors(places: Any) -> None:
    choice = TABLE.choose(4096, 1024, "bf16", "bf16", **places)
    assert (choice.how, choice.kernel and choice.kernel.file) == ("fallback", "any1024_2")
    assert "k4096 needs" in choice.reason


def test_kernel_that_fits_in_one_round_is_not_nearest_to_one_row_more() -> None:
    """8 rows for each of 132 CTAs: 1056 rows are one round of the grid, 1057 are two."""
    whole, fine = entry(1056, batch_rows=4), entry(2112)
    table = Table(TABLE.target, (whole, fine), ())

    def nearest(M: int) -> int:
        found = table.choose(M, 1024, "bf16", "bf16").tuned
        assert found is not None
        return found.M

    assert [nearest(M) for M in (900, 1056, 1057, 1300)] == [1056, 1056, 2112, 2112]
    assert nearest(2112) == 2112
    alone = Table(TABLE.target, (whole,), ())
    assert alone.choose(1057, 1024, "bf16", "bf16").kernel is whole.kernel


def test_wide_vectors_need_only_16_bytes_of_the_weight() -> None:
    wide = Table(TABLE.target, (entry(4096, vector_bytes=32),), ())
    assert wide.choose(4096, 1024, "bf16", "bf16", weight_alignment=16).how == "tuned"
    assert wide.choose(4096, 1024, "bf16", "bf16", alignment=16).how == "none"


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_103a", (10, 3), True),
        ("sm_120a", (12, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_89", (8, 6), False),
        ("sm_80", (9, 0), False),
    ],
)
def test_code_runs_on(arch: str, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(arch, capability) is runs
