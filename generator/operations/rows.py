"""Derives what the tuner has to know about an operation over rows from its signature and its
terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from functools import cache, partial, reduce
from operator import add
from typing import Any

import torch

from generator.operations.operation import (
    FP32_SLACK,
    HALF_UNIT,
    Bound,
    FrontEnd,
    Operation,
    TensorSpec,
    half_subnormal,
    over_bytes,
    row_slices,
)
from generator.operations.row_inputs import make_cancelling, make_inputs
from generator.problem import HEADS, Problem
from normforge.launch.binding import bind
from normforge.launch.kernel_arguments import DW_IN_WEIGHT_DTYPE, argument_layout, extent_of
from normforge.launch.loaded_kernel import LoadedKernel
from normforge.launch.row_layout import RowLayout
from normforge.operations import RowOperation, signature_of
from normforge.operations.formula import added_to, in_dtype
from normforge.operations.signature import Signature
from normforge.operations.tensor import Tensor
from normforge.spec import KernelSpec, Launch, plan_launch


def _spec(tensor: Tensor, problem: Problem) -> TensorSpec | None:
    """A tensor of a problem, None where the problem has none, for a number, and for what is written
    for calls alone that ask for it."""
    M, N = problem.M, problem.N
    dtype = getattr(problem, tensor.option) if tensor.option else problem.dtype
    if (
        tensor.role in ("number", "flag")
        or tensor.extra
        or not dtype
        or (tensor.copy_of and dtype == problem.dtype)
    ):
        return None
    if tensor.role == "rows":
        return TensorSpec(tensor.name, (M, N), dtype)
    if tensor.role == "row":
        return TensorSpec(tensor.name, (M,), "fp32")
    if tensor.kind:
        return TensorSpec(tensor.name, (M, N // max(1, tensor.block)), tensor.kind)
    if tensor.role == "group":
        return TensorSpec(tensor.name, problem.group_shape, "fp32")
    return TensorSpec(tensor.name, (tensor.count * N,), problem.weight_dtype)


def tensor_specs(signature: Signature, problem: Problem, output: bool) -> tuple[TensorSpec, ...]:
    """The inputs or the outputs of a problem."""
    found = (_spec(t, problem) for t in signature.tensors if t.output is output)
    return tuple(spec for spec in found if spec is not None)


@dataclass
class Reference:
    """Outputs by name from float64 arithmetic on the rounded inputs, with the magnitudes that bound
    the error of fp32 arithmetic: for rows (M, 1), the largest sum of |terms| in the row; for
    numbers of a row (M,), that sum; for sums the sum of |terms| over the rows. For a dtype narrower
    than fp32, rows are kept in float32, whose error is far below half a unit of bf16 or fp16."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)


