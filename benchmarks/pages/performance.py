"""Measured numbers of docs/performance.md, and of what is tuned in which package."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from math import nan
from typing import Any

from benchmarks.goals import geometric_mean, goals
from benchmarks.pages.comparison import comparison, flushed, overheads
from benchmarks.pages.method import tuned_ratios
from benchmarks.pages.note_facts import winners
from benchmarks.pages.text import generated, read, table
from generator.paths import GENERATED
from generator.problem import Problem
from generator.shape_lists import load_problems

FLUSHED_LIMIT = 1.08
"""The limit of the ratio to the floor in the mean, with other ways of making the L2 cold."""


# ---- Packages ------------------------------------------------------------------------------------


def gpus() -> str:
    """Tuned packages, and how many shapes of each have kernels that were measured or predicted."""
    kinds = {
        "rmsnorm_backward/table.json": "RMSNorm backward",
        "rmsnorm_backward/forward.json": "RMSNorm forward",
        "rmsnorm_invariant_backward/table.json": "batch-invariant backward",
        "layernorm_backward/table.json": "LayerNorm backward",
    }
    rows = []
    for gpu in sorted({path.parent.parent for path in GENERATED.glob("*/*/table.json")}):
        told = []
        for path in (gpu / name for name in kinds):
            content = (
                json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tuned": []}
            )
            found = Counter(entry["evidence"] for entry in content["tuned"])
            told.append(", ".join(f"{n} {evidence}" for evidence, n in sorted(found.items())))
        title = json.loads((gpu / "rmsnorm_backward" / "table.json").read_text(encoding="utf-8"))[
            "target"
        ]["title"]
        rows.append((title, *told))
    return table(["package for", *kinds.values()], rows)


def tuned_lengths() -> str:
    """Say which row lengths were tuned with which dtypes, without options, and for how many
    rows."""
    packages = defaultdict(list)
    for path in sorted(GENERATED.glob("*/rmsnorm_backward/table.json")):
        found = defaultdict(set)
        for entry in json.loads(path.read_text(encoding="utf-8"))["tuned"]:
            spec, dtype, weight = entry["kernel"]["spec"], entry["dtype"], entry["weight_dtype"]
            if not spec["offset"] and not spec["residual"]:
                name = dtype if weight == dtype else f"{dtype}, weight {weight}"
                found[name].add((entry["N"], entry["M"]))
        for name, shapes in found.items():
            lengths, counts = (sorted(set(each)) for each in zip(*shapes, strict=True))
            rows = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
            packages[name, ", ".join(map(str, lengths)), rows].append(path.parts[-3])
    cells = ((", ".join(gpus), *facts) for facts, gpus in packages.items())
    return table(["package", "dtype", "row lengths", "rows"], sorted(cells))


# ---- performance.md ------------------------------------------------------------------------------


def goal_table() -> str:
    """The goals that were set for the H200, and what the comparison says about them."""
    found = [
        (goal.text, goal.limit, "**missed**: " * (goal.met is False) + goal.reached)
        for goal in goals(read("h200")["rows"])
    ]
    costs = overheads()
    worst = max(costs, key=lambda shape: costs[shape])
    mean = geometric_mean(costs.values())
    reached = f"{mean:.3f} ({len(costs)} shapes; {costs[worst]:.3f} at worst, {worst})"
    found.append(("overhead of determinism, geometric mean", "≤ 1.01", reached))
    for text, name in (("256 MB of writes", "writes"), ("inputs in rotation", "rotating")):
        mean = flushed(name)
        said = f"{mean:.3f}" if mean <= FLUSHED_LIMIT else f"**missed**: {mean:.3f}"
        found.append((f"{text} for a flush, geometric mean", f"≤ {FLUSHED_LIMIT} floor", said))
    return table(["goal", "limit", "reached"], found)


def tuned_finals() -> dict[str, float]:
    """Ratios to the floor in the finals on the H200, by shape."""
    return {shape: winner.result.ratio or nan for shape, winner in winners().items()}


def headlines() -> str:
    """The three sets whose means are called the ratio to the floor."""
    finals = tuned_finals()
    compared = [str(problem) for problem in load_problems("compare")]
    plain = {shape: value for shape, value in finals.items() if "residual" not in shape}
    return table(
        ["ratio to the floor", "geometric mean"],
        [
            (
                f"the {len(compared)} shapes of the comparison, on another GPU than the tuning",
                f"{comparison().ours:.3f}",
            ),
            (
                "the same shapes in the finals of the tuning",
                f"{geometric_mean(finals[shape] for shape in compared):.3f}",
            ),
            (
                f"all {len(plain)} tuned shapes without a residual, many of them small, finals",
                f"{geometric_mean(plain.values()):.3f}",
            ),
        ],
    )


HOST_CALLS = (
    ("`rmsnorm_backward`", "rmsnorm_backward", "aten op"),
    ("the operator that compiled models call", "rmsnorm_backward, operator", "aten op"),
    ("`layer_norm_backward`", "layer_norm_backward", "aten op"),
    ("the operator that compiled models call", "layer_norm_backward, operator", "aten op"),
    ("PyTorch's operator after `install()`", "install() op", "aten op"),
    ("backward of `rms_norm` by autograd", "rms_norm backward", "aten autograd backward"),
    ("backward of `layer_norm` by autograd", "layer_norm backward", "aten autograd backward"),
    (
        "backward by autograd after `install()`",
        "install() autograd backward",
        "aten autograd backward",
    ),
    ("`rms_norm` with autograd", "rms_norm forward", "aten autograd forward"),
    ("`rms_norm` without autograd", "rms_norm without grad", "aten without grad"),
    ("`layer_norm` with autograd", "layer_norm forward", "aten autograd forward"),
    ("`layer_norm` without autograd", "layer_norm without grad", "aten without grad"),
    ("`RMSNorm`", "RMSNorm module forward", "aten module forward"),
    ("`rmsnorm_forward`", "rmsnorm_forward", "aten forward op"),
    ("the forward's operator", "rms_norm, operator", "aten forward op"),
    ("the same with a residual", "add_rms_norm, operator", "aten add and forward op"),
)
"""The title of each call on a page, its name in the results, and PyTorch's."""


