"""One launch of a rendered source on the CPU, under as many schedules as asked for."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Any, NamedTuple

import torch

from generator.emulate.build import DEFAULT_CACHE, HostError, build
from generator.operations.operation import TORCH_DTYPE
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import ITEMSIZE, RMSNORM_BACKWARD, SUMS
from normforge.launch.kernel_arguments import DW_IN_WEIGHT_DTYPE, gap_factor
from normforge.spec import ForwardSpec, KernelSpec, Launch

DEADLINE_SECONDS = 120.0
_ENDED_FROM_OUTSIDE = (-SIGKILL, -SIGTERM, -SIGHUP)
_GRACE_SECONDS = 5
"""After the deadline, a program whose parent was killed ends by itself."""


@dataclass(frozen=True)
class Schedule:
    """One order of events. residency: CTAs that may run at the same time (whole clusters start)."""

    seed: int
    residency: int

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.residency} CTAs resident"


@dataclass(frozen=True)
class Layout:
    """How the matrices lie in memory: elements of padding behind every row of x, dy and dx, and
    bytes between a 4096-byte boundary and their first element."""

    pad_x: int = 0
    pad_dy: int = 0
    pad_dx: int = 0
    misaligned_bytes: int = 0


@dataclass(frozen=True)
class CallOptions:
    """What a call may ask of any kernel: no weight (ones), no dx, no dw, dw as fp32 (DW_IN_FP32)
    or added to `added_to`, as fp32 (DW_ADDED); inner > 0: x and dy lie as `inner` rows and then a
    gap; dx_over_dy: dx is written over dy, which needs equal strides and no gaps."""

    weight: bool = True
    dx: bool = True
    dw: bool = True
    dw_mode: int = DW_IN_WEIGHT_DTYPE
    added_to: torch.Tensor | None = None
    inner: int = 0
    dx_over_dy: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one schedule gave: indices into Runs.dx, Runs.dw and Runs.residual, or the fault that
    ended it."""

    schedule: Schedule
    dx: int | None = None
    dw: int | None = None
    residual: int | None = None
    fault: str = ""


@dataclass
class Runs:
    """The outcomes in the order of the schedules, and every different dx (M, N), dw (N,) and second
    output of dx in the residual's dtype (where that is another one)."""

    outcomes: list[Outcome] = field(default_factory=list)
    dx: list[torch.Tensor] = field(default_factory=list)
    dw: list[torch.Tensor] = field(default_factory=list)
    residual: list[torch.Tensor] = field(default_factory=list)

    @property
    def distinct_results(self) -> int:
        return len({(o.dx, o.dw, o.residual) for o in self.outcomes if not o.fault})

    @property
    def faults(self) -> list[str]:
        """One sentence for every schedule that found something, with the schedule."""
        return [f"{o.fault} [{o.schedule}]" for o in self.outcomes if o.fault]


class Outputs(NamedTuple):
    """dtype and shape of the three outputs."""

    dx: tuple[torch.dtype, tuple[int, ...]]
    dw: tuple[torch.dtype, tuple[int, ...]]
    dresidual_out: tuple[torch.dtype, tuple[int, ...]]


def run_schedules(
    source: str,
    spec: KernelSpec,
    launch: Launch,
    inputs: Inputs,
    schedules: Sequence[Schedule],
    *,
    layout: Layout | None = None,
    call_options: CallOptions | None = None,
    **options: Any,
) -> Runs:
    """Run `launch` of the kernels in `source` once for every schedule, up to its first fault.
    inputs: on the CPU; options: of `execute`. Raises NormforgeError when the C++ compiler refuses
    the source, and HostError when this machine cannot compile or run it."""
    call_options = call_options or CallOptions()
    statistics = [inputs.rstd] + ([] if inputs.mean is None else [inputs.mean])
    tensors = [inputs.x, inputs.dy, *statistics, inputs.weight]
    tensors += [] if inputs.residual is None else [inputs.residual]
    tensors += [] if call_options.added_to is None else [call_options.added_to]
    rows = tuple(inputs.x.shape)
    dw_dtype = spec.weight_dtype if call_options.dw_mode == DW_IN_WEIGHT_DTYPE else "fp32"
    return execute(
        source,
        _fields(spec, launch, inputs, layout or Layout(), call_options),
        tensors,
        Outputs(
            dx=(TORCH_DTYPE[spec.dtype], rows),
            dw=(TORCH_DTYPE[dw_dtype], (inputs.weight.numel() * SUMS[spec.operation].column_sums,)),
            dresidual_out=(TORCH_DTYPE[spec.residual or spec.dtype], rows),
        ),
        schedules,
        kernel=spec.operation,
        **options,
    )


def execute(
    source: str,
    fields: Mapping[str, int],
    tensors: Sequence[torch.Tensor],
    outputs: Outputs,
    schedules: Sequence[Schedule],
    *,
    kernel: str = RMSNORM_BACKWARD,
    deadline: float = DEADLINE_SECONDS,
    cache_folder: Path = DEFAULT_CACHE,
) -> Runs:
    """`run_schedules` for a request that is made up already. fields, tensors: as main.cpp reads
    them, x first and contiguous on the CPU. deadline: seconds for all schedules; the one under way
    then gets a fault, later ones have no outcome."""
    program = build(source, cache_folder, kernel=kernel)
    lines = [f"{name} {value}" for name, value in fields.items()]
    lines += [f"run {schedule.seed} {schedule.residency}" for schedule in schedules]
    request = ("\n".join(lines) + "\ndata\n").encode() + b"".join(map(_bytes, tensors))
    output, end = _run_program(program, request, deadline)
    runs = _read(output, outputs, schedules)
    if len(runs.outcomes) < len(schedules):
        runs.outcomes.append(Outcome(schedules[len(runs.outcomes)], fault=end))
    return runs


