"""Finds where the rows of a call's tensors are, and which of them are copied for a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..launch.row_layout import RowLayout, alignment_of, dense, row_layout
from ..table import MAX_ALIGNMENT
from .options import Arguments


class Copies(NamedTuple):
    """The tensors that have to be made dense before a launch."""

    dy: bool
    x: bool
    rstd: bool
    weight: bool
    dresidual: bool
    mean: bool


class Layout(NamedTuple):
    """The facts that `KernelCall` needs about the arguments of a signature. strided: by the names
    of tensors. first_alignment: the power of two, up to MAX_ALIGNMENT, that divides the addresses
    of x and dy where the rows of both lie one behind the other, else 1."""

    rows: int
    columns: int
    strided: Mapping[str, RowLayout]
    copy: Copies
    first_alignment: int = 1


def read_layout(given: Arguments) -> tuple[Layout, int]:
    """The layout of CUDA arguments, and the power of two, up to MAX_ALIGNMENT, that divides all
    addresses and steps between rows of x and dy, in bytes (those of a copy, where one is made)."""
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
    addresses, in_a_row = 0, True
    for tensor, rows, copied in ((x, x_rows, copy_x), (dy, dy_rows, copy_dy)):
        places |= (rows.stride | rows.outer) * x.element_size()
        addresses |= 0 if copied else tensor.data_ptr()
        in_a_row &= rows.stride == N and not rows.inner
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
    copies = Copies(
        dy=copy_dy,
        x=copy_x,
        rstd=_has_gaps(given.rstd),
        weight=_has_gaps(given.weight),
        dresidual=copy_dresidual,
        mean=_has_gaps(given.mean),
    )
    strided = {"x": x_rows, "dy": dy_rows, "dresidual": RowLayout(stride)}
    first_alignment = alignment_of(addresses) if in_a_row else 1
    layout = Layout(x.numel() // N, N, strided, copies, first_alignment)
    return layout, alignment_of(places | addresses)


def _has_gaps(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not tensor.is_contiguous()
