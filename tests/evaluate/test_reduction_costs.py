"""The dw reduction of each strategy adds to a prediction: differences that can be said by hand
(docs/prediction.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from generator.evaluate.predict.dw_reduction import DW_REDUCTIONS
from generator.evaluate.predict.evaluator import predict_us
from generator.evaluate.predict.model import MODEL, Case, Rates
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant
from generator.problem import Problem
from generator.target import find_target
from normforge.spec import plan_launch
from tests.support.samples import plain_variant

TARGET = find_target("h200")
SHAPE = "65536x1024:bf16"
LIGHT = Resources(32, 0, 0, 0)


def variant(**knobs: int | str) -> Variant:
    return plain_variant(SHAPE, TARGET, **knobs)


def case(own: Variant) -> Case:
    problem = Problem.parse(SHAPE)
    launch = plan_launch(own.spec(TARGET.sms), problem.M)
    return Case(own, problem, Rates(TARGET, MODEL), launch, 1)


def parts(own: Variant, M: int = 65536) -> dict[str, float]:
    problem = replace(Problem.parse(SHAPE), M=M)
    return dict(predict_us(own, LIGHT, problem, TARGET).parts)


def test_a_mailbox_waits_for_no_release_and_empties_its_places() -> None:
    slices, mailbox = (
        case(variant(strategy=name, slice_columns=64)) for name in ("column_slices", "mailbox")
    )
    one, other = (DW_REDUCTIONS[c.variant.strategy.way](c) for c in (slices, mailbox))
    assert one["arrival"] - other["arrival"] == pytest.approx(MODEL.release_us)
    emptied = mailbox.launch.participants * 1024 * 4
    assert other["sums"] - one["sums"] == pytest.approx(
        mailbox.rates.exchange(emptied, mailbox.sms_used)
    )


def test_two_levels_pay_for_both() -> None:
    one, two = (parts(variant(strategy="last_cta", levels=levels)) for levels in (1, 2))
    # 132 CTAs in 11 groups of 12: two arrivals, and two sums of a dozen rows instead of one of 132.
    arrivals = 2 * MODEL.arrival_us + 23 * MODEL.counter_clocks / Rates(TARGET, MODEL).clocks
    assert two["arrival"] == pytest.approx(arrivals)
    own = case(variant(strategy="last_cta", levels=2))
    threads = own.variant.threads
    assert two["sums"] == pytest.approx(
        own.slices(12, threads, 1, 1) + own.slices(11, threads, 1, 1)
    )
    assert two["sums"] < one["sums"]


def test_turns_of_two_levels_are_those_of_a_group_and_of_the_groups() -> None:
    one, two = (parts(variant(strategy="semaphore", levels=levels)) for levels in (1, 2))
    assert one["turns"] == pytest.approx(132 * MODEL.turn_us)
    assert two["turns"] == pytest.approx((12 + 11) * MODEL.turn_us)


def test_a_turn_adds_a_row_that_it_reads_and_writes() -> None:
    for levels, turns in ((1, 132), (2, 12 + 11)):
        own = variant(strategy="semaphore", levels=levels)
        port = case(own).rates.port
        assert parts(own)["adds"] == pytest.approx(turns * 2 * 1024 * 4 / port)


@pytest.mark.parametrize(
    "knobs", [{"strategy": "atomic"}, {"strategy": "bulk_reduce", "order": "free"}]
)
def test_the_last_of_the_arrivals_narrows_the_sums_and_zeroes_them(knobs: dict[str, str]) -> None:
    own = case(variant(**knobs))
    found, clocks = parts(own.variant), own.rates.clocks
    arrival = MODEL.arrival_us + 132 * MODEL.counter_clocks / clocks
    finish = MODEL.l2_latency_us + 2 * 1024 * 4 / own.rates.port
    assert found["arrival"] == pytest.approx(arrival + finish)
    bulk = own.variant.strategy.bulk_adds
    of_an_sm = MODEL.bulk_add_bytes_per_clock if bulk else MODEL.add_bytes_per_clock
    assert found["adds"] == pytest.approx(132 * 1024 * 4 / (of_an_sm * TARGET.sms * clocks))


def test_a_second_kernel_costs_its_launch_and_its_sums() -> None:
    for overlap, launch in (
        ("none", MODEL.second_launch_us),
        ("dependent", MODEL.overlapped_launch_us),
    ):
        own = case(variant(strategy="separate", overlap=overlap))
        threads = own.variant["sum_threads"]
        at_once = TARGET.sms * (TARGET.max_threads_per_sm // threads)
        found = parts(own.variant)
        assert found["second_launch"] == pytest.approx(launch)
        sums = own.slices(132, threads, at_once, own.launch.sum_grid)
        assert found["sums"] == pytest.approx(sums)


def test_rows_that_fill_their_rounds_have_no_imbalance() -> None:
    own = variant(strategy="column_slices")
    spec = own.spec(TARGET.sms)
    once = spec.participants * spec.rows_per_cta * spec.batch_rows
    assert parts(own, 8 * once)["imbalance"] == 0
    assert parts(own, once // 2)["imbalance"] == 0, "all batches start at once"
    assert parts(own, 8 * once + 1)["imbalance"] > 0


def test_the_first_of_all_batches_waits_for_no_other() -> None:
    """One round of rows has nothing in flight to wait for."""
    own = variant(strategy="column_slices")
    spec = own.spec(TARGET.sms)
    once = spec.participants * spec.rows_per_cta * spec.batch_rows
    assert parts(own, once)["flight"] == 0
    assert parts(own, 3 * once)["flight"] > 0