def host_times(name: str = "host_time_h200") -> str:
    """Microseconds on the host of one call, and their ratio to PyTorch's."""
    document = read(name)
    times, ratios = document["whole calls"], document["ratios"]

    def cell(ours: str, theirs: str) -> str:
        return f"{times[ours]:.1f} ({ratios[f'{ours} / {theirs}']:.2f})"

    rows = [
        (text, f"{times[theirs]:.1f}", cell(ours, theirs))
        + ((cell(f"{ours}, native", theirs),) if f"{ours}, native" in times else ())
        for text, ours, theirs in HOST_CALLS
        if f"{ours} / {theirs}" in ratios
    ]
    headers = ["call", "PyTorch", "Normforge (ratio)", "with `use_native()` (ratio)"]
    return table(headers[: len(rows[0])], rows)


UNTUNED = (
    ("first", "untuned_h200", "M"),
    ("first", "untuned_h200", "N"),
    ("second", "untuned_seed1_h200", "M"),
    ("second", "untuned_seed1_h200", "N"),
    ("long rows", "untuned_long_h100", "N"),
)
"""Sets of shapes: what the page calls them, their results, and what is untuned."""


def untuned() -> str:
    """Shapes that nobody tuned: random M at a tuned N, random N and M, and long rows."""
    lines = []
    for title, name, unknown in UNTUNED:
        rows = [row for row in read(name)["rows"] if row["unknown"] == unknown]

        def span(key: str, rows: list[Any] = rows) -> str:
            values = [row[key] for row in rows]
            return f"{min(values):.2f} to {max(values):.2f}"

        mean = geometric_mean(row["ours_over_tuned"] for row in rows)
        lines.append(
            (
                f"{title}, {len(rows)} shapes, untuned {unknown}",
                f"{mean:.3f}",
                span("ours_over_tuned"),
                span("ours_over_aten"),
                span("ours_over_floor"),
            )
        )
    return table(
        ["set", "time / tuned kernel's: mean", "range", "time / ATen's", "time / floor"], lines
    )


