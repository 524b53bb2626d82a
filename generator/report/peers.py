"""Other implementations beside ours, as `benchmarks/compare.py` timed them on the same GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from generator.disk import read_json

TITLES = {
    "quack": "QuACK",
    "quack_tuned": "QuACK tuned",
    "liger_cutedsl": "Liger CuTe DSL",
    "liger_triton": "Liger Triton",
    "inductor": "Inductor",
    "inductor_max": "Inductor max-autotune",
    "aten": "ATen",
    "cudnn": "cuDNN best plan",
    "cudnn_heuristic": "cuDNN first plan",
}
"""Titles of all implementations that benchmarks/peers runs."""


@dataclass(frozen=True)
class PeerStanding:
    """One implementation: at how many shapes it was timed, and geometric means over those of its
    time over the floor and over ours."""

    name: str
    title: str
    version: str
    shapes: int
    over_floor: float
    over_ours: float


@dataclass(frozen=True)
class Comparison:
    """One run of the comparison. Shapes whose weight has another dtype than x are left out, because
    not every implementation serves them."""

    environment: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]

    @classmethod
    def load(cls, path: Path) -> Comparison | None:
        """Read the results of a run; None where there was none."""
        try:
            said = read_json(path)
        except FileNotFoundError:
            return None
        rows = [
            row
            for row in said["rows"]
            if row["weight_dtype"] == row["dtype"]
            and row["ours_us"] is not None
            # A shape without a kernel of ours is served by one of the peers.
            and row.get("how") != "none"
        ]
        return cls(said["environment"], tuple(rows))

    @cached_property
    def ours(self) -> float:
        """Our time over the floor, geometric mean."""
        return geometric_mean([row["ours_us"] / row["add_us"] for row in self.rows])

    @cached_property
    def best_peers(self) -> dict[str, float]:
        """Time of the fastest peer over ours, by shape."""
        return {
            _shape(row): min(times) / row["ours_us"]
            for row in self.rows
            if (times := [us for name in row["peers"] if (us := peer_us(row, name))])
        }

    @property
    def least(self) -> tuple[float, str]:
        """Time of the fastest peer over ours where it is smallest, and that shape."""
        return min((ratio, shape) for shape, ratio in self.best_peers.items())

    def over_ours(self, name: str) -> dict[str, float]:
        """Time of a peer over ours, by shape."""
        return {_shape(row): us / row["ours_us"] for row in self.rows if (us := peer_us(row, name))}

    @cached_property
    def standings(self) -> list[PeerStanding]:
        """Every peer that was timed, those at all shapes first, then by their time over ours."""
        found = []
        for name, version in self.environment["peers"].items():
            timed = [row for row in self.rows if peer_us(row, name)]
            if timed:
                floor = geometric_mean([row["peers"][name]["us"] / row["add_us"] for row in timed])
                ours = geometric_mean(self.over_ours(name).values())
                title = TITLES.get(name, name)
                short = version.split(",")[0].split()[-1]
                found.append(PeerStanding(name, title, short, len(timed), floor, ours))
        return sorted(found, key=lambda standing: (-standing.shapes, standing.over_ours))


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['M']}x{row['N']}:{row['dtype']}"


def peer_us(row: Mapping[str, Any], name: str) -> float | None:
    """Microseconds of a peer; None where it was not timed."""
    us = row["peers"].get(name, {}).get("us")
    return None if us is None else float(us)
