"""The predicted time of the rows: the smooth maximum of five bounds (memory traffic, bytes in
flight, instruction issue, copy engine, the SM's memory port), and what lies before and behind it.
`dw_reduction` has what comes then.
"""

from __future__ import annotations

from generator.evaluate.predict.model import Case
from generator.operations import operation_of
from normforge.spec import ceil_div


def main_loop(case: Case) -> dict[str, float]:
    """Parts of the time until the last row is done."""
    v, m, rates, launch = case.variant, case.model, case.rates, case.launch
    batch, teams = v.batch_rows, launch.participants * v.teams
    rounds = ceil_div(case.problem.M, batch * teams)
    full, left = divmod(case.problem.M, batch * teams)
    memory = rates.memory * m.row_efficiency

    problem, sums = case.problem, case.problem.sums
    row_bytes = operation_of(problem).traffic_bytes(problem) // problem.M + 4 * sums.statistics
    moved = problem.M * row_bytes + (1 + sums.column_sums) * problem.N * problem.weight_itemsize
    traffic = (moved + rates.written_back(moved)) / memory
    row_us = row_bytes / memory
    # A last round that is not full lasts as long as its batches take, however few they are.
    imbalance = max(0.0, min(case.period_us, batch * teams * row_us) - left * row_us)

    sm_batches = rounds * case.ctas_per_sm * v.teams
    waves = ceil_div(case.ctas_per_sm, case.resident)
    copies = 2 * batch * sm_batches if v["pipeline"] == "bulk" else 0
    cta_row_bytes = row_bytes / v["cluster"]
    bounds = {
        "flight": (rounds * waves - 1) * case.period_us,
        "issue": sm_batches * case.instructions / m.issue_per_clock / rates.clocks,
        "copies": copies * m.copy_clocks / rates.clocks,
        "port": sm_batches * batch * cta_row_bytes / rates.port,
    }
    parts = {
        "launch": m.launch_us,
        "fill": m.memory_latency_us,
        "traffic": traffic,
        "imbalance": imbalance if full and left else 0.0,
    }
    loop = parts["traffic"] + parts["imbalance"]
    for name, bound in bounds.items():
        longer = m.smooth_max(loop, bound)
        parts[name] = longer - loop
        loop = longer
    parts["drain"] = case.batch_us
    return parts


def partials(case: Case) -> dict[str, float]:
    """Parts of the time in which the CTAs write their partial dw."""
    v, rates = case.variant, case.rates
    fold = 0.0
    if v.teams > 1:
        per_sm = 2 * v.fold_bytes * min(case.resident, case.ctas_per_sm)
        fold = (per_sm / case.model.smem_bytes_per_clock + case.model.barrier_clocks) / rates.clocks
    written = case.launch.participants * case.partial_row_bytes if v.stores_rows else 0
    return {"fold": fold, "partials": rates.exchange(written, case.sms_used)}
