"""Rewrites the forward of a class so that calls in it go elsewhere. Its text is what tells that the
forward has them: a class of another version, or of another model, may not."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

Forward = Callable[..., Any]
_ROTATE = "apply_rotary_pos_emb"
SERVED = "_normforge_served"
"""The name by which a rewritten forward knows the function that it calls."""


class _Heads(ast.NodeTransformer):
    """Takes the norms of queries and keys away, and calls another function in the place of the
    rotation: of the module and what the rotation took."""

    def __init__(self) -> None:
        self.norms: list[str] = []
        self.turns = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr="q_norm" | "k_norm" as name),
                args=[rows],
                keywords=[],
            ):
                self.norms.append(name)
                return rows
            case ast.Call(func=ast.Name(id=name), args=[_, _, _, _], keywords=[]) if (
                name == _ROTATE
            ):
                self.turns += 1
                node.func = ast.copy_location(ast.Name(SERVED, ast.Load()), node)
                node.args.insert(0, ast.copy_location(ast.Name("self", ast.Load()), node))
        return node


def of_class(kind: Any) -> ast.FunctionDef | None:
    """Return the text of a class's forward as a tree, without types; None where it has none, has
    decorators that may do anything, or names what is neither an argument nor a global."""
    forward = plain_forward(kind)
    try:
        lines, first = inspect.getsourcelines(forward)
        (made,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(made, ast.FunctionDef) or forward.__closure__ is not None:
        return None
    for decorator in made.decorator_list:
        match decorator:
            case ast.Call(func=ast.Name(id="deprecate_kwarg")):  # an older name of an argument
                continue
        return None
    given = made.args
    for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if one is not None:
            one.annotation = None
    made.returns, made.decorator_list = None, []
    ast.increment_lineno(made, first - 1)
    return made


def plain_forward(kind: Any) -> Any:
    """Return the forward of a class without its decorators."""
    return inspect.unwrap(kind.forward)


def heads_rotated(made: ast.FunctionDef) -> bool:
    """Rewrite the forward of an attention. Return False for one that does not normalize queries and
    keys and then rotate both, once each."""
    found = _Heads()
    found.visit(made)
    return sorted(found.norms) == ["k_norm", "q_norm"] and found.turns == 1


def compiled(kind: Any, made: ast.FunctionDef, served: Mapping[str, Forward]) -> Forward:
    """Return the function of a rewritten forward of a class. served: what it calls, by its name
    there. It has the globals of the class's own, where torch.compile looks for them."""
    forward = plain_forward(kind)
    tree = ast.parse(f"def make({', '.join(served)}):\n    return {made.name}")
    (make,) = tree.body
    assert isinstance(make, ast.FunctionDef)
    make.body.insert(0, made)
    ast.fix_missing_locations(tree)
    scope = dict(forward.__globals__)  # the defaults are computed once more
    exec(compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True), scope)
    found = scope["make"](**served)
    return among(found, forward.__globals__, forward)


def among(function: Any, scope: dict[str, Any], like: Any) -> Forward:
    """Return a function among other globals, with the defaults of another one."""
    closure = function.__closure__
    found = FunctionType(function.__code__, scope, "forward", like.__defaults__, closure)
    found.__kwdefaults__ = like.__kwdefaults__
    return found


def global_of(kind: Any, name: str = _ROTATE) -> Any:
    """Return a global that a class's forward uses."""
    return plain_forward(kind).__globals__.get(name)
