#!/usr/bin/env python3
"""What several GPUs gain over one, from two finished runs of the same shapes.

    python tune.py --gpu h200 --devices 0 --out one --json > one.json
    python tune.py --gpu h200 --devices 0,1,2,3 --out many --json > many.json
    python benchmarks/scaling.py --one one.json --many many.json --devices 4 \
        --out benchmarks/results/scaling_h200.json

Both runs must start alike, for example in empty folders. Says how long they took and, for every
shape, whether they chose the same kernel or one that is as fast within 1 %. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from generator.errors import NormforgeError  # noqa: E402
from generator.winner import TIE  # noqa: E402


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


def compare(one: dict[str, Any], many: dict[str, Any], devices: int) -> dict[str, Any]:
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
        rows.append(
            {
                "shape": shape,
                "variant": [row["variant"], other["variant"]],
                "ratio": [row["ratio"], other["ratio"]],
                "agree": agreement(row, other),
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
        "agreement": counts,
        "rows": rows,
    }


KINDS = ("same", "tie", "differs")


def agreement(row: dict[str, Any], other: dict[str, Any]) -> str:
    """`same` kernel; `tie`: another one that is no worse than 1 % in either run; or `differs`."""
    if row["variant"] == other["variant"]:
        return "same"
    low, high = sorted((row["ratio"], other["ratio"]))
    return "tie" if high <= low * (1 + TIE) else "differs"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--one", type=Path, required=True, help="the run on one GPU")
    parser.add_argument("--many", type=Path, required=True, help="the run on several")
    parser.add_argument("--devices", type=int, required=True, help="how many GPUs that had")
    parser.add_argument("--out", type=Path, help="where to write the result as JSON")
    args = parser.parse_args(arguments)
    try:
        result = compare(read(args.one), read(args.many), args.devices)
    except NormforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    seconds = result["seconds"]
    print(
        f"{result['shapes']} shapes: {seconds[0]:.0f} s on one GPU, {seconds[1]:.0f} s on "
        f"{args.devices} ({result['ratio']:.2f}); winners: {result['agreement']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
