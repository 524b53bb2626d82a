"""The jobs of the GPU worker. All CUDA of a tuning run is in this process: in this file,
workload.py, timer.py, l2_flush.py, verify/, and the operations and launches that these call."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from generator.evaluate.gpu.noise import SEARCH_PAUSES, collect
from generator.evaluate.gpu.protocol import Answer, Candidate, Job, NoGpuError
from generator.evaluate.gpu.rotation import FLUSH, Timed
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.gpu.workload import Workload
from generator.evaluate.verify.accuracy import Accuracy, check_accuracy
from generator.evaluate.verify.batch_invariance import check_batch_invariance
from generator.evaluate.verify.bench import LEFT_CHANGED, WROTE_OUTSIDE, Bench
from generator.evaluate.verify.determinism import (
    RUNS,
    Disturbance,
    check_call_options,
    check_repeats,
    digest,
)
from generator.evaluate.verify.seeded import bits_of
from generator.problem import Problem
from generator.result import Result
from normforge.launch.driver import LaunchError
from normforge.launch.loaded_kernel import LoadedKernel

SEARCH_ROUNDS = 15
FINAL_ROUNDS = 21
SLOW = 1.6
"""A candidate this many times slower than the best is timed and not checked any further."""
# The driver said no and nothing ran. After any other error the context is gone, and the worker.
_REFUSED = (
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_INVALID_IMAGE",
)


class Session:
    """One process's hold of one GPU. Keeps the workload of the problem it last saw."""

    def __init__(self, device: int, condition: str = FLUSH) -> None:
        """condition: of all times, one of rotation.CONDITIONS, unless a job names another."""
        if not torch.cuda.is_available():
            raise NoGpuError("PyTorch sees no CUDA device")
        torch.cuda.set_device(device)
        self.device = torch.device("cuda", device)
        self.timer = Timer(self.device, condition=condition)
        self._timers = {condition: self.timer}
        self.disturbance = Disturbance(self.device)
        self.facts = {**device_facts(device), **self.timer.facts()}
        self._workload: Workload | None = None

    def workload(self, problem: Problem) -> Workload:
        kept = self._workload
        if kept is None or kept.problem != problem:
            kept = self._workload = None
            torch.cuda.empty_cache()
            kept = self._workload = Workload(problem, self.device)
        return kept

    def handle(self, job: Job) -> Answer:
        """The answer to a job; whatever a candidate does is part of it."""
        try:
            workload = self.workload(job.problem)
            torch.cuda.synchronize()
        except RuntimeError as error:
            short = _short_of_memory(error)
            return Answer(error=_sentence(error), last=True, short_of_memory=short)
        work: dict[str, Callable[[Workload, Job], Answer]] = {
            "evaluate": self._evaluate,
            "accuracy": self._accuracy,
            "determinism": self._determinism,
            "recheck": self._recheck,
            "digest": self._digest,
            "interleave": self._interleave,
            "probe": self._probe,
        }
        try:
            answer = work[job.kind](workload, job)
            torch.cuda.synchronize()
            return answer
        except RuntimeError as error:  # LaunchError and PyTorch's own are of this kind
            note = _sentence(error)
            if _short_of_memory(error):
                return Answer(Result("launch_error", note=note), last=True, short_of_memory=True)
            if isinstance(error, LaunchError) and error.code in _REFUSED:
                return Answer(Result("launch_error", note=note))
            return Answer(Result("crashed", note=note), last=True)

    def _evaluate(self, workload: Workload, job: Job) -> Answer:
        bench = workload.bench(job.candidates[0])
        accuracy = check_accuracy(bench, workload.inputs, workload.expected)
        if accuracy.fault:
            return Answer(_accuracy_result(accuracy))
        operations = self._operations(workload, bench)
        timing = collect(
            lambda: self.timer.block(operations, SEARCH_ROUNDS),
            1,
            job.floor_us,
            SEARCH_PAUSES,
            time.sleep,
        )
        result = replace(_accuracy_result(accuracy), **timing.fields(workload.floor_bytes))
        us = timing.us[0]
        # Noise makes anything slow.
        if job.best_us is not None and us > SLOW * job.best_us and not timing.fault:
            note = f"{us:.1f} us, the best has {job.best_us:.1f}"
            return Answer(replace(result, outcome="slow", note=note))
        fault = check_repeats(bench, workload.cancelling)
        return Answer(_determinism_result(result, job.candidates[0], fault, (f"{RUNS} runs",)))

    def _accuracy(self, workload: Workload, job: Job) -> Answer:
        bench = workload.bench(job.candidates[0])
        return Answer(_accuracy_result(check_accuracy(bench, workload.inputs, workload.expected)))

    def _determinism(self, workload: Workload, job: Job) -> Answer:
        candidate = job.candidates[0]
        bench = workload.bench(candidate)
        result = _accuracy_result(check_accuracy(bench, workload.inputs, workload.expected))
        if result.outcome != "ok":
            return Answer(result)
        bits = bits_of(workload.operation, bench, workload.inputs)
        extra = {"digest": digest(bench, workload.cancelling), "bits": bits}
        result = replace(result, extra=extra)
        checks: tuple[str, ...] = (f"{RUNS} runs",)
        fault = check_repeats(bench, workload.inputs)
        signature = workload.operation.signature
        if workload.operation.sums_rows:
            checks += ("cancelling magnitudes", "busy GPU and thrashed L2")
            fault = fault or check_repeats(bench, workload.cancelling)
            fault = fault or check_repeats(bench, workload.cancelling, around=self.disturbance)
        if signature is not None:
            checks += ("call options",)
            if not fault and not candidate.nondeterministic:
                wrong = check_call_options(
                    bench,
                    workload.inputs,
                    signature,
                    candidate.batch_invariant,
                    candidate.packs,
                )
                if wrong:
                    return Answer(replace(result, outcome="wrong", note=wrong))
            if candidate.batch_invariant:
                checks += ("batch invariance",)
                kernel = LoadedKernel(candidate.cubin, candidate.spec)
                fault = fault or check_batch_invariance(kernel, workload.cancelling)
        return Answer(_determinism_result(result, candidate, fault, checks))

    def _recheck(self, workload: Workload, job: Job) -> Answer:
        bench = workload.bench(job.candidates[0])
        result = _accuracy_result(check_accuracy(bench, workload.inputs, workload.expected))
        if result.outcome == "ok":  # a wrong kernel's leftovers may make another launch wait
            bits = bits_of(workload.operation, bench, workload.inputs)
            result = replace(result, extra={"bits": bits})
        return Answer(result)

    def _digest(self, workload: Workload, job: Job) -> Answer:
        bench = workload.bench(job.candidates[0])
        return Answer(Result("ok", extra={"digest": digest(bench, workload.cancelling)}))

    def _interleave(self, workload: Workload, job: Job) -> Answer:
        benches = [workload.bench(candidate) for candidate in job.candidates]
        timer = self._timer(job.condition)
        sets = workload.number_of_sets(timer)
        block = timer.block(workload.operations(benches, sets), job.rounds or FINAL_ROUNDS)
        return Answer(block=block, condition=timer.condition if sets > 1 else FLUSH)

    def _timer(self, condition: str) -> Timer:
        if not condition:
            return self.timer
        if condition not in self._timers:
            self._timers[condition] = Timer(self.device, condition=condition)
        return self._timers[condition]

    def _probe(self, workload: Workload, job: Job) -> Answer:
        return Answer(block=self.timer.block(self._operations(workload), SEARCH_ROUNDS))

    def _operations(self, workload: Workload, *benches: Bench) -> list[list[Timed]]:
        return workload.operations(benches, workload.number_of_sets(self.timer))


