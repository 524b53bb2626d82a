"""The terms that each way to add up dw adds to a prediction, in microseconds by part.

docs/prediction.md is the one-page account.
"""

from __future__ import annotations

from collections.abc import Callable

from generator.evaluate.predict.model import Case
from normforge.spec import ceil_div


def _arrival(case: Case, arrivals: int) -> float:
    return case.model.arrival_us + arrivals * case.model.counter_clocks / case.rates.clocks


def _slices(case: Case) -> dict[str, float]:
    v, launch = case.variant, case.launch
    count = ceil_div(v.partial_columns, v.tail_columns) * v["cluster"]
    return {
        "arrival": _arrival(case, launch.participants),
        "sums": case.slices(launch.participants, v.threads, launch.grid, count),
    }


def _flagged_slices(case: Case) -> dict[str, float]:
    parts = _slices(case)
    size = case.launch.participants * case.partial_row_bytes
    return {
        "arrival": parts["arrival"] - case.model.release_us,
        "sums": parts["sums"] + case.rates.exchange(size, case.sms_used),  # every place is emptied
    }


def _second_kernel(case: Case) -> dict[str, float]:
    m, launch, target = case.model, case.launch, case.rates.target
    threads = case.variant["sum_threads"]
    overlapped = case.variant["overlap"] == "dependent"
    at_once = target.sms * (target.max_threads_per_sm // threads)
    return {
        "second_launch": m.overlapped_launch_us if overlapped else m.second_launch_us,
        "sums": case.slices(launch.participants, threads, at_once, launch.sum_grid),
    }


def _last_cta(case: Case) -> dict[str, float]:
    v, launch = case.variant, case.launch
    passes = ceil_div(v.partial_stride, v.tail_columns)
    groups = ceil_div(launch.participants, launch.group)
    # One CTA of every cluster rank sums: they run side by side.
    arrival = _arrival(case, launch.group)
    sums = case.slices(launch.group, v.threads, 1, passes)
    if v["levels"] == 2:
        arrival += _arrival(case, groups)
        sums += case.slices(groups, v.threads, 1, passes)
    return {"arrival": arrival, "sums": sums}


def _in_turns(case: Case) -> dict[str, float]:
    launch = case.launch
    turns = launch.group
    if case.variant["levels"] == 2:
        turns += ceil_div(launch.participants, launch.group)
    add = 2 * case.partial_row_bytes / case.rates.port
    return {"turns": turns * case.model.turn_us, "adds": turns * add}


def _on_arrival(case: Case) -> dict[str, float]:
    launch, rates, model = case.launch, case.rates, case.model
    bulk = case.variant.strategy.bulk_adds
    bytes_per_clock = model.bulk_add_bytes_per_clock if bulk else model.add_bytes_per_clock
    size = launch.participants * case.partial_row_bytes
    # The last CTA to arrive narrows the fp32 sums to dw and zeroes them for the next call.
    finish = model.l2_latency_us + 2 * case.partial_row_bytes / rates.port
    return {
        "adds": size / (bytes_per_clock * rates.target.sms * rates.clocks),
        "arrival": _arrival(case, launch.participants) + finish,
    }


DW_REDUCTIONS: dict[str, Callable[[Case], dict[str, float]]] = {
    "slices": _slices,
    "flagged_slices": _flagged_slices,
    "second_kernel": _second_kernel,
    "last_cta": _last_cta,
    "in_turns": _in_turns,
    "on_arrival": _on_arrival,
    "": lambda case: {},
}
"""The term of each way to add, by `Strategy.way`."""
