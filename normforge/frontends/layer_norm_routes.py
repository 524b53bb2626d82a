"""Leads PyTorch's LayerNorm in graphs, and its backward also under `install()`, to a package, and
back where there is no kernel."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..serve.call import Call
from ..serve.options import Options
from ..serve.reference import Results
from .install import Routed, Serve
from .routes import Routes, arguments_of, getitems, of_tiny_eps, replace_node, takes


def dw_and_db(sums: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The rows of what a kernel gives for both. Not by unbind, whose results may not be changed in
    place."""
    return (None, None) if sums is None else (sums.select(0, 0), sums.select(0, 1))


def layer_norm_aten_call(options: Options) -> Call:
    """Return a call of PyTorch's own kernel, as `aten_call` does for RMSNorm."""

    def call(
        dy: torch.Tensor,
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        dresidual: None,
        dw_out: None,
        mean: torch.Tensor,
        *_: Any,
    ) -> Results:
        rows, need_dw = (*x.shape[:-1], 1), options.need_dw and weight is not None
        with torch.no_grad():
            dx, dw, db = torch.ops.aten.native_layer_norm_backward(
                dy,
                x,
                x.shape[-1:],
                mean.reshape(rows),
                rstd.reshape(rows),
                weight,
                weight,
                [options.need_dx, need_dw, need_dw],
            )
            return dx if options.need_dx else None, torch.stack((dw, db)) if need_dw else None

    return call


def _layer_norm_backward(
    quick: Serve, route: Serve, leave: Callable[..., Any]
) -> Callable[..., Any]:
    def routed(
        dy: torch.Tensor,
        x: torch.Tensor,
        normalized_shape: list[int],
        mean: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        output_mask: list[bool],
    ) -> Any:
        need_dx, need_dw, need_db = output_mask
        need_sums = need_dw or need_db
        # A kernel gives both sums or none, in the weight's dtype.
        alike = weight is None or bias is None or weight.dtype == bias.dtype
        if len(normalized_shape) == 1 and alike and (weight is not None or not need_sums):
            results = quick(dy, x, rstd, weight, mean) if need_dx and need_sums else None
            if results is None:
                results = route(dy, x, rstd, weight, need_dx, need_sums, mean)
            if results is not None:
                dx, sums = results
                dw, db = dw_and_db(sums)
                return dx, dw if need_dw else None, db if need_db else None
        return leave(dy, x, normalized_shape, mean, rstd, weight, bias, output_mask)

    return routed


LAYER_NORM = Routed(
    "native_layer_norm_backward",
    "_normforge_installed_layer_norm",
    "layer_norm or LayerNorm",
    _layer_norm_backward,
)


def _route_layer_norm(node: Node, operators: Any) -> bool:
    """Route a forward where the package has kernels of it at all."""
    given = arguments_of(node)
    x, weight, bias, shape = (
        given[name] for name in ("input", "weight", "bias", "normalized_shape")
    )
    if getattr(operators.by_kernel, "missing", "no package") or len(getitems(node)) < len(
        node.users
    ):
        return False
    if not (takes(x, weight, shape) and takes(x, bias, shape)):
        return False
    rstd = (node.meta.get("val") or [None])[-1]
    # What takes narrow statistics may stay PyTorch's, and the operator gives wide ones.
    if not _is_wide(getattr(rstd, "dtype", None), x):
        return False
    arguments = (x, None, weight, bias, given["eps"], operators.package)
    replace_node(node, operators.layer_norm, arguments)
    return True


def _route_layer_norm_backward(node: Node, operators: Any) -> bool:
    given = arguments_of(node)
    x, weight, bias, rstd = given["input"], given["weight"], given["bias"], given["rstd"]
    need_dx, *sums = given["output_mask"]
    kind = _dtype(rstd)
    if not takes(x, weight, given["normalized_shape"]) or not (kind is None or _is_wide(kind, x)):
        return False
    if of_tiny_eps(rstd):
        return False
    if any(sums) and (weight is None or _dtype(bias) not in (None, _dtype(weight))):
        return False
    items = getitems(node)
    if len(items) < len(node.users):  # somebody takes all results, and both sums are one here
        return False
    arguments = (given["grad_out"], x, rstd, weight, None, None, 0.0, need_dx, any(sums))
    behind = (operators.package, given["mean"])
    new = replace_node(node, operators.layer_norm_backward, (*arguments, *behind))
    halves = [item for item in items if item.args[1] != 0 and sums[int(item.args[1] == 2)]]
    if halves:
        with node.graph.inserting_after(new):
            both = node.graph.call_function(operator.getitem, (new, 1))
        known = ("val", "tensor_meta")
        both.meta = {name: m for name, m in halves[0].meta.items() if name not in known}
        if "val" in new.meta:
            both.meta["val"] = new.meta["val"][1]
    for item in halves:
        with node.graph.inserting_before(item):
            half = node.graph.call_function(
                torch.ops.aten.select.int, (both, 0, int(item.args[1] == 2))
            )
        half.meta = dict(item.meta)
        item.replace_all_uses_with(half)
        node.graph.erase_node(item)
    return True


def _dtype(given: Any) -> torch.dtype | None:
    """Return the dtype of a node, where tracing left its value."""
    return getattr(given.meta.get("val"), "dtype", None) if isinstance(given, Node) else None


def _is_wide(kind: torch.dtype | None, x: Any) -> bool:
    """Return True if the operators take statistics of this dtype; PyTorch's LayerNorm of narrow
    rows saves narrow ones on the CPU."""
    return kind == torch.float32 or kind == _dtype(x) == torch.float64


LAYER_NORM_ROUTES: Routes = {
    "aten::native_layer_norm": _route_layer_norm,
    "aten::native_layer_norm_backward": _route_layer_norm_backward,
}
