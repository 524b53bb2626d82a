"""Accuracy against float64 and the determinism ladder, for one loaded kernel on one problem."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from generator.problem import Problem
from generator.runtime.launch import (
    DW_ADDED,
    DW_IN_FP32,
    DW_IN_WEIGHT_DTYPE,
    LoadedKernel,
    gap_factor,
)
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
        self,
        kernel: LoadedKernel,
        problem: Problem,
        launch: Launch,
        dx: Guarded,
        dw: Guarded,
        dresidual: Guarded | None = None,
    ) -> None:
        """dresidual: where the kernel writes dx in the residual's dtype as well."""
        self.kernel, self.problem, self.launch = kernel, problem, launch
        self.dx, self.dw, self.dresidual = dx, dw, dresidual
        device = dx.buffer.device
        self.workspace = Guarded((launch.workspace_bytes,), torch.uint8, device)
        self.clean = self.workspace.tensor[: launch.scratch_offset]
        self.scratch = self.workspace.tensor[launch.scratch_offset :]
        self.clean.zero_()

    @property
    def outputs(self) -> dict[str, Guarded]:
        named = {"dw": self.dw, "dx": self.dx}
        return named | ({"dresidual_out": self.dresidual} if self.dresidual else {})

    def run(
        self,
        inputs: Inputs,
        *,
        want_dx: bool = True,
        want_dw: bool = True,
        dw: torch.Tensor | None = None,
        dw_mode: int = DW_IN_WEIGHT_DTYPE,
    ) -> None:
        """Enqueue one call. inputs.weight may be None here, and x and dy packed as (M / H, H, N);
        dw, dw_mode: another place for dw, and what to do with it."""
        dw = self.dw.tensor if dw is None else dw
        self.kernel.launch(
            inputs.x,
            inputs.dy,
            inputs.rstd,
            inputs.weight,
            self.dx.tensor if want_dx else None,
            dw if want_dw else None,
            self.workspace.tensor.data_ptr(),
            self.launch,
            torch.cuda.current_stream().cuda_stream,
            dresidual=inputs.residual,
            dresidual_out=self.dresidual.tensor if self.dresidual and want_dx else None,
            dw_mode=dw_mode,
            weight_offset=inputs.offset,
        )

    def arm(self) -> None:
        """Start a check: guards in order, counters and accumulators at zero."""
        for guarded in (*self.outputs.values(), self.workspace):
            guarded.arm()
        self.clean.zero_()

    def poison(self, byte: int = 0xFF) -> None:
        for guarded in self.outputs.values():
            guarded.poison(byte)
        self.scratch.fill_(byte)

    def fault(self) -> str:
        """What the last run left behind that it should not have."""
        if not all(guarded.intact() for guarded in (*self.outputs.values(), self.workspace)):
            return "wrote outside its outputs or the workspace"
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
        if out.dtype == torch.float16:  # may overflow, and rightly so
            rounded = wide.to(out.dtype)
            error = error.masked_fill(rounded.isinf() & (out[part] == rounded), 0.0)
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
    fault = fault_dx or fault_dw
    if bench.dresidual is not None:
        unit = HALF_UNIT[problem.residual]
        _, second = compare("dresidual_out", bench.dresidual.tensor, reference.dx, unit, slack_dx)
        fault = fault or second
    return Accuracy(error_dx, error_dw, fault or bench.fault())


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
    firsts = {name: guarded.inside.clone() for name, guarded in bench.outputs.items()}
    for i in range(1, runs):
        bench.poison((0xFF, 0x7F, 0x00, 0x3C)[i % 4])
        if around is not None:
            around(i)
        bench.run(inputs)
        for name, out in bench.outputs.items():
            if not same_bits(out, firsts[name]):
                count = int((out.inside != firsts[name]).sum())
                return f"{name} of run {i} differs from run 0 in {count} bytes"
    return bench.fault()


def check_wishes(bench: Bench, inputs: Inputs) -> str:
    """What a call may ask of any kernel at run time, each compared bit by bit with plain calls: no
    dx, no dw, no weight, dw as fp32, dw added to an fp32 buffer, x and dy as the heads of packed
    tensors. Returns "" or what differed."""
    bench.arm()
    bench.poison()
    bench.run(inputs)
    plain = {name: guarded.inside.clone() for name, guarded in bench.outputs.items()}

    def differs(wish: str, *names: str) -> str:
        for name in names:
            if not same_bits(bench.outputs[name], plain[name]):
                return f"{name} of a call {wish} is not that of a plain call"
        return bench.fault()

    rows = tuple(name for name in plain if name != "dw")
    bench.poison()
    bench.run(inputs, want_dw=False)
    fault = differs("without dw", *rows)
    bench.poison()
    bench.run(inputs, want_dx=False)
    fault = fault or differs("without dx", "dw")

    wide = Guarded((bench.problem.N,), torch.float32, bench.dx.buffer.device)
    wide.poison()
    bench.run(inputs, dw=wide.tensor, dw_mode=DW_IN_FP32)
    narrowed = wide.tensor.to(bench.dw.tensor.dtype)
    if not torch.equal(narrowed.view(torch.uint8), plain["dw"].view(torch.uint8)):
        fault = fault or "dw as fp32 does not round to dw"
    start = torch.linspace(-3, 5, bench.problem.N, device=wide.buffer.device)
    expected = start + wide.tensor
    wide.tensor.copy_(start)
    bench.run(inputs, dw=wide.tensor, dw_mode=DW_ADDED)
    if not (torch.equal(wide.tensor, expected) and wide.intact()):
        fault = fault or "dw added to a buffer is not the buffer and dw"

    bench.run(replace(inputs, weight=torch.ones_like(inputs.weight)))
    plain = {name: guarded.inside.clone() for name, guarded in bench.outputs.items()}
    bench.poison()
    without = replace(inputs, weight=None)  # type: ignore[arg-type]
    bench.run(without)
    fault = fault or differs("without a weight", *plain)
    for heads in (32, 8, 3, 2):
        if bench.problem.M % heads == 0 and gap_factor(bench.problem.M, heads):
            bench.poison()
            x, dy = pack(inputs.x, heads, 1), pack(inputs.dy, heads, 2)
            bench.run(replace(without, x=x, dy=dy))
            return fault or differs(f"with {heads} packed heads", *plain)
    return fault


def pack(rows: torch.Tensor, heads: int, gap: int) -> torch.Tensor:
    """A copy of (M, N) rows as (M / heads, heads, N) with room for `gap` more heads in between, as
    in a slice of a packed QKV tensor."""
    M, N = rows.shape
    packed = rows.new_empty((M // heads, heads + gap, N))
    packed[:, :heads] = rows.view(M // heads, heads, N)
    return packed[:, :heads]


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
