"""One comparison: which shapes are still to be measured, and what goes into the results file."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from benchmarks import harness
from benchmarks.command import say
from benchmarks.goals import best_peer, ratio
from benchmarks.harness import Cell, Contender, Entrant, ShapeRun, check_gpu, kernel_path, sentence
from benchmarks.peers.peer import Gradients, Peer, arguments, installed_version
from benchmarks.prepare import any_inputs
from benchmarks.results import (
    OURS,
    Environment,
    Results,
    Row,
    cell_of,
    machine,
    module_facts,
    problem_of,
    write_text,
)
from generator.errors import NormforgeError
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.verify.determinism import RUNS
from generator.operations import OPERATIONS
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import RMSNORM_BACKWARD, Problem
from normforge.table import TABLE, Table

RESERVE_SECONDS = 40.0
"""Seconds kept for the code paths and the report; no shape is begun in them."""


FUNCTIONS = {RMSNORM_BACKWARD: "rmsnorm_backward", "layernorm_backward": "layer_norm_backward"}
"""The function of a package that is compared, by operation."""


@dataclass(frozen=True)
class Plan:
    """The plan of a comparison. problems: all of `operation`; tuned: the shapes for peers that tune
    themselves; until: the end, on the monotonic clock."""

    problems: tuple[Problem, ...]
    tuned: frozenset[Problem]
    peers: tuple[Peer, ...]
    until: float
    operation: str = RMSNORM_BACKWARD

    def peers_of(self, problem: Problem) -> list[Peer]:
        return [peer for peer in self.peers if not peer.tuned or problem in self.tuned]

    def remaining(self, results: Results) -> list[Problem]:
        """The shapes that were not yet measured together with all of their peers; those on which
        peers tune themselves come last, because they take longest."""
        missing = [
            problem
            for problem in self.problems
            if not results.has(problem, [peer.name for peer in self.peers_of(problem)])
        ]
        return sorted(missing, key=lambda problem: problem in self.tuned)

    def check_resumed(self, results: Results, missing: Mapping[str, str]) -> None:
        """Raise NormforgeError where a row is to be measured again without all of its peers.
        missing: why peers take no part."""
        for problem in self.remaining(results):
            before = (results.row(problem) or {"peers": {}})["peers"]
            if lost := sorted(before.keys() - {peer.name for peer in self.peers_of(problem)}):
                why = "".join(f" ({missing[name]})" for name in lost if name in missing)
                raise NormforgeError(
                    f"{problem} would be measured again, without {', '.join(lost)}{why}: let them "
                    "take part with --peers and --tuned, or leave out --resume"
                )


class Comparison:
    """The emitted module and the loaded peers on one GPU."""

    def __init__(
        self, plan: Plan, contenders: dict[str, Contender], module: ModuleType, timer: Timer
    ) -> None:
        # The package's public function, called as a training program calls it.
        backward = getattr(module, FUNCTIONS[plan.operation])
        ours = Contender(lambda inputs: partial(backward, *arguments(inputs)))
        self.plan, self.module, self.timer = plan, module, timer
        self.contenders = {OURS: ours, **contenders}

    def measure(self, results: Results) -> int:
        """Measure what is missing and write it shape by shape, as long as there is time; how many
        shapes are left."""
        todo = self.plan.remaining(results)
        longest = {False: 0.0, True: 0.0}
        for index, problem in enumerate(todo):
            started = time.monotonic()
            slow = problem in self.plan.tuned
            if started + longest[slow] > self.plan.until - RESERVE_SECONDS:
                return len(todo) - index
            row = self.measure_shape(problem)
            results.put(row)
            results.sort(self.plan.problems)
            results.write()
            seconds = time.monotonic() - started
            longest[slow] = max(longest[slow], seconds)
            say(f"[{index + 1}/{len(todo)}] {progress(row)}  {seconds:.1f} s")
        return 0

    def measure_shape(self, problem: Problem) -> Row:
        """Measure one row of the results file, without the paths."""
        names = [OURS, *(peer.name for peer in self.plan.peers_of(problem))]
        contenders = {name: self.contenders[name] for name in names}
        mixed = problem.weight_dtype != problem.dtype
        run = ShapeRun(problem, contenders, self.timer, self._plain_weight if mixed else None)
        with torch.no_grad():
            add_us = run.run()
        torch.cuda.empty_cache()
        facts = self.module.explain(problem.M, problem.N, problem.dtype, problem.weight_dtype)
        return make_row(problem, add_us, run.cells, facts, run.beside_us) | {"sets": run.sets}

    def _plain_weight(self, inputs: Inputs) -> Callable[[], Gradients]:
        """Time ours on the same inputs, with the weight in x's dtype."""
        return self.contenders[OURS].bind(replace(inputs, weight=inputs.weight.to(inputs.x.dtype)))

    def record_paths(self, results: Results) -> None:
        """Ask the profiler, once per implementation, N and dtypes, ours once per strategy, too,
        which kernels run. This comes last, because a profiler that was once on can slow later
        launches down."""
        groups: dict[tuple[str, str, int, str, str], list[Row]] = {}
        for row in results.rows:
            kind = row["N"], row["dtype"], row["weight_dtype"]
            for name in self.contenders:
                cell = cell_of(row, name)
                if cell and cell["us"] is not None and cell["path"] is None:
                    strategy = row["strategy"] if name == OURS else ""
                    groups.setdefault((name, strategy, *kind), []).append(row)
        for (name, *_), rows in groups.items():
            if time.monotonic() < self.plan.until:
                path = self._path(name, problem_of(rows[0], results.operation))
                for row in rows:
                    set_path(row, name, path)
        results.write()

    def _path(self, name: str, problem: Problem) -> str:
        try:
            with torch.no_grad():
                inputs = any_inputs(problem, self.timer.device)
                return kernel_path(Entrant(self.contenders[name], inputs).run)
        except Exception as error:
            check_gpu(name, problem)
            return f"not seen ({sentence(error)})"


