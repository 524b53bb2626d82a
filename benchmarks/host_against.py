"""Host time of today's entry points beside those of a package that stands alone, in one process.

    python -m benchmarks.host_against /tmp/before/rmsnorm_backward --out against.json

`tune.py export --standalone` in another tree writes such a package. It may be of any version: older
ones have a copy of the library as well. Ours is that of the same GPU, by its name or as `normforge`
chooses it (`--by name`, `--by gpu`). Calls of both take turns in short batches, in an order that
changes, because a host's times drift by far more than they differ: a difference is the median of
those of neighbouring batches.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.command import command_line, exit_code, say
from benchmarks.gpu import check_cuda, this_machine
from benchmarks.host_time import Calls, entry_points, layer_norm_calls
from benchmarks.results import module_facts, show_json
from generator.errors import NormforgeError
from generator.operations import operation_of
from generator.paths import results_of
from generator.problem import RMSNORM_BACKWARD, Problem
from normforge.api import Package
from normforge.frontends.layer_norm import LayerNormPackage
from normforge.packages import Chosen

BATCH = 40
OPERATORS = ("rms_norm", "add_rms_norm", "rms_norm_backward", "layer_norm_backward")


def load(folder: Path) -> Any:
    """The functions of a package that stands alone. Raises NormforgeError."""
    name = f"before_{abs(hash(folder))}"
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    try:
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module._package
    except (ImportError, OSError, ValueError, AttributeError) as error:
        raise NormforgeError(f"{folder} is no package that stands alone ({error})") from error


class Side:
    """One of two packages. Its operators take the name of a package, whether or not those of
    its version did: at the same cost."""

    def __init__(self, package: Any) -> None:
        self._package, self.name = package, getattr(package, "name", "")
        there = [name for name in OPERATORS if hasattr(package.ops, name)]
        self.ops = SimpleNamespace(**{name: _named(getattr(package.ops, name)) for name in there})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._package, name)


def _named(operator: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]
    there = "package" in names
    known = names.index("package") if there else len(names)
    place = known if there or "mean" not in names else names.index("mean")
    rest = place if there else place + 1
    return lambda *given: operator(*given[:place], *given[rest:])


def compare(
    before: Calls, ours: Calls, installed: Callable[[int, str], Any], seconds: float
) -> dict[str, dict[str, float]]:
    """Microseconds of each call before, and by how much ours differ. installed: a block in which
    PyTorch's calls of that name go to the first or the second package."""
    found = {}
    for name in before.keys() & ours.keys():
        calls, times = (before[name], ours[name]), ([], [])  # type: ignore[var-annotated]

        def batch(which: int, name: str = name, calls: Any = calls) -> float:
            with installed(which, name):
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                for _ in range(BATCH):
                    calls[which]()
                return (time.perf_counter_ns() - start) / BATCH / 1e3

        batch(0), batch(1)
        gc.collect()
        gc.disable()
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(times[0]) % 2:
            for which in (0, 1) if len(times[0]) % 2 else (1, 0):
                times[which].append(batch(which))
        gc.enable()
        difference = median(b - a for a, b in zip(*times, strict=True))
        found[name] = {"before": round(median(times[0]), 2), "difference": round(difference, 2)}
        say(f"{name}: {found[name]}")
    return dict(sorted(found.items()))


def run(folder: Path, by: str, problem: Problem, seconds: float) -> dict[str, Any]:
    """The document. by: `name` or `gpu`, as on the command line."""
    before = Side(load(folder))
    of: Any = Chosen(problem.operation)
    if by == "name":
        of = results_of(before.table.target["name"]) / problem.operation
    inputs = operation_of(problem).make_inputs(problem, torch.device("cuda", 0))
    rms = problem.operation == RMSNORM_BACKWARD
    ours = Side((Package if rms else LayerNormPackage)(of, "ours"))
    lines: Any = entry_points if rms else layer_norm_calls

    def installed(which: int, name: str) -> Any:
        return (before, ours)[which].installed() if name.startswith("install()") else nullcontext()

    found = compare(lines(before, inputs), lines(ours, inputs), installed, seconds)
    if rms:
        before.use_native(), ours.use_native()
        native = compare(lines(before, inputs), lines(ours, inputs), installed, seconds)
        found |= {f"{name}, native": times for name, times in native.items()}
    table = module_facts(ours.folder)["digest"]
    same = table == module_facts(folder)["digest"]
    return {"shape": str(problem), "by": by, "same table": same, **this_machine(), "us": found}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, op=RMSNORM_BACKWARD, out=None, seconds=1.2)
    parser.add_argument("package", type=Path, help="folder of the package beside ours")
    parser.add_argument("--by", choices=("name", "gpu"), default="gpu")
    parser.add_argument("--shape", default="4096x256:bf16")
    args = parser.parse_args(argv)

    def print_document() -> int:
        check_cuda()
        problem = Problem.parse(args.shape, args.op)
        document = run(args.package.resolve(), args.by, problem, args.seconds)
        show_json(document, args.out)
        return 0

    return exit_code(__file__, print_document)


if __name__ == "__main__":
    sys.exit(main())
