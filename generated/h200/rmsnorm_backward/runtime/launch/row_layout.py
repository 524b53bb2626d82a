"""Where the rows of a call's tensors are, and which have to be copied for a kernel."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from ..serve.options import Arguments
from ..table import MAX_ALIGNMENT
from .launch import gap_factor


class RowLayout(NamedTuple):
    """How the rows of a tensor lie: at `stride` elements from each other, or `inner` of them at
    `stride` and then a step of `outer` elements (the heads of a packed tensor). inner is 0 for one
    stride."""

    stride: int
    inner: int = 0
    outer: int = 0

    def in_steps_of(self, inner: int) -> RowLayout | None:
        """The same rows with another `inner`; None where that is another order of rows."""
        if inner == self.inner or inner == 0:
            return self if inner == self.inner else None
        return None if self.inner else RowLayout(self.stride, inner, inner * self.stride)


def row_layout(tensor: torch.Tensor) -> RowLayout | None:
    """Where the rows of (..., N) are, when each is contiguous in itself and two strides describe
    them; None when that takes a copy. Stride 0 for one row repeated by `expand`."""
    N = tensor.shape[-1]
    if N > 1 and tensor.stride(-1) != 1:
        return None
    groups: list[tuple[int, int]] = []  # size and stride, outermost first
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if groups and groups[-1][1] == stride * size:
            groups[-1] = (groups[-1][0] * size, stride)
        else:
            groups.append((size, stride))
    if not groups:
        return RowLayout(N)
    if len(groups) == 1:
        return RowLayout(groups[0][1])
    if len(groups) == 2 and gap_factor(prod(size for size, _ in groups), groups[1][0]):
        (_, outer), (inner, stride) = groups
        return RowLayout(stride, inner, outer)
    return None


def power_of_two(number: int, most: int) -> int:
    """The largest power of two that divides `number`, up to `most` (itself a power of two)."""
    return (number | most) & -(number | most)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows kernels can read, at an aligned address: of one row where all are the same
    one, else of all."""
    tensor = tensor.detach()
    if tensor.dim() > 1 and not any(
        stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1
    ):
        return _aligned(tensor[(0,) * (tensor.dim() - 1)]).expand(tensor.shape)
    return _aligned(tensor)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.contiguous()
    return made.clone() if made.data_ptr() % MAX_ALIGNMENT else made


class Layout(NamedTuple):
    """What `kernel_call` needs to know about the arguments of a signature.

    copy: which of dy, x, rstd, weight and dresidual have to be made dense first.
    """

    rows: int
    columns: int
    x: RowLayout
    dy: RowLayout
    dresidual_stride: int
    copy: tuple[bool, ...]


def read_layout(given: Arguments) -> tuple[Layout, int]:
    """The layout of CUDA arguments, and a number that every power of two divides which divides all
    addresses and steps between rows of x and dy (those of a copy, where one is made)."""
    x, dy, dresidual = given.x, given.dy, given.dresidual
    N = x.shape[-1]
    places = N * x.element_size()
    x_rows, dy_rows = row_layout(x), row_layout(dy)
    copy_x, copy_dy = x_rows is None, dy_rows is None
    x_rows = x_rows or row_layout(dense(x)) or RowLayout(N)
    dy_rows = dy_rows or row_layout(dense(dy)) or RowLayout(N)
    inner = x_rows.inner or dy_rows.inner
    if x_rows.in_steps_of(inner) is None or dy_rows.in_steps_of(inner) is None:
        # Two ways to step through the rows; a dense tensor goes along with any.
        copy_dy, dy_rows = True, RowLayout(N)
    x_rows, dy_rows = (rows.in_steps_of(inner) or rows for rows in (x_rows, dy_rows))
    for tensor, rows, copied in ((x, x_rows, copy_x), (dy, dy_rows, copy_dy)):
        places |= (rows.stride | rows.outer) * x.element_size()
        places |= 0 if copied else tensor.data_ptr()
    stride, copy_dresidual = N, False
    if dresidual is not None:
        found = row_layout(dresidual)
        size = dresidual.element_size()
        if (
            found is None
            or found.inner
            or (dresidual.data_ptr() | found.stride * size) % MAX_ALIGNMENT
        ):
            copy_dresidual, found = True, row_layout(dense(dresidual))
        stride = N if found is None else found.stride
    small = (given.rstd, given.weight)
    copies = (
        *(copy_dy, copy_x),
        *(tensor is not None and not tensor.is_contiguous() for tensor in small),
        copy_dresidual,
    )
    layout = Layout(x.numel() // N, N, x_rows, dy_rows, stride, copies)
    return layout, places
