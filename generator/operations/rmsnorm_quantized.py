"""RMSNorm whose result is quantized to FP8, as the tuner knows it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from itertools import product
from typing import Any

import torch

from generator.operations.operation import (
    FP32_SLACK,
    HALF_UNIT,
    Bound,
    FrontEnd,
    Operation,
    row_slices,
)
from generator.operations.rmsnorm_backward import RMSNORM_BACKWARD
from generator.operations.rows import inputs_class, make_reference, row_operation
from generator.problem import Problem
from normforge import operations
from normforge.operations import RowOperation
from normforge.operations.formula import quantize
from normforge.operations.rmsnorm_backward import EPS
from normforge.operations.rmsnorm_quantized import LARGEST


def make_inputs(operation: RowOperation, problem: Problem, device: torch.device, **how: Any) -> Any:
    """Make the inputs of RMSNorm's backward, but for the incoming gradient, with y as it is in
    fp32. how: as for it."""
    given = RMSNORM_BACKWARD.make_inputs(problem, device, **how)
    numbers = {tensor.name: 0.0 for tensor in operation.signature.numbers} | {"eps": EPS}
    made = inputs_class(operation.signature)
    return made(x=given.x, weight=given.weight, **numbers, offset=given.offset)


def bounds(operation: RowOperation, problem: Problem, inputs: Any) -> dict[str, Bound]:
    """Return the bounds of the outputs, of finite rows. What is quantized is exact, but where y,
    off by fp32 arithmetic, may be rounded in one way or the other; and so are scales that are
    powers of two."""
    reference = make_reference(operation, problem, inputs)
    y, rstd = reference.outputs["y"], reference.outputs["rstd"]
    found: dict[str, Bound] = {}
    scales = operation.signature.scales
    assert scales is not None
    shapes = {"y8": y.shape, "y_scales": (problem.M, problem.N // scales.block)}
    # Halfway between two of e4m3 needs five bits.
    dtypes = {"y8": torch.bfloat16, "y_scales": torch.float32}
    for name, shape in shapes.items():
        middle = torch.empty(shape, dtype=dtypes[name], device=y.device)
        found[name] = Bound(middle, 0.0, torch.empty_like(middle))
    given = {tensor.name: getattr(inputs, tensor.name) for tensor in operation.signature.inputs}
    for part in row_slices(problem.M, problem.N):
        for name, (least, most) in _ends(operation, given, y[part].double(), scales.block).items():
            found[name].reference[part] = (least + most) / 2
            found[name].slack[part] = (most - least) / 2
    return found | {"rstd": Bound(rstd, HALF_UNIT["fp32"], rstd * FP32_SLACK)}


def _ends(
    operation: RowOperation, given: Mapping[str, Any], y: torch.Tensor, block: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the least and the most of what is quantized and of the scales, for each number of y
    off by fp32 arithmetic on its own."""
    off = [y * (1 - FP32_SLACK), y * (1 + FP32_SLACK)]
    scales = [quantize(operation, given, one)["y_scales"].float() for one in off]
    seen = [one.to(given["x"].dtype).double() if given["rounded"] else one for one in off]
    values = [
        (one / scale.double().repeat_interleave(block, 1)).clamp(-LARGEST, LARGEST)
        for one, scale in product(seen, scales)
    ]
    rounded = [one.float().to(torch.float8_e4m3fn).float() for one in values]
    return {
        "y8": (reduce(torch.minimum, rounded), reduce(torch.maximum, rounded)),
        "y_scales": (scales[0], scales[1]),
    }


FRONT_END = FrontEnd(
    norm="",
    module="frontends.quantized",
    package="QuantizedPackage",
    functions=("explain", "operators", "rms_norm_quantized"),
)


def _operation(operation: RowOperation) -> Operation:
    return row_operation(
        operation,
        FRONT_END,
        make_inputs=partial(make_inputs, operation),
        make_cancelling=lambda problem, inputs, seed=1: inputs,
        bounds=partial(bounds, operation),
    )


RMSNORM_FP8_FORWARD = _operation(operations.RMSNORM_FP8_FORWARD)
RMSNORM_MXFP8_FORWARD = _operation(operations.RMSNORM_MXFP8_FORWARD)
