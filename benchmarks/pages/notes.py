"""Tables of docs/lab-notes.md: what limits the kernels, and what each change gained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from math import ceil
from typing import Any

from benchmarks.pages.note_facts import trials_of
from benchmarks.pages.text import read, table
from generator.kernels.strategies import strategy_of
from generator.problem import Problem

SMS = 132
COUNTED = (
    "4096x256:bf16",
    "4096x1024:bf16",
    "4096x4096:bf16",
    "16384x4096:bf16",
    "4096x16384:bf16",
    "16384x16384:bf16",
    "4096x65536:bf16",
)
BY_STRATEGY = ("4096x1024:bf16", "4096x4096:bf16", "16384x3072:bf16", "65536x8192:bf16")
"""Shapes of the table of strategies, from rows that end fast to many long ones."""


# ---- What limits the kernels ---------------------------------------------------------------------


def counters() -> str:
    """Hardware counters of the floor and of ours, each kernel alone, in bf16."""
    lines = []
    rows = {row["shape"]: row for row in read("counters_h200")["rows"]}
    for shape in COUNTED:
        row = rows[shape]
        [floor], (ours, *second) = row["floor"], row["ours"]
        lines.append(
            (
                shape.removesuffix(":bf16"),
                f"{floor['us']:.1f}, {ours['us']:.1f}",
                f"{floor['dram_percent']:.0f}, {ours['dram_percent']:.0f}",
                f"{ours['dram_read_mb'] / floor['dram_read_mb']:.3f}",
                f"{floor['issue_percent']:.0f}, {ours['issue_percent']:.0f}",
                f"{floor['sm_active_avg_percent']:.0f}, {ours['sm_active_avg_percent']:.0f}",
                f"{second[0]['us']:.1f}" if second else "none",
            )
        )
    header = ("µs", "DRAM, % of peak", "DRAM reads", "issue slots, %", "active SMs, %")
    return table(("shape", *header, "second kernel, µs"), lines)


def tails() -> str:
    """Tabulate where the time above the floor goes, in the fastest kernel of every shape."""

    def size(shape: str) -> tuple[int, int]:
        problem = Problem.parse(shape)
        return problem.M * problem.N, problem.N

    fastest: dict[str, Any] = {}
    for row in sorted(read("ablations_h200")["rows"], key=lambda row: row["us"]):
        if "no_tail_us" in row:
            fastest.setdefault(row["shape"], row)
    lines = []
    for shape in sorted(fastest, key=size):
        row = fastest[shape]
        clocks, floor, cluster = row["clocks_us"], row["floor_us"], row["config"]["cluster"]
        kernel = f"`{row['config']['strategy']}`" + (f", {cluster} CTAs" if cluster > 1 else "")
        lines.append(
            (
                shape,
                kernel,
                f"{floor:.1f}",
                f"{row['no_tail_us'] - floor:+.1f}",
                f"{row['us'] - floor:+.1f}",
                ", ".join(f"{us:.1f}" for us in clocks["rows_end"]),
                f"{clocks['done'][2] - clocks['rows_end'][2]:.1f}",
            )
        )
    header = ("floor", "without dw reduction", "whole", "rows end", "last rows' end to dw")
    return table(("shape", "strategy, cluster", *header), lines)


# ---- Clusters ------------------------------------------------------------------------------------


def cluster_room() -> str:
    """Tabulate how many clusters found room at once."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for row in read("clusters_h200")["rows"]:
        cluster, room = row["config"]["cluster"], row["room"]
        if cluster > 1:
            found[cluster, ceil(room * cluster / SMS)].add(room)
    sizes = sorted({cluster for cluster, _ in found})

    def cell(cluster: int, ctas: int) -> str:
        rooms = sorted(found[cluster, ctas])
        return ", ".join(f"{room} ({room * cluster / ctas:.0f} SMs)" for room in rooms)

    rows = [(str(cluster), *(cell(cluster, ctas) for ctas in (1, 2, 3))) for cluster in sizes]
    return table(("CTAs in a cluster", "1 CTA per SM", "2", "3"), rows)


