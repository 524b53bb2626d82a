"""One launch of a rendered source on the CPU, under as many schedules as asked for."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import ceil
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM
from typing import Any

import torch

from generator.emulate.build import DEFAULT_CACHE, HostError, build
from generator.emulate.request import WRITTEN, Buffer, Request, dtype_of, fields_of
from generator.operations.operation import TORCH_DTYPE
from normforge.launch.kernel_arguments import DW_IN_WEIGHT_DTYPE, argument_layout, extent_of
from normforge.launch.row_layout import RowLayout
from normforge.operations import signature_of
from normforge.operations.signature import Signature
from normforge.spec import KernelSpec, Launch

DEADLINE_SECONDS = 120.0
_ENDED_FROM_OUTSIDE = (-SIGKILL, -SIGTERM, -SIGHUP)
_GRACE_SECONDS = 5
"""Seconds after the deadline at which a program whose parent was killed ends by itself."""


@dataclass(frozen=True)
class Schedule:
    """One order of events. residency: CTAs that may run at the same time (whole clusters start)."""

    seed: int
    residency: int

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.residency} CTAs resident"


@dataclass(frozen=True)
class Layout:
    """The layout of matrices in memory. pads: elements behind every row, first of the matrices that
    are read before the row sums, then of the outputs, and of the one that is read behind the sums,
    repeated where there are more matrices;
    misaligned_bytes: distance of their first element from a 4096-byte boundary."""

    pads: tuple[int, ...] = (0,)
    misaligned_bytes: int = 0

    def pads_of(self, signature: Signature) -> dict[str, int]:
        """The elements behind every row by the names of tensors."""
        matrices = (*signature.early, *signature.outputs, *signature.late)
        return {t.name: pad for t, pad in zip(matrices, cycle(self.pads), strict=False)}


@dataclass(frozen=True)
class CallOptions:
    """The options that a call of any kernel may have.

    columns: whether it is given those that rows share; else they are ones. without: outputs that
    are not wanted. dw_mode: sums as fp32 (DW_IN_FP32), or added to `added_to`, as fp32 (DW_ADDED).
    extra: whether outputs are written that a call has to ask for.
    inner > 0: matrices that may be packed lie as `inner` rows and then a gap. over: by output, the
    matrix over which it is written, which needs equal strides and no gaps.
    """

    columns: bool = True
    without: frozenset[str] = frozenset()
    dw_mode: int = DW_IN_WEIGHT_DTYPE
    added_to: torch.Tensor | None = None
    extra: bool = False
    inner: int = 0
    over: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one schedule: an index into Runs.results by output, or what ended it."""

    schedule: Schedule
    results: Mapping[str, int] = field(default_factory=dict)
    fault: str = ""


@dataclass
class Runs:
    """The outcomes in the order of the schedules, and by output every different result: matrices
    (M, N), sums (N,) or as many times N as there are sums."""

    outcomes: list[Outcome] = field(default_factory=list)
    results: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def distinct_results(self) -> int:
        return len({tuple(o.results.values()) for o in self.outcomes if not o.fault})

    @property
    def faults(self) -> list[str]:
        """One sentence for every schedule that found something, with the schedule."""
        return [f"{o.fault} [{o.schedule}]" for o in self.outcomes if o.fault]


def run_schedules(
    source: str,
    spec: KernelSpec,
    launch: Launch,
    inputs: Any,
    schedules: Sequence[Schedule],
    *,
    layout: Layout | None = None,
    call_options: CallOptions | None = None,
    **options: Any,
) -> Runs:
    """Run `launch` of the kernels in `source` once for every schedule, up to its first fault.
    inputs: on the CPU, an object that has the inputs of the operation by their names, and `offset`,
    which is added to the columns; options: of `execute`. Raises NormforgeError when the C++
    compiler refuses the source, and HostError when this machine cannot compile or run it."""
    request = _request(spec, launch, inputs, layout or Layout(), call_options or CallOptions())
    return execute(source, request, schedules, kernel=spec.operation, **options)


def execute(
    source: str,
    request: Request,
    schedules: Sequence[Schedule],
    *,
    kernel: str,
    deadline: float = DEADLINE_SECONDS,
    cache_folder: Path = DEFAULT_CACHE,
) -> Runs:
    """Do `run_schedules` for a request that is made up already. kernel: name of the main one.
    deadline: seconds for all schedules; the one under way then gets a fault, later ones have no
    outcome."""
    program = build(source, cache_folder, kernel=kernel)
    asked = request.encode((schedule.seed, schedule.residency) for schedule in schedules)
    output, end = _run_program(program, asked, deadline)
    runs = _read(output, request, schedules)
    if len(runs.outcomes) < len(schedules):
        runs.outcomes.append(Outcome(schedules[len(runs.outcomes)], fault=end))
    return runs


def _run_program(program: Path, request: bytes, deadline: float) -> tuple[bytes, str]:
    """Run a program and return its answer and how it ended. Raises HostError where the answer is
    not that of a host program."""
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


