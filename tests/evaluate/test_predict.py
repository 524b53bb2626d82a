"""The prediction model: its anchors on one H200, its monotonicity, and what the search gets."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.errors import NormforgeError
from generator.evaluate.predict.dw_reduction import DW_REDUCTIONS
from generator.evaluate.predict.evaluator import Predictor, predict_us
from generator.evaluate.predict.model import MODEL, floor_us
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.strategies import NO_SUMS, STRATEGIES
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.space.load import load_space
from generator.target import find_target, load_targets
from normforge.spec import MAIN_KERNEL

SPACE = load_space()
H200 = find_target("h200")
LEAN = Resources(registers=64, spill_bytes=0, stack_bytes=0, smem_bytes=0)

WARP_ROWS: dict[str, Any] = {
    "pipeline": "direct",
    "threads_per_row": 32,
    "rows_per_cta": 16,
    "ctas_per_sm": 1,
}
BULK: dict[str, Any] = {"pipeline": "bulk", "stages": 3, "threads_per_row": 256, "rows_per_cta": 2}
ANY_TARGET = st.sampled_from(sorted(load_targets()))
ANY_STRATEGY = st.sampled_from(sorted({strategy.name for strategy in STRATEGIES}))


def variant_of(problem: Problem, target: Any = H200, **knobs: Any) -> Variant:
    """The variant of a legal config: `knobs`, and the first value of the space for the rest."""
    config = SPACE.normalize(knobs, problem, target)
    assert SPACE.reject(config, problem, target) is None
    return make_variant(config, problem)


def us(shape: str, resources: Resources = LEAN, target: Any = H200, **knobs: Any) -> float:
    problem = Problem.parse(shape)
    return predict_us(variant_of(problem, target, **knobs), resources, problem, target).us


def parts(shape: str, **knobs: Any) -> dict[str, float]:
    problem = Problem.parse(shape)
    return dict(predict_us(variant_of(problem, **knobs), LEAN, problem, H200).parts)


# Anchors: medians in µs, cold L2 and CUDA graph, measured on one H200.


@pytest.mark.parametrize(
    ("shape", "measured"),
    [
        ("4096x256:bf16", 6.27),
        ("8192x256:bf16", 7.97),
        ("4096x512:bf16", 7.65),
        ("4096x1024:bf16", 11.23),
        ("4096x1024:fp32", 17.41),
        ("16384x512:bf16", 18.27),
        ("4096x4096:bf16", 29.15),
        ("16384x3072:bf16", 75.94),
        ("65536x1024:bf16", 98.05),
        ("4096x16384:fp32", 189.6),
        ("65536x4096:bf16", 370.46),
        ("65536x8192:bf16", 736.35),
    ],
)
def test_floor_meets_torch_add(shape: str, measured: float) -> None:
    assert floor_us(Problem.parse(shape), H200) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("shape", "measured", "registers", "knobs"),
    [
        ("4096x256:bf16", 9.1, 64, WARP_ROWS | {"rows_in_flight": 2}),
        ("16384x256:bf16", 13.9, 64, WARP_ROWS | {"rows_in_flight": 2}),
        ("65536x256:bf16", 33.5, 64, WARP_ROWS | {"rows_in_flight": 4}),
        ("4096x1024:bf16", 14.2, 64, BULK | {"threads_per_row": 32, "rows_per_cta": 8}),
        (
            "65536x1024:bf16",
            104.9,
            56,
            BULK | {"threads_per_row": 128, "stages": 2, "ctas_per_sm": 3, "reload": "smem"},
        ),
        ("4096x2048:bf16", 20.9, 64, BULK | {"pipeline": "direct", "rows_in_flight": 2}),
        (
            "65536x2048:bf16",
            200.1,
            64,
            BULK | {"threads_per_row": 128, "rows_per_cta": 1, "stages": 2, "ctas_per_sm": 3},
        ),
        ("4096x4096:bf16", 34.4, 96, BULK | {"threads_per_row": 128, "stages": 6}),
        ("65536x4096:bf16", 391.0, 64, BULK | {"stages": 6}),
        ("16384x8192:bf16", 201.0, 64, BULK | {"threads_per_row": 512, "rows_per_cta": 1}),
    ],
)
def test_prediction_meets_hand_written_kernels(
    shape: str, measured: float, registers: int, knobs: dict[str, Any]
) -> None:
    resources = replace(LEAN, registers=registers)
    assert us(shape, resources, **knobs) == pytest.approx(measured, rel=0.08)


# Properties of the model.


@settings(max_examples=60, deadline=None)
@given(st.data(), ANY_TARGET, ANY_STRATEGY)
def test_every_legal_variant_has_a_finite_time_above_its_floor(
    data: st.DataObject, name: str, strategy: str
) -> None:
    target = find_target(name)
    if not target.has_bulk_copy and all(s.bulk_adds for s in STRATEGIES if s.name == strategy):
        return
    problem = Problem.parse(data.draw(st.sampled_from(["4096x256:fp16", "8192x3072:bf16:fp32"])))
    random = data.draw(st.randoms(use_true_random=False))
    config = SPACE.sample(problem, target, random, fixed={"strategy": strategy})
    prediction = predict_us(make_variant(config, problem), LEAN, problem, target)
    assert all(isfinite(part) and part >= 0 for part in prediction.parts.values())
    assert prediction.us == pytest.approx(sum(prediction.parts.values()))
    assert prediction.us > floor_us(problem, target)


@settings(max_examples=300, deadline=None)
@given(
    ANY_STRATEGY,
    st.sampled_from(["direct", "bulk", "async"]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4) | st.integers(1, 250),
    st.sampled_from([0, 1, -1]) | st.integers(0, 1056),
    st.just(1) | st.integers(1, 70_000),
)
def test_more_rows_are_never_faster(
    strategy: str, pipeline: str, rows_in_flight: int, rounds: int, beyond: int, more: int
) -> None:
    knobs = {"strategy": strategy, "pipeline": pipeline, "rows_in_flight": rows_in_flight}
    variant = variant_of(
        Problem.parse("65536x1024:bf16"), threads_per_row=128, **knobs, rows_per_cta=2
    )
    # This holds from the second round on: before it a new row brings a CTA, which speeds dw up.
    rows = H200.sms * rows_in_flight * 2 * (1 + rounds) + beyond
    few, many = (Problem(M, 1024, "bf16", "bf16") for M in (rows, rows + more))
    slower = predict_us(variant, LEAN, many, H200).us
    assert slower >= predict_us(variant, LEAN, few, H200).us - 1e-9


@settings(max_examples=60, deadline=None)
@given(ANY_STRATEGY, st.integers(1, 70_000), st.floats(0.2, 10), st.floats(1, 5))
def test_more_bandwidth_is_never_slower(strategy: str, M: int, low: float, factor: float) -> None:
    problem = Problem(M, 2048, "bf16", "bf16")
    variant = variant_of(Problem.parse("65536x2048:bf16"), strategy=strategy, **BULK)
    slow = replace(H200, bandwidth=low * 1e12)
    fast = replace(H200, bandwidth=low * factor * 1e12)
    assert floor_us(problem, fast) <= floor_us(problem, slow)
    faster = predict_us(variant, LEAN, problem, fast).us
    assert faster <= predict_us(variant, LEAN, problem, slow).us + 1e-9


@pytest.mark.parametrize("N", [1024, 4096])
@pytest.mark.parametrize("reload", ["none", "smem"])
@pytest.mark.parametrize("name", ["h200", "gb200"])
def test_fewer_stages_are_never_faster(N: int, reload: str, name: str) -> None:
    target = find_target(name)
    knobs = BULK | {"threads_per_row": 128, "reload": reload}
    times = [
        us(f"65536x{N}:bf16", target=target, **knobs | {"stages": stages})
        for stages in (2, 3, 4, 5, 6)
    ]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


def test_fewer_rows_in_flight_are_slower_where_loads_are_direct() -> None:
    times = [us("65536x256:bf16", **WARP_ROWS, rows_in_flight=rows) for rows in (1, 2, 4)]
    assert times[0] > 1.05 * times[1]
    assert times[1] > times[2]


def test_rows_of_less_than_a_warp_are_faster_where_rows_are_short() -> None:
    knobs = WARP_ROWS | {"rows_in_flight": 2, "rows_per_cta": 8}
    times = {
        per_row: us("524288x64:bf16", **knobs | {"threads_per_row": per_row}) for per_row in (8, 32)
    }
    assert times[32] > 1.3 * times[8] > 1.3 * floor_us(Problem.parse("524288x64:bf16"), H200)


def test_one_stage_with_too_few_bytes_in_flight_starves() -> None:
    one_stage: dict[str, Any] = {"pipeline": "direct", "rows_per_cta": 1, "threads_per_row": 256}
    three_stages = BULK | {"rows_per_cta": 1}
    assert us("65536x4096:bf16", **one_stage) > 1.3 * us("65536x4096:bf16", **three_stages)


def test_registers_that_allow_fewer_ctas_cost_waves() -> None:
    knobs = BULK | {"threads_per_row": 512, "rows_per_cta": 1, "ctas_per_sm": 2}
    fits, does_not = replace(LEAN, registers=64), replace(LEAN, registers=72)
    assert us("4096x4096:bf16", does_not, **knobs) > us("4096x4096:bf16", fits, **knobs)


def test_even_grid_saves_the_imbalance_of_the_last_round() -> None:
    knobs = {**BULK, "stages": 2}
    full, even = (parts("8192x8192:bf16", **knobs, grid=grid) for grid in ("full", "even"))
    assert full["imbalance"] > 0.0
    assert even["imbalance"] < full["imbalance"]


def test_extra_work_per_element_is_never_faster() -> None:
    base = us("65536x4096:bf16", **BULK)
    assert us("65536x4096:bf16", **BULK, reload="smem") > base
    assert us("65536x4096:bf16", **BULK, weight_in="smem") > base
    assert us("65536x4096:fp16", **BULK) > base


def test_cluster_exchange_and_launch_are_counted() -> None:
    problem = Problem.parse("4096x16384:bf16")
    knobs = {
        "strategy": "separate",
        "pipeline": "bulk",
        "stages": 2,
        "threads_per_row": 256,
        "cluster": 4,
    }
    variant = variant_of(problem, **knobs)
    cheap = replace(MODEL, cluster_clocks=0.0)
    with_exchange = predict_us(variant, LEAN, problem, H200)
    without = predict_us(variant, LEAN, problem, H200, cheap)
    assert with_exchange.parts["cluster"] == MODEL.cluster_us
    assert with_exchange.parts["drain"] > without.parts["drain"]
    assert with_exchange.us > without.us


# dw reductions.

DW_REDUCTION = ("arrival", "sums", "turns", "adds", "second_launch")


def dw_reduction_us(shape: str, **knobs: Any) -> float:
    return sum(time for part, time in parts(shape, **BULK, **knobs).items() if part in DW_REDUCTION)


def test_two_levels_shorten_a_chain_of_many_ctas() -> None:
    for strategy, factor in (("semaphore", 4), ("bulk_reduce", 4), ("last_cta", 2)):
        one, two = (
            dw_reduction_us("4096x4096:bf16", strategy=strategy, levels=levels) for levels in (1, 2)
        )
        assert one > factor * two, strategy


def test_dependent_launch_is_shorter_than_a_plain_second_launch() -> None:
    plain = dw_reduction_us("4096x4096:bf16", strategy="separate", overlap="none")
    assert dw_reduction_us("4096x4096:bf16", strategy="separate", overlap="dependent") < plain
    assert dw_reduction_us("4096x4096:bf16", strategy="column_slices") < plain


def test_bulk_adds_beat_atomics() -> None:
    shape = "4096x4096:bf16"
    atomic = parts(shape, strategy="atomic", **BULK)["adds"]
    assert parts(shape, strategy="bulk_reduce", order="free", **BULK)["adds"] < atomic


def test_partials_that_leave_l2_cost_memory_bandwidth() -> None:
    knobs = BULK | {"strategy": "separate"}
    problem = Problem.parse("65536x4096:bf16")
    roomy, tiny = H200, replace(H200, l2_bytes=1 << 20)
    inside, outside = (
        predict_us(variant_of(problem, **knobs), LEAN, problem, target).parts
        for target in (roomy, tiny)
    )
    assert outside["partials"] > inside["partials"]
    assert outside["sums"] >= inside["sums"]


# The answers to a search.


def compiled(resources: Resources = LEAN) -> Compiled:
    return Compiled("sm_90a", "", b"", {MAIN_KERNEL: resources}, "13.0", False, "")


def test_predictor_claims_nothing_that_was_not_run() -> None:
    problem = Problem.parse("4096x4096:bf16")
    predictor = Predictor(H200)
    result = predictor.evaluate(problem, variant_of(problem, **BULK), compiled(), best_us=1.0)
    assert predictor.evidence == "predicted"
    assert (result.outcome, result.determinism, result.checks) == ("ok", "unverified", ())
    assert result.us == pytest.approx(sum(result.extra["parts"].values()))
    assert result.floor_us == floor_us(problem, H200)
    assert result.us is not None and result.floor_us is not None
    assert result.ratio == result.us / result.floor_us
    assert type(result).from_json(result.to_json()) == result


@pytest.mark.parametrize(
    "knobs", [{"strategy": "atomic"}, {"strategy": "bulk_reduce", "order": "free"}]
)
def test_predictor_lets_no_unordered_variant_win(knobs: dict[str, Any]) -> None:
    problem = Problem.parse("4096x4096:bf16")
    result = Predictor(H200).evaluate(
        problem, variant_of(problem, **BULK, **knobs), compiled(), None
    )
    assert (result.outcome, result.determinism) == ("nondeterministic", "unverified")
    assert result.timed and not result.may_win
    assert "by construction" in result.note


def test_finals_repeat_the_trials_numbers_in_order() -> None:
    problem = Problem.parse("16384x4096:bf16")
    entries = [
        (variant_of(problem, **BULK | {"stages": stages}), compiled()) for stages in (2, 3, 4)
    ]
    predictor = Predictor(find_target("gb200"))
    finals = predictor.finals(problem, entries)
    assert finals == [predictor.evaluate(problem, v, c, None) for v, c in entries]
    assert len({result.us for result in finals}) == 3


def test_a_cta_that_fits_no_sm_is_refused() -> None:
    problem = Problem.parse("4096x4096:bf16")
    variant = variant_of(problem, **BULK | {"threads_per_row": 512})
    with pytest.raises(NormforgeError, match="does not fit an SM of h200"):
        predict_us(variant, replace(LEAN, registers=200), problem, H200)


def test_every_strategy_has_a_cost() -> None:
    assert {strategy.way for strategy in (*STRATEGIES, NO_SUMS)} == DW_REDUCTIONS.keys()
