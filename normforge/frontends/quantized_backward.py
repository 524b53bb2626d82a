"""RMSNorm's backward whose dx is also quantized to FP8: in plain eager code by a call of what a
package serves, elsewhere by an operator. No gradient flows through its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..operations import BACKWARD_FORMATS
from ..operations.formula import evaluate, quantized_like
from ..serve.row_checks import check_tensors
from ..torch_internals import nothing_like
from .library import define
from .quantized_node import SERVED, numbers_of
from .row_nodes import is_ours, is_seen

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""dx, dx8, its scales, dw without elements where there is no weight, and dx in the residual's
dtype, without elements where that is x's."""
_TENSORS = ("dy", "x", "rstd", "weight", "dresidual")
_OUTPUTS = ("dx", "dx8", "dx_scales", "dw", "dresidual_out")


class BackwardCall(NamedTuple):
    """The arguments of a call that are no tensors. form: of BACKWARD_FORMATS; rounded: whether dx
    is rounded to x's dtype before it is quantized; powers: whether scales in fp32 are powers of
    two."""

    offset: float
    form: str
    rounded: bool
    powers: bool

    def tensors(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the operation: tensors that are there, and its numbers."""
        found = {name: tensor for name, tensor in given.items() if tensor is not None}
        return found | numbers_of(BACKWARD_FORMATS[self.form], self)


def results_of(found: Mapping[str, Any], given: Mapping[str, Any]) -> Results:
    """Return the results of a call from the outputs by name, each in its dtype."""
    x, weight = given["x"], given["weight"]
    dw = nothing_like(x) if weight is None else found["dw"].to(weight.dtype)
    wide = found.get("dresidual_out")
    return (
        *(found[name] for name in _OUTPUTS[:3]),
        dw,
        nothing_like(x) if wide is None else wide,
    )


def _formula(given: Mapping[str, Any], call: BackwardCall) -> Results:
    operation, tensors = BACKWARD_FORMATS[call.form], call.tensors(given)
    check_tensors(operation, tensors)
    found = evaluate(operation, tensors, offset=call.offset)
    found = {name: one.detach() for name, one in found.items()}  # tangents come through no_grad
    dx, x, residual = found["dx"], given["x"], given["dresidual"]
    if residual is not None and residual.dtype != x.dtype:
        found["dresidual_out"] = dx.to(residual.dtype)
    return results_of(found | {"dx": dx.to(x.dtype)}, given)


def _run(*given: Any) -> Results:
    *call, package = given[len(_TENSORS) :]
    tensors = dict(zip(_TENSORS, given, strict=False))
    found: Results = SERVED(package).backward_quantized(tensors, BackwardCall(*call))
    return found


def _fake(*given: Any) -> Results:
    tensors = dict(zip(_TENSORS, given, strict=False))
    call = BackwardCall(*given[len(_TENSORS) : -1])
    x, weight, residual = (tensors[name] for name in ("x", "weight", "dresidual"))
    dx8, scales = quantized_like(BACKWARD_FORMATS[call.form].signature, x).values()
    wide = residual is not None and residual.dtype != x.dtype
    return (
        x.new_empty(x.shape),
        dx8,
        scales,
        x.new_empty(0) if weight is None else weight.new_empty(weight.shape),
        residual.new_empty(x.shape) if wide else x.new_empty(0),
    )


rms_norm_backward_quantized = define(
    "rms_norm_backward_quantized",
    "(Tensor dy, Tensor x, Tensor rstd, Tensor? weight, Tensor? dresidual, float weight_offset,"
    " str format, bool rounded, bool powers, str package)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)


def quantized_backward(given: Mapping[str, Any], call: BackwardCall, package: str) -> Results:
    """Compute a call as a package serves it, by PyTorch's operators where it does not. given: the
    tensors by name, None for one that is not there. Raises TypeError or ValueError for those that
    do not fit together."""
    tensors = [given[name] for name in _TENSORS]
    with torch.no_grad():
        if not is_ours(*tensors):
            return _formula(given, call)
        found: Results
        if is_seen(*tensors):
            found = rms_norm_backward_quantized(*tensors, *call, package)
        else:
            found = SERVED(package).backward_quantized(given, call)
        return found
