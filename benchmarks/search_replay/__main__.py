"""Search recorded spaces many times without a GPU and compare, or record one on a GPU.

    python -m benchmarks.search_replay
    python -m benchmarks.search_replay --record FILE --gpu auto
    python -m benchmarks.search_replay --side-by-side --gpu auto

Compared are searches at random, by Optuna's samplers alone, by the search of this tuner, and by the
same with another surrogate.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.command import command_line, exit_code, say, spare_cores
from benchmarks.results import json_text
from benchmarks.search_replay.comparison import CHECKPOINTS, compare, table
from benchmarks.search_replay.narrow import NARROW_FILE, load_narrow
from benchmarks.search_replay.recording import Recording, record, recordings, time_side_by_side
from benchmarks.search_replay.replay import Replayed
from generator.errors import NormforgeError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.noise import NoisyError
from generator.kernels.compile_pool import CompilePool
from generator.kernels.nvrtc import nvrtc_version
from generator.search.budget import Progress
from generator.studies.storage import open_storage
from generator.target import Target
from generator.tuner.choose_device import choose_target


def main(argv: list[str] | None = None) -> int:
    """Compare searches on a swept space, or sweep one. The exit code is 2 for bad input."""
    parser = command_line(__doc__, gpu="auto", device=0)
    parser.add_argument(
        "--recording",
        type=Path,
        action="append",
        metavar="FILE",
        help="a swept space (default: all in benchmarks/results); may be repeated",
    )
    parser.add_argument("--seeds", type=int, default=50, help="searches of each kind (default: 50)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="instead, sweep the space of --narrow on the GPU of this machine and write FILE",
    )
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="instead, time the best of each recording side by side again, and write that into it",
    )
    parser.add_argument("--narrow", type=Path, default=NARROW_FILE, help="what --record sweeps")
    args = parser.parse_args(argv)
    if args.record is not None:
        return _record(args)
    if args.side_by_side:
        return _time_side_by_side(args)
    if args.seeds < 1:
        raise NormforgeError("--seeds must be at least 1")
    sweeps = []
    for path in args.recording or recordings():
        recording = Recording.load(path)
        compared = compare(recording, args.seeds)
        if not args.json:
            print(table(recording, compared), end="\n\n")
        said = {"problem": str(recording.problem), **Replayed(recording).counts()}
        said |= {"optimum": recording.optimum, "facts": recording.facts}
        sweeps.append(said | {"searches": [asdict(row) for row in compared]})
    if args.json:
        print(json_text({"after": CHECKPOINTS, "sweeps": sweeps}))
    return 0


def _record(args: argparse.Namespace) -> int:
    """Sweep; the study lies beside the file, so that a killed sweep is resumed."""
    swept = load_narrow(args.narrow)
    target, measured = _on_gpu(args)

    def tell(event: Progress) -> None:
        if event.done % 200 == 0 or event.phase == "finals":
            best = f"best {event.best_us:.2f} us" if event.best_us else "no time yet"
            say(f"{event.phase} {event.done}/{event.total}, {best}")

    with measured, CompilePool(target.arch, spare_cores()) as pool:
        journal = args.record.with_name(args.record.name.split(".")[0] + ".journal")
        facts = {"gpu": measured.facts["name"], "driver": measured.facts["driver"]}
        facts["nvrtc"] = nvrtc_version()
        recording = record(
            swept, target, pool, measured, open_storage(journal), facts, on_progress=tell
        )
    recording.save(args.record)
    print(
        f"{args.record}: {len(recording.entries)} configs of {recording.problem} on {target.name}, "
        f"the best at {recording.optimum:.4f} x floor"
    )
    return 0


def _time_side_by_side(args: argparse.Namespace) -> int:
    """Time the best configs side by side. Each recording is written when it is done; the exit code
    is 1 where one was too noisy."""
    noisy = 0
    target, measured = _on_gpu(args)
    with measured, CompilePool(target.arch, spare_cores()) as pool:
        for path in args.recording or recordings():
            recording = Recording.load(path)
            if recording.gpu != target.name:
                raise NormforgeError(f"{path} is of {recording.gpu}; this GPU is {target.name}")
            try:
                timed = time_side_by_side(recording, pool, measured)
            except NoisyError as error:
                say(str(error))
                noisy += 1
                continue
            timed.save(path)
            print(f"{path}: the best of {len(timed.side_by_side)} is {timed.optimum:.4f} x floor")
    return 1 if noisy else 0


def _on_gpu(args: argparse.Namespace) -> tuple[Target, MeasuredEvaluator]:
    target, measured, sentence = choose_target(args.gpu, args.device)
    say(sentence)
    if measured is None:
        raise NormforgeError("this is measured: run it where the GPU is")
    return target, measured


if __name__ == "__main__":
    sys.exit(exit_code("search_replay", main))
