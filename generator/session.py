"""What the GPU worker does with a job: the only tuning code that runs with CUDA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from generator.measure import Timer
from generator.problem import Problem
from generator.result import Result
from generator.runtime.launch import LaunchError, LoadedKernel
from generator.runtime.plan import plan_launch
from generator.verify import Accuracy, Bench, Disturbance, check_accuracy, check_repeats, digest
from generator.worker import Candidate, Job
from generator.workload import (
    TORCH_DTYPE,
    Guarded,
    make_cancelling,
    make_inputs,
    make_reference,
)

SEARCH_ROUNDS = 15
FINAL_ROUNDS = 21
FINAL_BLOCKS = 3
SLOW = 1.6
"""A candidate this many times slower than the best is timed and not checked any further."""
# After these the context is gone, and with it the worker.
_REFUSED = (
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_IMAGE",
)


class Workload:
    """Inputs, reference and outputs of one problem on the device."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        self.problem = problem
        self.inputs = make_inputs(problem, device)
        self.cancelling = make_cancelling(problem, self.inputs)
        self.reference = make_reference(problem, self.inputs)
        self.dx = Guarded((problem.M, problem.N), TORCH_DTYPE[problem.dtype], device)
        self.dw = Guarded((problem.N,), TORCH_DTYPE[problem.weight_dtype], device)

    def floor(self) -> object:
        """The practical floor: the same three streams of memory."""
        return torch.add(self.inputs.x, self.inputs.dy, out=self.dx.tensor)

    def bench(self, candidate: Candidate) -> Bench:
        kernel = LoadedKernel(candidate.cubin, candidate.spec)
        launch = plan_launch(candidate.spec, self.problem.M)
        return Bench(kernel, self.problem, launch, self.dx, self.dw)


class Session:
    """One process's hold of one GPU. Keeps the workload of the problem it last saw."""

    def __init__(self, device: int) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device")
        torch.cuda.set_device(device)
        self.device = torch.device("cuda", device)
        self.timer = Timer(self.device)
        self.disturbance = Disturbance(self.device)
        self.facts = _facts(device)
        self._workload: Workload | None = None

    def workload(self, problem: Problem) -> Workload:
        if self._workload is None or self._workload.problem != problem:
            self._workload = None
            torch.cuda.empty_cache()
            self._workload = Workload(problem, self.device)
        return self._workload

    def handle(self, job: Job) -> tuple[Any, bool]:
        """The answer to a job, and whether this process must end after it."""
        workload = self.workload(job.problem)
        torch.cuda.synchronize()
        if job.kind == "interleave":
            return self._interleave(workload, job.candidates), False
        work: Callable[[Workload, Job], Result] = {
            "evaluate": self._evaluate,
            "ladder": self._ladder,
            "digest": self._digest,
        }[job.kind]
        try:
            result = work(workload, job)
            torch.cuda.synchronize()
            return result.to_json(), False
        except LaunchError as error:
            outcome = "launch_error" if error.code in _REFUSED else "crashed"
            return Result(outcome, note=str(error)).to_json(), outcome == "crashed"
        except torch.cuda.OutOfMemoryError as error:
            return Result("launch_error", note=_sentence(error)).to_json(), False
        except RuntimeError as error:
            return Result("crashed", note=_sentence(error)).to_json(), True

    def _evaluate(self, workload: Workload, job: Job) -> Result:
        bench = workload.bench(job.candidates[0])
        accuracy = check_accuracy(bench, workload.inputs, workload.reference)
        if accuracy.fault:
            return _wrong(accuracy)
        [(us, ratio)], floor_us = self.timer.against(
            workload.floor, [lambda: bench.run(workload.inputs)], SEARCH_ROUNDS
        )
        known = _accurate(accuracy) | {"us": us, "floor_us": floor_us, "ratio": ratio}
        if job.best_us is not None and us > SLOW * job.best_us:
            note = f"{us:.1f} us, the best has {job.best_us:.1f}"
            return Result.from_json(known | {"outcome": "slow", "note": note})
        fault = check_repeats(bench, workload.cancelling)
        return Result.from_json(known | _determinism(job.candidates[0], fault, ("20 runs",)))

    def _ladder(self, workload: Workload, job: Job) -> Result:
        candidate = job.candidates[0]
        bench = workload.bench(candidate)
        accuracy = check_accuracy(bench, workload.inputs, workload.reference)
        if accuracy.fault:
            return _wrong(accuracy)
        bits = digest(bench, workload.cancelling)
        fault = check_repeats(bench, workload.inputs)
        fault = fault or check_repeats(bench, workload.cancelling)
        fault = fault or check_repeats(bench, workload.cancelling, around=self.disturbance)
        checks = ("20 runs", "cancelling magnitudes", "busy GPU and thrashed L2")
        return Result.from_json(
            _accurate(accuracy)
            | {"extra": {"digest": bits}}
            | _determinism(candidate, fault, checks)
        )

    def _digest(self, workload: Workload, job: Job) -> Result:
        bench = workload.bench(job.candidates[0])
        return Result("ok", extra={"digest": digest(bench, workload.cancelling)})

    def _interleave(
        self, workload: Workload, candidates: tuple[Candidate, ...]
    ) -> list[tuple[float, float, float]]:
        benches = [workload.bench(candidate) for candidate in candidates]

        def operation(bench: Bench) -> Callable[[], None]:
            return lambda: bench.run(workload.inputs)

        operations = [workload.floor, *map(operation, benches)]
        times: list[list[float]] = [[] for _ in operations]
        for _ in range(FINAL_BLOCKS):
            for own, block in zip(times, self.timer.block(operations, FINAL_ROUNDS), strict=True):
                own += block
        floors = times[0]
        return [
            (
                median(own),
                median(floors),
                median(t / floor for t, floor in zip(own, floors, strict=True)),
            )
            for own in times[1:]
        ]


def _wrong(accuracy: Accuracy) -> Result:
    return Result(
        "wrong",
        error_dx=accuracy.error_dx,
        error_dw=accuracy.error_dw,
        note=accuracy.fault,
    )


def _accurate(accuracy: Accuracy) -> dict[str, Any]:
    return {
        "outcome": "ok",
        "error_dx": accuracy.error_dx,
        "error_dw": accuracy.error_dw,
        "checks": ("accuracy",),
    }


def _determinism(candidate: Candidate, fault: str, checks: tuple[str, ...]) -> dict[str, Any]:
    """Outcome, verdict and checks after runs were compared bit by bit."""
    if fault.startswith(("wrote", "left")):
        return {"outcome": "wrong", "note": fault}
    if fault:
        return {"outcome": "nondeterministic", "determinism": "refuted", "note": fault}
    if candidate.spec.determinism == "none":
        note = "not deterministic by construction, though these runs agreed"
        return {"outcome": "nondeterministic", "determinism": "unverified", "note": note}
    return {"determinism": "verified", "checks": ("accuracy", *checks)}


def _sentence(error: BaseException) -> str:
    return str(error).split("\n")[0][:300]


def _facts(device: int) -> dict[str, Any]:
    """Facts about the device for matching a target and for provenance."""
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(device)
    _, version = driver.cuDriverGetVersion()
    return {
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "compute_capability": [properties.major, properties.minor],
        "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        "driver": _driver_version(),
        "torch": torch.__version__,
    }


def _driver_version() -> str:
    """The kernel driver's version, from the file that the driver offers."""
    try:
        with Path("/proc/driver/nvidia/version").open() as file:
            words = file.readline().split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    except (OSError, StopIteration):
        return "unknown"
