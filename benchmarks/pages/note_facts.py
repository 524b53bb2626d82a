"""Numbers in sentences of docs/lab-notes.md, computed from the committed results."""

from __future__ import annotations

import json
import lzma
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import nan
from typing import Any, NamedTuple

from benchmarks.goals import best_peer, geometric_mean
from benchmarks.pages.text import generated, read
from benchmarks.results import problem_of
from generator.kernels.strategies import launches
from generator.package.known_winners import known_winners
from generator.paths import GENERATED
from generator.problem import Problem
from generator.shape_lists import load_problems
from generator.studies.records import Winner

SMALL = 2**22
"""Elements up to which early arrival is counted apart."""


def span(values: Iterable[float], digits: int = 2, sign: str = "") -> str:
    """Format a range as `least to most`."""
    every = list(values)
    return f"{min(every):{sign}.{digits}f} to {max(every):{sign}.{digits}f}"


def exchange() -> tuple[int, int, int]:
    """Kernels that are slower by more than 1 %, within 1 %, and faster by more than 1 % without the
    exchange of row sums in a cluster."""
    rows = [row for row in read("ablations_h200")["rows"] if "no_exchange_us" in row]
    times = [row["no_exchange_us"] / row["us"] for row in rows]
    slower, faster = (sum(t > 1.01 for t in times), sum(t < 0.99 for t in times))
    return slower, len(times) - slower - faster, faster


def _pairs(name: str, knob: str) -> Iterator[tuple[Problem, Any, dict[Any, Any]]]:
    """Problem, config and the rows of both values of a knob, for configs that were timed with
    both."""
    found: dict[tuple[str, str], dict[Any, Any]] = defaultdict(dict)
    for row in read(name)["rows"]:
        config = {key: value for key, value in row["config"].items() if key != knob}
        found[row["shape"], json.dumps(config, sort_keys=True)][row[knob]] = row
    for (shape, text), both in found.items():
        if len(both) == 2:
            yield Problem.parse(shape), json.loads(text), both


def early_arrival(small: bool) -> list[float]:
    """µs of `mailbox` with early arrival less those of the same config with late arrival."""
    return [
        rows["early"]["us"] - rows["late"]["us"]
        for problem, _, rows in _pairs("arrival_h200", "arrival")
        if (problem.M * problem.N <= SMALL) == small
    ]


def in_blocks(name: str, clusters: bool) -> list[float]:
    """Ratios to the floor with rows added in blocks over those of the same config without."""
    return [
        rows[True]["ratio"] / rows[False]["ratio"]
        for _, config, rows in _pairs(name, "value")
        if (config["cluster"] > 1) == clusters
    ]


def generic_in_blocks() -> list[float]:
    """The best generic layouts with rows added in blocks over the best without, by bracket."""
    groups = [group for group in read("layouts_h200")["groups"] if "in_a_row" in group]
    return [group["best"][0]["mean"] / group["in_a_row"]["mean"] for group in groups]


def sent_early(dw: str, clusters: bool) -> list[float]:
    """Times with the last partial dw sent before dx over those with it sent after."""
    rows = read("send_h200")["rows"]
    some = [row for row in rows if row["dw"] == dw]
    return [row["ratio"] for row in some if (row["config"]["cluster"] > 1) == clusters]


def fewer_partials(share: int) -> list[float]:
    """Times of kernels of which every second (share 0) or fourth CTA (1) leaves its sums over those
    of the same where all do, under both conditions."""
    rows = read("fewer_partials_h200")["rows"]
    every = [row[name] for row in rows for name in ("rotation_us", "flush_us")]
    return [some[share] / whole for _, whole, *some in every]


def row_by_row() -> list[Any]:
    """Specs of the fallback kernels that add row by row, for want of room."""
    kernels = generated("h200", "rmsnorm_backward", "table.json")["fallback"]
    return [kernel["spec"] for kernel in kernels if not kernel["config"]["in_blocks"]]


def winners() -> dict[str, Winner]:
    """The winners of the H200, by shape."""
    found = known_winners(GENERATED / "h200" / "rmsnorm_backward")
    return {str(winner.problem): winner for winner in found}


def compared() -> dict[str, Any]:
    """The rows of the comparison, by shape."""
    return {str(problem_of(row)): row for row in read("h200")["rows"]}


def floors_of_two_gpus() -> list[float]:
    """Floors on the GPU of the comparison over those in the finals, shape by shape."""
    known = winners()
    rows = compared().items()
    shared = [(row["add_us"], known[shape].result) for shape, row in rows if shape in known]
    return [here / (there.floor_us or nan) for here, there in shared]


def near_the_floor(limit: float) -> tuple[int, int]:
    """Return at how many shapes of the comparison some peer is that near the floor, and how many
    shapes there are."""
    rows = [compared()[str(problem)] for problem in load_problems("compare")]
    peers = [(row["add_us"], best_peer(row)) for row in rows]
    return sum(peer is not None and peer[1] <= limit * us for us, peer in peers), len(rows)