def _accuracy_result(accuracy: Accuracy) -> Result:
    """The result so far; it is the last one where the outcome is not ok."""
    return Result(
        "wrong" if accuracy.fault else "ok",
        errors=dict(accuracy.errors),
        checks=() if accuracy.fault else ("accuracy",),
        note=accuracy.fault,
    )


def _determinism_result(
    result: Result, candidate: Candidate, fault: str, checks: tuple[str, ...]
) -> Result:
    """The result after runs were compared bit by bit."""
    if fault in (WROTE_OUTSIDE, LEFT_CHANGED):
        return replace(result, outcome="wrong", note=fault)
    if fault:
        return replace(result, outcome="nondeterministic", determinism="refuted", note=fault)
    if candidate.nondeterministic:
        note = "not deterministic by construction, though these runs agreed"
        return replace(result, outcome="nondeterministic", note=note)
    return replace(result, determinism="verified", checks=(*result.checks, *checks))


def _sentence(error: BaseException) -> str:
    return str(error).split("\n")[0][:300]


def _short_of_memory(error: RuntimeError) -> bool:
    """Return True if an error of PyTorch's allocator, the driver or cuBLAS says that memory ran
    out."""
    if isinstance(error, LaunchError):
        return error.code == "CUDA_ERROR_OUT_OF_MEMORY"
    said = str(error).lower()
    kinds = ("out of memory", "alloc_failed")
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(kind in said for kind in kinds)


def device_facts(device: int) -> dict[str, Any]:
    """Facts about the device for matching a target, for provenance, and for NVML."""
    from cuda.bindings import driver

    properties = torch.cuda.get_device_properties(device)
    _, version = driver.cuDriverGetVersion()
    _, handle = driver.cuDeviceGet(device)
    _, bus_id = driver.cuDeviceGetPCIBusId(16, handle)
    return {
        "name": properties.name,
        "sms": properties.multi_processor_count,
        "uuid": str(getattr(properties, "uuid", "")),
        "bus_id": bus_id.decode().rstrip("\0").strip(),
        "cuda_driver": f"{version // 1000}.{version % 1000 // 10}",
        "driver": _driver_version(),
        "torch": torch.__version__,
    }


def _driver_version() -> str:
    """The kernel driver's version, from the file that the driver offers."""
    try:
        with Path("/proc/driver/nvidia/version").open(encoding="utf-8") as file:
            words = file.readline().split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    except (OSError, StopIteration):
        return "unknown"
