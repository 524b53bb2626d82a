"""One tuning run: every problem searched, its winner emitted."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generator.budget import Budget, Progress
from generator.compile import CompilePool, compile_variant, nvrtc_version
from generator.emit import Emission, Entry, check_package, emit_package
from generator.errors import NormforgeError
from generator.evaluator import Evaluator, refuse
from generator.generic import MANY_ROWS, generic_variants
from generator.problem import Problem
from generator.rehearse import RehearsingPredictor
from generator.render import TEMPLATES
from generator.search import search_problem
from generator.space import Space
from generator.store import JOURNAL_NAME, open_storage
from generator.target import Target, find_target, match_device
from generator.variant import make_variant
from generator.winner import Winner
from generator.worker import GpuWorker, MeasuredEvaluator

PACKAGE_NAME = "rmsnorm_backward"
TRIALS = {"measured": 400, "predicted": 64}
"""Trials of one problem unless the caller says otherwise."""
FINALISTS = 8


@dataclass(frozen=True)
class Plan:
    """What to do. trials: of each problem; seconds: of search in the whole run, in equal shares for
    the problems, None for no limit; storage: a database URL or None for the journal in `out`."""

    target: Target
    problems: tuple[Problem, ...]
    space: Space
    out: Path
    trials: int
    seconds: float | None = None
    storage: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """What came out: winners (None where nothing may win) in the order of the problems, and the
    emission, None when there was nothing to emit."""

    winners: tuple[tuple[Problem, Winner | None], ...]
    emission: Emission | None
    interrupted: bool


def revision() -> str:
    """Eight hex digits over all templates and the compiler's version: results of kernels that are
    written or compiled differently never share a study."""
    digest = hashlib.sha256(nvrtc_version().encode())
    for path in sorted(TEMPLATES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def choose_target(name: str, device: int) -> tuple[Target, MeasuredEvaluator | None, str]:
    """The target called `name` ("auto": the GPU of this machine), an evaluator when that very GPU
    is here, and a sentence that says what will happen."""
    if name != "auto":
        find_target(name)  # an unknown name is told at once, not after a worker has started
    facts = _device_facts(device)
    here = match_device(facts["name"], facts["sms"]) if facts else None
    if name == "auto":
        if facts is None:
            raise NormforgeError("--gpu auto found no CUDA GPU: name one, for example --gpu gb200")
        if here is None:
            raise NormforgeError(
                f"--gpu auto found a {facts['name']}, which search_spaces/gpus.yaml does not know: "
                "add it there"
            )
        name = here.name
    target = find_target(name)
    if here is not None and here.name == name:
        evaluator = MeasuredEvaluator(here, device)
        return here, evaluator, f"Measuring on device {device}, {evaluator.facts['name']}."
    found = f"this machine has a {facts['name']}" if facts else "this machine has no CUDA GPU"
    return (
        target,
        None,
        f"No {target.name} here ({found}): nothing is measured. Times are predicted from the "
        "compiled kernels, winners are executed on the CPU under many schedules, and every one is "
        "marked `predicted`.",
    )


def _device_facts(device: int) -> dict[str, Any] | None:
    """Facts about the GPU, asked in a process of its own; None without one."""
    if torch.version.cuda is None:
        return None
    worker = GpuWorker(device)
    try:
        return worker.ready()
    except NormforgeError:
        return None
    finally:
        worker.kill()


def check_problems(plan: Plan) -> None:
    """Raise NormforgeError, before anything is searched, for a problem that no config serves."""
    for problem in plan.problems:
        plan.space.sample(problem, plan.target, random.Random(0))


def tune(
    plan: Plan,
    measured: MeasuredEvaluator | None,
    on_progress: Callable[[int, Progress], None],
    on_winner: Callable[[int, Problem, Winner | None], None],
) -> Outcome:
    """Search every problem of the plan and emit the winners.

    Finished problems of an earlier run with the same storage return at once. Ctrl-C ends the run
    after the trial under way and emits what has been found.
    """
    check_problems(plan)
    package = plan.out / PACKAGE_NAME
    check_package(package, plan.target)
    storage = open_storage(plan.storage or plan.out / JOURNAL_NAME)
    evaluator: Evaluator = measured or RehearsingPredictor(plan.target)
    name = revision()
    winners: list[tuple[Problem, Winner | None]] = []
    interrupted = False
    share = plan.seconds / len(plan.problems) if plan.seconds else None
    with CompilePool(plan.target.arch, _processes()) as pool:
        for index, problem in enumerate(plan.problems):
            try:
                winner = search_problem(
                    problem,
                    plan.target,
                    plan.space,
                    pool,
                    evaluator,
                    storage,
                    Budget(plan.trials, share, FINALISTS),
                    revision=name,
                    seed=plan.seed,
                    on_progress=lambda event, index=index: on_progress(index, event),  # type: ignore[misc]
                )
            except KeyboardInterrupt:
                interrupted = True
                break
            winners.append((problem, winner))
            on_winner(index, problem, winner)
    found = [winner for _, winner in winners if winner is not None]
    emission = emit(plan, found, measured) if found else None
    return Outcome(tuple(winners), emission, interrupted)


def _processes() -> int:
    """Compiler processes: one core stays free for the search itself where there are several."""
    cores = len(os.sched_getaffinity(0))
    return cores if cores <= 2 else cores - 1


def emit(plan: Plan, winners: Sequence[Winner], measured: MeasuredEvaluator | None) -> Emission:
    """Write the package with these winners and the generic kernels of their dtypes."""
    target = plan.target
    entries = []
    for winner in winners:
        variant = make_variant(winner.config, winner.problem)
        compiled = compile_variant(variant, target.arch)
        entries.append(
            Entry(winner.problem, variant, compiled, winner.evidence, provenance(winner, measured))
        )
    generics = []
    for variant in generic_variants(target):
        compiled = compile_variant(variant, target.arch)
        many_rows = Problem(MANY_ROWS, variant.N, variant.dtype, variant.weight_dtype)
        if refuse(variant, compiled, many_rows, target) is None:
            generics.append((variant, compiled))
    return emit_package(entries, generics, target, plan.out / PACKAGE_NAME)


def provenance(winner: Winner, measured: MeasuredEvaluator | None) -> dict[str, Any]:
    """Everything a reader of the package may ask about where a winner comes from."""
    result = winner.result
    facts = measured.facts if measured else {}
    fastest = winner.fastest_nondeterministic
    return {
        "gpu": facts.get("name", f"{winner.target} (absent)"),
        "driver": facts.get("driver"),
        "nvrtc": nvrtc_version(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "space": winner.space_hash,
        "study": winner.study,
        "date": winner.date,
        "trials": winner.trials,
        "outcomes": dict(winner.counts),
        "us": result.us,
        "floor_us": result.floor_us,
        "ratio": result.ratio,
        "error_dx": result.error_dx,
        "error_dw": result.error_dw,
        "verified": result.determinism,
        "checks": list(result.checks),
        "note": result.note,
        "tie": [{"variant": f.variant, "us": f.us, "ratio": f.ratio} for f in winner.tied],
        "fastest_nondeterministic": (
            {"variant": fastest.variant, "us": fastest.us, "ratio": fastest.ratio}
            if fastest
            else None
        ),
        "price_of_determinism": winner.price_of_determinism,
        "reason": winner.reason,
    }