def error_over_fused(gradient: str) -> float:
    """The largest error in fp32 over that of PyTorch's fused operator, on the inputs of the
    comparison."""
    rows = [row for row in compared().values() if row["dtype"] == "fp32"]
    key = f"error_{gradient}"
    return max(float(row[f"ours_{key}"] / row["peers"]["aten"][key]) for row in rows)


def load_hints(pipeline: str) -> list[float]:
    """Times with `evict_last` over times of the same config without."""
    rows = [row for row in read("load_hints_h200")["rows"] if row["pipeline"] == pipeline]
    return [row["evict_last"] / row["default"] for row in rows]


def kept_outputs(condition: str, operation: str, follower: str) -> list[dict[str, Any]]:
    """Times of an operation and what follows it, with neither, either and both hints."""
    wanted = {"condition": condition, "operation": operation, "follower": follower}
    return [row for row in read("stores_h100")["rows"] if wanted.items() <= row.items()]


def saved_by_stores() -> float:
    """The largest share of a cold forward that stores with `evict_last` save."""
    rows = kept_outputs("cold", "forward", "nothing")
    return max(1 - row["stores_us"] / row["default_us"] for row in rows)


def gained_by_both() -> float:
    """The most µs that stores with the hint, beside loads with it, save where a backward's dx is
    read next and nothing is flushed."""
    rows = kept_outputs("loop", "backward", "torch.mul(out, 2.0)")
    return max(row["loads_us"] - row["both_us"] for row in rows)


class Hinted(NamedTuple):
    """Kernels with loads by `evict_last` beside the same without. longer: how much longer they
    take, by shape; hinted, plain: geometric means of both over the floor."""

    longer: dict[str, float]
    hinted: float
    plain: float


def hint_under(condition: str) -> Hinted:
    """The H100's backwards with nothing behind them, under a condition of benchmarks/flushes.py."""
    rows = kept_outputs(condition, "backward", "nothing")
    hinted, plain = (
        geometric_mean(row[f"{name}_us"] / row["floor_us"] for row in rows)
        for name in ("loads", "default")
    )
    return Hinted(
        {row["shape"]: row["loads_us"] / row["default_us"] - 1 for row in rows}, hinted, plain
    )


def hinted(gpu: str, shapes: str = "") -> tuple[int, int]:
    """Return how many winners of a GPU load with `evict_last`, and how many there are. shapes: a
    list, for those of its shapes alone."""
    every = known_winners(GENERATED / gpu / "rmsnorm_backward")
    if shapes:
        wanted = load_problems(shapes)
        every = [winner for winner in every if winner.problem in wanted]
    return sum(winner.config["load_hint"] == "evict_last" for winner in every), len(every)


def fastest_forwards(gpu: str) -> tuple[int, int]:
    """Return how many measured forward kernels of a GPU's package are the fastest of their finals,
    and how many there are: others are among those that tie with it."""
    tuned = generated(gpu, "rmsnorm_backward", "forward.json")["tuned"]
    facts = [entry["provenance"] for entry in tuned if entry["evidence"] == "measured"]
    first = [each["ratio"] <= min(other["ratio"] for other in each["tie"]) for each in facts]
    return sum(first), len(first)


def tie_of_forwards() -> float:
    """Return how much slower than the fastest the packages' forwards may have been, as they say."""
    tuned = generated("h200", "rmsnorm_backward", "forward.json")["tuned"]
    said = [re.findall(r"([\d.]+) %", entry["provenance"]["reason"]) for entry in tuned]
    return max(float(percent) for each in said for percent in each) / 100


def usual_stores() -> list[float]:
    """cuDNN's forward over kernels that store y without a hint, on an H100."""
    cells = [row["cells"] for row in read("forward_usual_stores_h100")["rows"]]
    return [each["cudnn"]["us"] / each["ours"]["us"] for each in cells]


def _journal() -> Iterator[tuple[str, str]]:
    """Shape and line, of all lines about a study of the H200. By line, because opening the file as
    studies takes many times as long."""
    names = []
    with lzma.open(GENERATED / "h200" / "studies.journal.xz", "rt", encoding="utf-8") as journal:
        for line in journal:
            if line.startswith('{"op_code":0'):
                names.append(json.loads(line)["study_name"].split("@")[0])
            else:
                yield names[int(line.split('"study_id":', 1)[1].split(",", 1)[0])], line


def trials_of(shapes: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Shape and trial, as the study file has them."""
    for shape, line in _journal():
        if shape in shapes and line.startswith('{"op_code":4'):
            yield shape, json.loads(line)


def one_launch(least: int) -> list[float]:
    """The best verified kernel of one launch over the best of two, in finals of RMSNorm that had
    both, for rows of that many columns or more."""
    over: dict[str, float] = {}
    for shape, line in _journal():
        if not shape[0].isdigit() or '"user_attr":{"finals"' not in line:
            continue
        best: dict[int, float] = {}
        for entry in json.loads(line)["user_attr"]["finals"]:
            result, count = entry["result"], launches(entry["config"])
            if result["determinism"] == "verified" and result["ratio"]:
                best[count] = min(best.get(count, result["ratio"]), result["ratio"])
        if len(best) == 2 and least <= Problem.parse(shape).N:
            over[shape] = best[1] / best[2]
    return list(over.values())
