"""A pass over FX graphs of a training step: the norms to this package, or to Inductor.

A graph that `make_fx` traced without decompositions (as graph trainers do) holds RMSNorm as
`aten._fused_rms_norm.default` and `aten._fused_rms_norm_backward.default` with their getitem users;
the operators of other norms are those that `NormOperators.aten` says. `route` gives them to a
package's operators, and additions of a residual stream with them, and RMSNorms that are written
out. `tag` marks them, getitems included, for `torch.fx.passes.regional_inductor`, which compiles
what is marked and leaves the rest as it is.

Plain torch.compile decomposes these operators before any pass can see them; `make_backend` is an
Inductor that keeps them, and routes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from .complex_rotations import fuse_complex_rotations
from .decomposed import replace_decomposed
from .gates import fuse_gates
from .graph_values import graph_modules
from .inductor import FILES, SLOT, is_free, missing_beside
from .layouts import ask_for_layouts
from .left import write_out
from .library import VERSION, namespace
from .operators import NormOperators, Operators
from .quantizations import fold_beside
from .rotations import fuse_rotations
from .routes import MARK, getitems, is_tiny
from .worth import Worth

Pass = Callable[..., GraphModule]
"""Takes a graph module and, as graph trainers give it, the example inputs; returns the module."""

AUTOTUNED = {"max_autotune": True, "coordinate_descent_tuning": True}
"""Settings of Inductor with which it searches for the fastest norm."""

_REGION = "inductor_region"
_log = logging.getLogger(__name__)


AnyOperators = NormOperators | type[NormOperators]
"""The operators that say which norm is meant."""


def norm_operators(norm: AnyOperators) -> list[Any]:
    """PyTorch's operators of a norm, forward and backward: those that this PyTorch has."""
    aten = torch.ops.aten
    return [getattr(aten, name).default for name in norm.aten if hasattr(aten, name)]


def find_norms(graph: torch.fx.Graph, norm: AnyOperators) -> list[Node]:
    """The forward and backward nodes of a norm, in the order of the graph; not those inside nested
    GraphModules.
    """
    targets = norm_operators(norm)
    return [node for node in graph.nodes if node.op == "call_function" and node.target in targets]


def tag(
    module: GraphModule, norm: AnyOperators, inductor_configs: Mapping[str, Any] | None = None
) -> GraphModule:
    """Mark every norm and its getitems for regional compilation with these settings of
    torch._inductor.config, None for those of Inductor. Changes node.meta only. An earlier mark is
    replaced; of it stays the region that it put the norm into, with its getitems.
    """
    settings = {} if inductor_configs is None else {"inductor_configs": dict(inductor_configs)}
    norms = [found for each in graph_modules(module) for found in find_norms(each.graph, norm)]
    for found in norms:
        earlier = (found.meta.get("custom") or {}).get(MARK)
        mark = dict(settings)
        if isinstance(earlier, dict) and _REGION in earlier:
            mark[_REGION] = earlier[_REGION]
        for node in (found, *getitems(found)):
            # A dictionary of its own: tracers give one to many nodes.
            node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: mark}
    if norms:
        _log.info("marked %d %s nodes for Inductor", len(norms), norm.layer)
    return module


class Counts(NamedTuple):
    """The numbers of norms, of norms that are written out, and of additions and quantizations
    beside them, whose nodes a package was given."""

    norms: int = 0
    written_out: int = 0
    additions: int = 0
    quantizations: int = 0

    def tell(self, operators: NormOperators) -> None:
        if any(self):
            served = operators.package or namespace
            others = f" and {self.written_out} written-out ones" if self.written_out else ""
            more = f"; quantizations: {self.quantizations}" if self.quantizations else ""
            given = (self.norms, operators.layer, others, served, self.additions, more)
            _log.info("gave %d %s nodes%s to %s; additions folded: %d%s", *given)


def route(
    module: GraphModule,
    operators: NormOperators,
    *,
    written_out_only: bool = False,
    is_routed: Callable[..., bool] | None = None,
) -> GraphModule:
    """Replace every norm over the last dimension by the operators of a package, together with
    what `fold_beside` folds into them. written_out_only: only what
    `replace_decomposed` finds, and no addition; is_routed: as there."""
    counts = []
    behind_autograd = not torch.is_grad_enabled() or _has_backward(module, operators)
    for each in graph_modules(module):
        written_out = 0
        if isinstance(operators, Operators):
            written_out = replace_decomposed(each.graph, operators, is_routed)
        # This comes behind it, for its norms have additions, too.
        found = Counts()
        if not written_out_only:
            found = route_graph(each.graph, operators, behind_autograd)
        found = found._replace(written_out=written_out)
        if any(found):
            each.recompile()
        counts.append(found)
    Counts(*map(sum, zip(*counts, strict=True))).tell(operators)
    return module


def _has_backward(module: GraphModule, operators: NormOperators) -> bool:
    """Return True if a graph is of a whole step: it has the backward of a norm."""
    backwards = (*norm_operators(operators)[1:], operators.backward_operator)
    nodes = (node for each in graph_modules(module) for node in each.graph.nodes)
    return any(node.target in backwards for node in nodes)