def make_reference(operation: RowOperation, problem: Problem, inputs: Any) -> Reference:
    """The reference in float64, computed in chunks of rows from the operation's terms."""
    signature = operation.signature
    M, N, offset = problem.M, problem.N, inputs.offset
    wide = torch.float64 if problem.dtype == "fp32" else torch.float32
    given = {tensor.name: getattr(inputs, tensor.name) for tensor in signature.inputs}
    device = given[signature.early[0].name].device
    found = Reference()
    for output in signature.outputs:
        found.outputs[output.name] = torch.empty((M, N), dtype=wide, device=device)
        found.scales[output.name] = torch.empty((M, 1), device=device)
    for output in signature.row_outputs:
        found.outputs[output.name] = torch.empty(M, dtype=torch.float64, device=device)
        found.scales[output.name] = torch.empty_like(found.outputs[output.name])
    if signature.sums:
        zeros = torch.zeros(signature.column_sums * N, dtype=torch.float64, device=device)
        found.outputs[signature.sums.name] = zeros
        found.scales[signature.sums.name] = torch.zeros_like(zeros)
    for part in row_slices(M, N):
        sliced = {
            tensor.name: given[tensor.name]
            if tensor.role in ("columns", "number", "flag") or given[tensor.name] is None
            else given[tensor.name][part]
            for tensor in signature.inputs
            if tensor.role != "group"
        }
        for tensor in signature.groups:
            groups = torch.arange(part.start, part.stop, device=device) // inputs.heads
            sliced[tensor.name] = given[tensor.name][groups % len(given[tensor.name])]
        arguments = in_dtype(signature, sliced, torch.float64, offset)
        terms = operation.terms(**arguments)
        added = added_to(signature, sliced)
        for i, output in enumerate(signature.outputs):
            parts = [*terms[output.name]]
            parts += [added.double()] if added is not None and i == 0 else []
            found.outputs[output.name][part] = reduce(add, parts)
            magnitude = reduce(add, (term.abs() for term in parts))
            found.scales[output.name][part] = magnitude.amax(dim=1, keepdim=True)
        for output in signature.row_outputs:
            numbers = [term[:, 0] for term in terms[output.name]]
            found.outputs[output.name][part] = reduce(add, numbers)
            found.scales[output.name][part] = reduce(add, (one.abs() for one in numbers))
        if signature.sums:
            rows = torch.cat([*terms[signature.sums.name]], dim=1)
            found.outputs[signature.sums.name] += rows.sum(0)
            if operation.magnitudes is not None:
                rows = torch.cat([*operation.magnitudes(**arguments)], dim=1)
            found.scales[signature.sums.name] += rows.abs().sum(0)
    for copy in signature.copies:
        found.outputs[copy.name] = found.outputs[copy.copy_of]
        found.scales[copy.name] = found.scales[copy.copy_of]
    return found


def bounds(operation: RowOperation, problem: Problem, inputs: Any) -> dict[str, Bound]:
    """Return the bounds of the outputs."""
    return rounded_bounds(operation.signature, problem, make_reference(operation, problem, inputs))


def rounded_bounds(
    signature: Signature, problem: Problem, reference: Reference
) -> dict[str, Bound]:
    """Return the bounds of outputs that are in a reference. Beside one rounding they may be off by
    fp32 arithmetic, in units of the sums of the magnitudes of their terms, and by half a unit of a
    subnormal result."""
    return {
        spec.name: Bound(
            reference.outputs[spec.name],
            HALF_UNIT[spec.dtype],
            reference.scales[spec.name] * FP32_SLACK + half_subnormal(spec.dtype),
        )
        for spec in tensor_specs(signature, problem, output=True)
        if spec.name in reference.outputs
    }


def floor(
    signature: Signature, size: int, inputs: Any, outputs: Mapping[str, torch.Tensor]
) -> Callable[[], object]:
    """torch.add over `size` bytes: of two inputs into the output where that is the same."""
    early = [getattr(inputs, tensor.name) for tensor in signature.early]
    written = outputs.get(signature.outputs[0].name)
    if written is None:  # others are made: nothing that is read may be written to
        early = [early[0].new_empty(0)]
        written = early[0]
    like = (early[0], early[min(1, len(early) - 1)], written)
    one, two, out = over_bytes(size, like)
    return lambda: torch.add(one, two, out=out)


@cache
def inputs_class(signature: Signature) -> Any:
    """The class of the inputs of a call: a dataclass with a field for every input of the signature
    and `offset`, which is added to the columns in fp32, and `heads` where groups of so many rows
    share something."""
    kinds = {"number": float, "flag": bool}
    needed = [(t.name, kinds.get(t.role, torch.Tensor)) for t in signature.inputs if not t.option]
    late = [(t.name, torch.Tensor | None, None) for t in signature.inputs if t.option]
    heads = [("heads", int, HEADS)] if signature.groups else []
    return make_dataclass("Inputs", [*needed, ("offset", float, 0.0), *late, *heads])


