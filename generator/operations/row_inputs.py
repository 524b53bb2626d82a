"""Random inputs of an operation over rows, which its own forward completes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from generator.errors import NormforgeError
from generator.operations.operation import TORCH_DTYPE, row_slices
from generator.problem import Problem
from normforge.operations import RowOperation


def make_inputs(
    operation: RowOperation,
    inputs_class: Any,
    problem: Problem,
    device: torch.device,
    seed: int = 0,
    centres: float = 0.0,
) -> Any:
    """Random inputs on which every term shows: the incoming gradient has a part along the rows
    whose sign alternates from row to row, so that what is summed over a row is large, while sums
    over the rows stay near sqrt(M) and a lost row shows. What the forward saves is computed in
    float64 from the rounded rows. centres: rows lie around numbers up to this one and its negative;
    a mean that is left out then shows. What groups of rows share is drawn, whatever the
    forward saves."""
    generator = torch.Generator(device).manual_seed(seed)
    signature, shape = operation.signature, (problem.M, problem.N)
    dtype = TORCH_DTYPE[problem.dtype]
    if operation.forward is None:
        raise NormforgeError(f"operation {operation.name} has no forward to make inputs with")
    named = {name: signature[gradient] for name, gradient in operation.gradients.items()}
    matrices = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, tensor in named.items()
        if tensor.role == "rows"
    }
    incoming = torch.empty(shape, dtype=dtype, device=device)
    for part in row_slices(*shape):
        along = torch.zeros((), device=device)
        for matrix in matrices.values():
            along = torch.randn(matrix[part].shape, generator=generator, device=device)
            matrix[part] = along
        rows = torch.arange(part.start, part.stop, device=device)
        noise = torch.randn(incoming[part].shape, generator=generator, device=device)
        incoming[part] = noise + 0.5 * (1.0 - 2.0 * (rows % 2))[:, None] * along
        if centres:
            for matrix in matrices.values():
                around = rows % 9 / 4 * centres - centres
                matrix[part] = matrix[part].float() + around[:, None]
    offset = 1.0 if problem.offset else 0.0
    columns = {}
    for name, tensor in named.items():
        if tensor.role == "sums":
            drawn = 1 - offset + 0.1 * torch.randn(problem.N, generator=generator, device=device)
            columns[name] = drawn.to(TORCH_DTYPE[problem.weight_dtype])
    late = {tensor.name: _late(tensor.option, problem, generator) for tensor in signature.late}
    found = _saved(operation, problem, matrices, columns, offset)
    for tensor in signature.groups:
        drawn = torch.randn(problem.group_shape, generator=generator, device=device)
        found |= {tensor.name: drawn, "heads": problem.heads}
    for tensor in signature.inputs:
        if tensor.role == "flag":
            found[tensor.name] = getattr(problem, tensor.name)
    missing = [t.name for t in signature.inputs if t.name not in found and not t.late]
    of_rows = all(signature[name] in signature.early for name in missing)
    if len(missing) != operation.incoming or not of_rows:
        named_missing = ", ".join(missing) or "nothing"
        count = "one" if operation.incoming == 1 else operation.incoming
        raise NormforgeError(
            f"operation {operation.name}: forward() leaves {named_missing} to the incoming "
            f"gradient, which is exactly {count} tensor{'s' * (count != 'one')} of rows"
        )
    found[missing[0]] = incoming
    for name in missing[1:]:
        found[name] = _drawn(torch.empty_like(incoming), generator)
    return inputs_class(**found, **late, offset=offset)


def _late(option: str, problem: Problem, generator: torch.Generator) -> torch.Tensor | None:
    """Random rows of an option's dtype; None where the problem does not have the option."""
    dtype = getattr(problem, option)
    if not dtype:
        return None
    shape = (problem.M, problem.N)
    made = torch.empty(shape, dtype=TORCH_DTYPE[dtype], device=generator.device)
    return _drawn(made, generator)


def _drawn(made: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    for part in row_slices(*made.shape):
        made[part] = torch.randn(made[part].shape, generator=generator, device=made.device)
    return made


def _saved(
    operation: RowOperation,
    problem: Problem,
    matrices: dict[str, torch.Tensor],
    columns: dict[str, torch.Tensor],
    offset: float,
) -> dict[str, Any]:
    """Return the values that the forward saves, by the names of inputs, each in its own dtype.
    Columns that are an input are those given, without the offset."""
    assert operation.forward is not None
    signature, found = operation.signature, dict[str, Any]()
    device = next(iter(matrices.values())).device
    for part in row_slices(problem.M, problem.N):
        rows = {name: matrix[part].double() for name, matrix in matrices.items()}
        shared = {name: column.double() + offset for name, column in columns.items()}
        _, saved = operation.forward(**rows, **shared)
        for name, value in saved.items():
            try:
                tensor = signature[name]
            except KeyError:
                raise NormforgeError(
                    f"operation {operation.name}: forward() saves '{name}', which is no tensor of "
                    "the signature"
                ) from None
            if tensor.role == "group":
                continue  # it is drawn
            if tensor.role == "number":
                found[name] = float(value)
                continue
            if tensor.role == "columns":
                dtype = TORCH_DTYPE[problem.weight_dtype]
                given = value is shared.get(name)  # without the offset: kernels add it
                found[name] = columns[name] if given else value.to(dtype)
                continue
            if name not in found:
                shape = (problem.M, problem.N) if tensor.role == "rows" else (problem.M,)
                dtype = TORCH_DTYPE[problem.dtype] if tensor.role == "rows" else torch.float32
                found[name] = torch.empty(shape, dtype=dtype, device=device)
            found[name][part] = value.reshape(found[name][part].shape)
    return found


def make_cancelling(operation: RowOperation, problem: Problem, inputs: Any, seed: int = 1) -> Any:
    """Inputs whose sums over the rows are a small rest of large terms: the second half of the rows
    takes back, but for small noise, what the first half adds, with magnitudes from 1 to 2^10.
    Adding partial sums in another order changes the rest in its leading digits, so any reordering
    shows."""
    signature = operation.signature
    half = problem.M // 2
    if half == 0:
        return inputs
    incoming = incoming_gradients(operation)
    changed = {}
    for tensor in signature.inputs:
        if tensor.role in ("rows", "row") and not tensor.late:
            copied = changed[tensor.name] = getattr(inputs, tensor.name).clone()
            copied[half : 2 * half] = copied[:half]
        elif tensor.role == "group":  # alike in both halves
            changed[tensor.name] = getattr(inputs, tensor.name)[:1].clone()
    generator = torch.Generator(changed[incoming[0]].device).manual_seed(seed)
    for dy in (changed[name] for name in incoming):
        for part in row_slices(half, problem.N):
            shape = dy[part].shape
            power = torch.randint(0, 11, (shape[0], 1), generator=generator, device=dy.device)
            large = torch.randn(shape, generator=generator, device=dy.device) * torch.exp2(power)
            noise = torch.randn(shape, generator=generator, device=dy.device)
            dy[part] = large
            again = dy[half + part.start : half + part.stop]
            again.copy_(-dy[part])
            again += noise * 0.01
    return replace(inputs, **changed)


def incoming_gradients(operation: RowOperation) -> list[str]:
    """The names of the gradients that come in, whose sum is that of the result: the rows that the
    forward neither takes nor saves."""
    probe = {
        name: torch.ones((1, 4) if operation.signature[gradient].role == "rows" else (4,))
        for name, gradient in operation.gradients.items()
    }
    assert operation.forward is not None
    _, saved = operation.forward(**probe)
    return [tensor.name for tensor in operation.signature.early if tensor.name not in saved]
