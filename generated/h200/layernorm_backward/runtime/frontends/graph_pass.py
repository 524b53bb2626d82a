"""A pass over FX graphs of a training step: RMSNorm to this package, or to Inductor.

A graph that `make_fx` traced without decompositions (as graph trainers do) holds RMSNorm as
`aten._fused_rms_norm.default` and `aten._fused_rms_norm_backward.default` with their getitem users.
`route` gives them to a package's operators. `tag` marks them, getitems included, for
`torch.fx.passes.regional_inductor`, which compiles what is marked and leaves the rest as it is.

Plain torch.compile decomposes both operators before any pass can see them; `make_backend` is an
Inductor that keeps them, and routes them.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .operators import Operators

Pass = Callable[..., GraphModule]
"""Takes a graph module and, as graph trainers give it, the example inputs; returns the module."""

AUTOTUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
"""Settings of Inductor with which it searches for the fastest norm."""

_MARK, _REGION = "compile_with_inductor", "inductor_region"
_log = logging.getLogger(__name__)


def norm_operators() -> list[Any]:
    """PyTorch's operators of RMSNorm, forward and backward: those that this PyTorch has."""
    aten = torch.ops.aten
    names = ("_fused_rms_norm", "_fused_rms_norm_backward")
    return [getattr(aten, name).default for name in names if hasattr(aten, name)]


def find_norms(graph: torch.fx.Graph) -> list[Node]:
    """The forward and backward nodes of RMSNorm, in the order of the graph; not those inside nested
    GraphModules.
    """
    targets = norm_operators()
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def graph_modules(module: GraphModule) -> Iterator[GraphModule]:
    """A module and those nested in it, such as the bodies of higher-order operators."""
    return (each for each in module.modules() if isinstance(each, GraphModule))


def getitems(node: Node) -> list[Node]:
    """The users of a node that take one of its results."""
    return [
        user
        for user in node.users
        if user.op == "call_function" and user.target is operator.getitem
    ]


def tag(module: GraphModule, inductor_configs: Mapping[str, Any] | None = None) -> GraphModule:
    """Mark every RMSNorm and its getitems for regional compilation with these settings of
    torch._inductor.config, None for those of Inductor. Changes node.meta only. An earlier mark is
    replaced; of it stays the region that it put the norm into, with its getitems.
    """
    settings = {} if inductor_configs is None else {"inductor_configs": dict(inductor_configs)}
    norms = [norm for each in graph_modules(module) for norm in find_norms(each.graph)]
    for norm in norms:
        earlier = (norm.meta.get("custom") or {}).get(_MARK)
        mark = dict(settings)
        if isinstance(earlier, dict) and _REGION in earlier:
            mark[_REGION] = earlier[_REGION]
        for node in (norm, *getitems(norm)):
            # A dictionary of its own: tracers give one to many nodes.
            node.meta["custom"] = {**(node.meta.get("custom") or {}), _MARK: mark}
    if norms:
        _log.info("marked %d RMSNorm nodes for Inductor", len(norms))
    return module


def route(module: GraphModule, operators: Operators) -> GraphModule:
    """Replace every RMSNorm over the last dimension by the operators of a package."""
    count = 0
    for each in graph_modules(module):
        replaced = route_graph(each.graph, operators)
        if replaced:
            each.recompile()
        count += replaced
    if count:
        _log.info("gave %d RMSNorm nodes to %s", count, operators.namespace)
    return module


def route_graph(graph: torch.fx.Graph, operators: Operators) -> int:
    """`route` on a graph; how many nodes it replaced."""
    replaced = 0
    for node in find_norms(graph):
        backward = node.target is torch.ops.aten._fused_rms_norm_backward.default
        replaced += _route_backward(node, operators) if backward else _route_norm(node, operators)
    if replaced:
        graph.lint()
    return replaced


def _named(node: Node) -> dict[str, Any]:
    """The arguments of a node by the names of its operator's schema."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _served(x: Any, weight: Any, normalized_shape: Any) -> bool:
    """Whether the package's operators take these: one normalised dimension, dtypes they know."""
    if len(normalized_shape) != 1:
        return False
    if not isinstance(weight, Node) or not isinstance(x, Node):
        return True
    rows, scale = x.meta.get("val"), weight.meta.get("val")
    return rows is None or scale is None or scale.dtype in (rows.dtype, torch.float32)


def _route_norm(node: Node, operators: Operators) -> bool:
    given = _named(node)
    x, weight = given["input"], given.get("weight")
    if not _served(x, weight, given["normalized_shape"]):
        return False
    arguments = (x, weight, given.get("eps"), 0.0)
    _replace(node, operators.rms_norm, arguments)
    return True


