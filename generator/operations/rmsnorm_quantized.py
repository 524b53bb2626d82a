"""RMSNorm whose result, or whose dx, is quantized to FP8, as the tuner knows it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from itertools import product
from typing import Any

import torch

from generator.operations.operation import FP32_SLACK, Bound, FrontEnd, Operation, row_slices
from generator.operations.rmsnorm_backward import RMSNORM_BACKWARD
from generator.operations.row_inputs import make_cancelling
from generator.operations.rows import (
    inputs_class,
    make_reference,
    rounded_bounds,
    row_operation,
    tensor_specs,
)
from generator.problem import Problem
from normforge import operations
from normforge.operations import RowOperation
from normforge.operations.formula import quantize
from normforge.operations.rmsnorm_backward import EPS
from normforge.operations.rmsnorm_quantized import LARGEST

Ends = tuple[torch.Tensor, torch.Tensor]
"""The least and the most that each number may be."""


def make_inputs(operation: RowOperation, problem: Problem, device: torch.device, **how: Any) -> Any:
    """Make those inputs of RMSNorm's backward that an operation has, and its incoming gradient for
    a residual stream, with the first output quantized as it is in fp32. how: as for it."""
    given = RMSNORM_BACKWARD.make_inputs(problem, device, **how)
    signature = operation.signature
    numbers = {tensor.name: 0.0 for tensor in signature.numbers} | {"eps": EPS}
    numbers |= {"r": given.dy} if signature.stream else {}
    tensors = {t.name: numbers.get(t.name, getattr(given, t.name, None)) for t in signature.inputs}
    return inputs_class(signature)(**tensors, offset=given.offset)


def bounds(operation: RowOperation, problem: Problem, inputs: Any) -> dict[str, Bound]:
    """Return the bounds of the outputs, of finite rows. What is quantized is exact, but where the
    first output, off by fp32 arithmetic, may be rounded in one way or the other; and so are scales
    that are powers of two."""
    reference = make_reference(operation, problem, inputs)
    signature = operation.signature
    found = rounded_bounds(signature, problem, reference)
    quantized, scales, first = signature.quantized, signature.scales, signature.outputs[0].name
    assert quantized is not None and scales is not None
    y, magnitude = reference.outputs[first], reference.scales[first]
    # Halfway between two of e4m3 needs five bits.
    for name, columns, dtype in (
        (quantized.name, problem.N, torch.bfloat16),
        (scales.name, problem.N // scales.block, torch.float32),
    ):
        middle = torch.empty(problem.M, columns, dtype=dtype, device=y.device)
        found[name] = Bound(middle, 0.0, torch.empty_like(middle))
    given = {tensor.name: getattr(inputs, tensor.name) for tensor in signature.inputs}
    for part in row_slices(problem.M, problem.N):
        rows = y[part].double()
        # A product is off by a part of itself, and a sum by one of its terms.
        off = (rows.abs() if signature.sums is None else magnitude[part]) * FP32_SLACK
        ends = _ends(operation, given, rows, off)
        for name, (least, most) in zip((quantized.name, scales.name), ends, strict=True):
            found[name].reference[part] = (least + most) / 2
            found[name].slack[part] = (most - least) / 2
    return {spec.name: found[spec.name] for spec in tensor_specs(signature, problem, output=True)}


def _ends(
    operation: RowOperation, given: Mapping[str, Any], y: torch.Tensor, off: torch.Tensor
) -> tuple[Ends, Ends]:
    """Return the ends of what is quantized and those of the scales, for each number of y off by up
    to `off` on its own."""
    scales = operation.signature.scales
    assert scales is not None
    magnitudes = ((y.abs() - off).clamp_min(0), y.abs() + off)
    least, most = (quantize(operation, given, one)[scales.name].float() for one in magnitudes)
    seen = [y - off, y + off]
    if given["rounded"]:
        seen = [one.to(given["x"].dtype).double() for one in seen]
    values = [
        (one / scale.double().repeat_interleave(scales.block, 1)).clamp(-LARGEST, LARGEST)
        for one, scale in product(seen, (least, most))
    ]
    rounded = [one.float().to(torch.float8_e4m3fn).float() for one in values]
    return (reduce(torch.minimum, rounded), reduce(torch.maximum, rounded)), (least, most)


def _keep(problem: Problem, inputs: Any, seed: int = 1) -> Any:
    """Return the inputs: without sums over the rows nothing cancels."""
    return inputs


FRONT_END = FrontEnd(
    norm="",
    module="frontends.quantized",
    package="QuantizedPackage",
    functions=(
        "explain",
        "operators",
        "rms_norm_backward_quantized",
        "rms_norm_quantized",
    ),
)


def _operation(operation: RowOperation) -> Operation:
    sums = operation.signature.sums is not None
    return row_operation(
        operation,
        FRONT_END,
        make_inputs=partial(make_inputs, operation),
        make_cancelling=partial(make_cancelling, operation) if sums else _keep,
        bounds=partial(bounds, operation),
    )


RMSNORM_QUANTIZED = tuple(_operation(operations.OPERATIONS[name]) for name in operations.QUANTIZED)
