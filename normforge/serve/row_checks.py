"""Checks the arguments of operations over rows: each fault is one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..operations import RowOperation
from ..operations.formula import wide_dtype
from ..operations.tensor import Tensor
from .checks import FLOATS

Tensors = Mapping[str, Any]
"""The arguments of a call by name: tensors, None for one that it does without, and numbers."""
_KINDS: dict[str, tuple[str, Any]] = {
    "number": ("a number", (int, float)),
    "flag": ("True or False", bool),
}


def check_tensors(operation: RowOperation, tensors: Tensors) -> torch.Tensor:
    """Return the first rows of a call. Raises TypeError or ValueError for arguments that do not fit
    together."""
    signature = operation.signature
    if unknown := sorted(tensors.keys() - {tensor.name for tensor in signature.inputs}):
        raise TypeError(f"{operation.name} takes no '{unknown[0]}'")
    for tensor in signature.inputs:
        given = tensors.get(tensor.name)
        if given is None and not (tensor.late or tensor.role in ("columns", "flag")):
            raise TypeError(f"{operation.name} needs {tensor.name}")
        what, kind = _KINDS.get(tensor.role, ("a tensor", torch.Tensor))
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"{tensor.name} must be {what}, got {type(given).__name__}")
    x: torch.Tensor = tensors[signature.early[0].name]
    for tensor in signature.inputs:
        given = tensors.get(tensor.name)
        if isinstance(given, torch.Tensor):
            _check_one(tensor, given, signature.early[0].name, x)
    shared = {t.name: tensors.get(t.name) for t in signature.all_columns}
    dtypes = {name: one.dtype for name, one in shared.items() if one is not None}
    if len({*dtypes.values()}) > 1:
        said = ", ".join(f"{name} of {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"what all rows share must be of one dtype, got {said}")
    widths = {tensor.name: tensors[tensor.name].shape[-1] for tensor in signature.groups}
    if len({*widths.values()}) > 1:
        said = ", ".join(f"{name} {width}" for name, width in widths.items())
        raise ValueError(f"what groups share has equally many columns, got of {said}")
    return x


def _check_one(tensor: Tensor, given: torch.Tensor, first: str, x: torch.Tensor) -> None:
    if given.device != x.device:
        raise ValueError(f"{tensor.name} is on {given.device} and {first} on {x.device}")
    if x.dim() == 0 or x.shape[-1] == 0 or x.dtype not in FLOATS:
        raise ValueError(
            f"{first} must be floating rows of at least one element, got {x.dtype} of shape "
            f"{tuple(x.shape)}"
        )
    N, wide = x.shape[-1], wide_dtype(x)
    dtypes = {"rows": (x.dtype,), "row": (torch.float32, wide)}.get(tensor.role, FLOATS)
    dtypes = FLOATS if tensor.late else dtypes
    if tensor.role == "group":
        _check_group(tensor.name, given, x)
        return
    if given.dtype not in dtypes:
        raise TypeError(f"{tensor.name} must be of {dtypes[0]}, got {given.dtype}")
    if tensor.role == "row":
        fits = given.numel() * N == x.numel()
    elif tensor.role == "columns":
        fits = given.shape == (N,)
    else:  # others would tell tracers that M is not N
        fits = given.shape == x.shape
    if not fits:
        wanted = {"row": "one number for each row", "columns": f"shape ({N},)"}
        what = wanted.get(tensor.role, f"the shape {tuple(x.shape)} of {first}")
        raise ValueError(f"{tensor.name} must have {what}, got {tuple(given.shape)}")


def _check_group(name: str, given: torch.Tensor, x: torch.Tensor) -> None:
    """Raises TypeError or ValueError, in one sentence, for what the groups of rows like x cannot
    share."""
    if given.dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"{name} must be of torch.float32 or x's dtype {x.dtype}, got {given.dtype}"
        )
    shape = (*x.shape[:-2], 1, x.shape[-1] // 2)
    missing = len(shape) - given.dim()
    fits = x.dim() > 1 and x.shape[-1] % 2 == 0 and 0 <= missing <= len(shape) - 2
    if fits:
        at_ends = given.shape[-2] == 1 and 0 < given.shape[-1] <= shape[-1]
        along = zip(given.shape[:-2], shape[missing:-2], strict=True)
        fits = at_ends and all(size in (1, wanted) for size, wanted in along)
    if not fits:
        raise ValueError(
            f"{name} must have the shape {shape}, or 1 where it is repeated, or fewer columns "
            f"where fewer are rotated, got {tuple(given.shape)}"
        )
