"""The launch of a backward kernel as a run of the tuner has it, without the package's dispatch."""

from __future__ import annotations

import torch

from generator.runtime.launch.binding import bind
from generator.runtime.launch.launch import DW_IN_WEIGHT_DTYPE, plain_extent
from generator.runtime.launch.loaded_kernel import LoadedKernel
from generator.runtime.spec import Launch


def launch_backward(
    kernel: LoadedKernel,
    launch: Launch,
    stream: int,
    *,
    x: torch.Tensor,
    dy: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    dx: torch.Tensor | None,
    dw: torch.Tensor | None,
    workspace: int,
    dresidual: torch.Tensor | None = None,
    dresidual_out: torch.Tensor | None = None,
    dw_mode: int = DW_IN_WEIGHT_DTYPE,
    weight_offset: float = 0.0,
    mean: torch.Tensor | None = None,
) -> None:
    """Launch on `stream` (a raw CUDA stream), without waiting.

    x, dy, dx: (M, N) of the spec's dtype, the columns contiguous, M >= 1; base addresses and row
    strides multiples of spec.vector_bytes. x and dy may be (M / H, H, N) as well, with any two
    strides, where H > 1 and M * H < 2^32. rstd, mean: (M,) fp32, of which the kernel reads what its
    operation has. weight: (N,) contiguous; dw: the same, of every sum over rows; dw is fp32 unless
    dw_mode is DW_IN_WEIGHT_DTYPE. weight None stands for ones; dx or dw None is not
    computed. dresidual: (M, N) of spec.residual, if it has one; dresidual_out: the same, contiguous
    like dx, where that is not the spec's dtype. weight_offset: counts where spec.offset is set.
    workspace: address of launch.workspace_bytes bytes on the device, of which the first
    launch.scratch_offset are zero. launch: plan_launch(spec, M).

    Raises LaunchError. Nothing is checked here.
    """
    extent = plain_extent(
        launch,
        rows=x.numel() // x.shape[-1],
        columns=x.shape[-1],
        x_stride=x.stride(-2),
        dy_stride=dy.stride(-2),
        dresidual_stride=0 if dresidual is None else dresidual.stride(0),
        packed=(x.shape[1], x.stride(0), dy.stride(0)) if x.dim() == 3 else (0, 0, 0),
        dw_mode=dw_mode,
        weight_offset=weight_offset,
    )
    if dx is not None:
        extent = extent._replace(dx_stride=dx.stride(0))
    at = (workspace, workspace + launch.scratch_offset)
    binding = bind(kernel, launch, extent, x.get_device(), stream, *at, wants_dw=dw is not None)
    tensors = (x, dy, rstd, weight, dx, dw, dresidual, dresidual_out)
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    binding.run(addresses, 0 if mean is None else mean.data_ptr())
