"""Run a benchmark on several GPUs of this host at the same time, and join what they measured.

    python -m benchmarks.side_by_side 0,1,2,3 compare --module generated/h100/rmsnorm_backward \
        --shapes compare --condition rotation --out benchmarks/results/h100_rotation.json

Behind the GPUs stand the name of a command of this folder and its options, among them --shapes and
--out. Each GPU takes a part of the shapes in a process of its own, with its share of the cores, and
writes a file into a folder beside --out, called as that with `_parts`; `benchmarks.merge` joins
them. With --resume, a run that was stopped goes on. `compare --render` then draws page and plot.
Exit code: the largest of the processes'; 2 for bad input, and then nothing is joined.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.command import exit_code
from benchmarks.merge import merged
from benchmarks.results import write_json
from generator.errors import NormforgeError
from generator.shape_lists import load_problems

FOLDER = Path(__file__).parent


def parts(shapes: str, number: int) -> list[str]:
    """Return the shapes of each process, so that all take about as long: the largest shapes are
    dealt first. Raises NormforgeError for shapes that do not exist, and for fewer than
    processes."""
    problems = sorted(load_problems(shapes), key=lambda p: (-p.M * p.N * p.itemsize, str(p)))
    if len(problems) < number:
        raise NormforgeError(f"--shapes has {len(problems)} shapes for {number} GPUs: name fewer")
    return [",".join(map(str, problems[first::number])) for first in range(number)]


def cores_of(process: int, processes: int) -> set[int]:
    """Return the cores of a process: all of them are dealt out in runs."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // processes)
    first = process * share % len(cores)
    return set(cores[first : first + share])


def devices_of(text: str) -> list[int]:
    """Parse indices of GPUs, `0,1,2`. Raises NormforgeError."""
    devices = [device.strip() for device in text.split(",")]
    if len({*devices}) < len(devices) or not all(device.isdecimal() for device in devices):
        raise NormforgeError(f"GPUs are given as 0,1,2, each once, and not as {text}")
    return [int(device) for device in devices]


def visible(device: int) -> str:
    """Return the name of a GPU for CUDA, among those that this process may see. Raises
    NormforgeError."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return str(device)
    if device >= len(names.split(",")):
        raise NormforgeError(f"CUDA_VISIBLE_DEVICES={names} has no GPU {device}: name another")
    return names.split(",")[device]


def run(args: argparse.Namespace, options: Sequence[str]) -> int:
    """Run a command with these options, shapes and file excepted. Raises NormforgeError."""
    devices = devices_of(args.devices)
    if not (FOLDER / f"{args.command}.py").exists():
        raise NormforgeError(f"no benchmark is called {args.command}: see benchmarks/README.md")
    shapes = parts(args.shapes, len(devices))
    folder = args.out.with_name(f"{args.out.stem}_parts")
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{device}.json" for device in devices]
    if "--resume" not in options:
        for file in files:  # of an earlier run; a process without time for a shape writes none
            file.unlink(missing_ok=True)
    with ExitStack() as running:
        processes = []
        for number, device in enumerate(devices):
            line = (sys.executable, "-m", f"benchmarks.{args.command}", *options)
            line += ("--shapes", shapes[number], "--out", str(files[number]))
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible(device)}
            process = subprocess.Popen(line, env=environment)
            os.sched_setaffinity(process.pid, cores_of(number, len(devices)))
            running.callback(process.kill)
            processes.append(process)
        codes = [process.wait() for process in processes]
    if bad := [
        str(device) for device, code in zip(devices, codes, strict=True) if code not in (0, 1)
    ]:
        raise NormforgeError(f"{args.command} failed on GPU {', '.join(bad)}: it says why above")
    write_json(args.out, merged([file for file in files if file.exists()]))
    return max(codes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=about)
    parser.add_argument("devices", help="indices of GPUs, such as 0,1,2,3")
    parser.add_argument("command", help="a command of this folder, such as compare")
    parser.add_argument("--shapes", required=True, help="as for tune.py")
    parser.add_argument("--out", required=True, type=Path, help="the results file, .json")
    args, options = parser.parse_known_args(argv)
    return exit_code(__file__, lambda: run(args, options))


if __name__ == "__main__":
    sys.exit(main())
