"""Functions that apply autograd nodes in compiled code, each as one node of Dynamo's graph.
Autograd then sees changes in place of what a node saved, where AOTAutograd traces it. In a node
that Dynamo looks into, nobody sees them.

Only Dynamo asks for them, while it traces, and its import takes a second: so they are made then.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from .row_nodes import applied

_NODES = {"gated": ("gated_node", "GatedNode"), "packed": ("rope_packed", "PackedNode")}
"""The module of a node, and its class."""


def __getattr__(name: str) -> Any:
    if name not in _NODES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, node = _NODES[name]
    kind = getattr(import_module(f".{module}", __package__), node)

    @torch.compiler.allow_in_graph
    def apply(*given: Any) -> Any:
        return applied(kind, *given)

    return globals().setdefault(name, apply)