def run_rows(
    kernel: LoadedKernel,
    launch: Launch,
    inputs: Any,
    outputs: Mapping[str, torch.Tensor | None],
    workspace: torch.Tensor,
    dw_mode: int = DW_IN_WEIGHT_DTYPE,
) -> None:
    """Enqueue one call on the current stream, without waiting. Nothing is checked.

    inputs: of `inputs_class`. Rows have contiguous columns, and base addresses and row strides that
    are multiples of spec.vector_bytes; those that are read early may be packed as (M / H, H, N),
    with any two strides, where H > 1 and M * H < 2^32. Columns of None stand for ones. outputs: by
    name; one that is None is not computed. Sums are fp32 unless dw_mode is DW_IN_WEIGHT_DTYPE.
    workspace: launch.workspace_bytes, the first launch.scratch_offset of them zero. launch:
    plan_launch(spec, M). Raises LaunchError.
    """
    signature = signature_of(kernel.spec.operation)
    tensors = {tensor.name: getattr(inputs, tensor.name) for tensor in signature.inputs}
    tensors |= {"heads": getattr(inputs, "heads", 1), **outputs}
    for copy in signature.copies:
        if tensors.get(copy.copy_of) is None:
            tensors[copy.name] = None
    first = tensors[signature.early[0].name]
    columns = first.shape[-1]
    strided = {tensor.name: tensors.get(tensor.name) for tensor in signature.strided}
    layouts = {name: _layout(rows) for name, rows in strided.items() if rows is not None}
    rows = first.numel() // columns
    extent = extent_of(signature, rows, columns, layouts, launch.group, tensors)
    extent = extent._replace(dw_mode=dw_mode, weight_offset=inputs.offset)
    place = workspace.data_ptr()
    at = (torch.cuda.current_stream().cuda_stream, place, place + launch.scratch_offset)
    wants_sums = signature.sums is not None and tensors[signature.sums.name] is not None
    binding = bind(kernel, launch, extent, first.get_device(), *at, wants_sums=wants_sums)
    binding.run(*argument_layout(signature).addresses(tensors))


def _layout(rows: torch.Tensor) -> RowLayout:
    if rows.dim() == 3:
        return RowLayout(rows.stride(1), rows.shape[1], rows.stride(0))
    return RowLayout(rows.stride(0))


class RowRunner:
    """A kernel over rows on M of them."""

    def __init__(self, cubin: bytes, spec: KernelSpec, problem: Problem) -> None:
        self.kernel = LoadedKernel(cubin, spec)
        self.launch = plan_launch(spec, problem.M)
        self.workspace_bytes = self.launch.workspace_bytes
        self.clean_bytes = self.launch.scratch_offset

    def run(
        self,
        inputs: Any,
        outputs: Mapping[str, torch.Tensor | None],
        workspace: torch.Tensor,
        *,
        dw_mode: int = DW_IN_WEIGHT_DTYPE,
    ) -> None:
        """See Runner and `run_rows`."""
        run_rows(self.kernel, self.launch, inputs, outputs, workspace, dw_mode)


def row_operation(
    operation: RowOperation, front_end: FrontEnd | None = None, **facts: Any
) -> Operation:
    """The operation as the tuner knows it. facts: fields of Operation that differ."""
    signature = operation.signature
    made = inputs_class(signature)
    of: dict[str, Any] = {
        "name": operation.name,
        "front_end": front_end,
        "signature": signature,
        "sums_rows": signature.sums is not None,
        "arguments": lambda problem: tensor_specs(signature, problem, output=False),
        "outputs": lambda problem: tensor_specs(signature, problem, output=True),
        "make_inputs": partial(make_inputs, operation, made),
        "make_cancelling": partial(make_cancelling, operation),
        "bounds": partial(bounds, operation),
        "floor": lambda problem, *tensors: floor(signature, found.traffic_bytes(problem), *tensors),
        "load": RowRunner,
    }
    found: Operation = Operation(**(of | facts))
    return found