def route_graph(graph: torch.fx.Graph, operators: NormOperators, behind_autograd: bool) -> Counts:
    """Do `route` on a graph that writes no norm out. behind_autograd: as of `fold_beside`."""
    norms = 0
    for node in find_norms(graph, operators):
        target: Any = node.target
        route_node = operators.routes.get(target._schema.name)
        norms += route_node is not None and route_node(node, operators)
    additions, quantizations = fold_beside(graph, operators, behind_autograd)
    counts = Counts(norms, additions=additions, quantizations=quantizations)
    if any(counts):
        graph.lint()
    return counts


def make_pass(
    operators: NormOperators,
    how: str = "route",
    inductor_configs: Mapping[str, Any] | None = AUTOTUNED,
) -> Pass:
    """A pass for a graph trainer, called normforge_<how> for RMSNorm and normforge_<how>_<norm> for
    others. how: `route` or `tag`; inductor_configs: for `tag`."""
    if how not in ("route", "tag"):
        raise ValueError(f"how must be 'route' or 'tag', got {how!r}")

    def normforge_route(module: GraphModule, example_inputs: Any = None) -> GraphModule:
        route(module, operators)
        if isinstance(operators, Operators):
            fuse_complex_rotations(module, operators)
        return module

    def normforge_tag(module: GraphModule, example_inputs: Any = None) -> GraphModule:
        return tag(module, operators, inductor_configs)

    made = normforge_route if how == "route" else normforge_tag
    if operators.layer != "RMSNorm":
        made.__name__ += f"_{operators.layer.lower()}"
    return made


class Decompositions(dict[Any, Callable[..., Any]]):
    """Inductor's decompositions under its settings of now, without those of the operators of a norm
    that `route` takes.

    Pickled it is a constant. Inductor pickles it for the keys of its caches, which hold the
    settings and the names of the operators as well. The functions in it cannot be pickled, nor can
    this class by name where the modules of a package are no longer in sys.modules.
    """

    def __init__(self, norm: AnyOperators) -> None:
        from torch._inductor.decomposition import select_decomp_table

        self._norm = norm.layer
        names = norm.routes.keys() - norm.fused
        kept = [op for op in norm_operators(norm) if op._schema.name in names]
        super().__init__((op, fn) for op, fn in select_decomp_table().items() if op not in kept)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({"Inductor's decompositions, without": self._norm},)


def _refuse_other(given: Any) -> None:
    if not is_free(given):
        raise ValueError(
            f"inductor_backend routes its norms in torch._inductor.config.{SLOT}, where there is "
            "a pass already: unset that one, or make it the post_grad_custom_post_pass"
        )


def has_tiny_eps(module: GraphModule, norm: AnyOperators) -> bool:
    """Return True if a graph of Dynamo calls PyTorch's function of the norm with an eps whose
    backward is not for kernels. A graph of the backward alone does not tell."""
    for node in (node for each in graph_modules(module) for node in each.graph.nodes):
        name = getattr(node.target, "__name__", "").split(".")[0]
        if name.endswith("_norm") and norm.aten[0].endswith(name):
            numbers = (*node.args[3:], *node.kwargs.values())  # behind x, shape and weight
            if any(map(is_tiny, numbers)):
                return True
    return False


def route_before_autograd(module: GraphModule, operators: NormOperators) -> None:
    """Route what a graph of Dynamo writes out, and write out those of PyTorch's norms that are
    better left to Inductor. `Worth` says which these are, where bits may depend on that."""
    if not isinstance(operators, Operators):
        return
    is_routed = None if operators.invariant else Worth(operators)
    fuse_complex_rotations(module, operators)  # Inductor fuses nothing with these
    fuse_gates(module, operators)  # before their norms are left to Inductor
    route(module, operators, written_out_only=True, is_routed=is_routed)
    if is_routed is not None:
        for each in graph_modules(module):
            write_out(each, is_routed)
    fuse_rotations(module, operators)


def make_backend(operators: NormOperators, **inductor_configs: Any) -> Callable[..., Any]:
    """A backend for torch.compile: Inductor with these settings, which override those of
    torch.compile's `mode` and `options`, but what `route` takes of the norm
    stays whole and is this package's, and so are RMSNorms that are written out, but for those that
    `Worth` leaves to Inductor. Inductor's caches
    keep what it compiles under keys that have the package, VERSION and the code of the pass. In a
    graph where `has_tiny_eps`, PyTorch's norms are Inductor's.

    Raises ValueError where post_grad_custom_pre_pass is set, here or, once it compiles, in
    torch._inductor.config.
    """
    _refuse_other(inductor_configs.get(SLOT))
    asks_for = repr((namespace, VERSION, operators.package))

    def normforge_inductor(
        module: GraphModule,
        example_inputs: Any,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> Any:
        from torch._inductor import config, list_mode_options
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

        class RouteNorms(CustomGraphPass):
            def __call__(self, graph: torch.fx.Graph) -> None:
                route_graph(graph, operators, behind_autograd=True).tell(operators)
                ask_for_layouts(graph, operators)

            def uuid(self) -> bytes:
                return get_hash_for_files(FILES, repr((asks_for, missing_beside(operators))))

        asked = dict(list_mode_options(mode or "default"))
        asked |= {name.replace("-", "_"): value for name, value in (options or {}).items()}
        asked |= inductor_configs
        with config.patch(asked):
            _refuse_other(getattr(config, SLOT))
            table = None if has_tiny_eps(module, operators) else Decompositions(operators)
        settings = {**asked, SLOT: RouteNorms()}
        route_before_autograd(module, operators)
        return compile_fx(
            module, example_inputs, decompositions=table, config_patches=settings, **more
        )

    return normforge_inductor
