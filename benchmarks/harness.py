"""Measures any number of implementations of one operation in the same blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import isfinite
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import BLOCKS, ROUNDS, take_turns
from benchmarks.peers.peer import Bind, Gradients
from generator.errors import NormforgeError
from generator.evaluate.gpu.rotation import Operation, copies
from generator.evaluate.gpu.timer import Timer
from generator.evaluate.verify.accuracy import compare
from generator.evaluate.verify.determinism import RUNS, equal_bits
from generator.operations import operation_of
from generator.operations.operation import TORCH_DTYPE, Bound
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem

HOST_CALLS = 20
HOST_REPEATS = 9
PATH_CHARACTERS = 70
"""The most characters of each kernel's name; those that CuTe DSL makes run to several hundred."""


@dataclass(frozen=True)
class Contender:
    """An implementation. overwrites_dy: writes dx over dy."""

    bind: Bind
    overwrites_dy: bool = False


@dataclass
class Cell:
    """The measurements of one implementation on one shape.

    us: median GPU time of the whole operation; host_us: host time of one call; error_dx, error_dw:
    ||out - ref|| / ||ref|| against float64, dw being all sums over rows; deterministic: equal bits
    in all runs on inputs that show any reordering; path: its kernels; timed: `graph`, or `events`
    when it cannot be captured (then with launch gaps); reason: why the rest is missing.
    """

    us: float | None = None
    host_us: float | None = None
    error_dx: float | None = None
    error_dw: float | None = None
    deterministic: bool | None = None
    path: str | None = None
    timed: str = "graph"
    reason: str = ""


class Entrant:
    """A contender bound to inputs. One that overwrites dy gets its own, filled by `restore`."""

    def __init__(self, contender: Contender, inputs: Inputs) -> None:
        self._given = inputs.dy
        self._own = inputs.dy
        if contender.overwrites_dy:
            self._own = inputs.dy.clone()
            inputs = replace(inputs, dy=self._own)
        self.run: Callable[[], Gradients] = contender.bind(inputs)

    def restore(self) -> None:
        if self._own is not self._given:
            self._own.copy_(self._given)


