"""Finds out where the tensors of a call of an operation over rows lie, and copies those that no
kernel can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..launch.row_layout import RowLayout, dense, row_layout
from ..operations import Signature
from ..table import MAX_ALIGNMENT


def lay_out(
    signature: Signature, given: dict[str, Any], into: Mapping[str, torch.Tensor]
) -> tuple[dict[str, RowLayout], dict[str, torch.Tensor]]:
    """Put copies in the place of arguments that kernels cannot read. Return the layouts of rows
    by name, and the outputs that can be written where they are to lie."""
    present = [t for t in (*signature.early, *signature.late) if t.name in given]
    found = {tensor.name: row_layout(given[tensor.name].detach()) for tensor in present}
    # All in heads step through their rows alike; a dense one goes along with any.
    written = {name: at for name, out in into.items() if (at := row_layout(out))}
    at_first = (*written.values(), *(found[tensor.name] for tensor in signature.early))
    inner = next((at.inner for at in at_first if at and at.inner), 0)
    written = {name: at for name, to in written.items() if (at := to.in_steps_of(inner))}
    in_place, layouts = {name: into[name] for name in written}, dict(written)
    for tensor in present:
        rows, at = given[tensor.name].detach(), found[tensor.name]
        if tensor.late:
            fits = at is not None and not at.inner and not _unaligned(rows, at)
        else:
            at = at and at.in_steps_of(inner)
            fits = at is not None
        if not fits:
            rows = dense(rows)
            at = row_layout(rows)
            at = at if tensor.late or at is None else at.in_steps_of(inner)
        given[tensor.name], layouts[tensor.name] = rows, at or RowLayout(rows.shape[-1])
    for tensor in signature.inputs:
        if tensor.role in ("row", "columns") and tensor.name in given:
            given[tensor.name] = given[tensor.name].detach().contiguous()
    return layouts, in_place


def _unaligned(rows: torch.Tensor, at: RowLayout) -> bool:
    return bool((rows.data_ptr() | at.stride * rows.element_size()) % MAX_ALIGNMENT)
