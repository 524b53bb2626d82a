"""Measured numbers about norms with their neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

from benchmarks.pages.text import generated, paragraph, read, table


def fewer_instructions() -> str:
    """Tabulate the winners of norms with neighbours over the floor, in the packages before and in
    today's. Means are geometric, of the shapes that both have."""
    before = read("neighbours_before")["ratios"]
    lines = []
    for operation in before["h200"]:
        cells = []
        for gpu in ("h200", "h100"):
            if gpu == "h200" and "rope" in operation:  # now the floor has cos and sin as well
                cells += ["", "", ""]
                continue
            old, now = before[gpu][operation], _ratios(gpu, operation)
            both = [(old[shape], now[shape]) for shape in old if shape in now]
            was, today = (geometric_mean(each) for each in zip(*both, strict=True))
            cells += [str(len(both)), f"{was:.3f}", f"{today:.3f}"]
        lines.append((f"`{operation}`", *cells))
    header = [f"{gpu}, {what}" for gpu in ("H200", "H100") for what in ("shapes", "before", "now")]
    return table(["time over the floor", *header], lines)


def _ratios(gpu: str, operation: str) -> dict[str, float]:
    """Return the ratio of each shape's winner in its finals, as the package's table has it."""
    facts = [entry["provenance"] for entry in generated(gpu, operation, "table.json")["tuned"]]
    return {own["study"].split(":", 1)[1].rsplit("@", 1)[0]: own["ratio"] for own in facts}


def in_two_formats() -> str:
    """Tabulate the H200's winners of backwards whose dx is quantized, over the floor."""
    found = {one: _ratios("h200", f"rmsnorm_{one}_backward") for one in ("fp8", "mxfp8")}
    shapes = sorted(found["fp8"], key=lambda s: [int(size) for size in re.findall(r"\d+", s)])
    cells = [[f"{one[s]:.3f}" if s in one else "" for one in found.values()] for s in shapes]
    means = (geometric_mean(one.values()) for one in found.values())
    lines = [[s, *of_shape] for s, of_shape in zip(shapes, cells, strict=True)]
    lines.append(["geometric mean", *(f"{mean:.3f}" for mean in means)])
    return table(["time over the floor", "`fp8_1x128`", "`mxfp8_1x32`"], lines)


def rope_together() -> str:
    """Tabulate the H200's kernels of rotated heads over the floor, before batches of one token had
    a loop of their own and since."""
    return _before_and_now("rope_together_h200")


def rope_halves() -> str:
    """Tabulate the H200's kernels of rows of heads over the floor, before a thread had both columns
    of a pair and since."""
    return _before_and_now("rope_halves_h200")


def groups_ahead() -> str:
    """Tabulate kernels of rows of heads over the floor, by how many batches ahead the L2 is asked
    for cos and sin."""
    rows = [row for row in read("groups_ahead_h200")["rows"] if "+joined" in row["shape"]]
    ahead = list(rows[0]["ratio"])
    lines = []
    for row in rows:
        operation, _, shape = row["shape"].partition(":")
        direction = operation.removeprefix("rmsnorm_rope_")
        lines.append((shape, direction, *(f"{row['ratio'][each]:.3f}" for each in ahead)))
    header = ["not asked" if each == "0" else f"{each} batches" for each in ahead]
    return table(["time over the floor", "direction", *header], lines)


def groups_in() -> str:
    """Tabulate the time of kernels whose stages hold cos and sin over that of the same with them in
    registers, by how many stages they have more."""
    more = ("+0", "+1", "+2")
    lines = []
    for row in read("groups_in_h200")["rows"]:
        operation, _, shape = row["shape"].partition(":")
        times, direction = row["us"], operation.removeprefix("rmsnorm_rope_")
        over = (times[each] / times["registers"] if each in times else None for each in more)
        cells = ("" if one is None else f"{one:.3f}" for one in over)
        lines.append((shape, direction, row["config"]["pipeline"], *cells))
    lines.sort(key=lambda line: line[1])
    header = ["as many stages", "one more", "two more"]
    return table(["time over that with registers", "direction", "pipeline", *header], lines)


def rope_without() -> str:
    """Tabulate backwards of rotated heads over the floor, whole and without parts of their code."""
    rows = read("rope_without_h200")["rows"]
    parts = [part for part in rows[0] if part != "shape"]
    lines = [
        (row["shape"].partition(":")[2], *(f"{row[part]['ratio']:.3f}" for part in parts))
        for row in rows
    ]
    return table(["time over the floor", *parts], lines)


def _before_and_now(name: str) -> str:
    """Tabulate two packages of rotated heads in one run, over the floor."""
    found = read(name)
    lines: list[tuple[str, ...]] = []
    for direction in ("forward", "backward"):
        of = f"rmsnorm_rope_{direction}:"
        was, now = (
            {row["shape"]: row["cells"]["ours"]["ratio"] for row in found[when]}
            for when in ("before", "after")
        )
        shapes = [shape for shape in now if shape.startswith(of)]
        lines += [(s.removeprefix(of), direction, f"{was[s]:.3f}", f"{now[s]:.3f}") for s in shapes]
        means = (geometric_mean(one[s] for s in shapes) for one in (was, now))
        lines.append(("geometric mean", direction, *(f"{mean:.3f}" for mean in means)))
    return table(["time over the floor", "direction", "before", "now"], lines)


