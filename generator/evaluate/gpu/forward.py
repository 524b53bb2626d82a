"""Measures forward kernels of one shape, with CUDA in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import torch

from generator.evaluate.gpu.timer import Timer
from generator.evaluate.verify.determinism import RUNS
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.operations.rmsnorm_forward import EPS, ForwardInputs, forward_inputs, output_fault
from generator.problem import Problem
from generator.processes import end_pool, end_with_parent, shielded
from generator.runtime.launch.forward_call import forward_call
from generator.runtime.launch.loaded_kernel import LoadedKernel
from generator.runtime.launch.row_layout import row_layout
from generator.runtime.spec import ForwardSpec

SECONDS = 120.0
"""Deadline of one shape on the GPU."""


SCREEN_ROUNDS, FINAL_ROUNDS, FINAL_BLOCKS = 7, 21, 3


FINALISTS = 6


Run = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class ForwardTime:
    """What is known of one candidate. us, floor_us: medians, cold L2; ratio: median of the ratios
    within a round; fault: "" or why it may not win, and then there may be no times."""

    us: float | None = None
    floor_us: float | None = None
    ratio: float | None = None
    fault: str = ""
    final: bool = False


def measure_forwards(
    problem: Problem, candidates: Sequence[tuple[bytes, ForwardSpec]], device: int
) -> list[ForwardTime]:
    """Check and time the candidates on the device, the fastest of them a second time in the same
    blocks. Raises RuntimeError when the device fails."""
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no CUDA device")
    torch.cuda.set_device(device)
    torch.cuda.empty_cache()
    place = torch.device("cuda", device)
    timer = Timer(place)
    inputs = forward_inputs(problem, place)
    out = torch.empty_like(inputs.x)
    operations: dict[int, Run] = {}
    times = [ForwardTime() for _ in candidates]
    for index, (cubin, spec) in enumerate(candidates):
        run = _runner(inputs, cubin, spec, residual=False)
        fault = output_fault(problem, inputs, run())
        if not fault:
            fault = output_fault(problem, inputs, _runner(inputs, cubin, spec, residual=True)())
        times[index] = ForwardTime(fault=fault)
        if not fault:
            operations[index] = run

    def floor() -> object:
        return torch.mul(inputs.x, 1.5, out=out)

    def time(chosen: Sequence[int], rounds: int, blocks: int, final: bool) -> None:
        together = [floor, *(operations[index] for index in chosen)]
        gathered: list[list[float]] = [[] for _ in together]
        for _ in range(blocks):
            for own, block in zip(gathered, timer.block(together, rounds), strict=True):
                own += block
        floors = gathered[0]
        for index, own in zip(chosen, gathered[1:], strict=True):
            ratio = median(t / f for t, f in zip(own, floors, strict=True))
            times[index] = ForwardTime(median(own), median(floors), ratio, final=final)

    if operations:
        time(list(operations), SCREEN_ROUNDS, 1, False)
    best = sorted(operations, key=lambda index: times[index].ratio or 0.0)[:FINALISTS]
    steady = []
    for index in best:
        runs = [operations[index], _runner(inputs, *candidates[index], residual=True)]
        if all(map(_repeats, runs)):
            steady.append(index)
        else:
            times[index] = ForwardTime(fault="its bits change from run to run")
    if steady:
        time(steady, FINAL_ROUNDS, FINAL_BLOCKS, True)
    return times


def _runner(inputs: ForwardInputs, cubin: bytes, spec: ForwardSpec, residual: bool) -> Run:
    x, weight = inputs.x, inputs.weight
    other = inputs.residual if residual else None
    layout = row_layout(x)
    call = forward_call(LoadedKernel(cubin, spec), x, weight, other, layout, layout)
    return lambda: call(x, weight, EPS, 0.0, other)


def _repeats(run: Run) -> bool:
    """Whether a candidate gives the same bits in all runs."""
    first = run()
    return all(
        torch.equal(out, expected)
        for _ in range(RUNS - 1)
        for out, expected in zip(run(), first, strict=True)
    )


class ForwardGpu:
    """Measures in a process of its own, so that nothing a kernel does to the GPU outlives it; a
    process that is lost is replaced for the next shape."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._pool: ProcessPoolExecutor | None = self._start()

    def _start(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(1, get_context("spawn"), end_with_parent)
        with shielded():
            pool.submit(_wake, self.device)
        return pool

    def measure(
        self, problem: Problem, made: Sequence[tuple[ForwardVariant, Compiled]], sms: int
    ) -> list[ForwardTime] | str:
        """The times, or why there are none."""
        if self._pool is None:
            self._pool = self._start()
        candidates = [(compiled.cubin, variant.spec(sms)) for variant, compiled in made]
        try:
            work = self._pool.submit(measure_forwards, problem, candidates, self.device)
            return work.result(SECONDS)
        except TimeoutError:
            self.close()
            return f"no answer after {SECONDS:.0f} s"
        except (BrokenProcessPool, RuntimeError) as error:
            self.close()
            return " ".join(str(error).split())[:200]

    def close(self) -> None:
        if self._pool is not None:
            end_pool(self._pool)
            self._pool = None


def _wake(device: int) -> None:
    """Create the context. What is wrong with it the first measurement says."""
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
