"""Measured numbers about layers of models."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import geometric_mean
from typing import Any

from benchmarks.pages.text import generated, paragraph, read, table
from benchmarks.training.layer_models import TITLES
from benchmarks.training.layers import WAYS


def layers_with_sums() -> str:
    """Milliseconds of the kernels beside products and attention in a layer's step on an H200, whose
    packages add gradients in the norms' backwards; in parentheses without these."""
    return _by_way(read("layers_h200")["layers"], read("layers_without_sums_h200")["layers"])


def layers_rotated() -> str:
    """Milliseconds of those kernels on an H200, since there are kernels for the heads of Gemma 3
    and OLMo 2."""
    return _by_way(read("layers_rotated_h200")["layers"], every=False)


def layers_more() -> str:
    """Milliseconds of those kernels on an H200, in layers with a gate and with complex numbers."""
    return _by_way(read("layers_more_h200")["layers"])


def layers_autotuned() -> str:
    """Milliseconds of those kernels on an H200, where Inductor tunes its own."""
    return _by_way(read("layers_autotuned_h200")["layers"])


def layers_fp8() -> str:
    """Milliseconds of those kernels on an H200, where linear layers multiply in FP8."""
    return _by_way(read("layers_fp8_h200")["layers"])


def layers_with_sums_h100() -> str:
    """Milliseconds of those kernels on an H100, which has no packages of its own for them."""
    return _by_way(read("layers_with_sums_h100")["layers"])


def layers_on_ranks() -> str:
    """Milliseconds of those kernels, and of a step, on one H200 and on two that share a layer."""
    kinds = {
        "one GPU": "layers_one_rank_h200",
        "two": "layers_two_ranks_h200",
        "two, tokens split": "layers_two_ranks_sequence_h200",
    }
    found = {kind: read(name)["layers"] for kind, name in kinds.items()}
    models = list(found["one GPU"])
    header = [f"{TITLES[model]}, {kind}" for model in models for kind in kinds]
    lines = [
        [
            WAYS[way].title,
            *(
                f"{(cell := found[kind][model][way])['others_ms']:.2f} ({cell['step_ms']:.2f})"
                for model in models
                for kind in kinds
            ),
        ]
        for way in found["one GPU"][models[0]]
    ]
    return table(["ms per step", *header], lines)


def layers_native() -> str:
    """Milliseconds of steps of a layer that two GPUs share, with calls launched from C++."""
    (found,) = read("layers_two_ranks_native_h200")["layers"].values()
    plain, *ours = ((WAYS[way].title, cell["step_ms"]) for way, cell in found.items())
    said = "; ".join(f"{ms:.2f} ms by {title}" for title, ms in ours)
    return paragraph(
        "With [`use_native()`](adopting.md#use_native), which launches norms and their backwards"
        f" from C++, a step of Qwen's layer on two GPUs took {said}; and {plain[1]:.2f} ms by plain"
        f" {plain[0]} (`--native`, `layers_two_ranks_native_h200.json`)."
    )


def host_of_rows() -> str:
    """Microseconds on the host of one call of the other operations, and of what else computes
    them."""
    ways = {"ours": "Normforge", "triton": "one plain Triton kernel"}
    ways |= {"inductor": "Inductor", "eager": "eager PyTorch"}
    lines = []
    for row in read("host_rows_h200")["rows"]:
        cells = [row["cells"].get(way, {}).get("host_us") for way in ways]
        times = ("" if us is None else f"{us:.0f}" for us in cells)
        lines.append((f"`{row['shape'].partition(':')[0]}`", *times))
    return table(["operation", *ways.values()], lines)


def _by_way(found: dict[str, Any], before: dict[str, Any] | None = None, every: bool = True) -> str:
    """Tabulate models by ways. every: without ways in which a model was not measured."""

    def cell(model: str, way: str) -> str:
        if way not in found[model]:
            return ""
        time = f"{found[model][way]['others_ms']:.2f}"
        other = (before or {}).get(model, {}).get(way)
        return f"{time} ({other['others_ms']:.2f})" if other else time

    have = all if every else any
    ways = [way for way in WAYS if have(way in measured for measured in found.values())]
    lines = [(WAYS[way].title, *(cell(model, way) for model in found)) for way in ways]
    return table(["ms per step", *(TITLES[model] for model in found)], lines)


def fewer_instructions() -> str:
    """Tabulate the winners of norms with neighbours over the floor, in the packages before and in
    today's. Means are geometric, of the shapes that both have."""
    before = read("neighbours_before")["ratios"]
    lines = []
    for operation in before["h200"]:
        cells = []
        for gpu in ("h200", "h100"):
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


def beside_neighbours() -> str:
    """Tabulate norms fused with their neighbours beside what else computes them on an H200: the
    geometric means over the floor, of the shapes that a contender serves, and how many these are
    where it is not all. Below it the shapes at which something else is faster."""
    found = read("neighbours_h200")
    rows, packages = found["rows"], found["environment"]["packages"]
    lines, faster = [], []
    for kind in dict.fromkeys(_kind(row) for row in rows):
        own = [row["cells"] for row in rows if _kind(row) == kind]
        cells = []
        for name in CONTENDERS:
            ratios = [one[name]["ratio"] for one in own if "ratio" in one.get(name, {})]
            some = f" ({len(ratios)})" if len(ratios) < len(own) else ""
            cells.append(f"{geometric_mean(ratios):.3f}{some}" if ratios else "")
        lines.append((kind, str(len(own)), *cells))
    for row in rows:
        of = {n: c["ratio"] for n, c in row["cells"].items() if n in CONTENDERS and "ratio" in c}
        best = min(of, key=lambda name: of[name])
        if best != "ours":
            said = f"`{row['shape']}`: {CONTENDERS[best]}, by {of['ours'] / of[best] - 1:.1%}"
            faster.append(f"{said.replace('%', ' %')}{_since(row['shape'], packages)}")
    tabulated = table(["time over the floor", "shapes", *CONTENDERS.values()], lines)
    said = f"Faster at {len(faster)} of {len(rows)} shapes: {'; '.join(faster)}."
    return f"{tabulated}\n\n{paragraph(said)}"


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


LAYERS_BLOCKS: dict[str, Callable[[], str]] = {
    "layers_with_sums": layers_with_sums,
    "layers_rotated": layers_rotated,
    "layers_more": layers_more,
    "layers_autotuned": layers_autotuned,
    "layers_fp8": layers_fp8,
    "layers_on_ranks": layers_on_ranks,
    "layers_native": layers_native,
    "host_of_rows": host_of_rows,
    "layers_with_sums_h100": layers_with_sums_h100,
    "fewer_instructions": fewer_instructions,
    "in_two_formats": in_two_formats,
    "rope_together": rope_together,
    "rope_halves": rope_halves,
    "groups_ahead": groups_ahead,
    "beside_neighbours": beside_neighbours,
}