def _run_program(program: Path, request: bytes, deadline: float) -> tuple[bytes, str]:
    """What a program answers, and how it ended. Raises HostError where that is not what it runs."""
    try:
        process = subprocess.Popen(
            [str(program), str(ceil(deadline) + _GRACE_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is no verdict on a kernel
        )
    except OSError as error:
        raise HostError(f"cannot run {program} ({error.strerror})") from error
    with process:
        try:
            output, errors = process.communicate(request, timeout=deadline)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            return output, f"no end within {deadline:g} s: a thread runs without ever waiting"
        except BaseException:
            process.kill()  # it is in a session of its own
            raise
    said = errors.decode(errors="replace").strip()
    if process.returncode == -SIGINT:  # Ctrl-C, before it had a session of its own
        raise KeyboardInterrupt
    if process.returncode in _ENDED_FROM_OUTSIDE or "bad_alloc" in said:
        raise HostError(
            f"the emulator was ended from outside or had no memory (code {process.returncode}): "
            "run the same command to continue"
        )
    return output, f"the emulator ended with code {process.returncode}: {said}"


def row_fields(
    spec: KernelSpec | ForwardSpec, x: torch.Tensor, layout: Layout, inner: int
) -> dict[str, int]:
    """The fields that any kernel over rows needs; main.cpp has the format."""
    M, N = x.shape
    item, weight_item = ITEMSIZE[spec.dtype], ITEMSIZE[spec.weight_dtype]
    weight_bytes = max(1, spec.vector_bytes // item) * weight_item
    return {
        "threads": spec.threads,
        "cluster": spec.cluster,
        "shared_bytes": spec.smem_bytes,
        "team_threads": spec.threads // spec.rows_per_cta,
        # Neighbouring threads may own neighbouring halves of a word of shared memory.
        "granule": min(4, spec.vector_bytes, weight_bytes),
        "rows": M,
        "columns": N,
        "item": item,
        "weight_item": weight_item,
        "x_stride": N + layout.pad_x,
        "dy_stride": N + layout.pad_dy,
        "dx_stride": N + layout.pad_dx,
        "misaligned_bytes": layout.misaligned_bytes,
        "inner": inner,
        "gaps": gap_factor(M, inner),
    }


def float_bits(number: float) -> int:
    """How a field holds an fp32 number."""
    return int(struct.unpack("I", struct.pack("f", number))[0])


def _fields(
    spec: KernelSpec, launch: Launch, inputs: Inputs, layout: Layout, call_options: CallOptions
) -> dict[str, int]:
    sums = SUMS[spec.operation]
    fp32_dw = call_options.dw_mode != DW_IN_WEIGHT_DTYPE
    return row_fields(spec, inputs.x, layout, call_options.inner) | {
        "grid": launch.grid,
        "sum_grid": launch.sum_grid if call_options.dw else 0,
        "sum_threads": spec.sum_threads,
        "dependent": int(spec.dependent),
        "ordered_adds": int(spec.determinism != "none"),
        "counters": launch.counters,
        "zeroed": launch.zeroed,
        "scratch": launch.scratch,
        "partial_columns": spec.columns
        if spec.exact or spec.cluster > 1
        else sums.column_sums * inputs.x.shape[1],
        "column_sums": sums.column_sums,
        "statistics": sums.statistics,
        "partial_stride": spec.partial_stride,
        "group": launch.group,
        "partials": launch.partials,
        "no_weight": int(not call_options.weight),
        "no_dx": int(not call_options.dx),
        "dx_over_dy": int(call_options.dx_over_dy),
        "no_dw": int(not call_options.dw),
        "dw_mode": call_options.dw_mode,
        "dw_item": 4 if fp32_dw else ITEMSIZE[spec.weight_dtype],
        "weight_offset": float_bits(inputs.offset),
        "residual_item": ITEMSIZE[spec.residual] if spec.residual else 0,
        "residual_out": int(spec.residual not in ("", spec.dtype)),
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _read(output: bytes, outputs: Outputs, schedules: Sequence[Schedule]) -> Runs:
    runs = Runs()
    results = {
        "dx": (runs.dx, *outputs.dx),
        "dw": (runs.dw, *outputs.dw),
        "dresidual_out": (runs.residual, *outputs.dresidual_out),
    }
    at = 0
    while (end := output.find(b"\n", at)) >= 0 and len(runs.outcomes) < len(schedules):
        kind, _, rest = output[at:end].decode().partition(" ")
        at = end + 1
        schedule = schedules[len(runs.outcomes)]
        if kind == "fault":
            runs.outcomes.append(Outcome(schedule, fault=rest))
        elif kind == "run":
            dx, dw, residual = map(int, rest.split())
            runs.outcomes.append(Outcome(schedule, dx, dw, residual))
        else:
            found, dtype, shape = results[kind]
            content = bytearray(output[at : at + int(rest)])
            if not content:
                continue  # an output that there is not
            at += int(rest)
            if len(content) < int(rest):
                break  # killed while it wrote
            found.append(torch.frombuffer(content, dtype=dtype).view(shape))
    return runs
