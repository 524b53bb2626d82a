"""An operation's mathematics in plain PyTorch: what serves CPU tensors, and says what kernels
compute."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from operator import add
from typing import Any

import torch

from .row_operation import RowOperation, Terms
from .signature import Signature

KINDS = {
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "fp32": torch.float32,
}
"""The dtypes of what is quantized and of scales, by their kinds."""


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that is computed in, and that a forward saves of every row."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def terms_of(
    operation: RowOperation, tensors: Mapping[str, Any], compute: torch.dtype, offset: float = 0.0
) -> Terms:
    """The terms of an operation's outputs, in the dtype `compute`. The arguments are as of
    `in_dtype`."""
    return operation.terms(**in_dtype(operation.signature, tensors, compute, offset))


def in_dtype(
    signature: Signature, tensors: Mapping[str, Any], compute: torch.dtype, offset: float
) -> dict[str, Any]:
    """Return the arguments of an operation's `terms` in the dtype `compute`. tensors: by name; rows
    as (..., N), numbers of each row in any shape, columns without one for ones or zeros, what
    groups share as (..., N / 2), which is repeated like any operand of PyTorch's, numbers and flags
    of the call as they are. offset: is added to the columns that are a factor."""
    shape = tensors[signature.early[0].name].shape
    given: dict[str, Any] = {}
    if (stream := signature.stream) is not None:
        given[stream.name] = _sum(*(tensors[name] for name in stream.sum_of)).to(compute)
    for tensor in signature.inputs:
        found: Any = tensors.get(tensor.name)
        if tensor.name not in signature.of_terms:
            continue
        if tensor.added:
            given[tensor.name] = 0.0 if found is None else found.to(compute)
        elif tensor.role == "columns":
            given[tensor.name] = 1.0 + offset if found is None else found.to(compute) + offset
        elif tensor.role == "row":
            given[tensor.name] = found.to(compute).reshape(*shape[:-1], 1)
        elif tensor.role in ("number", "flag"):
            given[tensor.name] = found
        else:
            given[tensor.name] = found.to(compute)
    return given


def _sum(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the sum of two tensors of rows as kernels round it: once, to their dtype."""
    wide = wide_dtype(one)
    return (one.to(wide) + other.to(wide)).to(one.dtype)


def quantize(
    operation: RowOperation, tensors: Mapping[str, Any], y: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return what an operation quantizes of its first output, and the scales, by name; nothing
    where it does not. y: in the dtype that is computed in. Where a call's number `rounded` is not
    0, it is rounded to that of the rows first."""
    quantized, scales = operation.signature.quantized, operation.signature.scales
    if operation.quantize is None or quantized is None or scales is None or y is None:
        return {}
    numbers = {tensor.name: tensors[tensor.name] for tensor in operation.signature.numbers}
    if numbers.get("rounded"):
        y = y.to(tensors[operation.signature.early[0].name].dtype)
    made = operation.quantize(y.float(), numbers)
    return {quantized.name: made.values, scales.name: made.scales}


def quantized_like(signature: Signature, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Empty tensors for what an operation quantizes of rows like x, and for its scales, by name."""
    made = {}
    for narrow in (signature.quantized, signature.scales):
        if narrow is not None:
            shape = [*x.shape[:-1], x.shape[-1] // max(1, narrow.block)]
            made[narrow.name] = x.new_empty(shape, dtype=KINDS[narrow.kind])
    return made


def added_to(signature: Signature, tensors: Mapping[str, Any]) -> Any:
    """The rows that a call adds to its first output, None without."""
    return next((tensors[t.name] for t in signature.late if tensors.get(t.name) is not None), None)


def evaluate(
    operation: RowOperation,
    tensors: Mapping[str, Any],
    *,
    offset: float = 0.0,
    wanted: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The outputs of an operation by name, before they are rounded: in fp32, or in float64 for
    float64 rows. Differentiable. tensors, offset: as in `terms_of`. Numbers of a row have shape
    (..., 1). Sums over the rows have the shape of the columns, or (N,) without, and one dimension
    more where there are several. What is quantized is so already. wanted: some outputs that are
    not quantized, by default all but copies."""
    signature = operation.signature
    like = tensors[signature.early[0].name]
    compute = wide_dtype(like)
    terms = terms_of(operation, tensors, compute, offset)
    results = {}
    for output in (*signature.outputs, *signature.row_outputs):
        if wanted is None or output.name in wanted:
            results[output.name] = reduce(add, terms[output.name])
    first, added = signature.outputs[0].name, added_to(signature, tensors)
    if added is not None and first in results:
        results[first] = results[first] + added.to(compute)
    if wanted is None:
        results |= quantize(operation, tensors, results.get(first))
    sums = signature.sums
    if sums is not None and (wanted is None or sums.name in wanted):
        columns = None if signature.columns is None else tensors.get(signature.columns.name)
        shape = like.shape[-1:] if columns is None else columns.shape
        rows = like.numel() // max(1, shape.numel())
        parts = [term.reshape(rows, *shape).sum(0) for term in terms[sums.name]]
        results[sums.name] = torch.stack(parts) if sums.count > 1 else parts[0]
    return results
