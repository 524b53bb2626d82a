"""Gated RMSNorms: y = norm(x) * w * act(z) and y = norm(x * act(z)) * w, as in
gated_rmsnorm_backward.py. Nothing is saved for the backward, which computes rstd again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .gated_rmsnorm_backward import ACTIVATIONS, gated_rmsnorm
from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import columns, number, rows, rows_out

if TYPE_CHECKING:
    import torch


def _terms(
    kind: tuple[str, bool],
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | float,
    eps: float,
) -> Terms:
    return {"y": (gated_rmsnorm(x, z, weight, eps, *kind),)}


def _operation(activation: str, norm_before_gate: bool) -> RowOperation:
    order = "gated_rmsnorm" if norm_before_gate else "gate_first_rmsnorm"
    suffix = "" if activation == "silu" else f"_{activation}"
    tensors = (rows("x"), rows("z"), columns("weight"), rows_out("y"), number("eps"))
    return RowOperation(
        name=f"{order}{suffix}_forward",
        signature=Signature(*tensors, row_sums=1),
        terms=partial(_terms, (activation, norm_before_gate)),
    )


GATED_FORWARDS: dict[tuple[str, bool], RowOperation] = {
    (activation, norm_before_gate): _operation(activation, norm_before_gate)
    for norm_before_gate in (True, False)
    for activation in ACTIVATIONS
}
"""The operations by the activation, and by whether the norm comes before the gate."""
