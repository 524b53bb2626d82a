"""Features that the learned correction is told of a prediction: shares, counts per SM and sizes
over those of the GPU, so that they mean the same on another GPU."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log, log2

from generator.evaluate.predict.model import Case, floor_us
from generator.kernels.ptxas import Resources
from generator.kernels.strategies import STRATEGIES

PARTS = (
    *("launch", "traffic", "imbalance", "flight", "issue", "copies", "port", "drain", "fold"),
    *("partials", "arrival", "sums", "adds", "second_launch"),
)
"""Parts of the physical prediction whose share of its sum is a feature."""
_DIGITS = 5
"""Rounded, so that the last bits of a logarithm decide nothing."""


def features(case: Case, parts: Mapping[str, float], resources: Resources) -> dict[str, float]:
    """The features of one physical prediction with its parts."""
    found = _work(case) | _kernel(case, resources)
    us = sum(parts.values())
    floor = floor_us(case.problem, case.rates.target, case.model)
    found["physical over floor"] = log(us / floor)
    found |= {f"share of {name}": parts.get(name, 0.0) / us for name in PARTS}
    return {name: round(float(value), _DIGITS) for name, value in found.items()}


def _work(case: Case) -> dict[str, float]:
    """Return features of how the rows are spread over the GPU."""
    v, launch, target, problem = case.variant, case.launch, case.rates.target, case.problem
    batch_bytes = v.batch_rows * (2 * v.row_bytes + v.residual_row_bytes)
    depth = v["stages"] if v["pipeline"] != "direct" else 1
    rounds = problem.M / (v.batch_rows * launch.participants * v.teams)
    resident = min(case.resident, case.ctas_per_sm)
    workspace = launch.participants * case.partial_row_bytes
    moved = 3 * problem.M * problem.N * problem.itemsize
    return {
        "batch bytes": log2(batch_bytes),
        "bytes in flight of an SM": log2(resident * v.teams * batch_bytes * depth),
        "rounds": log2(rounds),
        "fullness of the rounds": rounds / ceil(rounds),
        "participants of an SM": log2(launch.participants / target.sms),
        "used part of the grid": launch.grid / (case.ctas_per_sm * target.sms),
        "waves": case.ctas_per_sm / case.resident,
        "threads of an SM": resident * v.threads / target.max_threads_per_sm,
        "traffic over L2": log2(moved / target.l2_bytes),
        "workspace over L2": log2(max(1, workspace) / target.l2_bytes),
    }


def _kernel(case: Case, resources: Resources) -> dict[str, float]:
    """Return features of the kernel itself."""
    v, target = case.variant, case.rates.target
    smem = v.smem_bytes + resources.smem_bytes
    found = {
        "registers": resources.registers,
        "shared memory": smem / target.smem_per_sm,
        "stages": v["stages"],
        "accumulators": v.accumulators,
        "threads of a row": log2(v["threads_per_row"]),
        "cluster": log2(v["cluster"]),
        "spare SMs": v["spare_sms"] / target.sms,
        "columns of a slice": log2(max(1, v.tail_columns)),
        "direct": v["pipeline"] == "direct",
        "async": v["pipeline"] == "async",
        "reload": v["reload"] == "smem",
        "weight in smem": v["weight_in"] == "smem",
        "dependent": v["overlap"] == "dependent",
        "early": v["arrival"] == "early",
        "evict_last": v["load_hint"] == "evict_last",
    }
    learned = (strategy for strategy in STRATEGIES if strategy.learned)
    return found | {str(strategy): v.strategy == strategy for strategy in learned}
