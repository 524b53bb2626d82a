"""Functions that apply autograd nodes in compiled code, each as one node of Dynamo's graph.
Autograd then sees changes in place of what a node saved, where AOTAutograd traces it. In a node
that Dynamo looks into, nobody sees them.

Only Dynamo asks for them, while it traces, and its import takes a second: so they are made then.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from ..torch_internals import has_tangent
from .row_nodes import applied

_NODES = {"gated": ("gated_node", "GatedNode"), "packed": ("rope_packed", "PackedNode")}
"""The module of a node, and its class, which has the formula of a call."""


def __getattr__(name: str) -> Any:
    if name not in _NODES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, node = _NODES[name]
    kind = getattr(import_module(f".{module}", __package__), node)

    @torch.compiler.allow_in_graph
    def apply(*given: Any) -> Any:
        # Dynamo cannot ask this, and a backend may run its graph as it is.
        return kind.by_formula(*given) if has_tangent(*given) else applied(kind, *given)

    # Graphs are pickled with the name of the function.
    apply.__module__, apply.__name__, apply.__qualname__ = __name__, name, name
    return globals().setdefault(name, apply)
