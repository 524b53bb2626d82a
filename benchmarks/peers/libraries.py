"""Kernels of Liger and QuACK, called the way their own libraries call them in a training step."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.peers.peer import TUNER_ROUNDS, Bind, Gradients
from generator.errors import NormforgeError
from generator.evaluate.gpu.timer import Timer
from generator.operations.rmsnorm_backward import Inputs
from normforge.operations import layernorm_backward

EPS = 1e-6
"""The eps with which generator.operations.rmsnorm_backward computes rstd."""


class _Context:
    """The part of an autograd.Function's context that connects its forward and its backward."""

    needs_input_grad = (True, True, True)
    saved_tensors: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def _bind_liger(function: Any, in_place: bool) -> Bind:
    """The backward of Liger's autograd.Function after its own forward, in the casting mode that is
    its default; the library decides there which kernel serves the shape."""

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        context = _Context()
        function.forward(context, inputs.x, inputs.weight, EPS, 0.0, "llama", in_place)
        return lambda: function.backward(context, inputs.dy)[:2]

    return bind


def liger_triton(timer: Timer) -> Bind:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    # Working in place is the default; otherwise Liger fills dx with zeros first.
    return _bind_liger(LigerRMSNormFunction, in_place=True)


def liger_cutedsl(timer: Timer) -> Bind:
    try:
        from liger_kernel.ops.cutedsl.ops.rms_norm import LigerRMSNormFunction
    except ModuleNotFoundError as error:
        raise NormforgeError(f"this liger-kernel has no CuTe DSL RMSNorm ({error})") from error
    return _bind_liger(LigerRMSNormFunction, in_place=False)


def liger_layer_norm(timer: Timer) -> Bind:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        context, bias = _Context(), torch.zeros_like(inputs.weight)
        eps = layernorm_backward.EPS
        LigerLayerNormFunction.forward(context, inputs.x, inputs.weight, bias, eps)
        return lambda: LigerLayerNormFunction.backward(context, inputs.dy)[:3]

    return bind


def quack(timer: Timer) -> Bind:
    from quack.rmsnorm import rmsnorm_bwd

    return lambda i: lambda: rmsnorm_bwd(i.x, i.weight, i.dy, i.rstd)[:2]


def quack_layer_norm(timer: Timer) -> Bind:
    from quack.rmsnorm import layernorm_bwd

    return lambda i: lambda: layernorm_bwd(i.x, i.weight, i.dy, i.rstd, i.mean)


def quack_tuned(timer: Timer) -> Bind:
    """QuACK's tuner over all of its configurations, for either operation. They are timed by the
    timer of this benchmark, with a cold L2 as QuACK does; its own way takes over a minute per
    shape."""
    from quack.autotuner import Autotuner
    from quack.rmsnorm import rmsnorm_bwd_tuned
    from quack.rmsnorm_config import get_sm_count, prune_invalid_rmsnorm_bwd_configs

    def do_bench(call: Callable[[], object], quantiles: tuple[float, ...]) -> list[float]:
        (times,) = timer.block([call], TUNER_ROUNDS)
        return [median(times) * 1e-3] * len(quantiles)

    tuner = Autotuner(
        rmsnorm_bwd_tuned.fn,
        rmsnorm_bwd_tuned.keys,
        rmsnorm_bwd_tuned.configs,
        prune_configs_by={"early_config_prune": prune_invalid_rmsnorm_bwd_configs},
        do_bench=do_bench,
    )

    def bind(inputs: Inputs) -> Callable[[], Gradients]:
        x, weight, mean = inputs.x, inputs.weight, getattr(inputs, "mean", None)
        shape = (get_sm_count(x.shape[1], x.device), x.shape[1])

        def partials() -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=x.device)

        def backward() -> Gradients:
            dx, sums, more = torch.empty_like(x), [partials()], {}
            if mean is not None:
                sums.append(partials())
                more = {"db_partial": sums[1], "has_db_partial": True}
                more |= {"mean": mean, "is_layernorm": True}
            tuner(x, weight, inputs.dy, inputs.rstd, dx, sums[0], has_dw_partial=True, **more)
            return dx, *(part.sum(dim=0).to(weight.dtype) for part in sums)

        return backward

    return bind