def cluster_ratios() -> str:
    """The best ratios of random configs, by the CTAs of a cluster; in the last column those that
    compute dx of a row behind the sum of the next one."""
    best: dict[tuple[str, int | str], float] = {}
    for row in read("clusters_h200")["rows"]:
        config = row["config"]
        group = "deferred" if config["reload"] == "deferred" else config["cluster"]
        key = row["shape"], group
        best[key] = min(best.get(key, row["ratio"]), row["ratio"])
    groups = (1, 2, 4, 8, 16, "deferred")
    shapes = dict.fromkeys(shape for shape, _ in best)
    rows = [
        (shape, *(f"{best[shape, g]:.3f}" if (shape, g) in best else "" for g in groups))
        for shape in sorted(shapes, key=lambda shape: Problem.parse(shape).N)
    ]
    return table(("CTAs in a cluster", *map(str, groups[:-1]), "any, dx deferred"), rows)


# ---- The L2 --------------------------------------------------------------------------------------


def followers() -> str:
    """Tabulate what `evict_last` gains over the floor, alone and with an operation behind it;
    nothing where the floors of the two blocks differ by more than half of that."""
    titles = {
        "nothing": "alone",
        "torch.add(dx, r, out=o)": "`torch.add(dx, r)`",
        "dx.add_(1.0)": "`dx.add_(1)`",
        "torch.mm(dx, w), w (N, N)": "`dx @ w`, N x N",
        "torch.mm(dx, w), w (N, N/4)": "`dx @ w`, N x N/4",
        "torch.add(r, r, out=o)": "`torch.add(r, r)`",
    }
    gains: dict[str, dict[str, str]] = defaultdict(dict)
    for row in read("cache_hints_h200")["rows"]:
        before, after = row["floor_us"]
        gain = (row["default_us"] - before) - (row["evict_last_us"] - after)
        sure = 2 * abs(before - after) < gain
        gains[row["follower"]][row["shape"]] = f"{gain:.1f}" if sure else ""
    shapes = list(gains["nothing"])
    rows = [(title, *(gains[name][shape] for shape in shapes)) for name, title in titles.items()]
    return table(("µs gained", *(shape.removesuffix(":bf16") for shape in shapes)), rows)


def kept_in_loops(gain: str) -> str:
    """µs that `evict_last` gains in a loop without a flush, for the loads or the stores."""
    titles = {
        "nothing": "alone",
        "torch.mul(out, 2.0)": "`torch.mul(out, 2)`",
        "torch.mm(out, w), w (N, N/4)": "`out @ w`, N x N/4",
        "torch.add of other tensors": "`torch.add` of others",
    }
    found = [row for row in read("stores_h100")["rows"] if row["condition"] == "loop"]
    shapes = list(dict.fromkeys(row["shape"] for row in found))
    gains = {
        (row["operation"], row["follower"], row["shape"]): round(row["default_us"] - row[gain], 1)
        for row in found
    }
    rows = [
        (
            f"{operation}, {title}",
            *(f"{gains[operation, name, shape] + 0.0:.1f}" for shape in shapes),
        )
        for operation in ("forward", "backward")
        for name, title in titles.items()
    ]
    return table(("µs gained", *(shape.removesuffix(":bf16") for shape in shapes)), rows)


# ---- Strategies ----------------------------------------------------------------------------------


def strategies() -> str:
    """The best trial of every strategy at four shapes."""
    best: dict[tuple[str, str], float] = {}
    for shape, trial in trials_of(BY_STRATEGY):
        ratio = (trial["user_attrs"].get("result") or {}).get("ratio")
        if ratio is None:
            continue
        config = {
            knob: json.loads(trial["distributions"][knob])["attributes"]["choices"][index]
            for knob, index in trial["params"].items()
            if knob in ("strategy", "order")
        }
        key = str(strategy_of(config)), shape
        best[key] = min(best.get(key, ratio), ratio)
    names = sorted({name for name, _ in best}, key=lambda name: best[name, BY_STRATEGY[1]])
    rows = [(f"`{name}`", *(f"{best[name, shape]:.2f}" for shape in BY_STRATEGY)) for name in names]
    return table(("time / floor", *BY_STRATEGY), rows)


NOTE_BLOCKS: dict[str, Callable[[], str]] = {
    "counters": counters,
    "tails": tails,
    "cluster_room": cluster_room,
    "cluster_ratios": cluster_ratios,
    "followers": followers,
    "loads_in_loops": lambda: kept_in_loops("loads_us"),
    "stores_in_loops": lambda: kept_in_loops("stores_us"),
    "strategies": strategies,
}
