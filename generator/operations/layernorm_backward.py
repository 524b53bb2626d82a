"""The backward of LayerNorm: what it takes and gives, and the reference in float64.

It has the inputs of RMSNorm's backward and the mean of every row. The sums over the rows are one
output: dw, whose first half is dgamma and whose second half is dbeta.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from generator.operations import rmsnorm_backward as rmsnorm
from generator.operations.operation import (
    CHUNK_ELEMENTS,
    Bound,
    FrontEnd,
    Operation,
    TensorSpec,
)
from generator.operations.rmsnorm_backward import Inputs, Reference
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
    step = max(1, CHUNK_ELEMENTS // problem.N)
    for start in range(0, problem.M, step):
        part = slice(start, start + step)
        around = torch.arange(start, start + len(x[part]), device=device) % 9 / 2 - 2.0
        x[part] = x[part].float() + around[:, None]
        wide = x[part].double()
        mean[part] = wide.mean(dim=1)
        rstd[part] = torch.rsqrt(wide.var(dim=1, unbiased=False) + EPS)
    return replace(inputs, mean=mean, rstd=rstd)


def make_reference(problem: Problem, inputs: Inputs) -> Reference:
    """The reference in float64, computed in chunks of rows.

    dx = rstd * (w * dy - mean(w * dy) - xhat * mean(xhat * w * dy)), dgamma = sum over rows of
    dy * xhat, dbeta = sum over rows of dy, with xhat = (x - mean) * rstd (Ba, Kiros and Hinton,
    "Layer Normalization", 2016); w is the weight and the offset, and the residual's gradient is
    added to dx.
    """
    assert inputs.mean is not None
    wide = torch.float64 if problem.dtype == "fp32" else torch.float32
    device, N = inputs.x.device, problem.N
    dx = torch.empty(inputs.x.shape, dtype=wide, device=device)
    dw = torch.zeros(2 * N, dtype=torch.float64, device=device)
    dw_scale = torch.zeros_like(dw)
    row_scale = torch.empty((problem.M, 1), dtype=torch.float32, device=device)
    weight = inputs.weight.double() + inputs.offset
    step = max(1, CHUNK_ELEMENTS // N)
    for start in range(0, problem.M, step):
        part = slice(start, start + step)
        rstd = inputs.rstd[part].double()[:, None]
        xhat = (inputs.x[part].double() - inputs.mean[part].double()[:, None]) * rstd
        dy = inputs.dy[part].double()
        both = torch.cat((dy * xhat, dy), dim=1)
        dw += both.sum(0)
        dw_scale += both.abs().sum(0)
        weighted = dy * weight
        level = weighted.mean(dim=1, keepdim=True)
        along = xhat * (xhat * weighted).mean(dim=1, keepdim=True)
        gradient = rstd * (weighted - level - along)
        terms = rstd * (weighted.abs() + weighted.abs().mean(dim=1, keepdim=True) + along.abs())
        if inputs.residual is not None:
            gradient += inputs.residual[part].double()
            terms += inputs.residual[part].double().abs()
        dx[part] = gradient
        row_scale[part] = terms.amax(dim=1, keepdim=True)
    return Reference(dx, dw, row_scale, dw_scale)


def bounds(problem: Problem, inputs: Inputs) -> dict[str, Bound]:
    """What dx, dw and dresidual_out have to be."""
    return rmsnorm.bounds_of(problem, make_reference(problem, inputs))


LAYERNORM_BACKWARD = Operation(
    name="layernorm_backward",
    front_end=FrontEnd(
        norm="LayerNorm",
        module="frontends.layer_norm",
        package="LayerNormPackage",
        functions=(
            *("explain", "graph_pass", "inductor_backend", "install", "installed", "layer_norm"),
            *("layer_norm_backward", "patch", "uninstall", "unpatch"),
        ),
    ),
    sums_rows=True,
    arguments=arguments,
    outputs=outputs,
    make_inputs=make_inputs,
    make_cancelling=rmsnorm.make_cancelling,
    bounds=bounds,
    floor=rmsnorm.floor,
    load=rmsnorm.BackwardRunner,
)
