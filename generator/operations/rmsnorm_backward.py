"""The backward of RMSNorm: inputs, the reference in float64, and the error that is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from generator.operations.operation import (
    FP32_SLACK,
    HALF_UNIT,
    TORCH_DTYPE,
    Bound,
    FrontEnd,
    Operation,
    TensorSpec,
    half_subnormal,
    over_bytes,
    row_slices,
)
from generator.problem import Problem
from normforge.launch.binding import bind
from normforge.launch.kernel_arguments import DW_IN_WEIGHT_DTYPE, Extent, gap_factor
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.spec import KernelSpec, Launch, plan_launch


def arguments(problem: Problem) -> tuple[TensorSpec, ...]:
    """dy, x, rstd and weight, and with the option dresidual, the residual's gradient."""
    rows, dtype = (problem.M, problem.N), problem.dtype
    found: tuple[TensorSpec, ...] = (
        TensorSpec("dy", rows, dtype),
        TensorSpec("x", rows, dtype),
        TensorSpec("rstd", (problem.M,), "fp32"),
        TensorSpec("weight", (problem.N,), problem.weight_dtype),
    )
    if problem.residual:
        found += (TensorSpec("dresidual", rows, problem.residual),)
    return found


def outputs(problem: Problem) -> tuple[TensorSpec, ...]:
    """dx and dw, and dx once more where the residual's gradient has a dtype of its own."""
    rows = (problem.M, problem.N)
    found: tuple[TensorSpec, ...] = (
        TensorSpec("dx", rows, problem.dtype),
        TensorSpec("dw", (problem.N,), problem.weight_dtype),
    )
    if problem.residual not in ("", problem.dtype):
        found += (TensorSpec("dresidual_out", rows, problem.residual),)
    return found


@dataclass
class Inputs:
    """x, dy: (M, N); rstd: (M,) fp32; weight: (N,), to which `offset` is added in fp32; residual:
    (M, N), the gradient that is added to dx; mean: (M,) fp32, of an operation that takes it off."""

    x: torch.Tensor
    dy: torch.Tensor
    rstd: torch.Tensor
    weight: torch.Tensor
    offset: float = 0.0
    residual: torch.Tensor | None = None
    mean: torch.Tensor | None = None


@dataclass
class Reference:
    """dx (M, N) and dw (N,) from float64 arithmetic on the rounded inputs, with the magnitudes that
    bound the error of fp32 arithmetic: row_scale (M, 1), the largest sum of |terms| of dx in the
    row, and dw_scale (N,), the sum of |dy * xhat| over the rows. For a dtype narrower than fp32, dx
    is kept in float32, whose error is far below half a unit of bf16 or fp16."""

    dx: torch.Tensor
    dw: torch.Tensor
    row_scale: torch.Tensor
    dw_scale: torch.Tensor


