"""Formulas behind numbers in sentences, on files made by hand: the answers are worked out beside
them, and none by the code that it judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import note_facts as notes
from tests.support import stated_numbers
from tests.support.hand_made import compared, comparison_of, use, write

A, B, C = "4096x256:bf16", "4096x4096:bf16", "16384x1024:bf16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use(monkeypatch, tmp_path)
    return tmp_path


def stored(condition: str, operation: str, follower: str, shape: str, *us: float) -> dict[str, Any]:
    names = ("floor_us", "default_us", "loads_us", "stores_us", "both_us")
    said = {"condition": condition, "operation": operation, "follower": follower, "shape": shape}
    return {**said, **dict(zip(names, us, strict=True))}


def stores(folder: Path) -> None:
    """Microseconds of the floor, with neither hint, with loads, with stores, with both."""
    read_next = "torch.mul(out, 2.0)"
    rows = [
        stored("cold", "forward", "nothing", A, 9.0, 10.0, 11.0, 8.0, 7.0),
        stored("cold", "forward", "nothing", B, 9.0, 100.0, 90.0, 95.0, 50.0),
        stored("cold", "forward", read_next, C, 9.0, 10.0, 10.0, 1.0, 1.0),
        stored("loop", "backward", read_next, A, 9.0, 20.0, 12.0, 11.0, 10.5),
        stored("loop", "backward", read_next, B, 9.0, 30.0, 20.0, 18.0, 19.0),
        stored("rotating", "backward", "nothing", A, 10.0, 10.0, 10.5, 1.0, 1.0),
        stored("rotating", "backward", "nothing", B, 10.0, 40.0, 42.0, 1.0, 1.0),
        stored("rotating", "backward", "nothing", C, 10.0, 20.0, 19.0, 1.0, 1.0),
        stored("rotating", "forward", "nothing", C, 10.0, 20.0, 90.0, 1.0, 1.0),
        stored("cold", "backward", "nothing", A, 10.0, 11.0, 10.0, 1.0, 1.0),
    ]
    write(folder, "stores_h100", {"rows": rows})


def test_stores_and_both_hints(folder: Path) -> None:
    stores(folder)
    assert notes.saved_by_stores() == pytest.approx(0.2)  # 2 of 10 µs; of the other one 5 of 100
    assert notes.gained_by_both() == pytest.approx(1.5)  # 12 - 10.5; of the other one 1


def test_the_hint_under_a_condition(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores(folder)
    found = notes.hint_under("rotating")
    assert found.longer == {A: pytest.approx(0.05), B: pytest.approx(0.05), C: pytest.approx(-0.05)}
    # The cube roots of 1.05 * 4.2 * 1.9 = 8.379 and of 1 * 4 * 2 = 8.
    assert (found.hinted, found.plain) == (pytest.approx(2.0311, abs=1e-4), pytest.approx(2.0))
    monkeypatch.setattr(notes, "hinted", lambda gpu, shapes="": (1, 2) if shapes else (3, 4))
    slows, after, have, rotated = stated_numbers.hint_on_h100()
    assert slows == (
        "the hint slows 2 of 3 winners of an H100, by up to 5.0 % (4096x256), and all by 1.6 % in"
        " the mean: they take 2.031 times the floor with it, and 2.000 without"
    )
    assert after == "after the flush 1.000 and 1.100"
    assert have == "3 of the H100's 4 kernels for tuned shapes have it"
    assert rotated == "1 of the 2 for the shapes of `compare`, whose finals were held in"


def test_kernels_without_an_exchange(folder: Path) -> None:
    """One in a hundred and less is equal."""
    rows = [{"us": 100.0, "no_exchange_us": us} for us in (98.0, 99.0, 100.0, 101.0, 102.0, 110.0)]
    write(folder, "ablations_h200", {"rows": [*rows, {"us": 100.0}]})
    assert notes.exchange() == (2, 3, 1)


def test_pairs_differ_in_one_knob(folder: Path) -> None:
    def row(shape: str, arrival: str, us: float, stages: int = 2) -> dict[str, Any]:
        config = {"arrival": arrival, "stages": stages}
        return {"shape": shape, "arrival": arrival, "us": us, "config": config}

    rows = [
        row(A, "late", 10.0),
        row(A, "early", 9.5),
        # B has 16 M elements: above SMALL. The rows of C have another config each.
        row(B, "late", 30.0),
        row(B, "early", 31.0),
        row(C, "late", 1.0, 3),
        row(C, "early", 9.0, 4),
    ]
    write(folder, "arrival_h200", {"rows": rows})
    assert notes.early_arrival(small=True) == [pytest.approx(-0.5)]
    assert notes.early_arrival(small=False) == [pytest.approx(1.0)]


def test_blocks_of_rows_beside_none(folder: Path) -> None:
    def row(shape: str, value: bool, ratio: float, cluster: int) -> dict[str, Any]:
        return {"shape": shape, "value": value, "ratio": ratio, "config": {"cluster": cluster}}

    rows = [row(A, True, 1.1, 1), row(A, False, 1.0, 1), row(B, True, 1.0, 4)]
    write(folder, "blocks_h200", {"rows": [*rows, row(B, False, 1.25, 4)]})
    assert notes.in_blocks("blocks_h200", clusters=False) == [pytest.approx(1.1)]
    assert notes.in_blocks("blocks_h200", clusters=True) == [pytest.approx(0.8)]


def test_load_hints_by_pipeline(folder: Path) -> None:
    rows = [
        {"pipeline": "async", "default": 1.25, "evict_last": 1.0},
        {"pipeline": "bulk", "default": 1.0, "evict_last": 1.5},
    ]
    write(folder, "load_hints_h200", {"rows": rows})
    assert notes.load_hints("async") == [0.8] and notes.load_hints("bulk") == [1.5]


def test_peers_near_the_floor(folder: Path) -> None:
    """A peer is in reach at one shape of 47, with 11 of 10 µs; at the others it takes 20."""
    from generator.shape_lists import load_problems

    shapes = [str(problem) for problem in load_problems("compare")]
    rows = [compared(shape, 10.0, 10.0, cudnn=20.0, quack=30.0) for shape in shapes]
    rows[3]["peers"]["quack"]["us"] = 11.0
    write(folder, "h200", comparison_of(*rows))
    assert notes.near_the_floor(1.1) == (1, 47)
    assert notes.near_the_floor(1.09) == (0, 47)


def test_errors_over_the_fused_operators(folder: Path) -> None:
    rows = [compared("8x64:fp32", 1.0, 1.0, aten=1.0), compared("8x32:fp32", 1.0, 1.0, aten=1.0)]
    rows.append(compared("8x64:bf16", 1.0, 1.0, aten=1.0))
    for row, error in zip(rows, (0.5, 0.25, 99.0), strict=True):
        row["ours_error_dx"], row["peers"]["aten"]["error_dx"] = error, 0.25
    write(folder, "h200", comparison_of(*rows))
    assert notes.error_over_fused("dx") == 2.0


def test_sums_sent_early(folder: Path) -> None:
    rows = [
        {"dw": "first pass", "ratio": 0.9, "config": {"cluster": 1}},
        {"dw": "first pass", "ratio": 1.2, "config": {"cluster": 2}},
        {"dw": "second pass", "ratio": 7.0, "config": {"cluster": 1}},
    ]
    write(folder, "send_h200", {"rows": rows})
    assert notes.sent_early("first pass", clusters=False) == [0.9]
    assert notes.sent_early("first pass", clusters=True) == [1.2]


def test_host_times_against_those_before(folder: Path) -> None:
    """The largest of the operators, and the span of all others."""
    runs = [
        {"us": {"rms_norm, operator": {"difference": 0.4}, "rms_norm": {"difference": -0.7}}},
        {"us": {"x, operator, native": {"difference": 0.6}, "RMSNorm": {"difference": 0.25}}},
    ]
    write(folder, "host_against_h200", {"runs": runs})
    assert stated_numbers.against() == ([0.4, 0.6], [-0.7, 0.25])


def test_forwards_that_are_the_fastest_of_their_finals(folder: Path) -> None:
    """The first is, the second ties with a faster one, the third was predicted."""

    def entry(evidence: str, ratio: float, *tie: float) -> dict[str, Any]:
        return {
            "evidence": evidence,
            "provenance": {"ratio": ratio, "tie": [{"ratio": each} for each in tie]},
        }

    entries = [entry("measured", 1.0, 1.0, 1.005), entry("measured", 1.005, 1.0, 1.005)]
    entries.append(entry("predicted", 1.0, 1.0))
    write(folder, "h200/rmsnorm_backward/forward", {"tuned": entries})
    assert notes.fastest_forwards("h200") == (1, 2)


def test_cudnn_over_usual_stores(folder: Path) -> None:
    rows = [{"cells": {"ours": {"us": 10.0}, "cudnn": {"us": us}}} for us in (9.0, 11.0)]
    write(folder, "forward_usual_stores_h100", {"rows": rows})
    assert notes.usual_stores() == [0.9, 1.1]


def test_a_span_is_from_the_least_to_the_most() -> None:
    assert notes.span([2.0, 1.0, 3.0], 1) == "1.0 to 3.0"
    assert notes.span([-0.5, 0.25], sign="+") == "-0.50 to +0.25"


def test_sums_that_fewer_ctas_leave(folder: Path) -> None:
    """A row has the floor, all sums, every second and every fourth, under both conditions."""
    rows = [{"rotation_us": [9.0, 10.0, 9.5, 11.0], "flush_us": [19.0, 20.0, 22.0, 15.0]}]
    write(folder, "fewer_partials_h200", {"rows": rows})
    assert notes.fewer_partials(0) == [0.95, 1.1] and notes.fewer_partials(1) == [1.1, 0.75]
