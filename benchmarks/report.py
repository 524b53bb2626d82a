"""A comparison as a Markdown page and as a plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

from benchmarks.goals import best_peer, geometric_mean, goals, ratio
from benchmarks.pages import text as page_text
from benchmarks.peers import PEERS
from benchmarks.results import OURS, Environment, Row, cell_of, operation_in, problem_of
from generator.operations import OPERATIONS
from generator.report.peers import TITLES, peer_us

MET = {True: "yes", False: "**no**", None: "-"}


def markdown(environment: Environment, rows: Sequence[Row]) -> str:
    """The whole page: conditions, ratios, goals, then host times, accuracy and code paths."""
    operation = operation_in(environment)
    reached = goals(rows, operation)
    rows = [row for row in rows if row["weight_dtype"] == row["dtype"]]
    known = [peer.name for peer in PEERS[operation]]
    names = [name for name in known if any(name in row["peers"] for row in rows)]
    parts = [
        f"# {_title(environment)} on {environment['gpu']}",
        _conditions(environment),
        "## GPU time",
        "Ratio to `torch.add(x, dy, out=dx)`, which moves the same bytes: x and dy read, dx "
        "written. Whole operation, dw in its final dtype; cold L2; medians of replayed CUDA "
        "graphs in which the floor, ours and all peers of a row take turns. `!`: not available, "
        "see below; `*`: could not be captured, timed by events around the call, launch gaps "
        "inside; empty: not run on this shape.",
        _ratios(rows, names),
        "## Goals",
        _table(
            ["goal", "limit", "reached", "met"],
            [[g.text, g.limit, g.reached, MET[g.met]] for g in reached],
        ),
        "## Host time, accuracy, determinism",
        "Host time: one call, in µs, the median over the shapes. Errors: "
        "||out - ref|| / ||ref|| against float64, the largest over the shapes of a dtype. "
        "Deterministic: shapes on which 20 runs gave the same bits, on inputs whose sums cancel "
        "so that any reordering shows.",
        _qualities(rows, names),
        "## Code paths",
        "The kernels of one call, as the profiler saw them at one M of each N, "
        "and for ours of each strategy.",
        _paths(rows, names),
    ]
    failures = _failures(rows, names)
    if failures:
        parts += ["## Not available", failures]
    return "\n\n".join(parts) + "\n"


def _title(environment: Environment) -> str:
    front_end = OPERATIONS[operation_in(environment)].front_end
    assert front_end is not None
    return f"{front_end.norm} backward"


def missing_sentence(missing: dict[str, str]) -> str:
    """Say which peers were left out and why; "" when all took part."""
    if not missing:
        return ""
    reasons = "; ".join(f"{TITLES[name]} ({reason})" for name, reason in missing.items())
    return f"Not compared: {reasons}."


def _conditions(environment: Environment) -> str:
    lines = [
        f"Measured {environment['date']}, driver {environment['driver']}, "
        f"PyTorch {environment['torch']}, Triton {environment['triton']}.",
        "Peers: "
        + "; ".join(f"{TITLES[name]}: {text}" for name, text in environment["peers"].items())
        + ".",
        missing_sentence(environment["missing"]),
    ]
    return "\n".join(line for line in lines if line)


_table = partial(page_text.table, others="---:")


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None or value == inf else format(value, form)


def _ratios(rows: Sequence[Row], names: Sequence[str]) -> str:
    titles = [TITLES[name] for name in names]
    head = ["shape", "add µs", "ours µs", "strategy", "ours", *titles, "best peer", "ours faster"]
    lines, faster = [], []
    for row in rows:
        best = best_peer(row)
        gain = best[1] / row["ours_us"] if best and row["ours_us"] else None
        if gain is not None:
            faster.append(gain)
        lines.append(
            [
                str(problem_of(row)),
                _number(row["add_us"], ".1f"),
                _number(row["ours_us"], ".1f"),
                str(row["strategy"]),
                _number(ratio(row)),
                *(_ratio_cell(row, name) for name in names),
                TITLES[best[0]] if best else "-",
                f"{_number(gain)}x" if gain is not None else "-",
            ]
        )
    means = [
        geometric_mean(
            row["peers"][name]["us"] / row["add_us"]
            for row in rows
            if name in row["peers"] and row["peers"][name]["us"] is not None
        )
        for name in names
    ]
    best_ratios = [best[1] / row["add_us"] for row in rows if (best := best_peer(row)) is not None]
    served = len(faster) == len(best_ratios)  # of a row on which ours failed there is no gain
    lines.append(
        [
            "**geometric mean**",
            *[""] * 3,
            _number(geometric_mean(map(ratio, rows))),
            *map(_number, means),
            _number(geometric_mean(best_ratios)),
            f"{_number(geometric_mean(faster))}x" if served else "-",
        ]
    )
    return _table(head, lines)


def _ratio_cell(row: Row, name: str) -> str:
    cell = row["peers"].get(name)
    if cell is None:
        return ""
    if cell["us"] is None:
        return "!"
    mark = "*" if cell.get("timed") == "events" else ""
    return _number(cell["us"] / row["add_us"]) + mark


def _qualities(rows: Sequence[Row], names: Sequence[str]) -> str:
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    head = ["", "host µs"]
    head += [f"{what} {dtype}" for dtype in dtypes for what in ("dx", "dw")]
    lines = []
    for name in (OURS, *names):
        held = [(row, cell) for row in rows if (cell := cell_of(row, name)) is not None]
        host = _known(cell["host_us"] for _, cell in held)
        line = [TITLES.get(name, name), _number(median(host) if host else None, ".1f")]
        for dtype in dtypes:
            for key in ("error_dx", "error_dw"):
                errors = _known(cell[key] for row, cell in held if row["dtype"] == dtype)
                line.append(_number(max(errors) if errors else None, ".1e"))
        verdicts = [cell["deterministic"] for _, cell in held if cell["deterministic"] is not None]
        lines.append([*line, f"{sum(map(bool, verdicts))} of {len(verdicts)}"])
    return _table([*head, "deterministic"], lines)


def _known(values: Iterable[object]) -> list[float]:
    return [value for value in values if isinstance(value, float | int)]


def _paths(rows: Sequence[Row], names: Sequence[str]) -> str:
    lines = []
    for name in (OURS, *names):
        shapes = defaultdict(list)
        for row in rows:
            if path := (cell_of(row, name) or {}).get("path"):
                shapes[path].append(str(problem_of(row)).split("x", 1)[1])
        for path, widths in shapes.items():
            where = ", ".join(dict.fromkeys(widths))
            lines.append(f"- {TITLES.get(name, name)}, N {where}: `{path}`")
    return "\n".join(lines) or "Not recorded."


def _failures(rows: Sequence[Row], names: Sequence[str]) -> str:
    shapes = defaultdict(list)
    for row in rows:
        for name in (OURS, *names):
            if reason := (cell_of(row, name) or {}).get("reason"):
                shapes[name, reason].append(str(problem_of(row)))
    return "\n".join(
        f"- {TITLES.get(name, name)}, {', '.join(where)}: {reason}"
        for (name, reason), where in shapes.items()
    )


def plot(environment: Environment, rows: Sequence[Row], path: Path) -> str:
    """Draw every implementation by name: its mean ratio to the floor as a bar, and its ratio at
    every shape in bf16 over M·N. Those that ran at half of the shapes or fewer are left out: means
    over other shapes do not compare. So are shapes whose weight has another dtype than x, because
    not every implementation serves them. "" or the sentence that says why there is no plot."""
    pyplot = page_text.pyplot()
    if pyplot is None:
        return page_text.NO_PLOT
    rows = [row for row in rows if row["weight_dtype"] == row["dtype"]]
    known = [peer.name for peer in PEERS[operation_in(environment)]]
    ratios = {"ours": [(row, ratio(row)) for row in rows if ratio(row) < inf]}
    for name in known:
        timed = [
            (row, us / row["add_us"]) for row in rows if (us := peer_us(row, name)) is not None
        ]
        if 2 * len(timed) > len(rows):
            ratios[name] = timed
    means = {name: geometric_mean(over for _, over in found) for name, found in ratios.items()}
    names = sorted(means, key=lambda name: means[name])
    colours = {name: f"C{place}" for place, name in enumerate(names)}
    titles = {"ours": "Normforge", **TITLES}

    figure, (bars, dots) = pyplot.subplots(
        1, 2, figsize=(10.5, 4.6), width_ratios=(1, 1.5), layout="constrained"
    )
    condition = environment.get("harness", {}).get("condition")
    under = f", {condition}" if condition else ""
    figure.suptitle(f"{_title(environment)} on {environment['gpu']}{under}")
    drawn = bars.barh(
        [f"{titles[name]} ({len(ratios[name])})" for name in names],
        [means[name] for name in names],
        color=[colours[name] for name in names],
    )
    bars.bar_label(drawn, fmt="%.2f", padding=3)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15 * max(means.values()))
    bars.set_xlabel("time / floor, geometric mean (number of shapes)")
    for name in reversed(names):
        shown = [
            (row["M"] * row["N"], over) for row, over in ratios[name] if row["dtype"] == "bf16"
        ]
        if shown:
            dots.plot(*zip(*shown, strict=True), "o", ms=4, color=colours[name])
    for axes, line in ((bars, bars.axvline), (dots, dots.axhline)):
        line(1.0, color="black", linewidth=0.8)
        axes.grid(alpha=0.3)
    dots.set_xscale("log", base=2)
    dots.set_yscale("log", base=2)
    dots.yaxis.set_major_formatter("{x:g}")
    dots.set_xlabel("M · N (bf16)")
    dots.set_ylabel("time / floor")
    figure.savefig(path)
    pyplot.close(figure)
    return ""