def _rstd(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + 1e-6) of every row, fp32, computed in chunks of float64."""
    rstd = torch.empty(len(x), device=x.device)
    for part in row_slices(*x.shape):
        rstd[part] = torch.rsqrt(x[part].double().square().mean(dim=1) + 1e-6)
    return rstd


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Random inputs on which every term shows: dy has a part along x whose sign alternates from
    row to row, so that mean(xhat * w * dy) is large while dw stays near sqrt(M) and a lost row
    shows."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = TORCH_DTYPE[problem.dtype]
    shape = (problem.M, problem.N)
    x = torch.empty(shape, dtype=dtype, device=device)
    dy = torch.empty_like(x)
    for part in row_slices(*shape):
        drawn = torch.randn(x[part].shape, generator=generator, device=device)
        x[part] = drawn
        sign = 1.0 - 2.0 * (torch.arange(part.start, part.stop, device=device) % 2)
        noise = torch.randn(x[part].shape, generator=generator, device=device)
        dy[part] = noise + 0.5 * sign[:, None] * drawn
    offset = 1.0 if problem.offset else 0.0
    weight = 1 - offset + 0.1 * torch.randn(problem.N, generator=generator, device=device)
    residual = None
    if problem.residual:
        residual = torch.empty(shape, dtype=TORCH_DTYPE[problem.residual], device=device)
        for part in row_slices(*shape):
            residual[part] = torch.randn(x[part].shape, generator=generator, device=device)
    weight = weight.to(TORCH_DTYPE[problem.weight_dtype])
    return Inputs(x, dy, _rstd(x), weight, offset, residual)


def make_cancelling(problem: Problem, inputs: Inputs, seed: int = 1) -> Inputs:
    """Inputs whose dw is a small rest of large terms: the second half of the rows takes back, but
    for small noise, what the first half adds, with magnitudes from 1 to 2^10. Adding partial sums
    in another order changes the rest in its leading digits, so any reordering shows in dw."""
    generator = torch.Generator(inputs.x.device).manual_seed(seed)
    half = problem.M // 2
    if half == 0:
        return inputs
    x, dy, rstd = inputs.x.clone(), inputs.dy.clone(), inputs.rstd.clone()
    mean = None if inputs.mean is None else inputs.mean.clone()
    for same in (x, rstd, mean):
        if same is not None:
            same[half : 2 * half] = same[:half]
    for part in row_slices(half, problem.N):
        shape = dy[part].shape
        power = torch.randint(0, 11, (shape[0], 1), generator=generator, device=x.device)
        large = torch.randn(shape, generator=generator, device=x.device) * torch.exp2(power)
        noise = torch.randn(shape, generator=generator, device=x.device)
        dy[part] = large
        again = dy[half + part.start : half + part.stop]
        again.copy_(-dy[part])
        again += noise * 0.01
    return replace(inputs, x=x, dy=dy, rstd=rstd, mean=mean)


def make_reference(problem: Problem, inputs: Inputs) -> Reference:
    """The reference in float64, computed in chunks of rows.

    dx = rstd * (w * dy - xhat * mean(xhat * w * dy)), dw = sum over rows of dy * xhat, with
    xhat = x * rstd (Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019); w is the
    weight and the offset, and the residual's gradient is added to dx. Where rows have a mean,
    xhat = (x - mean) * rstd, dx loses rstd * mean(w * dy), and behind dw comes the sum over rows of
    dy (Ba, Kiros and Hinton, 2016).
    """
    wide = torch.float64 if problem.dtype == "fp32" else torch.float32
    device, mean = inputs.x.device, inputs.mean
    dx = torch.empty(inputs.x.shape, dtype=wide, device=device)
    dw = torch.zeros(problem.N * (1 if mean is None else 2), dtype=torch.float64, device=device)
    dw_scale = torch.zeros_like(dw)
    row_scale = torch.empty((problem.M, 1), dtype=torch.float32, device=device)
    weight = inputs.weight.double() + inputs.offset
    for part in row_slices(problem.M, problem.N):
        rstd = inputs.rstd[part].double()[:, None]
        x = inputs.x[part].double()
        xhat = (x if mean is None else x - mean[part].double()[:, None]) * rstd
        dy = inputs.dy[part].double()
        product = dy * xhat if mean is None else torch.cat((dy * xhat, dy), dim=1)
        dw += product.sum(0)
        dw_scale += product.abs().sum(0)
        weighted = dy * weight
        along = xhat * (xhat * weighted).mean(dim=1, keepdim=True)
        gradient = rstd * (weighted - along)
        terms = rstd * (weighted.abs() + along.abs())
        if mean is not None:
            gradient -= rstd * weighted.mean(dim=1, keepdim=True)
            terms += rstd * weighted.abs().mean(dim=1, keepdim=True)
        if inputs.residual is not None:
            gradient += inputs.residual[part].double()
            terms += inputs.residual[part].double().abs()
        dx[part] = gradient
        row_scale[part] = terms.amax(dim=1, keepdim=True)
    return Reference(dx, dw, row_scale, dw_scale)


def bounds(problem: Problem, inputs: Inputs) -> dict[str, Bound]:
    """What dx, dw and dresidual_out have to be. Beside one rounding they may be off by fp32
    arithmetic, in units of the sums of the magnitudes of their terms, and by half a unit of a
    subnormal result."""
    reference = make_reference(problem, inputs)
    slack_dx = reference.row_scale * FP32_SLACK + half_subnormal(problem.dtype)
    slack_dw = reference.dw_scale * FP32_SLACK + half_subnormal(problem.weight_dtype)
    found = {
        "dx": Bound(reference.dx, HALF_UNIT[problem.dtype], slack_dx),
        "dw": Bound(reference.dw, HALF_UNIT[problem.weight_dtype], slack_dw),
    }
    if problem.residual not in ("", problem.dtype):
        found["dresidual_out"] = Bound(reference.dx, HALF_UNIT[problem.residual], slack_dx)
    return found


def floor(
    problem: Problem, inputs: Inputs, outputs: Mapping[str, torch.Tensor]
) -> Callable[[], object]:
    """torch.add over as many bytes: torch.add(x, dy, out=dx) where there is no residual."""
    size = RMSNORM_BACKWARD.traffic_bytes(problem)
    one, two, out = over_bytes(size, (inputs.x, inputs.dy, outputs["dx"]))
    return lambda: torch.add(one, two, out=out)


def run_backward(
    kernel: LoadedKernel,
    launch: Launch,
    inputs: Inputs,
    outputs: Mapping[str, torch.Tensor | None],
    workspace: torch.Tensor,
    dw_mode: int = DW_IN_WEIGHT_DTYPE,
) -> None:
    """Enqueue one call on the current stream, without waiting. Nothing is checked.

    inputs: x and dy have contiguous columns, and base addresses and row strides that are multiples
    of spec.vector_bytes. They may be packed as (M / H, H, N), with any two strides, where H > 1 and
    M * H < 2^32. A weight of None stands for ones. outputs: dx, dw, and dresidual_out where the
    residual has another dtype than x; one that is None is not computed. dw is fp32 unless dw_mode
    is DW_IN_WEIGHT_DTYPE. workspace: launch.workspace_bytes, the first launch.scratch_offset of
    them zero. launch: plan_launch(spec, M). Raises LaunchError.
    """
    x, dy, residual = inputs.x, inputs.dy, inputs.residual
    dx, dw = outputs["dx"], outputs["dw"]
    rows, columns = x.numel() // x.shape[-1], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 0
    extent = Extent(
        rows=rows,
        x_stride=x.stride(-2),
        dy_stride=dy.stride(-2),
        dresidual_stride=0 if residual is None else residual.stride(0),
        dx_stride=columns if dx is None else dx.stride(0),
        x_gap=x.stride(0) - heads * x.stride(1) if heads else 0,
        dy_gap=dy.stride(0) - heads * dy.stride(1) if heads else 0,
        gaps=gap_factor(rows, heads),
        columns=columns,
        group=launch.group,
        dw_mode=dw_mode,
        weight_offset=inputs.offset,
    )
    place = workspace.data_ptr()
    at = (torch.cuda.current_stream().cuda_stream, place, place + launch.scratch_offset)
    binding = bind(kernel, launch, extent, x.get_device(), *at, wants_dw=dw is not None)
    dresidual_out = None if dx is None else outputs.get("dresidual_out")
    tensors = (x, dy, inputs.rstd, inputs.weight, dx, dw, residual, dresidual_out)
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    binding.run(addresses, 0 if inputs.mean is None else inputs.mean.data_ptr())


class BackwardRunner:
    """A backward kernel on M rows."""

    def __init__(self, cubin: bytes, spec: KernelSpec, problem: Problem) -> None:
        self.kernel = LoadedKernel(cubin, spec)
        self.launch = plan_launch(spec, problem.M)
        self.workspace_bytes = self.launch.workspace_bytes
        self.clean_bytes = self.launch.scratch_offset

    def run(
        self,
        inputs: Inputs,
        outputs: Mapping[str, torch.Tensor | None],
        workspace: torch.Tensor,
        *,
        dw_mode: int = DW_IN_WEIGHT_DTYPE,
    ) -> None:
        """See Runner and `run_backward`."""
        run_backward(self.kernel, self.launch, inputs, outputs, workspace, dw_mode)


RMSNORM_BACKWARD = Operation(
    name="rmsnorm_backward",
    front_end=FrontEnd(
        norm="RMSNorm",
        module="api",
        package="Package",
        functions=(
            *("explain", "graph_pass", "inductor_backend", "install", "installed", "operators"),
            *("patch", "rms_norm", "rmsnorm_backward", "rmsnorm_forward", "uninstall", "unpatch"),
            *("use_native", "warmup"),
        ),
    ),
    sums_rows=True,
    arguments=arguments,
    outputs=outputs,
    make_inputs=make_inputs,
    make_cancelling=make_cancelling,
    bounds=bounds,
    floor=floor,
    load=BackwardRunner,
    forward="rmsnorm_forward",
    fallbacks=True,
)
