"""Accuracy against float64 and the determinism ladder, for one loaded kernel on one problem."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from generator.problem import Problem
from generator.runtime.launch import LoadedKernel
from generator.runtime.plan import Launch
from generator.workload import CHUNK_ELEMENTS, TORCH_DTYPE, Guarded, Inputs, Reference

HALF_UNIT = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24}
"""Largest relative error of rounding once to nearest, by dtype."""
FP32_SLACK = 64 * 2.0**-24
"""What fp32 arithmetic may add to dx, in units of the row's largest |dx|, and to dw, in units of
the sum of its terms' magnitudes: a few dozen roundings, well above what any order of summation
showed and well below one lost row."""
RUNS = 20


def slacks(problem: Problem, reference: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    """What dx (M, 1) and dw (N,) may be off beside one rounding: fp32 arithmetic, and half a unit
    of a subnormal result."""

    def half_subnormal(dtype: str) -> float:
        info = torch.finfo(TORCH_DTYPE[dtype])
        return info.tiny * info.eps / 2

    return (
        reference.row_scale * FP32_SLACK + half_subnormal(problem.dtype),
        reference.dw_scale * FP32_SLACK + half_subnormal(problem.weight_dtype),
    )


@dataclass
class Accuracy:
    """Errors as ||out - ref|| / ||ref||; fault is "" or the sentence that says what is wrong."""

    error_dx: float
    error_dw: float
    fault: str


class Bench:
    """One kernel on one problem: outputs with guards, a workspace, and the way to run it."""

    def __init__(
        self, kernel: LoadedKernel, problem: Problem, launch: Launch, dx: Guarded, dw: Guarded
    ) -> None:
        self.kernel, self.problem, self.launch = kernel, problem, launch
        self.dx, self.dw = dx, dw
        device = dx.buffer.device
        self.workspace = Guarded((launch.workspace_bytes,), torch.uint8, device)
        self.clean = self.workspace.tensor[: launch.scratch_offset]
        self.scratch = self.workspace.tensor[launch.scratch_offset :]
        self.clean.zero_()

    def run(self, inputs: Inputs) -> None:
        self.kernel.launch(
            inputs.x,
            inputs.dy,
            inputs.rstd,
            inputs.weight,
            self.dx.tensor,
            self.dw.tensor,
            self.workspace.tensor.data_ptr(),
            self.launch,
            torch.cuda.current_stream().cuda_stream,
        )

    def arm(self) -> None:
        """Start a check: guards in order, counters and accumulators at zero."""
        for guarded in (self.dx, self.dw, self.workspace):
            guarded.arm()
        self.clean.zero_()

    def poison(self, byte: int = 0xFF) -> None:
        self.dx.poison(byte)
        self.dw.poison(byte)
        self.scratch.fill_(byte)

    def fault(self) -> str:
        """What the last run left behind that it should not have."""
        if not (self.dx.intact() and self.dw.intact() and self.workspace.intact()):
            return "wrote outside dx, dw or the workspace"
        if bool(self.clean.any()):
            return "left a counter or an accumulator of the workspace changed"
        return ""


def _first_bad(bad: torch.Tensor) -> tuple[int, ...]:
    flat = int(bad.flatten().to(torch.uint8).argmax())
    place = []
    for size in reversed(bad.shape):
        place.append(flat % size)
        flat //= size
    return tuple(reversed(place))


def compare(
    name: str, out: torch.Tensor, ref: torch.Tensor, unit: float, slack: torch.Tensor
) -> tuple[float, str]:
    """The relative error of `out` and "" or the first element outside `unit * |ref| + slack`.

    out, ref: same shape; slack broadcasts against them. Works in chunks of rows.
    """
    square_error = square_ref = 0.0
    fault = ""
    rows = max(1, CHUNK_ELEMENTS // out[0].numel()) if out.dim() > 1 else out.numel()
    for start in range(0, out.shape[0], rows):
        part = slice(start, start + rows)
        wide = ref[part].to(torch.float64 if ref.dtype == torch.float64 else torch.float32)
        error = (out[part].to(wide.dtype) - wide).abs()
        limit = wide.abs() * (unit * 1.001) + slack[part].to(wide.dtype)
        bad = ~(error <= limit)
        if not fault and bool(bad.any()):
            at = _first_bad(bad)
            index = [at[0] + start, *at[1:]]
            fault = (
                f"{name}{index} is {float(out[part][at]):.9g}, "
                f"float64 gives {float(wide[at]):.9g}; {int(bad.sum())} elements are off"
            )
        square_error += float(error.double().square().sum())
        square_ref += float(wide.double().square().sum())
    return (square_error / max(square_ref, 1e-300)) ** 0.5, fault


def check_accuracy(bench: Bench, inputs: Inputs, reference: Reference) -> Accuracy:
    """One run on poisoned outputs and workspace against the reference."""
    bench.arm()
    bench.poison()
    bench.run(inputs)
    problem = bench.problem
    slack_dx, slack_dw = slacks(problem, reference)
    error_dx, fault_dx = compare(
        "dx", bench.dx.tensor, reference.dx, HALF_UNIT[problem.dtype], slack_dx
    )
    error_dw, fault_dw = compare(
        "dw", bench.dw.tensor, reference.dw, HALF_UNIT[problem.weight_dtype], slack_dw
    )
    return Accuracy(error_dx, error_dw, fault_dx or fault_dw or bench.fault())


def same_bits(a: Guarded, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.inside, b))


def check_repeats(
    bench: Bench,
    inputs: Inputs,
    runs: int = RUNS,
    around: Callable[[int], None] | None = None,
) -> str:
    """Runs `runs` times, each on outputs and scratch dirtied with another byte, and compares all
    bits with those of the first run. `around(i)` is called before run i, to disturb it.

    Returns "" or which run differed in what.
    """
    bench.arm()
    bench.poison()
    bench.run(inputs)
    dx, dw = bench.dx.inside.clone(), bench.dw.inside.clone()
    for i in range(1, runs):
        bench.poison((0xFF, 0x7F, 0x00, 0x3C)[i % 4])
        if around is not None:
            around(i)
        bench.run(inputs)
        for name, out, first in (("dw", bench.dw, dw), ("dx", bench.dx, dx)):
            if not same_bits(out, first):
                count = int((out.inside != first).sum())
                return f"{name} of run {i} differs from run 0 in {count} bytes"
    return bench.fault()


class Disturbance:
    """Work on another stream that takes SMs away and thrashes the L2 cache."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.matrix = torch.randn(1024, 1024, device=device)
        self.memory = torch.empty(64 << 20, dtype=torch.uint8, device=device)

    def __call__(self, i: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(1 + i % 3):
                self.memory.fill_(i % 251)
                torch.mm(self.matrix, self.matrix)


def digest(bench: Bench, inputs: Inputs) -> str:
    """Hash of the bits of dx and dw, for comparing runs in different processes. dx enters through
    two sums over its 64-bit (or smaller) words, one of them weighted by position."""
    bench.poison()
    bench.run(inputs)
    hasher = hashlib.sha256(bench.dw.inside.cpu().numpy().tobytes())
    words = bench.dx.inside
    if words.numel() % 4 == 0:
        words = words.view(torch.int32)
    for start in range(0, words.numel(), CHUNK_ELEMENTS):
        part = words[start : start + CHUNK_ELEMENTS].to(torch.int64)
        weight = torch.arange(len(part), device=part.device) * 2654435761 + 1
        hasher.update(f"{int(part.sum())} {int((part * weight).sum())}".encode())
    return hasher.hexdigest()[:32]
