"""Measured numbers about ours beside other implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.goals import MEAN_LIMITS, geometric_mean
from benchmarks.pages.text import RESULTS, generated, paragraph, read, table
from generator.report.peers import Comparison

SMALL_US = 20
"""A floor that takes less is counted among the small ones."""
FLUSHES = {
    "present": "reads with `evict_last`, then 256 MB of writes (all other tables)",
    "writes": "256 MB of writes",
    "clean": "as in the first row, then 128 MB of plain reads",
    "rotating": "nothing, but inputs and outputs rotate through memory",
}
"""Conditions of benchmarks/flushes.py that make the L2 cold before an operation."""
BESIDE_OURS = ("time / Normforge's", "lowest time / Normforge's, at", "shapes where it is faster")
"""Columns of a table of peers."""


def beside_ours(over: Mapping[str, float]) -> tuple[str, ...]:
    """These columns of a peer, whose time over ours is given by shape."""
    least = min(over, key=over.__getitem__)
    faster = sum(ratio < 1 for ratio in over.values())
    return (f"{geometric_mean(over.values()):.2f}", f"{over[least]:.2f}, {least}", str(faster))


def comparison(name: str = "h200") -> Comparison:
    """Ours and its peers in one run."""
    found = Comparison.load(RESULTS / f"{name}.json")
    assert found is not None
    return found


def forward_peers() -> str:
    """The forward kernels and those of other libraries over `torch.mul`, and over ours."""
    document = read("forward_h200")
    rows, libraries = document["rows"], document["environment"]["libraries"]
    pytorch = document["environment"]["torch"]
    titles = {
        "aten": f"ATen {pytorch}",
        "inductor": f"Inductor {pytorch}, which leaves out rstd",
        "liger_triton": f"Liger Triton {libraries['liger-kernel']}",
        "quack": f"QuACK {libraries['quack-kernels']}",
        "cudnn": f"cuDNN best plan {libraries['nvidia-cudnn-cu13']}",
    }

    def cells(name: str) -> tuple[str, ...]:
        over = {row["shape"]: row["cells"][name]["us"] / ours(row) for row in rows}
        ratios = [row["cells"][name]["ratio"] for row in rows]
        return (f"{geometric_mean(ratios):.2f}", *beside_ours(over))

    def ours(row: dict[str, Any]) -> float:
        return float(row["cells"]["ours"]["us"])

    lines: list[tuple[str, ...]] = [("**Normforge**", f"**{cells('ours')[0]}**", *[""] * 3)]
    lines += [(title, *cells(name)) for name, title in titles.items()]
    header = ("time / mul (geometric mean)", *BESIDE_OURS)
    return table([f"{len(rows)} shapes, {document['environment']['gpu']}", *header], lines)


def layernorm() -> str:
    """Ours and its peers at the shapes that are tuned, in one run."""
    found = comparison("layernorm_h200")
    lines = [("**Normforge**", f"**{found.ours:.2f}**", "", "")]
    for peer in found.standings:
        least = min(found.over_ours(peer.name).values())
        lines.append(
            (peer.title, f"{peer.over_floor:.2f}", f"{peer.over_ours:.2f}", f"{least:.3f}")
        )
    header = ["", "time / floor", "time / Normforge's", "lowest time / Normforge's"]
    worst = max(
        row[f"ours_error_{what}"] / row["peers"]["aten"][f"error_{what}"]
        for row in found.rows
        for what in ("dx", "dw")
    )
    least, where = found.least
    limit = MEAN_LIMITS["layernorm_backward"]
    ran = found.environment["module"].get("cubins", {})
    tuned = generated("h200", "layernorm_backward", "table.json")["tuned"]
    same = all(ran.get(one["kernel"]["file"]) == one["kernel"]["digest"] for one in tuned)
    said = paragraph(
        f"{'' if same else 'The kernels were those of an earlier package. '}"
        f"{len(found.rows)} shapes, geometric means. The closest peer takes"
        f" {100 * (least - 1):.1f} % longer, at {where}. The errors of dx, dgamma and dbeta are at"
        f" most {worst:.3f} times those of ATen. The project's goal, at most {limit} times the"
        f" floor, is {'met' if found.ours <= limit else 'missed'}."
    )
    return "\n".join((table(header, lines), "", said))


def _fastest_free(row: Any) -> tuple[str, float]:
    """The fastest reduction that is not deterministic, and its time over the floor."""
    free = {name: over for name, over in row["over_floor"].items() if name != row["winner"]}
    return min(free.items(), key=lambda entry: entry[1])


def overheads() -> dict[str, float]:
    """Time of the winner over that of the fastest sum in any order, by shape."""
    return {
        row["shape"]: row["over_floor"][row["winner"]] / _fastest_free(row)[1]
        for row in read("determinism_overhead_h200")["rows"]
    }


def overhead() -> str:
    """Winners beside sums in any order, with as many trials."""
    costs = overheads()
    lines: list[tuple[str, ...]] = []
    for row in read("determinism_overhead_h200")["rows"]:
        shape, winner, trials = row["shape"], row["winner"], str(row["trials_of_winner"])
        free, over = _fastest_free(row)
        own = f"{row['over_floor'][winner]:.3f}"
        lines.append((shape, trials, winner, own, free, f"{over:.3f}", f"{costs[shape]:.3f}"))
    mean = geometric_mean(costs.values())
    lines.append(("**geometric mean**", *[""] * 5, f"**{mean:.3f}**"))
    header = ["shape", "trials of each", "winner", "time / floor", "fastest non-deterministic"]
    return table([*header, "time / floor", "overhead"], lines)


# ---- The L2 --------------------------------------------------------------------------------------


def _under(name: str) -> list[tuple[Any, float]]:
    """Rows of the study of flushes under one condition, each with ours over the floor."""
    rows = read("flushes_h200")["rows"]
    return [(row[name], row[name]["over_floor"][row["hint"]]) for row in rows]


def flushed(name: str) -> float:
    """Ours over the floor with the L2 made cold in this way, geometric mean of all shapes."""
    return geometric_mean(ours for _, ours in _under(name))


def flushes() -> str:
    """Ours, ours without its load hint and cuDNN, by the way in which the L2 is made cold."""
    lines, slower = [], []
    for name, text in FLUSHES.items():
        found = _under(name)
        plain = geometric_mean(cell["over_floor"]["default"] for cell, _ in found)
        small = geometric_mean(ours for cell, ours in found if cell["us"]["floor"] < SMALL_US)
        peer = [cell["over_floor"]["cudnn"] / r for cell, r in found if "cudnn" in cell["us"]]
        beside = f"{geometric_mean(peer):.3f} ({min(peer):.3f})"
        lines.append((text, f"{flushed(name):.3f}", f"{plain:.3f}", f"{small:.3f}", beside))
        ratios = [cell["over_floor"] for cell, _ in found]
        slower.append(str(sum(r["evict_last"] > 1.005 * r["default"] for r in ratios)))
    shapes, few = len(found), len(peer)
    header = [f"winners, {shapes} shapes", "without the load hint", f"floor below {SMALL_US} µs"]
    shown = table(
        ["before each operation", *header, f"cuDNN / Normforge, {few} shapes (lowest)"], lines
    )
    *most, last = slower
    said = (
        f"Of the {shapes} winners, {', '.join(most)} and {last} are more than 0.5 %"
        " slower with the hint than without it, in the order of the rows."
    )
    return f"{shown}\n\n{paragraph(said + _without_cudnn())}"


def _without_cudnn() -> str:
    """A sentence where cuDNN did not run at the shapes at which it is closest to ours."""
    beside = {
        row["shape"] for row in read("flushes_h200")["rows"] if "cudnn" in row["present"]["us"]
    }
    over = comparison().over_ours("cudnn")
    closest = sorted(over, key=over.__getitem__)
    missing = next((n for n, shape in enumerate(closest) if shape in beside), len(closest))
    return (
        f" cuDNN did not run at the {missing} shapes of the comparison at which it is closest, so"
        " its lowest ratios here are not the lowest of all."
        if missing
        else ""
    )


COMPARISON_BLOCKS: dict[str, Callable[[], str]] = {
    "forward_peers": forward_peers,
    "flushes": flushes,
    "layernorm": layernorm,
    "overhead": overhead,
}
