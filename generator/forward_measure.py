"""Measures forward kernels of one shape, with CUDA in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import torch

from generator.compile import Compiled
from generator.forward import ForwardVariant
from generator.measure import Timer
from generator.problem import Problem
from generator.processes import end_pool, end_with_parent, shielded
from generator.runtime.forward import reference_forward
from generator.runtime.forward_call import LoadedForward, forward_call
from generator.runtime.forward_table import ForwardSpec
from generator.runtime.layout import row_layout
from generator.verify import FP32_SLACK, HALF_UNIT, RUNS
from generator.workload import CHUNK_ELEMENTS, TORCH_DTYPE

EPS = 1e-6
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


@dataclass
class ForwardInputs:
    """x, residual: (M, N); weight: (N,)."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


def forward_inputs(problem: Problem, device: torch.device, seed: int = 0) -> ForwardInputs:
    """Random rows of different sizes, so that a row that gets another's rstd shows."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPE[problem.dtype]
    x = torch.empty((problem.M, problem.N), dtype=dtype, device=device)
    residual = torch.empty_like(x)
    for tensor in (x, residual):
        for part in tensor.split(max(1, CHUNK_ELEMENTS // problem.N)):
            drawn = torch.randn(part.shape, generator=generator, device=device)
            size = torch.rand((len(part), 1), generator=generator, device=device)
            part.copy_(drawn * (0.5 + 3 * size))
    weight = 1 + 0.1 * torch.randn(problem.N, generator=generator, device=device)
    return ForwardInputs(x, residual, weight.to(TORCH_DTYPE[problem.weight_dtype]))


def output_fault(
    problem: Problem,
    inputs: ForwardInputs,
    outputs: Sequence[torch.Tensor],
    *,
    weight: bool = True,
    weight_offset: float = 0.0,
) -> str:
    """What is wrong with (y, rstd[, residual_out]) against float64; "" for nothing.

    y may be off by one rounding and FP32_SLACK of itself; residual_out not at all.
    """
    y, rstd, *stream = outputs
    for first in range(0, problem.M, step := max(1, CHUNK_ELEMENTS // problem.N)):
        part = slice(first, first + step)
        x = inputs.x[part]
        if stream:
            summed = (x.float() + inputs.residual[part].float()).to(x.dtype)
            if not torch.equal(stream[0][part], summed):
                return f"residual_out differs from the rounded sum in rows from {first}"
            x = summed
        given = inputs.weight.double() if weight else None
        exact, exact_rstd = reference_forward(x.double(), given, EPS, weight_offset)
        for name, out, ref, unit in (
            ("y", y[part], exact, HALF_UNIT[problem.dtype]),
            ("rstd", rstd[part], exact_rstd, HALF_UNIT["fp32"]),
        ):
            tiny = torch.finfo(out.dtype).tiny * torch.finfo(out.dtype).eps / 2
            error = (out.double() - ref).abs()
            bad = ~(error <= ref.abs() * (unit * 1.001 + FP32_SLACK) + tiny)
            if bool(bad.any()):
                row, column = (int(i) for i in bad.nonzero()[0])
                got, wanted = float(out[row, column]), float(ref[row, column])
                return f"{name}[{first + row}, {column}] is {got:.6g}, expected {wanted:.6g}"
    return ""


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
    call = forward_call(LoadedForward(cubin, spec), x, weight, other, layout, layout)
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
