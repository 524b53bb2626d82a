"""The pages describe files made by hand: every expected number is worked out beside it, and none by
the code that it judges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import both_conditions, comparison, invariance, performance, training
from benchmarks.training.summary import Gain
from tests.support.hand_made import cells, compared, comparison_of, tuned, use, write

FLUSHES = ("present", "writes", "clean", "rotating")
A, B, C = "4096x256:bf16", "4096x512:bf16", "16384x1024:bf16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use(monkeypatch, tmp_path)
    return tmp_path


def three_shapes() -> dict[str, Any]:
    """Ours takes 1, 2 and 4 times the floor, so 2 in the geometric mean. cuDNN is ahead at two
    shapes: by 1/9 at A, and by half a percent at B. At C, QuACK is the fastest peer."""
    return comparison_of(
        compared(A, 10.0, 10.0, cudnn=9.0, quack=20.0),
        compared(B, 10.0, 20.0, cudnn=19.9, quack=40.0),
        compared(C, 10.0, 40.0, cudnn=80.0, quack=40.4),
    )


def test_a_peer_is_faster_wherever_it_takes_less(folder: Path) -> None:
    """It counts also where it is faster by less than one percent. Under rotation there are the
    three shapes; after a flush ours takes a quarter more at each."""
    slower = three_shapes()
    for row in slower["rows"]:
        row["ours_us"] *= 1.25
    write(folder, "on_rotation", three_shapes())
    write(folder, "on_flush", slower)
    page = both_conditions.under("on_{}")
    assert cells(page, "**Normforge**") == ["**2.000**", "**2.500**"]
    # The cube root of 0.9 * 1.99 * 8; 9 / 10 and 9 / 12.5 at A.
    assert cells(page, "cuDNN best plan") == ["2.429", "2.429", "0.900", "0.720"]
    assert cells(page, "QuACK") == ["3.185", "3.185", "1.010", "0.808"]
    rotation, flush = " ".join(page.split("\n\n")[1].split()).split(" After a flush, ")
    # The fastest peers take 0.9, 0.995 and 1.01 of ours: the cube root of 0.904455; 10 / 9.
    assert rotation == (
        f"Under rotation, a peer is faster at 2 of 3 shapes, by up to 11.1 % ({A}); the fastest"
        " peer of a shape takes 0.97 times as long on average."
    )
    # 0.967 / 1.25, and 12.5 / 9.
    said = f"a peer is faster at 3 of 3 shapes, by up to 38.9 % ({A}); the fastest peer of a"
    assert flush == f"{said} shape takes 0.77 times as long on average."


def test_the_closest_peer_is_named_under_both_conditions(folder: Path) -> None:
    """10.4 and 10.1 against 10 µs; a peer that is timed at one of two shapes says so."""
    rows = (compared(A, 10.0, 10.0, cudnn=10.4, quack=30.0), compared(B, 9.0, 10.0, cudnn=10.3))
    write(folder, "on_rotation", comparison_of(*rows))
    rows = (compared(A, 10.0, 10.0, cudnn=10.1, quack=30.0), compared(B, 9.0, 10.0, cudnn=12.0))
    write(folder, "on_flush", comparison_of(*rows))
    page = both_conditions.under("on_{}")
    assert cells(page, "QuACK 0.6.5 (1 shape)") == [*["3.000, ours 1.000"] * 2, *["3.000"] * 2]
    said = " ".join(page.split("\n\n")[1].split())
    none = "no peer is faster at any of the 2 shapes"
    of_each = "the fastest peer of a shape takes"
    # Roots of 1.04 * 1.03 and of 1.01 * 1.2.
    assert said == (
        f"Under rotation, {none}; {of_each} 1.03 times as long on average, and at least 1.030"
        f" times ({B}). After a flush, {none}; {of_each} 1.10 times as long on average, and at"
        f" least 1.010 times ({A})."
    )


def test_only_rows_with_another_weight_are_told_of(folder: Path) -> None:
    narrow = compared(A, 10.0, 10.0, cudnn=9.0, quack=20.0) | {"weight_dtype": "fp32"}
    write(folder, "h100", comparison_of(narrow, compared(B, 10.0, 10.0, cudnn=5.0)))
    said = " ".join(both_conditions.fp32_weights_on_h100().split())
    assert said.startswith(f"With an fp32 weight, the fastest peer takes 0.900 times at {A}:fp32.")


def test_peers_at_different_numbers_of_shapes_say_both(folder: Path) -> None:
    """QuACK was timed at both shapes under rotation, and at one of them after a flush."""
    a, b = (compared(shape, 10.0, 10.0, cudnn=20.0, quack=30.0) for shape in (A, B))
    write(folder, "on_rotation", comparison_of(a, b))
    write(folder, "on_flush", comparison_of(a, compared(B, 10.0, 10.0, cudnn=20.0)))
    page = both_conditions.under("on_{}")
    assert cells(page, "QuACK 0.6.5 |") == ["3.000", "3.000 (1 shape), ours 1.000", *["3.000"] * 2]
    assert cells(page, "cuDNN best plan") == ["2.000"] * 4


def test_the_comparison_in_short(folder: Path) -> None:
    """The root of 13 / 11 * 12 / 11 over ours."""
    rows = (compared(A, 10.0, 11.0, cudnn=13.0), compared(B, 10.0, 11.0, cudnn=12.0))
    write(folder, "h200_rotation", comparison_of(*rows))
    short = " ".join(both_conditions.on_h200_in_short().split())
    assert short.endswith(
        "under rotation, Normforge takes 1.100 times the floor; no peer is faster at any of the 2"
        " shapes; the fastest peer of a shape takes 1.14 times as long on average, and at least"
        f" 1.091 times ({B})."
    )


def steps(base: list[float]) -> dict[str, Any]:
    return {
        "ms": {"pytorch": base, "rms_norm": [100.0] * len(base), "quack": [102.0] * len(base)},
        "norm_ms": {"pytorch": 5.15, "rms_norm": 1.0},
        "repeats_bits": {"pytorch": True, "rms_norm": False},
    }


def trained(folder: Path, *more: dict[str, Any]) -> None:
    """Two processes with three pairs each: 1, 1.01 and 1.02, whose median is 1.01, and 1.04, 1.05
    and 1.1, whose median is 1.05. more: further processes."""
    found = [steps([100.0, 101.0, 102.0]), steps([104.0, 105.0, 110.0]), *more]
    models, modes = ("qwen3_2b", "llama3_8b"), ("eager", "blocks", "whole")
    names = [f"{model},4096,{mode}" for model in models for mode in modes]
    environment = {"gpu": "GPU", "tokens": 16384}
    write(
        folder, "training_h100", {"environment": environment, "cases": dict.fromkeys(names, found)}
    )


def test_a_gain_has_the_larger_half_of_its_interval(folder: Path) -> None:
    trained(folder)
    assert training.gain("qwen3_2b,4096,eager") == "3.0 % (± 2.0)"
    # 101 and 105 of 102, which is on both sides of 1.
    assert training.gain("qwen3_2b,4096,eager", "quack") == "1.0 % (± 2.0, within the noise)"
    assert str(Gain.of([1.0, 1.01, 1.02, 1.04, 1.05, 1.1])) == "1.030 ± 0.070"
    assert str(Gain.of([1.1, 1.09, 1.08, 1.06, 1.05, 1.0])) == "1.070 ± 0.070"
    # Of nine, the second and the last but one: 10 of 512 orders are outside at each end.
    assert Gain.of([float(i) for i in range(1, 10)]) == Gain(5.0, 2.0, 8.0)
    page = training.training()
    row = cells(page, "Qwen 3 1.7B, sequences of 4096, eager")
    assert row[0] == "103.0 ms (159)"  # the middle of 102 and 104; 16384 / 103
    assert "1.030 ± 0.020" in row
    # 5.15 of 103 ms.
    told = training.training_gain().replace("\n", " ")
    assert "norms take 5 % of a step" in told and "over 2 processes" in told
    said = " ".join(training.training_bits().split())
    assert "in all 12 combinations" in said and "except rms_norm in qwen3_2b,4096,eager" in said
    trained(folder, steps([101.0, 102.0, 103.0]))
    assert training.gain("qwen3_2b,4096,eager") == "2.0 % (± 3.0)"


def under(evict_last: float, default: float, floor_us: float, **more: float) -> dict[str, Any]:
    over = {"floor": 1.0, "evict_last": evict_last, "default": default, **more}
    return {"over_floor": over, "us": {name: ratio * floor_us for name, ratio in over.items()}}


def flushed(folder: Path) -> None:
    """Two shapes: the first has the hint, a floor of 10 µs and cuDNN beside it; the second is
    without the hint and has a floor of 30 µs."""
    first = {
        "present": under(1.0, 2.0, 10.0, cudnn=3.0),
        "writes": under(2.0, 1.98, 10.0, cudnn=4.0),
        "clean": under(1.004, 1.0, 10.0, cudnn=2.008),
        "rotating": under(3.0, 1.0, 10.0, cudnn=1.5),
    }
    second = {
        "present": under(4.0, 4.0, 30.0),
        "writes": under(9.0, 8.0, 30.0),
        "clean": under(16.0, 4.0, 30.0),
        "rotating": under(3.0, 12.0, 30.0),
    }
    rows = [
        {"shape": A, "hint": "evict_last", **first},
        {"shape": C, "hint": "default", **second},
    ]
    write(folder, "flushes_h200", {"rows": rows})
    write(folder, "h200", three_shapes())


def test_each_condition_has_its_own_numbers(folder: Path) -> None:
    """Columns: winners, all without the hint, the winner with the small floor, cuDNN over it."""
    flushed(folder)
    page = comparison.flushes()
    assert cells(page, "reads with") == ["2.000", "2.828", "1.000", "3.000 (3.000)"]  # √4, √8
    assert cells(page, "256 MB") == ["4.000", "3.980", "2.000", "2.000 (2.000)"]  # √16, √15.84
    assert cells(page, "as in") == ["2.004", "2.000", "1.004", "2.000 (2.000)"]  # √4.016, √4
    assert cells(page, "nothing") == ["6.000", "3.464", "3.000", "0.500 (0.500)"]  # √36, √12
    assert "winners, 2 shapes" in page and "floor below 20 µs" in page
    assert "cuDNN / Normforge, 1 shapes" in page
    # By more than half a percent: none; both; the second; the first.
    assert page.split("\n\n")[1].startswith("Of the 2 winners, 0, 2, 1 and 1 are more than 0.5 %")


def test_rotation_is_not_the_flush(folder: Path) -> None:
    flushed(folder)
    assert comparison.flushed("rotating") == pytest.approx(6.0)


def test_shapes_at_which_cudnn_is_closest_are_missed(folder: Path) -> None:
    """It takes 0.9 of ours at A, 0.995 at B and 2 at C."""
    flushed(folder)
    assert "cuDNN did not run" not in comparison.flushes(), "it ran at A"
    rows = [
        {"shape": C, "hint": "default"} | dict.fromkeys(FLUSHES, under(1.0, 1.0, 9.0, cudnn=2.0))
    ]
    write(folder, "flushes_h200", {"rows": rows})
    assert "cuDNN did not run at the 2 shapes of the comparison at which it is closest" in " ".join(
        comparison.flushes().split()
    )


def test_determinism_costs_what_the_fastest_free_sum_saves(folder: Path) -> None:
    rows = [
        {
            **{"shape": A, "winner": "mailbox", "trials_of_winner": 60},
            "over_floor": {"mailbox": 1.2, "atomic": 1.0, "bulk_reduce (free)": 1.5},
        },
        {
            **{"shape": C, "winner": "separate", "trials_of_winner": 80},
            "over_floor": {"separate": 1.0, "atomic": 4.0, "bulk_reduce (free)": 2.0},
        },
    ]
    write(folder, "determinism_overhead_h200", {"rows": rows})
    page = comparison.overhead()
    assert cells(page, A) == ["60", "mailbox", "1.200", "atomic", "1.000", "1.200"]
    assert cells(page, C) == ["80", "separate", "1.000", "bulk_reduce (free)", "2.000", "0.500"]
    assert cells(page, "**geometric mean**")[-1] == "**0.775**"  # √0.6


def test_untuned_shapes_have_the_mean_and_the_range(folder: Path) -> None:
    def row(unknown: str, tuned: float, aten: float, floor: float) -> dict[str, Any]:
        over = {"ours_over_tuned": tuned, "ours_over_aten": aten, "ours_over_floor": floor}
        return {"unknown": unknown, **over}

    few = [row("M", 0.8, 0.4, 1.0), row("M", 1.8, 0.1, 1.3), row("N", 2.0, 0.5, 1.5)]
    for name in ("untuned_h200", "untuned_seed1_h200", "untuned_long_h100"):
        write(folder, name, {"rows": few})
    page = performance.untuned()
    # The root of 0.8 * 1.8.
    assert cells(page, "first, 2 shapes, untuned M") == [
        *("1.200", "0.80 to 1.80", "0.10 to 0.40", "1.00 to 1.30"),
    ]
    assert cells(page, "second, 1 shapes, untuned N")[0] == "2.000"
    assert cells(page, "long rows, 1 shapes, untuned N")[1] == "2.00 to 2.00"


def test_ratios_of_host_times_are_those_of_the_passes(folder: Path) -> None:
    """They are not the quotients of the two columns."""
    times = {"rmsnorm_backward": 8.0, "rmsnorm_backward, native": 5.0, "aten op": 10.0}
    ratios = {"rmsnorm_backward / aten op": 0.9, "rmsnorm_backward, native / aten op": 0.4}
    write(folder, "host_time_h200", {"whole calls": times, "ratios": ratios})
    page = performance.host_times()
    assert cells(page, "`rmsnorm_backward`") == ["10.0", "8.0 (0.90)", "5.0 (0.40)"]
    assert len(page.splitlines()) == 3


def test_brackets_show_the_best_layout_and_the_lowest_of_aten(folder: Path) -> None:
    def group(vector_bytes: int, columns: int, best: float, *aten: float) -> dict[str, Any]:
        ranked = [{"mean": best}, {"mean": best + 1}]
        return {"vector_bytes": vector_bytes, "columns": columns, "best": ranked, "aten": aten}

    groups = [group(size, 1024, 1.5, 4.0, 3.0) for size in (16, 8, 4, 2)]
    groups += [group(16, 768, 1.25, 2.5, 2.75), group(16, 8192, 1.75, 9.0)]
    write(folder, "layouts_h200", {"groups": groups})
    page = performance.brackets()
    assert cells(page, "16 ") == ["1.25", "1.50", "", "", "1.75", "2.5"]
    assert cells(page, "8 ") == ["", "1.50", "", "", "", "3.0"]


def test_layernorm_beside_its_peers(folder: Path) -> None:
    rows = [
        compared(A, 10.0, 10.0, aten=20.0, cudnn=12.0),
        compared(C, 10.0, 10.2, aten=40.0, cudnn=10.404),
    ]
    document = comparison_of(*rows)
    document["environment"]["peers"] = {"aten": "torch 2.11.0", "cudnn": "cuDNN 9.1"}
    document["environment"]["module"] = {"cubins": {"a": "1", "c": "2"}}
    write(folder, "layernorm_h200", document)
    kernels = [{"file": "a", "digest": "1"}, {"file": "c", "digest": "2"}]
    table = {"tuned": [{"kernel": kernel} for kernel in kernels]}
    write(folder, "h200/layernorm_backward/table", table)
    page = comparison.layernorm()
    assert cells(page, "**Normforge**")[0] == "**1.01**"  # √1.02
    # Roots of 2 * 4, and of 2 * 40 / 10.2; the least is the one of A.
    assert cells(page, "ATen") == ["2.83", "2.80", "2.000"]
    # Over ours 1.2 and 1.02: the root of 1.224.
    assert cells(page, "cuDNN best plan")[1:] == ["1.11", "1.020"]
    said = " ".join(page.split())
    assert f"The closest peer takes 2.0 % longer, at {C}" in said
    assert "at most 1.250 times those of ATen" in said and "is met" in said
    assert "earlier package" not in said
    kernels[1]["digest"] = "3"  # tuned again
    write(folder, "h200/layernorm_backward/table", table)
    assert "The kernels were those of an earlier package." in comparison.layernorm()


def test_forwards_are_over_the_copy_of_their_round(folder: Path) -> None:
    """`ratio` is that of the rounds, and not of the medians in `us`."""
    names = ("aten", "inductor", "liger_triton", "quack", "cudnn")

    def row(shape: str, ours: float, theirs: float) -> dict[str, Any]:
        cells = {name: {"us": theirs, "ratio": 3.0} for name in names}
        return {"shape": shape, "cells": {"ours": {"us": ours, "ratio": 1.5}, **cells}}

    versions = {"liger-kernel": "1", "quack-kernels": "2", "nvidia-cudnn-cu13": "3"}
    environment = {"libraries": versions, "torch": "2.11.0", "gpu": "GPU"}
    rows = [row(A, 10.0, 9.9), row(C, 10.0, 40.0)]
    write(folder, "forward_h200", {"environment": environment, "rows": rows})
    page = comparison.forward_peers()
    assert cells(page, "**Normforge**")[0] == "**1.50**"
    # The root of 0.99 * 4; it is faster at A.
    assert cells(page, "QuACK") == ["3.00", "1.99", f"0.99, {A}", "1"]


def test_invariance_is_compared_with_the_winner_of_the_same_shape(folder: Path) -> None:
    free = [tuned(A, 1.0), tuned(C, 2.0), tuned(C, 9.0, residual="bf16")]
    write(folder, "h100/rmsnorm_backward/table", {"tuned": free})
    ours = [tuned(A, 1.21), tuned(C, 2.0), tuned(B, 7.0)]
    write(folder, "h100/rmsnorm_invariant_backward/table", {"tuned": ours})

    def times(after: float, ratio: float) -> dict[str, float]:
        return {"before": 3.0, "after": after, "after_over_before": ratio}

    rows = [
        {"shape": A, "rotation": times(1.0, 1.44), "flush": times(4.0, 1.0)},
        {"shape": C, "rotation": times(1.21, 1.0), "flush": times(1.0, 1.21)},
    ]
    write(folder, "invariance_price_h200", {"rows": rows})
    page = invariance.overhead_of_invariance_in_short()
    # The roots of 1.44 and 1.21 in the mean; over the floor those of 1.21 and of 4.
    assert cells(page, "H200, rotation") == ["2", "1.200", "1.440", "1.100"]
    assert cells(page, "H200, flush") == ["2", "1.100", "1.210", "2.000"]
    # 1.21 and 1, so 1.1 in the mean; over the floor 1.21, 2 and 7: the third root of 16.94.
    assert cells(page, "H100") == ["2", "1.100", "1.210", "2.568"]
    assert "1.44 (1.00)" in invariance.overhead_of_invariance()


def test_goals_for_other_flushes(folder: Path) -> None:
    flushed(folder)
    rows = [{"shape": A, "winner": "a", "trials_of_winner": 1, "over_floor": {"a": 1.0, "b": 2.0}}]
    write(folder, "determinism_overhead_h200", {"rows": rows})
    page = performance.goal_table()
    assert cells(page, "256 MB of writes")[-1] == "**missed**: 4.000"
    assert cells(page, "inputs in rotation")[-1] == "**missed**: 6.000"
    assert cells(page, "overhead of determinism")[-1] == f"0.500 (1 shapes; 0.500 at worst, {A})"
    assert cells(page, "all 47 shapes")[-1] == "**missed**: 2.000 (3 shapes)"
    # The fastest peers over ours: 0.9, 0.995 and 1.01.
    assert cells(page, "faster than the best peer, each")[-1] == f"**missed**: 0.900 at worst ({A})"
    assert cells(page, "faster than the best peer, geometric")[-1] == "**missed**: 0.967"
