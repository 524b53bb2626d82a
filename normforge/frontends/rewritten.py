"""Rewrites the forward of a class so that calls in it go elsewhere. Its text is what tells that the
forward has them: a class of another version, or of another model, may not."""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

Forward = Callable[..., Any]
_ROTATE = "apply_rotary_pos_emb"
SERVED = "_normforge_served"
"""The name by which a rewritten forward knows the function that it calls."""


class _Rotation(ast.NodeTransformer):
    """Calls another function in the place of the rotation of queries and keys: of the module and
    what the rotation took."""

    def __init__(self) -> None:
        self.turns = 0

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Name(id=name), args=[_, _, _, _], keywords=[]) if (
                name == _ROTATE
            ):
                self.turns += 1
                node.func = ast.copy_location(ast.Name(SERVED, ast.Load()), node)
                node.args.insert(0, ast.copy_location(ast.Name("self", ast.Load()), node))
        return node


class _Heads(_Rotation):
    """Takes the norms of queries and keys away, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        found = super().visit_Call(node)
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr="q_norm" | "k_norm" as name),
                args=[rows],
                keywords=[],
            ):
                self.norms.append(name)
                return rows
        return found


def of_class(kind: Any) -> ast.FunctionDef | None:
    """Return the text of a class's forward as a tree, without types; None where it has none, has
    decorators that may do anything, names what is neither an argument nor a global, or is not what
    runs: it was wrapped since, or its file has changed."""
    forward = plain_forward(kind)
    try:
        lines, first = inspect.getsourcelines(forward)
        # Without the spaces before its lines, strings of several lines would be others.
        tree = ast.parse("if 1:\n" * lines[0][:1].isspace() + "".join(lines))
        known = _codes_of("".join(inspect.findsource(forward)[0]), forward.__code__.co_filename)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    made = next((node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)), None)
    if made is None or forward.__closure__ is not None or forward.__code__ not in known:
        return None
    if _wrappers(kind.forward) != len(made.decorator_list) or _has_private_names(made):
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
    ast.increment_lineno(made, first - 1 - lines[0][:1].isspace())
    return made


@lru_cache(maxsize=8)
def _codes_of(text: str, file: str) -> frozenset[CodeType]:
    """Return what functions of a file are compiled to."""
    left, found = [compile(text, file, "exec", dont_inherit=True)], set[CodeType]()
    while left:
        found.add(code := left.pop())
        left += (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(found)


def _wrappers(forward: Any) -> int:
    """Return how many functions a function is wrapped in."""
    return 1 + _wrappers(forward.__wrapped__) if hasattr(forward, "__wrapped__") else 0


def _has_private_names(made: ast.FunctionDef) -> bool:
    """Return True if a text has names that mean something else outside its class."""
    nodes = ast.walk(made)
    names = (getattr(node, of, None) or "" for node in nodes for of in ("id", "attr", "arg"))
    return any(name.startswith("__") and not name.endswith("__") for name in names)


def plain_forward(kind: Any) -> Any:
    """Return the forward of a class without its decorators."""
    return inspect.unwrap(kind.forward)


def heads_rotated(made: ast.FunctionDef) -> bool:
    """Rewrite the forward of an attention. Return False for one that does not normalize queries and
    keys and then rotate both, once each."""
    found = _Heads()
    found.visit(made)
    return sorted(found.norms) == ["k_norm", "q_norm"] and found.turns == 1


def rotated(made: ast.FunctionDef) -> bool:
    """Rewrite the forward of an attention. Return False for one that does not rotate queries and
    keys once."""
    found = _Rotation()
    found.visit(made)
    return found.turns == 1


def rotates(kind: Any) -> bool:
    """Return True if a class's forward may call the rotation of queries and keys."""
    try:
        return _ROTATE in plain_forward(kind).__code__.co_names
    except (AttributeError, ValueError):  # of TorchScript, or wrapped in itself
        return False


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
    code = forward.__code__
    flags = code.co_flags & __future__.annotations.compiler_flag  # they may name what is not there
    exec(compile(tree, code.co_filename, "exec", flags, dont_inherit=True), scope)
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


def with_arguments_of(original: Any, forward: Forward) -> Any:
    """A method with the arguments of another one and their defaults, which gives them on."""
    kinds, none = inspect.Parameter, inspect.Parameter.empty
    given = list(inspect.signature(original).parameters.values())
    marks: dict[Any, str] = {
        kinds.VAR_POSITIONAL: "*{0}",
        kinds.VAR_KEYWORD: "**{0}",
        kinds.KEYWORD_ONLY: "{0}={0}",
    }
    names = ", ".join(marks.get(one.kind, "{0}").format(one.name) for one in given)
    bare = inspect.Signature([one.replace(annotation=none, default=none) for one in given])
    scope: dict[str, Any] = {"served": forward}
    exec(f"def forward{bare}:\n    return served({names})", scope)
    found, known = scope["forward"], [one for one in given if one.default is not none]
    found.__defaults__ = tuple(one.default for one in known if one.kind != kinds.KEYWORD_ONLY)
    found.__kwdefaults__ = {o.name: o.default for o in known if o.kind == kinds.KEYWORD_ONLY}
    return found
