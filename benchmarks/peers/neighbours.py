"""The contenders of a benchmark of norms that are fused with their neighbours: kernels of packages
and what else computes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.peers import plain
from generator.errors import NormforgeError
from generator.evaluate.gpu.timer import Timer
from generator.operations import operation_of
from generator.operations.operation import TORCH_DTYPE
from generator.problem import Problem
from normforge.operations import OPERATIONS
from normforge.operations.formula import evaluate
from normforge.serve.kernels import source_of
from normforge.serve.rows import RowServer

Results = dict[str, torch.Tensor]
Call = Callable[[], Results]
Binds = Callable[[Any], Call]
"""Makes a call of inputs, which gives the outputs by name."""


def tensors_of(problem: Problem, inputs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name. Where groups of rows share something, rows are
    (groups, rows of a group, N)."""
    signature = problem.signature
    given = {tensor.name: getattr(inputs, tensor.name) for tensor in signature.inputs}
    found = {name: value for name, value in given.items() if value is not None}
    if signature.groups:
        for tensor in signature.early:
            found[tensor.name] = found[tensor.name].view(-1, inputs.heads, problem.N)
        for tensor in signature.groups:
            found[tensor.name] = found[tensor.name].unsqueeze(-2)
    return found


def ours(problem: Problem, folder: Path) -> Binds:
    """Bind the package's kernel, below the functions that users call. Raises NormforgeError where
    it has none."""
    name = problem.operation
    server = RowServer(OPERATIONS[name], source_of(folder / name, name))

    def bind(inputs: Any) -> Call:
        tensors = tensors_of(problem, inputs)

        def call() -> Results:
            found = server.by_kernel(tensors, inputs.offset)
            if isinstance(found, str):
                raise NormforgeError(found)
            return found

        return call

    return bind


def formula(problem: Problem, compiled: str = "") -> Binds:
    """Bind the operation's formula in PyTorch. compiled: the mode of Inductor, "" for none."""
    operation = OPERATIONS[problem.operation]
    outputs = {
        spec.name: TORCH_DTYPE[spec.dtype] for spec in operation_of(problem).outputs(problem)
    }
    copied = {copy.name: copy.copy_of for copy in operation.signature.copies}

    def run(tensors: dict[str, Any], offset: float) -> Results:
        found = evaluate(operation, tensors, offset=offset)
        return {name: found[copied.get(name, name)].to(dtype) for name, dtype in outputs.items()}

    if compiled:
        run = torch.compile(run, dynamic=False, mode=None if compiled == "default" else compiled)
    return lambda inputs: partial(run, tensors_of(problem, inputs), inputs.offset)


def triton(problem: Problem, inputs: Any, timer: Timer) -> Binds:
    """Bind the plain Triton kernel with the launch that is fastest with these inputs. Raises what
    the last launch raised where none runs."""
    sms = torch.cuda.get_device_properties(timer.device).multi_processor_count
    bind = partial(plain.bind, problem.operation, sms=sms)
    best: tuple[float, plain.Launch] | None = None
    reason: Exception = NormforgeError("no launch of the plain kernel fits")
    for launch in plain.launches(problem.operation, problem.N):
        try:
            call = bind(inputs=inputs, launch=launch)
            call()
            us = median(timer.block([call], 5)[0])
        except Exception as error:  # too many registers, or too much shared memory
            reason = error
            continue
        if best is None or us < best[0]:
            best = us, launch
    if best is None:
        raise reason
    return lambda inputs: bind(inputs=inputs, launch=best[1])


def flash_linear_attention(problem: Problem) -> Binds:
    """Bind Flash-Linear-Attention's gated norm, of SiLU behind the norm. Its backward is called
    below autograd, which would launch it on the stream of the forward, outside of any capture."""
    if problem.operation not in ("gated_rmsnorm_forward", "gated_rmsnorm_backward"):
        raise NormforgeError("Flash-Linear-Attention has norms with a gate of SiLU behind them")
    from fla.modules.norm import fused_norm_gate as fla

    of_norm = {"bias": None, "activation": "swish", "is_rms_norm": True}

    def bind(inputs: Any) -> Call:
        given = {"x": inputs.x, "g": inputs.z, "weight": inputs.weight + inputs.offset}
        given |= {"eps": inputs.eps, **of_norm}
        if problem.operation.endswith("forward"):
            return lambda: {"y": fla.layer_norm_gated_fwd(**given)[0]}
        _, mean, rstd, _ = fla.layer_norm_gated_fwd(**given)

        def call() -> Results:
            found = fla.layer_norm_gated_bwd(dy=inputs.dy, mean=mean, rstd=rstd, **given)
            return dict(zip(("dx", "dz", "dw"), found, strict=False))

        return call

    return bind


def contenders(
    problem: Problem, folder: Path, inputs: Any, timer: Timer
) -> dict[str, Callable[[], Binds]]:
    """Return what takes part. Each raises where its library is missing or does not serve the
    shape."""
    return {
        "ours": lambda: ours(problem, folder),
        "eager": lambda: formula(problem),
        "inductor": lambda: formula(problem, "default"),
        "inductor_max": lambda: formula(problem, "max-autotune-no-cudagraphs"),
        "triton": lambda: triton(problem, inputs, timer),
        "fla": lambda: flash_linear_attention(problem),
    }
