"""Compare the values of one knob: the best configs of a study with each of them, side by side.

    python -m benchmarks.knob arrival --shapes 4096x256:bf16,4096x4096:bf16 --out arrival.json

For every shape the fastest deterministic configs of its studies for which the knob has at least two
legal values are compiled with each of them and checked against float64. Instead of a knob,
`in_blocks` sets kernels that add up rows in blocks beside the same that add one after another.
Those that may run are timed in one block with the floor, `torch.add(x, dy, out=dx)`. The file is
written after each shape.
Exit code: 1 where a shape has no times, 2 for bad input or without the GPU of the studies.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.command import command_line, exit_code, say, spare_cores
from benchmarks.gpu import evaluate, paired_ratio, target_of
from benchmarks.results import machine, write_json
from generator.errors import NormforgeError, ProblemError
from generator.evaluate.evaluator import Pool
from generator.evaluate.gpu.protocol import Candidate, Job, WorkerLostError
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.compile_pool import CompilePool
from generator.kernels.geometry import Config
from generator.kernels.resource_gate import refuse
from generator.kernels.variant import Variant, make_variant
from generator.paths import GENERATED
from generator.problem import Problem
from generator.shape_lists import load_problems
from generator.space.load import load_space
from generator.space.space import Space
from generator.studies.reader import Study, read_studies
from generator.target import Target

BLOCKS = "in_blocks"
"""The field of a variant that can be compared like a knob."""
Family = Mapping[int | str, Variant]
"""One config with each value of the knob, by the value."""


def family_of(space: Space, knob: str, config: Config, problem: Problem, target: Target) -> Family:
    """The config with each legal value of the knob."""
    if knob == BLOCKS:
        if space.reject(config, problem, target):
            return {}
        blocked = make_variant(config, problem)
        return {True: blocked, False: replace(blocked, in_blocks=False)}
    (values,) = [each.choices for each in space.knobs if each.name == knob]
    found: dict[int | str, Variant] = {}
    for value in values:
        try:
            changed = space.normalize({**config, knob: value}, problem, target)
        except NormforgeError:  # a value that the space no longer has
            break
        if changed[knob] == value and not space.reject(changed, problem, target):
            found[value] = make_variant(changed, problem)
    return found


def families(
    space: Space, knob: str, studies: Iterable[Study], problem: Problem, target: Target, count: int
) -> list[Family]:
    """The fastest `count` configs that may win, each with the legal values of the knob."""
    place = (problem, target.name, target.sms, "measured")
    own = [s for s in studies if (s.problem, s.gpu, s.sms, s.evidence) == place]
    ranked = sorted((record for study in own for record in study.ranked), key=lambda r: r.ratio)
    found: list[Family] = []
    names = {each.name for each in space.knobs}
    for record in ranked:
        if record.config.keys() != names:
            continue  # it is of another space, whose open knobs were not measured
        family = family_of(space, knob, record.config, problem, target)
        if len(family) > 1 and family not in found:
            found.append(family)
        if len(found) == count:
            break
    return found


def measure(
    gpu: Supervisor, pool: Pool, problem: Problem, target: Target, knob: str, family: Family
) -> list[dict[str, Any]]:
    """Rows of one config: `value` of the knob with µs, the floor's in the same block and the ratio
    (medians over the rounds, of the ratio within a round), or why there are none."""
    futures = {value: pool.submit(variant) for value, variant in family.items()}
    rows: dict[int | str, dict[str, Any]] = {}
    runnable: dict[int | str, Candidate] = {}
    for value, variant in family.items():
        compiled = pool.result(variant, futures[value])
        rest = {name: each for name, each in variant.config.items() if name != knob}
        rows[value] = {"shape": str(problem), "config": rest, "value": value}
        result = refuse(variant, compiled, problem, target)
        candidate = Candidate(compiled.cubin, variant.spec(target.sms))
        if result is None:
            result = evaluate(gpu, problem, candidate)
        if result.outcome == "ok":
            runnable[value] = candidate
        else:
            rows[value]["fault"] = f"{result.outcome}: {result.note}"
    if runnable:
        try:
            block = gpu.call(Job("interleave", problem, tuple(runnable.values()))).block or []
        except WorkerLostError as lost:
            for value in runnable:
                rows[value]["fault"] = f"{lost.outcome}: {lost.note}"
        else:
            for value, times in zip(runnable, block[1:], strict=True):
                ratio = paired_ratio(times, block[0])
                rows[value] |= {"us": round(median(times), 3), "ratio": round(ratio, 4)}
                rows[value]["floor_us"] = round(median(block[0]), 3)
    return list(rows.values())


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line for each row."""
    return "\n".join(
        f"  {row['value']!s:12}"
        + (f"{row['us']:9.2f} us {row['ratio']:7.3f}" if "us" in row else f" {row['fault']}")
        for row in rows
    )


def run(args: argparse.Namespace) -> int:
    """Measure all problems; the exit code. Raises NormforgeError."""
    if args.configs < 1:
        raise NormforgeError(f"--configs {args.configs}: at least 1 config of a shape is timed")
    space = load_space()
    names = [knob.name for knob in space.knobs]
    if args.knob not in (*names, BLOCKS):
        raise NormforgeError(f"the space has no knob '{args.knob}', but {', '.join(names)}")
    problems = load_problems(args.shapes)
    rows: list[dict[str, Any]] = []
    timed = set()
    with closing(Supervisor(0)) as gpu:
        target = target_of(gpu.facts, args.gpu)
        studies = read_studies(args.studies or GENERATED / target.name)
        with CompilePool(target.arch, spare_cores()) as pool:
            for problem in problems:
                found = families(space, args.knob, studies, problem, target, args.configs)
                if not found:
                    say(f"{problem}: no measured config has two values of {args.knob}")
                for family in found:
                    try:
                        own = measure(gpu, pool, problem, target, args.knob, family)
                    except ProblemError as error:
                        say(str(error))
                        break
                    rows += own
                    print(f"{problem} {next(iter(family.values()))}")
                    print(table(own))
                    if any("us" in row for row in own):
                        timed.add(problem)
                document = {
                    "environment": machine(gpu.facts, timed=True),
                    "knob": args.knob,
                    "rows": rows,
                }
                write_json(args.out, document)
    return 0 if len(timed) == len(problems) else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "shapes", "out", gpu="auto")
    parser.add_argument("knob", help=f"of search_spaces/rmsnorm_backward.yaml, or {BLOCKS}")
    parser.add_argument("--configs", type=int, default=3, help="of each shape")
    parser.add_argument("--studies", help="a folder or a URL; generated/<gpu> by default")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
