"""Finds layers of a model whose norms stand before or behind a sum of the residual stream, as in
transformers' Llama, OLMo 2 and Gemma, and makes the forwards in which `rms_norm` serves both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from ..serve.options import DTYPES
from . import rewritten
from .layer_calls import calls_of
from .layer_text import Joined, join, results_of_calls
from .patch import REMADE, ModuleForward, forward_of, original_class, replace_forwards, served_by
from .rms_norm import Norm
from .tried import alike, are_close, evenly, is_called_so, results_of, rows_to_try

_log = logging.getLogger(__name__)
LAYER = "layer"
"""The name of what is patched here, beside the norms."""
_ROUNDED_ONCE = ("torch", "gemma", "widening", "weight's")


def fuse_sums(norm: Norm, model: torch.nn.Module) -> list[str]:
    """Let `rms_norm` with `add` or `residual` serve the norms of a model's layers and the sums
    beside them; the names of the layers. Each is tried on the CPU, without what stands between its
    norms, and left alone if it computes something else. The log says why (level INFO)."""

    def has_sums(module: Any) -> bool:
        return bool(_joins_of(module).names)

    return replace_forwards(model, LAYER, partial(_forward_for, norm), has_sums, quiet=True)


def _joins_of(module: Any) -> Joined:
    """Return which norms of a module may be joined with what, by its text."""
    names = [name for name, one in module.named_children() if is_called_so("RMSNorm", one)]
    kind = original_class(type(module))
    allowed = Joined(*[tuple(names)] * 3)
    return _joined(kind, kind.forward, allowed) if names else allowed


@cache
def _joined(kind: Any, _: Any, allowed: Joined) -> Joined:
    """Return which norms of a class are joined with what, of those that are allowed, in the forward
    that it has now."""
    made = rewritten.of_class(kind) if allowed.names else None
    return Joined() if made is None else join(made, allowed)


def _forward_for(norm: Norm, module: Any) -> ModuleForward | str:
    """Return the forward that serves a layer, or a sentence that says why it is left alone."""
    joins = _joins_of(module)
    norms = [getattr(module, name) for name in joins.names]
    weight, *others = (getattr(one, "weight", None) for one in norms)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1:
        return "its norms have no weights of one dimension"
    if any(getattr(other, "shape", None) != weight.shape for other in others):
        return "its norms have weights of several lengths"
    if any(hasattr(type(one), "_package_norm") for one in norms):
        return "its norms are a package's own, which take residual and add"
    found = {served_by(one) for one in norms}
    casting = next((one for one in _ROUNDED_ONCE if found == {forward_of(norm, one)}), None)
    if casting is None:
        return "its norms were not all patched to compute xhat * w, or all xhat * (1 + w)"
    kind = original_class(type(module))
    offered = _with_kernels(norm, joins.names, weight, casting == "gemma")
    joins = _joined(kind, kind.forward, offered)
    if not joins.names:
        return f"no kernel that adds serves rows of {len(weight)} columns here"
    forward = _forward_of(norm, kind, joins, casting)
    try:
        same = _computes_the_same(module, joins.names, forward)
    except Exception:  # another kind of layer
        return "it raises an error on the CPU without what stands between its norms"
    if not same:
        return "it computes something else without what stands between its norms"
    _log.info("patch joins in a %s: %s", kind.__name__, joins)
    return forward


def _with_kernels(norm: Norm, names: tuple[str, ...], weight: torch.Tensor, offset: bool) -> Joined:
    """Return the names by what may be joined with norms of such weights: on a GPU, what it has
    kernels for. Without a GPU nothing is known."""
    if not torch.cuda.is_available():
        return Joined(names if norm.added else (), names, names)
    M, N, dtype = 1 << 14, len(weight), DTYPES.get(weight.dtype, "bf16")
    behind = norm.added is not None and norm.added.has_kernel(M, N, dtype, dtype, offset)
    table = norm.forward.table
    before = table is not None and table.choose(M, N, dtype, dtype).kernel is not None
    explain = partial(norm._server.explain, M, N, offset=offset)
    asked = (dtype, "bf16")  # weights in fp32 may be for training in bf16, as FSDP casts them
    kept = any(explain(one, one, residual=one)["how"] != "none" for one in asked)
    return Joined(*(names if there else () for there in (behind, before, kept)))


def _forward_of(norm: Norm, kind: Any, joins: Joined, casting: str) -> ModuleForward:
    """Return the forward of a class whose norms are joined so. casting: as of `calls_of`."""
    return _made(norm, kind, kind.forward, joins, casting)


@cache
def _made(norm: Norm, kind: Any, _: Any, joins: Joined, casting: str) -> ModuleForward:
    made = rewritten.of_class(kind)
    assert made is not None and join(made, joins) == joins
    found = rewritten.compiled(kind, made, calls_of(norm, casting))
    setattr(found, REMADE, partial(_forward_of, norm, kind, joins, casting))
    return found


# ---- Tried on the CPU ----------------------------------------------------------------------------


class _StandIn(torch.nn.Module):
    """Stands between norms, as a function of the rows alone. count: of its results, 0 for one that
    is no tuple."""

    def __init__(self, function: Callable[..., torch.Tensor], count: int) -> None:
        super().__init__()
        self.function, self.count = function, count

    def forward(self, *given: Any, **named: Any) -> Any:
        y = self.function(given[0] if given else named["hidden_states"])
        return (y, *[None] * (self.count - 1)) if self.count else y


def _computes_the_same(module: Any, names: tuple[str, ...], fused: Any) -> bool:
    """Return True if a forward has the results and gradients of that of a layer."""
    kind = original_class(type(module))
    original, text = rewritten.plain_forward(kind), rewritten.of_class(kind)
    counts = {} if text is None else results_of_calls(text)
    width = len(getattr(module, names[0]).weight)
    weights = [evenly(-1 + i, 2 - i, width) for i, _ in enumerate(names)]

    def run(forward: Callable[..., Any], rows: torch.Tensor) -> Any:
        def of(x: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
            inner = {}
            for name, child in module.named_children():
                if name in names:
                    inner[name] = alike(child, {"weight": scales[names.index(name)]})
                elif is_called_so("RMSNorm", child):
                    inner[name] = alike(child, {"weight": evenly(1, 2, width)})
                else:
                    function = torch.sin if "attn" in name else torch.cos
                    inner[name] = _StandIn(function, counts.get(name, 0))
            one = alike(module, {}, inner)
            one.__dict__["training"] = False
            given = {"position_embeddings": None, "attention_mask": None}
            y = forward(one, hidden_states=x, **given)
            result: torch.Tensor = y[0] if isinstance(y, tuple) else y
            return result

        return results_of(of, rows, *weights)

    rows = rows_to_try(width)[1]
    return are_close(run(fused, rows), run(original, rows), rows)
