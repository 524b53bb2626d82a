"""Reads the layout of what groups of rows share in a call, such as the cos and sin of a token's
heads.

Rows have the shape (..., H, N): the H rows of a group are those of the last dimension but one. What
they share has the shape (..., 1, N / 2), or fewer columns, and is repeated like any operand of
PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from ..launch.row_layout import alignment_of, dense, division_factor, row_layout
from ..operations.signature import Signature
from ..shape_names import rotation_name


def matrices_of_groups(
    signature: Signature, given: Mapping[str, Any], x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return what groups share as kernels read it, by name: matrices of equally many rows, of one
    dtype, that begin anew behind their last row."""
    shared = {tensor.name: given[tensor.name] for tensor in signature.groups}
    if len({tensor.dtype for tensor in shared.values()}) > 1:
        shared = {name: tensor.float() for name, tensor in shared.items()}
    groups = x.shape[:-2]
    period = max((_period(tensor, groups) for tensor in shared.values()), default=1)
    return {name: _matrix(tensor, groups, period) for name, tensor in shared.items()}


def _period(tensor: torch.Tensor, groups: torch.Size) -> int:
    """The number of groups behind which a tensor is begun anew; that of all groups where it is
    repeated in another way, or where no factor divides by it."""
    sizes = [*tensor.shape[:-2]]
    while sizes and sizes[0] == 1:
        del sizes[0]
    everything = prod(groups)
    whole = sizes == [*groups[len(groups) - len(sizes) :]]
    found = prod(sizes)
    return found if whole and division_factor(everything, found) else everything


def rotation_of(signature: Signature, given: Mapping[str, Any], x: torch.Tensor) -> str:
    """Return how the heads of a call are rotated, as kernels are named for it: by the numbers that
    groups share, one for every pair of columns, and the flags `interleaved` and `joined`. given: by
    name; x: the first rows."""
    first = next((given[tensor.name] for tensor in signature.groups), None)
    if first is None:
        return ""
    interleaved, joined = bool(given.get("interleaved")), bool(given.get("joined"))
    return rotation_name(2 * first.shape[-1], x.shape[-1], interleaved, joined)


def _matrix(tensor: torch.Tensor, groups: torch.Size, period: int) -> torch.Tensor:
    kept = next(n for n in range(len(groups) + 1) if prod(groups[len(groups) - n :]) == period)
    repeated = tensor.detach().squeeze(-2).expand(*groups, tensor.shape[-1])
    rows = repeated[(0,) * (len(groups) - kept)]
    at = row_layout(rows)
    aligned = (
        at is not None and alignment_of(rows.data_ptr() | at.stride * rows.element_size()) >= 16
    )
    if at is None or at.inner or not aligned:
        rows = dense(rows)
        at = row_layout(rows)
    assert at is not None
    return rows.as_strided((period, rows.shape[-1]), (at.stride, 1))
