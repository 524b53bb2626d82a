"""Lets plain torch.compile fold what stands beside norms into the operators of packages.

Inductor has one place for a pass of somebody else. A pass that folds goes there, if it is free,
when an operator is traced while Inductor is loaded. It changes graphs with operators of packages
alone. What an `inductor_backend()` compiles has the pass of that instead.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .layer_norm_operators import LayerNormOperators
from .layouts import ask_for_layouts
from .library import TRACED, VERSION, namespace
from .operators import NormOperators, Operators
from .quantizations import fold_beside, missing_quantized
from .routes import arguments_of

SLOT = "post_grad_custom_pre_pass"
FILES = tuple(map(str, sorted(Path(__file__).parent.glob("*.py"))))
"""Files of this folder, among them those that passes are made of."""
_NORMS: tuple[type[NormOperators], ...] = (Operators, LayerNormOperators)
_BESIDE = ("norm_and_add", "sum_backward")
_log = logging.getLogger(__name__)


def missing_beside(operators: Any) -> list[str]:
    """Say which kernels there are, beside the norm's own, that additions and quantizations are
    folded for."""
    found = [getattr(getattr(operators, name, None), "missing", "") for name in _BESIDE]
    return [*found, *missing_quantized(operators)]


def fold_all(graph: torch.fx.Graph) -> int:
    """Fold what stands beside the norms of a graph into the operators of whatever packages are in
    it. Returns how many."""
    folded: Counter[str] = Counter()
    for norm in _NORMS:
        found = [node for node in graph.nodes if node.target in norm.all]
        for package in dict.fromkeys(arguments_of(node)["package"] for node in found):
            operators = norm.served(package)
            if operators.package == package:
                additions, quantizations = fold_beside(graph, operators)
                folded["additions"] += additions
                folded["quantizations"] += quantizations
        if found:
            ask_for_layouts(graph, norm)
    if folded.total():
        graph.lint()
    for what, count in (+folded).items():
        _log.info("folded %d %s into norms", count, what)
    return folded.total()


@cache
def folding_pass() -> Any:
    """Return the pass, for this process. Inductor is loaded."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class FoldAdditions(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            fold_all(graph)

        def uuid(self) -> bytes:
            known = [dict(norm.served.known) for norm in _NORMS]
            there = [[(n, missing_beside(o)) for n, o in sorted(some.items())] for some in known]
            return get_hash_for_files(FILES, repr((namespace, VERSION, there)))

    return FoldAdditions()


def is_free(given: Any) -> bool:
    """Return True if Inductor's place for a pass is empty, or has the one of this module."""
    return given is None or (folding_pass.cache_info().currsize > 0 and given is folding_pass())


def _let_inductor_fold() -> None:
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return
    with suppress(AttributeError):  # another thread is importing it
        if getattr(config, SLOT) is None:
            setattr(config, SLOT, folding_pass())


TRACED.append(_let_inductor_fold)
