"""The backward of LayerNorm: what it takes and gives.

It has the inputs of RMSNorm's backward and the mean of every row. The sums over the rows are one
output: dw, whose first half is dgamma and whose second half is dbeta. The reference is that of
RMSNorm, which knows rows with a mean.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from generator.operations import rmsnorm_backward as rmsnorm
from generator.operations.operation import FrontEnd, TensorSpec, row_slices
from generator.operations.rmsnorm_backward import Inputs
from generator.problem import Problem

EPS = 1e-5


def arguments(problem: Problem) -> tuple[TensorSpec, ...]:
    """dy, x, rstd, weight and mean, and with the option dresidual, the residual's gradient."""
    return (*rmsnorm.arguments(problem), TensorSpec("mean", (problem.M,), "fp32"))


def outputs(problem: Problem) -> tuple[TensorSpec, ...]:
    """dx, dw and dresidual_out, as of RMSNorm's backward; dw is dgamma and then dbeta."""
    return tuple(
        replace(out, shape=(2 * problem.N,)) if out.name == "dw" else out
        for out in rmsnorm.outputs(problem)
    )


def make_inputs(problem: Problem, device: torch.device, seed: int = 0) -> Inputs:
    """Those of RMSNorm's backward, with rows of x that lie around numbers from -2 to 2: a mean that
    is left out shows in dx and in dgamma."""
    inputs = rmsnorm.make_inputs(problem, device, seed)
    x = inputs.x
    mean = torch.empty(problem.M, device=device)
    rstd = torch.empty_like(mean)
    for part in row_slices(problem.M, problem.N):
        around = torch.arange(part.start, part.stop, device=device) % 9 / 2 - 2.0
        x[part] = x[part].float() + around[:, None]
        wide = x[part].double()
        mean[part] = wide.mean(dim=1)
        rstd[part] = torch.rsqrt(wide.var(dim=1, unbiased=False) + EPS)
    return replace(inputs, mean=mean, rstd=rstd)


LAYERNORM_BACKWARD = replace(
    rmsnorm.RMSNORM_BACKWARD,
    name="layernorm_backward",
    front_end=FrontEnd(
        norm="LayerNorm",
        module="frontends.layer_norm",
        package="LayerNormPackage",
        functions=(
            *("explain", "graph_pass", "inductor_backend", "install", "installed", "layer_norm"),
            *("layer_norm_backward", "operators", "patch", "uninstall", "unpatch"),
        ),
    ),
    arguments=arguments,
    outputs=outputs,
    make_inputs=make_inputs,
    forward="",
    fallbacks=False,
)
