"""PyTorch's own: ATen's fused operators, and what torch.compile makes of their decompositions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.peers.peer import Bind, Gradients, arguments
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs


def aten(inputs: Inputs) -> Callable[[], Gradients]:
    """Call ATen's fused operator."""
    backward = torch.ops.aten._fused_rms_norm_backward
    shape, rstd = [inputs.x.shape[1]], inputs.rstd[:, None]
    return lambda: backward(inputs.dy, inputs.x, shape, rstd, inputs.weight, [True, True])


def aten_layer_norm(inputs: Inputs) -> Callable[[], Gradients]:
    """Call ATen's fused operator. Of the bias it reads the dtype alone, so the weight stands for
    it."""
    backward = torch.ops.aten.native_layer_norm_backward
    dy, x, mean, rstd, weight = arguments(inputs)
    rows = (mean[:, None], rstd[:, None])
    return lambda: backward(dy, x, [x.shape[1]], *rows, weight, weight, [True, True, True])


def decomposed_backward(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """The backward that torch.compile puts into a training step in place of ATen's operator:
    PyTorch's own decomposition of it (torch/_decomp/decompositions.py), operation by operation."""
    N = x.shape[1]
    grad, wide = dy.to(torch.float32), x.to(torch.float32)
    weighted = grad * weight.to(torch.float32)
    normalized = wide * rstd[:, None]
    total = torch.sum(normalized * weighted, dim=1, keepdim=True)
    dx = (weighted - (normalized / N) * total) * rstd[:, None]
    dw = torch.sum(grad * normalized, dim=0)
    return dx.to(x.dtype), dw.to(weight.dtype)


def decomposed_layer_norm(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> Gradients:
    """Compute PyTorch's decomposition of LayerNorm's backward, operation by operation."""
    N = x.shape[1]
    grad, wide = dy.to(torch.float32), x.to(torch.float32)
    normalized = (wide - mean[:, None]) * rstd[:, None]
    weighted = grad * weight.to(torch.float32)
    level = torch.sum(weighted, dim=1, keepdim=True)
    along = normalized * torch.sum(weighted * normalized, dim=1, keepdim=True)
    dx = (rstd[:, None] / N) * (weighted * N - level - along)
    dgamma, dbeta = torch.sum(grad * normalized, dim=0), torch.sum(grad, dim=0)
    return dx.to(x.dtype), dgamma.to(weight.dtype), dbeta.to(weight.dtype)


def inductor(formula: Callable[..., Gradients], mode: str, timer: Timer) -> Bind:
    """A decomposition, compiled anew for every shape."""
    # One entry per shape and inputs; beyond the limit Dynamo would silently run without compiling.
    torch._dynamo.config.recompile_limit = 1024
    torch._dynamo.config.accumulated_recompile_limit = 4096
    # Kernels are chosen anew in the process that is timed: what the preparing processes chose,
    # with the GPU shared, is not kept. What they compiled is.
    options = {**torch._inductor.list_mode_options(mode), "autotune_local_cache": False}
    compiled = torch.compile(formula, dynamic=False, options=options)
    return lambda inputs: partial(compiled, *arguments(inputs))
