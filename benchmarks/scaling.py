"""What several GPUs gain over one, from two finished runs of the same shapes.

    python tune.py --gpu h200 --devices 0 --out one --json > one.json
    python tune.py --gpu h200 --devices 0,1,2,3 --out many --json > many.json
    python -m benchmarks.scaling --one one.json --many many.json --devices 4 \
        --out benchmarks/results/scaling_h200.json

Both runs must start alike, for example in empty folders. Says how long they took and, for every
shape, whether they chose the same kernel or one that is as fast within 1 %.

Times of two runs differ by more than that between GPUs of one model, and even on one GPU. With
`--judge 0` winners that are not the same are therefore compiled and timed side by side on that GPU,
and what comes out there counts. Without it no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, exit_code
from benchmarks.gpu import bench_of, open_gpu, paired_ratio, take_turns
from benchmarks.repeatability import TIE
from benchmarks.results import write_json
from generator.errors import NormforgeError
from generator.problem import Problem

BLOCKS, ROUNDS = 5, 21
"""How long two winners are timed side by side."""


def read(path: Path) -> dict[str, Any]:
    """What `tune.py --json` printed. Raises NormforgeError."""
    try:
        run = json.loads(path.read_text())
        if run["interrupted"] or not run["shapes"]:
            raise NormforgeError(f"{path} is of an interrupted or empty run: run it to its end")
        if without := [row["shape"] for row in run["shapes"] if row["us"] is None]:
            raise NormforgeError(f"{path} has no winner for {', '.join(without)}: leave them out")
        run["shapes"] = {row["shape"]: row for row in run["shapes"]}
        return dict(run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NormforgeError(f"{path} is no output of `tune.py --json`: {error}") from error


Judge = Callable[[str, Mapping[str, Any], Mapping[str, Any]], float]
"""Of a shape and two configs: the second one's time over the first one's."""


def compare(
    one: dict[str, Any], many: dict[str, Any], devices: int, judge: Judge | None = None
) -> dict[str, Any]:
    """Times, and how the winners agree. Raises NormforgeError when the runs differ in more than the
    number of their GPUs."""
    if one["shapes"].keys() != many["shapes"].keys():
        raise NormforgeError("the two runs have other shapes: tune the same ones")
    for name in ("gpu", "evidence"):
        if one[name] != many[name]:
            raise NormforgeError(f"the two runs differ in {name}: {one[name]} and {many[name]}")
    trials = {row["trials"] for run in (one, many) for row in run["shapes"].values()}
    rows = []
    for shape, row in one["shapes"].items():
        other = many["shapes"][shape]
        slower = other["ratio"] / row["ratio"]
        if judge and row["variant"] != other["variant"]:
            slower = judge(shape, row["config"], other["config"])
        rows.append(
            {
                "shape": shape,
                "variant": [row["variant"], other["variant"]],
                "ratio": [row["ratio"], other["ratio"]],
                "many_over_one": round(slower, 4),
                "agree": agreement(row["variant"] == other["variant"], slower),
            }
        )
    counts = {kind: sum(r["agree"] == kind for r in rows) for kind in KINDS}
    return {
        "gpu": one["gpu"],
        "evidence": one["evidence"],
        "devices": [1, devices],
        "seconds": [one["seconds"], many["seconds"]],
        "ratio": round(many["seconds"] / one["seconds"], 3),
        "shapes": len(rows),
        "most_trials": max(trials),
        "judged": judge is not None,
        "agreement": counts,
        "rows": rows,
    }


KINDS = ("same", "tie", "differs")


def agreement(same: bool, slower: float) -> str:
    """`same` kernel; `tie`: another one whose time differs by no more than 1 %; or `differs`.
    slower: time of one winner over that of the other."""
    if same:
        return "same"
    return "tie" if max(slower, 1 / slower) <= 1 + TIE else "differs"


def judge_on(index: int, gpu: str) -> tuple[Judge, dict[str, Any]]:
    """A judge on a GPU of this machine, and facts about that. Raises NormforgeError when it is not
    the model that the runs were on."""
    try:
        session, target = open_gpu(gpu, index)
    except NormforgeError as error:
        raise NormforgeError(f"--judge {index}: {error}") from error

    def judge(shape: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
        work = session.workload(Problem.parse(shape))
        benches = [bench_of(work, config, target) for config in (first, second)]
        calls = [partial(bench.run, work.inputs) for bench in benches]
        one, other = take_turns(session.timer, calls, BLOCKS, ROUNDS)
        return paired_ratio(other, one)

    return judge, session.facts


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    one, many = read(args.one), read(args.many)
    judge, facts = (None, {}) if args.judge is None else judge_on(args.judge, one["gpu"])
    result = compare(one, many, args.devices, judge) | {"environment": facts}
    if args.out:
        write_json(args.out, result)
    seconds = result["seconds"]
    print(
        f"{result['shapes']} shapes: {seconds[0]:.0f} s on one GPU, {seconds[1]:.0f} s on "
        f"{args.devices} ({result['ratio']:.2f}); winners: {result['agreement']}"
    )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, out=None)
    parser.add_argument("--one", type=Path, required=True, help="the run on one GPU")
    parser.add_argument("--many", type=Path, required=True, help="the run on several")
    parser.add_argument("--devices", type=int, required=True, help="how many GPUs that had")
    parser.add_argument("--judge", type=int, metavar="N", help="index of the GPU that judges")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