CONTENDERS = {
    "ours": "Normforge",
    "inductor": "Inductor",
    "inductor_max": "Inductor, max-autotune",
    "triton": "plain Triton",
    "fla": "Flash-Linear-Attention",
}
"""The contenders of `benchmarks.neighbours` that are tabulated, and their titles."""
WITH_BACKWARD = ("gated_rmsnorm_backward:", "rmsnorm_rope_backward:")
"""The beginnings of shapes of backwards whose forward is measured, too."""


def beside_neighbours() -> str:
    """Tabulate norms fused with their neighbours beside what else computes them on an H200: the
    geometric means over the floor, of the shapes that a contender serves, and how many these are
    where it is not all. Below it the shapes at which something else is faster."""
    found = read("neighbours_h200")
    rows, packages = found["rows"], found["environment"]["packages"]
    lines, faster = [], []
    for kind in dict.fromkeys(_kind(row) for row in rows):
        own = [row["cells"] for row in rows if _kind(row) == kind]
        found_of = [[one.get(name, {}).get("ratio") for one in own] for name in CONTENDERS]
        lines.append((kind, *_means(found_of)))
    for row in rows:
        of = {n: c["ratio"] for n, c in row["cells"].items() if n in CONTENDERS and "ratio" in c}
        best = min(of, key=lambda name: of[name])
        if best != "ours":
            said = f"`{row['shape']}`: {CONTENDERS[best]}, by {of['ours'] / of[best] - 1:.1%}"
            faster.append(f"{said.replace('%', ' %')}{_since(row['shape'], packages)}")
    tabulated = table(["time over the floor", "shapes", *CONTENDERS.values()], lines)
    said = f"Faster at {len(faster)} of {len(rows)} shapes: {'; '.join(faster)}."
    return f"{tabulated}\n\n{paragraph(said)}"


def both_directions() -> str:
    """Tabulate forward and backward together over the sum of their floors, the geometric means of
    the shapes that have both on an H200."""
    rows = {row["shape"]: row for row in read("neighbours_h200")["rows"]}
    pairs: dict[str, list[tuple[dict[str, Any], ...]]] = {}
    for shape, backward in rows.items():
        forward = rows.get(shape.replace("_backward:", "_forward:"))
        if shape.startswith(WITH_BACKWARD) and forward is not backward and forward is not None:
            kind = _kind(backward).replace("_backward", "")
            pairs.setdefault(kind, []).append((forward, backward))

    def over_floors(pair: tuple[dict[str, Any], ...], name: str) -> float | None:
        times = [one["cells"].get(name, {}).get("us") for one in pair]
        return None if None in times else sum(times) / sum(one["floor_us"] for one in pair)

    lines = [
        (kind, *_means([[over_floors(pair, name) for pair in both] for name in CONTENDERS]))
        for kind, both in pairs.items()
    ]
    header = ["time of both directions over both floors", "shapes", *CONTENDERS.values()]
    return table(header, lines)


def _means(of_contenders: list[list[float | None]]) -> tuple[str, ...]:
    """Return how many shapes there are, and of each contender the geometric mean of its ratios, in
    parentheses how many it has if not all."""
    cells = [str(len(of_contenders[0]))]
    for ratios in of_contenders:
        known = [ratio for ratio in ratios if ratio is not None]
        some = f" ({len(known)})" if len(known) < len(ratios) else ""
        cells.append(f"{geometric_mean(known):.3f}{some}" if known else "")
    return tuple(cells)


def _kind(row: dict[str, Any]) -> str:
    """Return what a row is tabulated as: an operation, or one of rows of several heads."""
    operation, _, shape = row["shape"].partition(":")
    return f"`{operation}`" + (" of all heads" if "+joined" in shape else "")


def _since(shape: str, measured: dict[str, Any]) -> str:
    """Say what the finals of a shape gave that was tuned again after the comparison, "" for
    others."""
    operation, _, size = shape.partition(":")
    for entry in generated("h200", operation, "table.json")["tuned"]:
        if (
            f"{operation}:{size}@" in entry["provenance"]["study"]
            and entry["kernel"]["digest"] not in measured[operation]["cubins"].values()
        ):
            return f" (tuned again since: {entry['provenance']['ratio']:.3f} in its finals)"
    return ""


NEIGHBOURS_BLOCKS: dict[str, Callable[[], str]] = {
    "fewer_instructions": fewer_instructions,
    "in_two_formats": in_two_formats,
    "rope_together": rope_together,
    "rope_halves": rope_halves,
    "groups_ahead": groups_ahead,
    "groups_in": groups_in,
    "rope_without": rope_without,
    "beside_neighbours": beside_neighbours,
    "both_directions": both_directions,
}