class ShapeRun:
    """All contenders on one problem. `cells` fills up while `run` works; a contender that raises
    gets the reason into its cell and takes no further part. beside: another operation, which is
    only timed, in the same blocks: `beside_us` has its microseconds then; `sets`: through how many
    sets of inputs and outputs all rotated."""

    def __init__(
        self,
        problem: Problem,
        contenders: Mapping[str, Contender],
        timer: Timer,
        beside: Bind | None = None,
    ) -> None:
        self.problem, self.contenders, self.timer = problem, contenders, timer
        self.operation = operation_of(problem)
        self.beside = beside
        self.beside_us: float | None = None
        self.sets = 1
        self.cells = {name: Cell() for name in contenders}
        self._entrants: dict[str, Entrant] = {}

    def run(self) -> float:
        """Does everything but the paths; microseconds of the floor. Raises NormforgeError when a
        contender leaves the GPU unusable for this process."""
        inputs = self.operation.make_inputs(self.problem, self.timer.device)
        bounds = self.operation.bounds(self.problem, inputs)
        for name in self.contenders:
            self._attempt(name, partial(self._enter, name, inputs))
        self._each(partial(self._check_accuracy, bounds))
        del bounds
        add_us = self._time(inputs)
        self._each(self._time_host)
        self._entrants.clear()
        cancelling = self.operation.make_cancelling(self.problem, inputs)
        del inputs
        for name, cell in self.cells.items():
            if not cell.reason:
                # One at a time, so that copies of dy do not add up.
                self._attempt(name, partial(self._enter, name, cancelling))
                self._each(self._check_repeats)
                self._entrants.clear()
        return add_us

    def _attempt(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
            torch.cuda.synchronize()
        except Exception as error:
            self.cells[name].reason = sentence(error)
            self._entrants.pop(name, None)
            check_gpu(name, self.problem)

    def _each(self, work: Callable[[str, Entrant], None]) -> None:
        for name, entrant in list(self._entrants.items()):
            self._attempt(name, partial(work, name, entrant))

    def _enter(self, name: str, inputs: Inputs) -> None:
        self._entrants[name] = Entrant(self.contenders[name], inputs)

    def _check_accuracy(self, bounds: Mapping[str, Bound], name: str, entrant: Entrant) -> None:
        errors = []
        dx, *sums = entrant.run()
        for spec, out in zip(
            self.operation.outputs(self.problem), (dx, torch.cat(sums)), strict=True
        ):
            if (tuple(out.shape), out.dtype) != (spec.shape, TORCH_DTYPE[spec.dtype]):
                raise ValueError(f"{spec.name} is {tuple(out.shape)} of {out.dtype}")
            bound = bounds[spec.name]
            error, _ = compare(spec.name, out, bound.reference, bound.unit, bound.slack)
            if not isfinite(error):
                raise ValueError(f"{spec.name} is not finite")
            errors.append(error)
        self.cells[name].error_dx, self.cells[name].error_dw = errors

    def _time(self, inputs: Inputs) -> float:
        """Times all in the same blocks, beside the floor; returns the floor's microseconds."""
        sets = copies(inputs, self.timer.sets(self.operation.traffic_bytes(self.problem)))
        self.sets = len(sets)
        floor = [
            self.operation.floor(self.problem, each, {"dx": torch.empty_like(each.x)})
            for each in sets
        ]
        together: dict[str, list[Entrant]] = {}
        for name, entrant in self._entrants.items():
            try:
                more = [Entrant(self.contenders[name], each) for each in sets[1:]]
                self.timer.block([[each.run for each in (entrant, *more)]], 1)
                together[name] = [entrant, *more]
            except Exception:
                check_gpu(name, self.problem)
                self.cells[name].timed = "events"
        operations: list[Operation] = [
            floor,
            *([each.run for each in own] for own in together.values()),
        ]
        if self.beside is not None:
            operations.append([self.beside(each) for each in sets])

        def restore() -> None:
            for entrant in chain(*together.values()):
                entrant.restore()

        times = take_turns(self.timer, operations, before=restore)
        for name, own in zip(together, times[1 : 1 + len(together)], strict=True):
            self.cells[name].us = median(own)
        if self.beside is not None:
            self.beside_us = median(times[-1])
        self._each(self._time_by_events)
        return median(times[0])

    def _time_by_events(self, name: str, entrant: Entrant) -> None:
        if self.cells[name].timed == "events":
            self.cells[name].us = event_time(entrant, self.timer)

    def _time_host(self, name: str, entrant: Entrant) -> None:
        self.cells[name].host_us = host_time(entrant.run)

    def _check_repeats(self, name: str, entrant: Entrant) -> None:
        self.cells[name].deterministic = repeats(entrant)


def event_time(entrant: Entrant, timer: Timer) -> float:
    """Median microseconds between events around the call, with a cold L2. What the host is late
    with is inside."""
    times = []
    for _ in range(BLOCKS * ROUNDS):
        entrant.restore()
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        timer.cold.flush(0.0)
        before.record()
        entrant.run()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return median(times)


def host_time(call: Callable[[], object]) -> float:
    """Microseconds of one call on the host: the median over repeats of back-to-back calls that
    nobody waits for. They are so few that the launch queue never fills, so that the GPU's speed is
    not in it."""
    for _ in range(3):
        call()
    times = []
    for _ in range(HOST_REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(HOST_CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / HOST_CALLS * 1e-3)
    torch.cuda.synchronize()
    return median(times)


def repeats(entrant: Entrant) -> bool:
    """True when the bits of all gradients are the same in all runs."""
    entrant.restore()
    first = [out.clone() for out in entrant.run()]
    for _ in range(1, RUNS):
        entrant.restore()
        if not all(map(equal_bits, entrant.run(), first)):
            return False
    return True


def kernel_path(call: Callable[[], object]) -> str:
    """The kernels that one call runs, in order, by name without template arguments."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    kernels = [event for event in recorded.events() if event.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: event.time_range.start)
    return " + ".join(short_name(event.name) for event in kernels) or "no kernel seen"


def short_name(kernel: str) -> str:
    """Shorten a kernel's name: `void at::native::(anonymous namespace)::f<float>(int)` becomes
    `at::native::f`."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = name.split("<")[0]
    if not name.startswith(("Memset", "Memcpy")):
        name = name.split("(")[0]
    return name.strip()[:PATH_CHARACTERS]


def check_gpu(name: str, problem: Problem) -> None:
    """Raise NormforgeError when the GPU cannot be used any more after what `name` did."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise NormforgeError(
            f"{name} on {problem} left the GPU unusable ({sentence(error)}): "
            "go on with --resume and a --peers list without it"
        ) from error


def sentence(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240] if text else type(error).__name__