def _request(
    spec: KernelSpec, launch: Launch, inputs: Any, layout: Layout, options: CallOptions
) -> Request:
    signature = signature_of(spec.operation)
    M, N = getattr(inputs, signature.early[0].name).shape
    widths = {tensor.name: getattr(inputs, tensor.name).shape[-1] for tensor in signature.groups}
    rows_at = _rows_at(signature, N, layout, options.inner, widths)
    arguments = argument_layout(signature)
    extent = extent_of(signature, M, N, rows_at, launch.group, vars(inputs))
    extent = extent._replace(dw_mode=options.dw_mode, weight_offset=inputs.offset)
    addresses = [(at, name) for name, at in arguments.places.items()]
    addresses += zip(arguments.workspace_at, ("counters", "zeroed", "scratch"), strict=True)
    addresses += [(at, "scratch") for at in arguments.scratch_at]
    shared = ((tensor.name, vars(inputs)[tensor.name]) for tensor in signature.groups)
    lent = (Buffer(n, "columns", t.dtype, (*t.shape,), t, rows_at[n]) for n, t in shared)
    wants_sums = signature.sums is not None and signature.sums.name not in options.without
    numbers = spec.partial_columns if spec.exact or spec.cluster > 1 else signature.column_sums * N
    fields = {
        "grid": launch.grid,
        "sum_grid": launch.sum_grid if wants_sums else 0,
        "sum_threads": spec.sum_threads,
        "dependent": int(spec.dependent),
        "ordered_adds": int(spec.determinism != "none"),
        "counters": launch.counters,
        "zeroed": launch.zeroed,
        "scratch": launch.scratch,
        "partial_columns": numbers,
        "partial_stride": spec.partial_stride,
    }
    return Request(
        fields_of(spec) | fields,
        (*_buffers(signature, spec, inputs, (M, N), rows_at, layout, options), *lent),
        arguments.block(launch, extent, zeros=0, scratch=0).raw,
        addresses,
        arguments.parameters[1],
    )


def _rows_at(
    signature: Signature, N: int, layout: Layout, inner: int, widths: Mapping[str, int]
) -> dict[str, RowLayout]:
    """Return the row layouts of the matrices by name; the rows of a matrix that is left out are
    contiguous. With `inner`, a gap follows every `inner` rows: of one row in the first matrix, of
    two in all others; what groups share is then the first part of a matrix. widths: of what groups
    share."""
    found = {name: RowLayout(N + pad) for name, pad in layout.pads_of(signature).items()}
    if inner:
        for i, tensor in enumerate(signature.in_heads):
            stride = found[tensor.name].stride
            found[tensor.name] = RowLayout(stride, inner, (inner + min(i + 1, 2)) * stride)
    found |= {name: RowLayout(N if inner else width) for name, width in widths.items()}
    return found | {copy.name: found[copy.copy_of] for copy in signature.copies}


def _buffers(
    signature: Signature,
    spec: KernelSpec,
    inputs: Any,
    shape: tuple[int, int],
    rows_at: Mapping[str, RowLayout],
    layout: Layout,
    options: CallOptions,
) -> Iterator[Buffer]:
    """Yield the buffers of the tensors that the call has, in the order of the signature."""
    M, N = shape
    shapes = {"rows": shape, "row": (M,), "columns": (N,), "quantized": shape}
    if signature.scales:
        shapes["scales"] = (M, N // signature.scales.block)
    for tensor in signature.tensors:
        if tensor.role in ("number", "flag", "group"):
            continue
        content = None if tensor.output else getattr(inputs, tensor.name)
        dtype = dtype_of(tensor, spec, options.dw_mode != DW_IN_WEIGHT_DTYPE)
        if tensor.output:
            copied = tensor.copy_of and dtype == spec.dtype  # then the output is its own copy
            unasked = tensor.extra and not options.extra
            if copied or unasked or options.without & {tensor.name, tensor.copy_of}:
                continue
            if tensor.role == "sums":
                content = options.added_to
        elif content is None or (tensor.role == "columns" and not options.columns):
            continue
        if not dtype:
            continue  # an option that the kernel does not have
        own = tensor.late or tensor.copy_of  # a dtype, and so an alignment
        yield Buffer(
            tensor.name,
            WRITTEN[tensor.role] if tensor.output else tensor.role,
            TORCH_DTYPE[dtype],
            shapes.get(tensor.role, (N * tensor.count,)),
            content,
            rows_at.get(tensor.name),
            0 if own or tensor.role != "rows" else layout.misaligned_bytes,
            options.over.get(tensor.name, ""),
        )


def _read(output: bytes, request: Request, schedules: Sequence[Schedule]) -> Runs:
    runs = Runs(results={name: [] for name in request.outputs})
    at = 0
    while (end := output.find(b"\n", at)) >= 0 and len(runs.outcomes) < len(schedules):
        kind, _, rest = output[at:end].decode().partition(" ")
        at = end + 1
        schedule = schedules[len(runs.outcomes)]
        if kind == "fault":
            runs.outcomes.append(Outcome(schedule, fault=rest))
        elif kind == "run":
            indices = map(int, rest.split())
            found = dict(zip(request.outputs, indices, strict=True))
            runs.outcomes.append(Outcome(schedule, found))
        else:
            name, size = rest.split()
            content = bytearray(output[at : at + int(size)])
            at += int(size)
            if len(content) < int(size):
                break  # killed while it wrote
            buffer = request.outputs[name]
            made = torch.frombuffer(content, dtype=buffer.dtype).view(buffer.shape)
            runs.results[name].append(made)
    return runs