def brackets() -> str:
    """Fallback kernels over the floor, by the widest vector that divides the rows."""
    groups = read("layouts_h200")["groups"]
    widths = (640, 1024, 2048, 4096, 8192)
    lines = []
    for vector_bytes in (16, 8, 4, 2):
        mine = {g["columns"]: g for g in groups if g["vector_bytes"] == vector_bytes}
        chosen = [mine.get(width) or mine.get(768 if width == 640 else width) for width in widths]
        aten = min(value for group in chosen if group for value in group["aten"])
        cells = [f"{group['best'][0]['mean']:.2f}" if group else "" for group in chosen]
        lines.append((str(vector_bytes), *cells, f"{aten:.1f}"))
    columns = [f"N ≤ {width}" for width in widths]
    return table(["bytes of a vector", *columns, "ATen, lowest"], lines)


def first_search() -> str:
    """An H100, without earlier studies and with the H200's."""
    found = read("h100_first_search")
    rows, environment = found["rows"], found["environment"]
    mean = geometric_mean(row["ratio"] for row in rows)
    large = max(row["ratio"] for row in rows if row["floor_us"] > 130)
    theirs = tuned_finals()
    h200 = geometric_mean(theirs[row["shape"]] for row in rows)
    trials = [row["trials"] for row in rows]
    tuned = generated("h100", "rmsnorm_backward", "table.json")["tuned"]
    ratios = tuned_ratios("rmsnorm_backward", "h100")
    problems = [Problem.parse(row["shape"]) for row in rows]
    own = geometric_mean(ratios[p.M, p.N, p.dtype] for p in problems)
    counts = [entry["provenance"]["trials"] for entry in tuned]
    return (
        f"{environment['gpu']}, {environment['date']}: {len(rows)} shapes,"
        f" {min(trials)} to {max(trials)} trials each. Ratio to the floor in\nthe finals:"
        f" {mean:.3f} in the geometric mean, at most {large:.3f} where the floor takes more than"
        f" 130 µs. The\nlater search: {len(tuned)} shapes, {min(counts)} to {max(counts)} trials"
        f" each; {own:.3f} at those {len(rows)} shapes. The H200's kernels,\nafter several"
        f" searches, have {h200:.3f} at the same shapes on the H200."
    )


def what_wins() -> str:
    """Tabulate how often each choice wins among the tuned shapes of the H200."""
    configs = [winner.config for winner in winners().values()]

    def counts(key: str, name: Callable[[Any], str] = str) -> str:
        found = Counter(name(config[key]) for config in configs)
        return ", ".join(f"{value}: {n}" for value, n in found.most_common())

    return table(
        ["choice", f"winners of {len(configs)}"],
        [
            ("strategy", counts("strategy")),
            ("how rows reach the SM", counts("pipeline")),
            ("CTAs of a cluster", counts("cluster")),
            ("CTAs on an SM", counts("ctas_per_sm")),
            ("hint of the loads", counts("load_hint")),
        ],
    )


def trials() -> str:
    """Say from how many trials the winners were chosen."""
    numbers = [winner.trials for winner in winners().values()]
    return (
        f"The winners of {len(numbers)} shapes were chosen from {sum(numbers):,} trials,"
        f" {min(numbers)} to {max(numbers)} for each."
    )


PERFORMANCE_BLOCKS: dict[str, Callable[[], str]] = {
    "gpus": gpus,
    "tuned_lengths": tuned_lengths,
    "goals": goal_table,
    "headlines": headlines,
    "host_times": host_times,
    "layernorm_host_times": partial(host_times, "host_time_layernorm_h200"),
    "untuned": untuned,
    "brackets": brackets,
    "first_search": first_search,
    "what_wins": what_wins,
    "trials": trials,
}