def load_module(folder: Path) -> ModuleType:
    """Import an emitted package from its folder. Raises NormforgeError when there is none."""
    name = "compared_module"
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        name, init, submodule_search_locations=[str(folder)]
    )
    if not (folder / TABLE).is_file() or spec is None or spec.loader is None:
        raise NormforgeError(f"{folder} is no emitted package: --module names its folder")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise NormforgeError(f"{folder} cannot be imported: {sentence(error)}") from error
    return module


def operation_of_package(folder: Path, asked: str | None = None) -> str:
    """The operation of a package's kernels. Raises NormforgeError when it is not the one that was
    asked for."""
    try:
        found = next(Table.load(folder).kernels()).spec.operation
    except (OSError, ValueError, StopIteration) as error:
        raise NormforgeError(f"{folder / TABLE} cannot be read: {sentence(error)}") from error
    if asked not in (None, found):
        raise NormforgeError(f"{folder} is a package of {found}, not of {asked}")
    if found not in OPERATIONS:
        raise NormforgeError(f"{folder} is a package of {found}, which is unknown here")
    return found


def load_peers(wanted: Sequence[Peer], timer: Timer) -> tuple[dict[str, Contender], dict[str, str]]:
    """Load the peers. Returns those that are there by name, and why the others are not."""
    found: dict[str, Contender] = {}
    missing: dict[str, str] = {}
    for peer in wanted:
        reason = peer.missing()
        if not reason:
            try:
                found[peer.name] = Contender(peer.load(timer), peer.overwrites_dy)
            except Exception as error:
                reason = sentence(error)
        if reason:
            missing[peer.name] = reason
    return found, missing


def describe(
    facts: dict[str, Any],
    timer: Timer,
    peers: Sequence[Peer],
    missing: dict[str, str],
    module: Path,
    operation: str,
) -> Environment:
    """The conditions of the rows. facts: what the GPU session says of the device."""
    return {
        "operation": operation,
        **machine(facts),
        "triton": installed_version("triton"),
        "python": sys.version.split()[0],
        "peers": {peer.name: peer.versions() for peer in peers},
        "missing": missing,
        "module": module_facts(module),
        "harness": {
            **timer.facts(),
            "blocks": harness.BLOCKS,
            "rounds": harness.ROUNDS,
            "host_calls": harness.HOST_CALLS,
            "determinism_runs": RUNS,
        },
    }


def make_row(
    problem: Problem,
    add_us: float,
    cells: dict[str, Cell],
    facts: dict[str, Any],
    plain_weight_us: float | None = None,
) -> Row:
    """Make one row of the results file. facts: what the module's `explain` says about the shape;
    plain_weight_us: of ours with a weight of x's dtype, where the problem's has another."""
    return {
        "M": problem.M,
        "N": problem.N,
        "dtype": problem.dtype,
        "weight_dtype": problem.weight_dtype,
        "add_us": add_us,
        **{f"{OURS}_{key}": value for key, value in asdict(cells[OURS]).items()},
        "plain_weight_us": plain_weight_us,
        "strategy": facts.get("strategy", "none"),
        "kernel": facts.get("kernel"),
        "how": facts["how"],
        "peers": {name: asdict(cell) for name, cell in cells.items() if name != OURS},
    }


def set_path(row: Row, name: str, path: str) -> None:
    if name == OURS:
        row["ours_path"] = path
    else:
        row["peers"][name]["path"] = path


def progress(row: Row) -> str:
    """A row in one line."""
    best = best_peer(row)
    ours = f"{row['ours_us']:.1f} us ({ratio(row):.2f})" if row["ours_us"] else row["ours_reason"]
    peer = f"{best[0]} {best[1]:.1f} us ({best[1] / row['add_us']:.2f})" if best else "none"
    return (
        f"{row['M']}x{row['N']}:{row['dtype']}  add {row['add_us']:.1f} us  ours {ours}  "
        f"best peer {peer}"
    )


def write_page(results: Results) -> None:
    """Write the page and the plot beside the results file."""
    from benchmarks.report import markdown, plot

    write_text(results.path.with_suffix(".md"), markdown(results.environment, results.rows))
    say(plot(results.environment, results.rows, results.path.with_suffix(".svg")))
