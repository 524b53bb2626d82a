"""The backward of an RMSNorm whose result goes to several layers, such as the projections of
queries, keys and values, or of a gate: its gradient is the sum of those of these layers, two or
three. A kernel adds them in fp32 as it reads them, so that nobody writes the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .rmsnorm_backward import RMSNORM_BACKWARD, forward
from .rmsnorm_backward import terms as terms_of_norm
from .row_operation import RowOperation, Terms
from .signature import Signature
from .tensor import rows

GRADIENTS = ("dy", "dy2", "dy3")
"""The names of the gradients that are added up, in that order."""


def _two(x: Any, dy: Any, dy2: Any, rstd: Any, weight: Any) -> Terms:
    return terms_of_norm(x, dy + dy2, rstd, weight)


def _three(x: Any, dy: Any, dy2: Any, dy3: Any, rstd: Any, weight: Any) -> Terms:
    return terms_of_norm(x, dy + dy2 + dy3, rstd, weight)


def _two_magnitudes(x: Any, dy: Any, dy2: Any, rstd: Any, weight: Any) -> tuple[Any, ...]:
    return ((dy.abs() + dy2.abs()) * (x * rstd).abs(),)


def _three_magnitudes(
    x: Any, dy: Any, dy2: Any, dy3: Any, rstd: Any, weight: Any
) -> tuple[Any, ...]:
    return ((dy.abs() + dy2.abs() + dy3.abs()) * (x * rstd).abs(),)


def _operation(
    terms: Callable[..., Terms], magnitudes: Callable[..., tuple[Any, ...]], count: int
) -> RowOperation:
    """Return the operation for so many gradients: RMSNorm's but for the tensors that come in."""
    x, _, *others = RMSNORM_BACKWARD.signature.tensors
    given = map(rows, GRADIENTS[:count])
    return RowOperation(
        name=f"rmsnorm_sum{count}_backward",
        signature=Signature(x, *given, *others, summed=True),
        terms=terms,
        forward=forward,
        gradients=RMSNORM_BACKWARD.gradients,
        incoming=count,
        magnitudes=magnitudes,
    )


RMSNORM_SUM_BACKWARDS = {
    2: _operation(_two, _two_magnitudes, 2),
    3: _operation(_three, _three_magnitudes, 3),
}
"""The operations by the number of gradients."""
