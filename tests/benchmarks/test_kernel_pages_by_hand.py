"""Kernels, conditions, checks and errors on pages, from files made by hand: the answers are worked
out beside them, and none by the code that it judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import accuracy, method, pipelines, shapes
from tests.support.hand_made import cells, use, write

A, B, C = "4096x256:bf16", "4096x512:bf16", "16384x1024:bf16"
GPUS = ("h200", "h100")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use(monkeypatch, tmp_path)
    return tmp_path


def columns(page: str) -> list[str]:
    """Return the titles of the columns behind the first."""
    return [title.strip() for title in page.splitlines()[0].split("|")[2:-1]]


def test_kernels_with_a_producer_have_a_column_for_each_gpu_and_condition(folder: Path) -> None:
    """Package and best, over the floor, by condition: flush first, then rotation."""

    def row(shape: str, flush: tuple[float, float], rotation: tuple[float, float]) -> Any:
        pairs = {"flush": flush, "rotation": rotation}
        return {
            "shape": shape,
            "package_ratio": {condition: before for condition, (before, _) in pairs.items()},
            "best_ratio": {condition: now for condition, (_, now) in pairs.items()},
        }

    rows = [row(A, (2.0, 1.0), (1.5, 1.2)), row(B, (1.0, 1.62), (1.25, 1.0))]
    write(folder, "pipelines_h200", {"rows": rows})
    write(folder, "pipelines_h100", {"rows": [row(A, (1.1, 1.21), (4.0, 1.0)), rows[1]]})
    page = pipelines.pipelines()
    assert columns(page) == ["H200, flush", "H200, rotation", "H100, flush", "H100, rotation"]
    assert cells(page, A) == ["2.000, 1.000", "1.500, 1.200", "1.100, 1.210", "4.000, 1.000"]
    # Roots of 0.5 * 1.62, 0.8 * 0.8, 1.1 * 1.62 and 0.25 * 0.8.
    assert cells(page, "mean of the ratios") == ["0.900", "0.800", "1.335", "0.447"]


def conditions(number: float) -> dict[str, Any]:
    """A row in which every number is another one."""

    def own(condition: str, number: float) -> dict[str, Any]:
        other = {"flush": "rotation", "rotation": "flush"}[condition]
        return {
            "tau_halves": {"finals": number, "trials": -1.0},
            "tau_to_finals": {condition: number + 0.01, other: -1.0},
            "spread": {"trials": number / 10, "finals": 9.0},
            "loss_in_finals": {condition: number / 100, other: number / 50},
            "hint": number,
        }

    return {
        "shape": A,
        "flush": {"trial_seconds": number / 1e3},
        "rotation": {"trial_seconds": number / 1e2},
        "summary": {
            "tau": {"finals": number + 0.02, "trials": -1.0},
            "flush": own("flush", number),
            "rotation": own("rotation", number + 0.06),
        },
    }


def test_each_condition_is_described_by_its_own_numbers(folder: Path) -> None:
    rows = [conditions(0.4), conditions(0.4), conditions(0.9)]
    for gpu in GPUS:
        write(folder, f"conditions_{gpu}", {"rows": rows if gpu == "h200" else rows[2:]})
    page = pipelines.conditions()
    # Means of 0.4, 0.4 and 0.9; the median of tenths and of ms; the largest loss; the cube root of
    # 0.144.
    assert cells(page, "H200, flush") == [
        *("0.57", "0.59", "0.58", "4.0 %", "0 ms", "0.9 %, 1.8 %", "0.524"),
    ]
    assert cells(page, "H200, rotation") == [
        # 0.46, 0.46 and 0.96: the cube root of 0.203136.
        *("0.63", "0.59", "0.64", "4.6 %", "4 ms", "1.0 %, 1.9 %", "0.588"),
    ]
    assert cells(page, "H100, flush")[0] == "0.90" and cells(page, "H100, rotation")[0] == "0.96"


def test_packages_are_compared_where_their_kernels_differ_and_where_not(folder: Path) -> None:
    def row(before: str, after: str, flush: float, rotation: float) -> dict[str, Any]:
        def times(ratio: float) -> dict[str, float]:
            return {"before": 2.0, "after": 2.0 * ratio, "after_over_before": ratio}

        kernels = {"before": before, "after": after}
        return {"kernels": kernels, "flush": times(flush), "rotation": times(rotation)}

    rows = [row("a", "b", 0.5, 1.5), row("a", "c", 0.98, 0.54), row("d", "d", 1.01, 0.99)]
    write(folder, "packages_h200", {"rows": rows})
    write(folder, "packages_h100", {"rows": rows[1:]})
    assert cells(pipelines.packages("h100"), "all, flush")[0] == "2"
    page = pipelines.packages("h200")
    # Cube roots of 0.5 * 0.98 * 1.01 and of 1.5 * 0.54 * 0.99; roots without the last.
    assert cells(page, "all, flush") == ["3", "2.000", "1.582", "0.791", "0.500, 1.010"]
    assert cells(page, "all, rotation") == ["3", "2.000", "1.858", "0.929", "0.540, 1.500"]
    assert cells(page, "with another kernel, flush")[::3] == ["2", "0.700"]
    assert cells(page, "with another kernel, rotation")[::3] == ["2", "0.900"]
    assert cells(page, "with the same, flush") == ["1", "2.000", "2.020", "1.010", "1.010, 1.010"]


def test_few_rows_are_served_by_the_chosen_kernel(folder: Path) -> None:
    """It is neither the fastest nor the slowest of its row."""

    def row(shape: str, chosen: float, *fallbacks: float) -> dict[str, Any]:
        named = [("a", "tuned", 1.0), ("b", "tuned", chosen), ("c", "tuned", 99.0)]
        named += [(f"f{place}", "fallback", ratio) for place, ratio in enumerate(fallbacks)]
        kernels = [{"kernel": k, "how": how, "ratio": ratio} for k, how, ratio in named]
        return {"shape": shape, "chosen": "b", "aten": chosen + 1, "kernels": kernels}

    rows = [row("8x256:bf16", 2.0, 3.0, 1.0), row("1x256:bf16", 4.0, 5.0)]
    write(folder, "few_rows_h200", {"rows": [*rows, row("8x512:bf16", 8.0, 4.0, 12.0)]})
    page = shapes.few_rows()
    # Roots of 2 * 8, of 1 * 4 and 3 * 12, and of 3 * 9.
    assert cells(page, "8 ") == ["2", "4.00, 8.0", "2.00 to 6.00", "5.20"]
    assert cells(page, "1 ") == ["1", "4.00, 4.0", "5.00 to 5.00", "5.00"]
    assert page.index("| 1 ") < page.index("| 8 ")


def test_variants_that_gave_nothing_to_compare_did_not_agree(folder: Path) -> None:
    """Skipped are only those that the GPU cannot launch."""
    names = ("equal", "equal", "different", "failed", "skipped")
    cases = [{"outcome": outcome, "variant": "separate_n64"} for outcome in names]
    cases[0]["variant"] = "separate_n8to64_x"
    found = {"environment": {"gpu": "GPU"}, "outcomes": {"equal": 2}, "cases": cases}
    write(folder, "bit_exact_h200", found)
    said = "On one GPU, 2 of 4 sampled variants agreed, 1 of them kernels for any N."
    assert method.bit_exact() == said


def test_batches_with_a_differing_bit_are_counted(folder: Path) -> None:
    def row(cases: int, differing: int) -> dict[str, int]:
        return {"cases": cases, "differing": differing}

    for name, differing in (("h200", 0), ("h200_on_h100", 2), ("h100", 0)):
        rows = [row(9000, differing), row(400, 0), row(1000, differing)]
        write(folder, f"batch_invariance_{name}", {"rows": rows})
    lines = [line.strip("| ").split(" | ") for line in method.invariance_cases().splitlines()[2:]]
    assert lines == [
        ["H200", "H200", "3", "10,400", "400", "0"],
        ["H200", "H100", "3", "10,400", "400", "4"],
        ["H100", "H100", "3", "10,400", "400", "0"],
    ]


def test_planted_bugs_are_no_launches_of_unchanged_kernels(folder: Path) -> None:
    def row(strategy: str, planted: str, launches: int, differing: int) -> dict[str, Any]:
        return {
            **{"strategy": strategy, "planted": planted},
            **{"launches": launches, "differing": differing},
        }

    rows = [row("mailbox", "", 1000, 0), row("separate", "", 500, 1)]
    rows += [row("mailbox", "no fence", 200, 7), row("mailbox", "no fence", 100, 3)]
    rows += [row("separate", "no fence", 200, 5)]
    found = {"rows": rows, "sanitizer": {"memcheck": "ERROR SUMMARY: 0 errors"}}
    write(folder, "stress_h200", found)
    page = method.stress()
    assert page.startswith("| 2 kernels ")
    assert cells(page, "launches of unchanged") == ["1,500"]
    assert cells(page, "of these, with different bits") == ["1"]
    assert cells(page, "planted in `mailbox`") == ["10 of 300 launches with different bits"]
    assert cells(page, "planted in `separate`") == ["5 of 200 launches with different bits"]
    assert cells(page, "compute-sanitizer, memcheck") == ["ERROR SUMMARY: 0 errors"]


def test_errors_have_the_span_and_the_middle_of_their_dtypes(folder: Path) -> None:
    def row(shape: str, aten: tuple[float, float] | None, dx: float, dw: float) -> dict[str, Any]:
        over = {"composite": {"dx": dx, "dw": dw}}
        over |= {"aten": dict(zip(("dx", "dw"), aten, strict=True))} if aten else {}
        return {"shape": shape, "ours over": over, "errors": {"ours": {"dx": 0.1, "dw": dw / 1e3}}}

    rows = [
        row(A, (0.5, 0.9), 1.0, 2.0),
        row("8x64:fp16", (1.5, 0.9), 3.0, 4.0),
        row(B, (0.75, 0.9), 2.0, 8.0),
        row("8x64:bf16:fp32", None, 7.0, 6.0),
        row("8x64:fp32", (1.0, 1.0), 5.0, 5.001),
    ]
    write(folder, "errors_h200", {"rows": rows})
    write(folder, "errors_dw_fp32_h200", {"rows": [row(A, None, 1.0, 0.5), *rows[3:]]})
    page = accuracy.errors()
    assert cells(page, "bf16, fp16 (3)") == [
        *("0.50 to 1.50, median 0.75", "0.90", "1.00 to 3.00, median 2.00"),
        "2.00 to 8.00, median 4.00",
    ]
    assert cells(page, "bf16, fp16, fp32 weight (1)") == ["", "", "7.00", "6.00"]
    assert cells(page, "fp32 (1)") == ["1.00", "1.00", "5.00", "5.00"]
    assert cells(page, "bf16, fp16, dw in fp32 (1)") == ["", "", "1.00", "0.50"]
    assert len(page.splitlines()) == 6, "with an fp32 weight dw is in fp32 anyway"
    # Of A and B 2 and 8 thousandths; of dw in fp32 that of A alone.
    said = " ".join(accuracy.dw_precision().split())
    assert "the median of its relative error is 5.0e-03; in fp32 it is 5.0e-04." in said
