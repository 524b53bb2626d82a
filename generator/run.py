"""One tuning run: every problem searched, its winner emitted."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from optuna.storages import BaseStorage

from generator.ahead import cached, compiling_ahead
from generator.compile import Compiled, compile_variant, nvrtc_version
from generator.compile_pool import CompilePool
from generator.crew import Crew, Gpu
from generator.driver import Driver, Watcher, compilers, search_here
from generator.emit import Emission, Entry, check_package, emit_package, read_forward_table
from generator.errors import NormforgeError
from generator.forward import ForwardVariant
from generator.forward_tune import forwards_to_compile, tune_forwards, unsettled
from generator.generic import compile_generics, first_choices, generic_variants
from generator.guard import running
from generator.measured import MeasuredEvaluator
from generator.plan import Ledger, Plan
from generator.problem import Problem
from generator.queue import open_queue
from generator.rehearse import RehearsingPredictor
from generator.store import StudyLog, open_storage
from generator.target import Target, find_target, match_device
from generator.variant import Variant, make_variant
from generator.winner import Winner
from generator.worker import NoGpuError

PACKAGE_NAME = "rmsnorm_backward"
_Opened = TypeVar("_Opened", Gpu, Crew)


@dataclass(frozen=True)
class Outcome:
    """What came out: winners (None where nothing may win) in the order of the problems, failures
    (why a problem has no answer from this run), and the emission, None when there was nothing to
    emit."""

    winners: tuple[tuple[Problem, Winner | None], ...]
    emission: Emission | None
    interrupted: bool
    failures: Mapping[Problem, str]


def choose_target(name: str, device: int) -> tuple[Target, MeasuredEvaluator | None, str]:
    """The target called `name` ("auto": the GPU of this machine), an evaluator when that very GPU
    is here, and a sentence that says what will happen."""
    target, gpu, sentence = _choose(name, lambda: Gpu(device), f"device {device}")
    return target, gpu.evaluator(target) if gpu else None, sentence


def choose_crew(name: str, devices: Sequence[int]) -> tuple[Target, Crew | None, str]:
    """The same for several GPUs of this machine, which are of one model."""
    return _choose(name, lambda: Crew(devices), f"devices {', '.join(map(str, devices))}")


def _choose(
    name: str, start: Callable[[], _Opened], where: str
) -> tuple[Target, _Opened | None, str]:
    if name != "auto":
        find_target(name)  # an unknown name is told at once, not after a worker has started
    opened = None
    if torch.version.cuda is not None:
        with suppress(NoGpuError):
            opened = start()
    facts = opened.facts if opened else None
    here = match_device(facts["name"], facts["sms"]) if facts else None
    if opened and here and name in ("auto", here.name):
        return here, opened, f"Measuring on {where}: {opened.facts['name']}."
    if opened:
        opened.close()
    if name == "auto" and facts is None:
        raise NormforgeError("--gpu auto found no CUDA GPU: name one, for example --gpu gb200")
    if name == "auto":
        raise NormforgeError(
            f"--gpu auto found a {facts and facts['name']}, which search_spaces/gpus.yaml does not "
            "know: add it there"
        )
    found = f"this machine has a {facts['name']}" if facts else "this machine has no CUDA GPU"
    sentence = (
        f"No {name} here ({found}): nothing is measured. Times are predicted from the "
        "compiled kernels, winners are executed on the CPU under many schedules, and every one is "
        "marked `predicted`."
    )
    return find_target(name), None, sentence


def check_problems(plan: Plan) -> None:
    """Raise NormforgeError, before anything is searched, for a problem that no config serves."""
    for problem in plan.problems:
        plan.space.sample(problem, plan.target, random.Random(0))


def tune(plan: Plan, workforce: MeasuredEvaluator | Crew | None, watcher: Watcher) -> Outcome:
    """Search every problem of the plan and emit the winners.

    workforce: who measures, None to predict. Finished problems of an earlier run with the same
    storage return at once. Ctrl-C ends the run after the trial under way and emits what has been
    found. With a shared storage any number of runs may do the same plan at the same time: each
    problem is searched and concluded by one of them, and all of them end with the same winners.
    """
    check_problems(plan)
    check_package(plan.out / PACKAGE_NAME, plan.target)
    interrupted = False
    with (
        running(plan.out, plan.shared) as stop,
        CompilePool(plan.target.arch, compilers(plan), compile=compile_variant) as pool,
    ):
        storage = open_storage(plan.where)
        queue = open_queue(plan.storage)
        ledger = Ledger(plan, queue)
        try:
            with compiling_ahead(foreseen(plan), plan.target.arch):
                if isinstance(workforce, Crew):
                    workforce.search(plan, ledger, stop, watcher)
                else:
                    evaluator = workforce or RehearsingPredictor(plan.target)
                    facts = workforce.facts if workforce else {}
                    driver = Driver(plan, pool, evaluator, facts, storage)
                    search_here(driver, ledger, stop, watcher)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            queue.close()
        winners = [(p, ledger.winners[p]) for p in plan.problems if p in ledger.winners]
        found = [winner for _, winner in winners if winner is not None]
        emission = emit(plan, found, storage, pool) if found else None
    return Outcome(tuple(winners), emission, interrupted, ledger.failures)


def foreseen(plan: Plan) -> list[Variant | ForwardVariant]:
    """The kernels that the package will need whatever the search finds, in the order in which it
    does. None for a predicted run, whose search leaves no core idle."""
    if not plan.devices:
        return []
    known = read_forward_table(plan.out / PACKAGE_NAME)
    shapes = unsettled(plan.problems, plan.target, plan.devices, known)
    generics = first_choices(generic_variants(plan.target))
    return [*generics, *forwards_to_compile(shapes, plan.target)]


def _processes() -> int:
    """Compiler processes: one core stays free for the search itself where there are several."""
    cores = len(os.sched_getaffinity(0))
    return cores if cores <= 2 else cores - 1


def emit(
    plan: Plan, winners: Sequence[Winner], storage: BaseStorage, pool: CompilePool[Variant]
) -> Emission:
    """Write the package with these winners and the generic kernels of their dtypes."""
    target = plan.target
    chosen = [make_variant(winner.config, winner.problem) for winner in winners]
    entries = [
        Entry(winner.problem, variant, compiled, winner.evidence, provenance(winner, storage))
        for winner, variant, compiled in zip(winners, chosen, _compile(chosen, pool), strict=True)
    ]
    generics = compile_generics(target, lambda variants: _compile(variants, pool))
    package = plan.out / PACKAGE_NAME
    forwards = tune_forwards(
        [winner.problem for winner in winners],
        target,
        plan.devices,
        known=read_forward_table(package),
        processes=_processes(),
        say=lambda line: print(line, file=sys.stderr),
    )
    return emit_package(entries, generics, target, package, forwards)


def _compile(variants: Sequence[Variant], pool: CompilePool[Variant]) -> list[Compiled]:
    """All of them. No process starts for what the cache has, which after a search is nearly all."""
    jobs = [(v, cached(v, pool.arch, pool.cache_folder) or pool.submit(v)) for v in variants]
    return [job if isinstance(job, Compiled) else pool.result(v, job) for v, job in jobs]


def provenance(winner: Winner, storage: BaseStorage) -> dict[str, Any]:
    """Everything a reader of the package may ask about where a winner comes from."""
    result = winner.result
    machine = StudyLog(storage, winner.study).machine
    fastest = winner.fastest_nondeterministic
    return {
        "gpu": machine.get("gpu", winner.target),
        "driver": machine.get("driver"),
        "nvrtc": machine.get("nvrtc", nvrtc_version()),
        "torch": machine.get("torch", torch.__version__),
        "python": machine.get("python", sys.version.split()[0]),
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
