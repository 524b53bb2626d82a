"""Rows of a comparison that nobody measured, and a timer that needs no GPU."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.harness import Cell
from benchmarks.results import Environment, Row
from generator.evaluate.gpu.rotation import calls_of
from generator.operations import RMSNORM_BACKWARD
from generator.problem import Problem

ENVIRONMENT: Environment = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "date": "2026-01-02",
    "peers": {"aten": "torch 2.11.0", "quack": "quack-kernels 0.6.5"},
    "missing": {"liger_triton": "liger-kernel not installed"},
    "module": {"path": "generated/h200/rmsnorm_backward", "digest": "0123456789abcdef"},
}


def cell(us: float | None, **more: Any) -> dict[str, Any]:
    known = Cell(us, 12.0, 1e-3, 2e-3, True, "kernel") if us is not None else Cell()
    return asdict(replace(known, **more))


def row(problem: Problem, ratio: float = 1.03, peers: dict[str, float] | None = None) -> Row:
    """A row whose floor takes 10 us + 1 us per MB, with ours and peers at ratios to it."""
    add_us = 10 + RMSNORM_BACKWARD.traffic_bytes(problem) * 1e-6
    peers = {"aten": 2.5, "quack": 1.5} if peers is None else peers
    ours = {f"ours_{key}": value for key, value in cell(add_us * ratio).items()}
    return {
        "M": problem.M,
        "N": problem.N,
        "dtype": problem.dtype,
        "weight_dtype": problem.weight_dtype,
        "add_us": add_us,
        **ours,
        "strategy": "column_slices",
        "how": "tuned",
        "peers": {name: cell(add_us * value) for name, value in peers.items()},
    }


class CpuTimer:
    """Runs operations once and reports as many microseconds as the rounds have."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def sets(self, set_bytes: int) -> int:
        return 1

    def block(self, operations: list[Any], rounds: int) -> list[list[float]]:
        for call in (call for operation in operations for call in calls_of(operation)):
            call()
        return [[100.0 + index] * rounds for index in range(len(operations))]
