"""The forward of RMSNorm: inputs, the reference in float64, and the error that is allowed.

The option `+residual` of a problem means here that a residual of x's dtype is added to x first, and
that their sum, rounded, is an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from generator.operations.operation import (
    FP32_SLACK,
    HALF_UNIT,
    TORCH_DTYPE,
    Bound,
    Operation,
    TensorSpec,
    half_subnormal,
    over_bytes,
    row_slices,
)
from generator.problem import RMSNORM_FORWARD as FORWARD
from generator.problem import Problem
from normforge.launch.driver import checked, cuda_driver
from normforge.launch.forward_call import Bindings, ForwardExtent, pack_changing
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.serve.forward import reference_forward
from normforge.spec import ForwardSpec

EPS = 1e-6


@dataclass
class ForwardInputs:
    """x, residual: (M, N); weight: (N,), None for ones, to which `offset` is added in fp32."""

    x: torch.Tensor
    weight: torch.Tensor | None
    residual: torch.Tensor | None = None
    offset: float = 0.0


def arguments(problem: Problem) -> tuple[TensorSpec, ...]:
    """x and weight, and with the option residual."""
    rows = (problem.M, problem.N)
    weight = TensorSpec("weight", (problem.N,), problem.weight_dtype)
    found = (TensorSpec("x", rows, problem.dtype), weight)
    return (*found, TensorSpec("residual", rows, problem.dtype)) if problem.residual else found


def outputs(problem: Problem) -> tuple[TensorSpec, ...]:
    """y and rstd, and with the option residual_out."""
    rows = (problem.M, problem.N)
    found = (TensorSpec("y", rows, problem.dtype), TensorSpec("rstd", (problem.M,), "fp32"))
    return (*found, TensorSpec("residual_out", rows, problem.dtype)) if problem.residual else found


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> ForwardInputs:
    """Random rows of different sizes, so that a row that gets another's rstd shows."""
    generator = torch.Generator(device).manual_seed(seed)

    def rows() -> torch.Tensor:
        shape = (problem.M, problem.N)
        drawn = torch.empty(shape, dtype=TORCH_DTYPE[problem.dtype], device=device)
        for part in row_slices(*shape):
            normal = torch.randn(drawn[part].shape, generator=generator, device=device)
            size = torch.rand((len(normal), 1), generator=generator, device=device)
            drawn[part] = normal * (0.5 + 3 * size)
        return drawn

    x = rows()
    residual = rows() if problem.residual else None
    weight = 1 + 0.1 * torch.randn(problem.N, generator=generator, device=device)
    return ForwardInputs(x, weight.to(TORCH_DTYPE[problem.weight_dtype]), residual)


def bounds(problem: Problem, inputs: ForwardInputs) -> dict[str, Bound]:
    """Return what y, rstd and residual_out have to be. y and rstd may be off by one rounding and by
    FP32_SLACK of themselves, residual_out not at all."""
    x = inputs.x
    if inputs.residual is not None:
        x = torch.empty_like(inputs.x)
        for part in row_slices(problem.M, problem.N):
            x[part] = inputs.x[part].float() + inputs.residual[part].float()
    wide = torch.float64 if problem.dtype == "fp32" else torch.float32
    y = torch.empty(x.shape, dtype=wide, device=x.device)
    rstd = torch.empty(problem.M, dtype=torch.float64, device=x.device)
    weight = None if inputs.weight is None else inputs.weight.double()
    for part in row_slices(problem.M, problem.N):
        exact, own = reference_forward(x[part].double(), weight, EPS, inputs.offset)
        y[part], rstd[part] = exact, own[:, 0]

    def slack(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, half_subnormal(dtype), dtype=torch.float64, device=x.device)

    # compare() allows a thousandth more than `unit`.
    found = {
        "y": Bound(y, HALF_UNIT[problem.dtype] + FP32_SLACK, slack(problem.dtype, (problem.M, 1))),
        "rstd": Bound(rstd, HALF_UNIT["fp32"] + FP32_SLACK, slack("fp32", (problem.M,))),
    }
    if inputs.residual is not None:
        exactly = torch.zeros((problem.M, 1), device=x.device)
        found["residual_out"] = Bound(x, 0.0, exactly)
    return found


def floor(
    problem: Problem, inputs: ForwardInputs, outputs: Mapping[str, torch.Tensor]
) -> Callable[[], object]:
    """A copy of as many bytes, from x to y where there is no residual. torch.mul, because
    Tensor.copy_ is no kernel but a transfer."""
    size = RMSNORM_FORWARD.traffic_bytes(problem)
    one, out = over_bytes(size, (inputs.x, outputs["y"]))
    return lambda: torch.mul(one, 1.5, out=out)


class ForwardRunner:
    """A forward kernel on M contiguous rows."""

    workspace_bytes = clean_bytes = 0

    def __init__(self, cubin: bytes, spec: ForwardSpec, problem: Problem) -> None:
        self.kernel = LoadedKernel(cubin, spec)

    def run(
        self,
        inputs: ForwardInputs,
        outputs: Mapping[str, torch.Tensor | None],
        workspace: torch.Tensor,
    ) -> None:
        """See Runner; there is no workspace."""
        tensors = [inputs.x, inputs.residual, inputs.weight]
        tensors += [outputs["y"], outputs["rstd"], outputs.get("residual_out")]
        M, N = inputs.x.shape
        extent = ForwardExtent(M, N, 0, N, N, 0)  # one stride, and no second one
        with_residual, device = inputs.residual is not None, inputs.x.get_device()
        bindings = Bindings(self.kernel, device, with_residual, extent)
        binding = bindings[torch.cuda.current_stream().cuda_stream]
        _, values, config, function, array, _ = binding
        addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
        pack_changing(values, 0, *addresses, EPS, inputs.offset)
        launched = cuda_driver().cuLaunchKernelEx(config, function, array, 0)
        checked(launched, "launching", self.kernel.spec.name)


RMSNORM_FORWARD = Operation(
    name=FORWARD,
    front_end=None,
    sums_rows=False,
    arguments=arguments,
    outputs=outputs,
    make_inputs=make_inputs,
    make_cancelling=lambda problem, inputs: inputs,
    bounds=bounds,
    floor=floor,
    load=ForwardRunner,
    serves=lambda problem: {"residual": replace(problem, residual=problem.dtype)},
)
RMSNORM_INVARIANT_FORWARD = replace(RMSNORM_FORWARD, name="rmsnorm_invariant_forward")
"""Chosen among kernels whose bits do not depend on the batch."""
