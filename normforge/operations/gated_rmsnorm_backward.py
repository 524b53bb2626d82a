"""The backward of gated RMSNorms: y = norm(x) * w * act(z), as in Qwen3-Next, and y = norm(x *
act(z)) * w, as in Mamba 2. act is SiLU or the sigmoid.

A kernel computes rstd again from the rows, so that a forward saves nothing but its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import columns, number, rows, rows_out, sums

if TYPE_CHECKING:
    import torch

EPS = 1e-6
"""The eps of the forward that makes inputs for tuning and for tests."""

Gate = Callable[["torch.Tensor"], "tuple[torch.Tensor, tuple[torch.Tensor, ...]]"]
"""A function that gives act(z), and the terms of act'(z)."""


def _silu(z: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    gate = z.sigmoid()
    return z * gate, (gate, z * gate * (1 - gate))


def _sigmoid(z: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    gate = z.sigmoid()
    return gate, (gate * (1 - gate),)


ACTIVATIONS: dict[str, Gate] = {"silu": _silu, "sigmoid": _sigmoid}


def norm_terms(x: Any, dy: Any, weight: Any, eps: float) -> tuple[Any, tuple[Any, Any]]:
    """Return xhat, and the terms of the gradient of x, of y = xhat * w."""
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    normalized, weighted = x * rstd, dy * weight
    along = normalized * (weighted * normalized).mean(-1, keepdim=True)
    return normalized, (rstd * weighted, -rstd * along)


def norm_first_terms(
    gate: Gate,
    x: torch.Tensor,
    z: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor | float,
    eps: float,
) -> Terms:
    """Return the terms of the gradients of act(z) * norm(x). With g = dy * act(z) and xhat = x *
    rstd, dx = rstd * (w * g - xhat * mean(xhat * w * g)), dz = dy * xhat * w * act'(z), dw = sum
    over rows of g * xhat."""
    value, slopes = gate(z)
    normalized, dx = norm_terms(x, dy * value, weight, eps)
    dz = tuple(dy * normalized * weight * slope for slope in slopes)
    return {"dx": dx, "dz": dz, "dw": (dy * value * normalized,)}


def gate_first_terms(
    gate: Gate,
    x: torch.Tensor,
    z: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor | float,
    eps: float,
) -> Terms:
    """Return the terms of the gradients of norm(x * act(z)). With u = x * act(z), uhat = u * rstd
    and du = rstd * (w * dy - uhat * mean(uhat * w * dy)), dx = du * act(z), dz = du * x * act'(z),
    dw = sum over rows of dy * uhat."""
    value, slopes = gate(z)
    normalized, du = norm_terms(x * value, dy, weight, eps)
    dz = tuple(term * x * slope for term in du for slope in slopes)
    return {"dx": tuple(term * value for term in du), "dz": dz, "dw": (dy * normalized,)}


def gated_rmsnorm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor | float,
    eps: float,
    activation: str,
    norm_before_gate: bool,
) -> torch.Tensor:
    """Return y in the dtype of the arguments, which is that of the arithmetic. Differentiable."""
    value, _ = ACTIVATIONS[activation](z)
    rows = x if norm_before_gate else x * value
    y = rows * (rows.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    return y * value if norm_before_gate else y


def _operation(activation: str, norm_before_gate: bool) -> RowOperation:
    def forward(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> tuple[Any, Any]:
        y = gated_rmsnorm(x, z, weight, EPS, activation, norm_before_gate)
        return y, {"x": x, "z": z, "weight": weight, "eps": EPS}

    order = "gated_rmsnorm" if norm_before_gate else "gate_first_rmsnorm"
    suffix = "" if activation == "silu" else f"_{activation}"
    terms = norm_first_terms if norm_before_gate else gate_first_terms
    return RowOperation(
        name=f"{order}{suffix}_backward",
        signature=Signature(
            rows("x"),
            rows("z"),
            rows("dy"),
            columns("weight"),
            rows_out("dx"),
            rows_out("dz"),
            sums("dw"),
            number("eps"),
            row_sums=2,
            summed=True,
        ),
        terms=partial(terms, ACTIVATIONS[activation]),
        forward=forward,
        gradients={"x": "dx", "z": "dz", "weight": "dw"},
    )


GATED_BACKWARDS: dict[tuple[str, bool], RowOperation] = {
    (activation, norm_before_gate): _operation(activation, norm_before_gate)
    for norm_before_gate in (True, False)
    for activation in ACTIVATIONS
}
"""The operations by the activation, and by whether the norm comes before the gate."""
