"""The GPU of this machine, kernels on it, and times of operations that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.results import Environment, machine
from generator.errors import NormforgeError
from generator.evaluate.gpu.protocol import Candidate, Job, WorkerLostError
from generator.evaluate.gpu.rotation import FLUSH, Operation
from generator.evaluate.gpu.session import Session, device_facts
from generator.evaluate.gpu.supervisor import Supervisor
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.gpu.workload import Workload
from generator.evaluate.verify.bench import Bench
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.geometry import Config
from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.result import Result
from generator.target import Target, match_device
from normforge.api import Package
from normforge.table import TABLE

BLOCKS, ROUNDS = 3, 15
"""The number of blocks, of one CUDA graph each, in which operations take turns, and of rounds in a
block."""


def check_cuda() -> None:
    """Raise NormforgeError where PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        raise NormforgeError("this needs a CUDA GPU, and PyTorch sees none")


def this_machine(device: int = 0) -> Environment:
    """Return what a results file says about a GPU of this machine. Raises NormforgeError without
    one."""
    check_cuda()
    return machine(device_facts(device))


def target_of(facts: Mapping[str, Any], gpu: str = "auto") -> Target:
    """The target of a device with its facts. Raises NormforgeError where it is not `gpu`."""
    target = match_device(facts["name"], facts["sms"])
    if target is None:
        raise NormforgeError(f"search_spaces/gpus.yaml has no {facts['name']}: add it there")
    if gpu not in ("auto", target.name):
        raise NormforgeError(f"no --gpu {gpu}: this machine has a {facts['name']}; leave --gpu out")
    return target


def open_session(device: int = 0, condition: str = FLUSH) -> Session:
    """A session on a GPU of this machine. Raises NormforgeError where there is none."""
    check_cuda()
    try:
        return Session(device, condition)
    except RuntimeError as error:
        raise NormforgeError(f"device {device} cannot be used: {error}") from error


def open_gpu(gpu: str = "auto", device: int = 0) -> tuple[Session, Target]:
    """Open a session with its target. Raises NormforgeError where that is another one than
    `gpu`."""
    session = open_session(device)
    return session, target_of(session.facts, gpu)


def package_in(folder: Path) -> Package:
    """The package of a folder. Raises NormforgeError where there is none."""
    if not (folder / TABLE).exists():
        raise NormforgeError(f"{folder} is no package: it has no {TABLE}")
    return Package(folder)


def bench_of(workload: Workload, config: Config, target: Target) -> Bench:
    """The kernel of a config, compiled and loaded. Raises NormforgeError where it does not
    compile."""
    variant = make_variant(config, workload.problem)
    compiled = compile_variant(variant, target.arch)
    if compiled.error:
        raise NormforgeError(f"{variant} does not compile: {compiled.error.splitlines()[0]}")
    return workload.bench(Candidate(compiled.cubin, variant.spec(target.sms)))


def cubin_of(problem: Problem, config: Config, target: Target) -> str:
    """The digest of a config's machine code, which the cache has once it was compiled."""
    return compile_variant(make_variant(config, problem), target.arch).digest


def evaluate(
    gpu: Supervisor, problem: Problem, candidate: Candidate, kind: str = "evaluate"
) -> Result:
    """The worker's result for a candidate, or the result that its loss is. kind: of the job."""
    try:
        result = gpu.call(Job(kind, problem, (candidate,))).result
    except WorkerLostError as lost:
        return Result(lost.outcome, note=lost.note)
    assert result is not None
    return result


def take_turns(
    timer: Timer,
    operations: Sequence[Operation],
    blocks: int = BLOCKS,
    rounds: int = ROUNDS,
    before: Callable[[], None] = lambda: None,
) -> list[list[float]]:
    """Microseconds of each operation in all rounds of all blocks. before: called before a block."""
    times: list[list[float]] = [[] for _ in operations]
    for _ in range(blocks):
        before()
        for own, block in zip(times, timer.block(operations, rounds), strict=True):
            own += block
    return times


def paired_ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """The median of the ratios within a round."""
    return median(map(truediv, times, reference))