def _route_backward(node: Node, operators: Operators) -> bool:
    given = _named(node)
    x, weight = given["input"], given.get("weight")
    if not _served(x, weight, given["normalized_shape"]):
        return False
    need_dx, need_dw = given["output_mask"]
    arguments = (given["grad_out"], x, given["rstd"], weight, None, None, 0.0, need_dx, need_dw)
    _replace(node, operators.rms_norm_backward, arguments)
    return True


def _replace(node: Node, target: Any, arguments: tuple[Any, ...]) -> None:
    """Put a call of `target` in the place of a node. Its first results are the node's."""
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    new.meta = dict(node.meta)
    for each in (new, *getitems(node)):  # Inductor is not to take what is no norm of PyTorch's now
        if _MARK in (each.meta.get("custom") or {}):
            each.meta["custom"] = {k: v for k, v in each.meta["custom"].items() if k != _MARK}
    value = _fake_value(target, arguments)
    if value is not None:
        new.meta["val"] = value
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _fake_value(target: Any, arguments: tuple[Any, ...]) -> Any:
    """What the call gives, on the values that tracing left in the nodes; None without them."""
    values = [a.meta.get("val") if isinstance(a, Node) else a for a in arguments]
    missing = any(
        isinstance(a, Node) and value is None for a, value in zip(arguments, values, strict=True)
    )
    modes = [mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None]
    if missing or not modes or any(mode is not modes[0] for mode in modes):
        return None
    with modes[0]:
        return target(*values)


def make_pass(
    operators: Operators,
    how: str = "route",
    inductor_configs: Mapping[str, Any] | None = AUTOTUNED,
) -> Pass:
    """A pass for a graph trainer. how: `route` or `tag`; inductor_configs: for `tag`."""
    if how not in ("route", "tag"):
        raise ValueError(f"how must be 'route' or 'tag', got {how!r}")

    def normforge_route(module: GraphModule, example_inputs: Any = None) -> GraphModule:
        return route(module, operators)

    def normforge_tag(module: GraphModule, example_inputs: Any = None) -> GraphModule:
        return tag(module, inductor_configs)

    return normforge_route if how == "route" else normforge_tag


class Decompositions(dict[Any, Callable[..., Any]]):
    """Inductor's decompositions under its settings of now, without those of RMSNorm.

    Pickled it is a constant. Inductor pickles it for the keys of its caches, which hold the
    settings and `cache_key` as well. The functions in it cannot be pickled, nor can this class by
    name where the modules of a package are no longer in sys.modules.
    """

    def __init__(self) -> None:
        from torch._inductor.decomposition import select_decomp_table

        kept = norm_operators()
        super().__init__((op, fn) for op, fn in select_decomp_table().items() if op not in kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({"Inductor's decompositions, without": "RMSNorm"},)


@cache
def code_digest(folder: Path) -> str:
    """Hex digits that change with the Python files in a folder. A folder is read once."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]


def cache_key(operators: Operators) -> str:
    """What code compiled with a package is cached under. It changes with the tables of the package
    and with the code of its runtime."""
    return f"{operators.namespace} {code_digest(Path(__file__).resolve().parents[1])}"


_SLOT = "post_grad_custom_pre_pass"


def _refuse_other(given: Any) -> None:
    if given:
        raise ValueError(
            f"inductor_backend routes its norms in torch._inductor.config.{_SLOT}, where there is "
            "a pass already: unset that one, or make it the post_grad_custom_post_pass"
        )


def make_backend(operators: Operators, **inductor_configs: Any) -> Callable[..., Any]:
    """A backend for torch.compile: Inductor with these settings, but every RMSNorm stays one
    operator and is this package's. Inductor's caches keep what it compiles under keys that have
    `cache_key` in them.

    Raises ValueError where post_grad_custom_pre_pass is set, here or, once it compiles, in
    torch._inductor.config.
    """
    _refuse_other(inductor_configs.get(_SLOT))
    key = cache_key(operators)

    def normforge_inductor(module: GraphModule, example_inputs: Any, **options: Any) -> Any:
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.custom_graph_pass import CustomGraphPass

        class RouteNorms(CustomGraphPass):
            def __call__(self, graph: torch.fx.Graph) -> None:
                route_graph(graph, operators)

            def uuid(self) -> str:
                return key

        with config.patch(inductor_configs):
            _refuse_other(getattr(config, _SLOT))
            table = Decompositions()
        settings = {**inductor_configs, _SLOT: RouteNorms()}
        return compile_fx(
            module, example_inputs, decompositions=table, config_patches=settings, **options
        )

    return normforge_inductor
