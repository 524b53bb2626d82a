"""Rewrites the forward of a layer: a norm and the sum behind or before it, or a norm of what the
layer keeps as its residual stream, become a call of another function."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

BEHIND, BEFORE, KEPT = "_normforge_behind", "_normforge_before", "_normforge_kept"
"""The names by which a rewritten forward knows these functions. BEHIND takes a norm, its rows and
what their norm is added to, and returns the sum. BEFORE takes a norm and two terms, KEPT a norm and
rows; both return the norm, and then the sum or the rows."""

Found = tuple[int, list[ast.stmt]]
"""The number of statements that are replaced, and those in their place."""


@dataclass(frozen=True)
class Joined:
    """The names of a layer's norms by what is joined with them."""

    behind: tuple[str, ...] = ()
    """The sum in the next line, `h = self.norm(y)` and `h = r + h`."""
    before: tuple[str, ...] = ()
    """The sum before, which stays: `h = r + h`, `r = h` and `h = self.norm(h)`."""
    kept: tuple[str, ...] = ()
    """The gradients of the rows, which stay: `r = h` and `h = self.norm(h)`."""

    def __str__(self) -> str:
        said = {"a sum behind": self.behind, "a sum before": self.before, "gradients at": self.kept}
        return ", ".join(f"{what} {' and '.join(names)}" for what, names in said.items() if names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for names in astuple(self) for name in names))


def join(made: ast.FunctionDef, allowed: Joined) -> Joined:
    """Rewrite the forward of a layer, where the names of the norms are allowed. Return those that
    were joined. Of two norms that a sum stands between, the first one has it."""
    found = {BEHIND: list[str](), BEFORE: list[str](), KEPT: list[str]()}
    ways: tuple[tuple[Callable[..., Found | None], str, tuple[str, ...]], ...] = (
        (_with_sum_behind, BEHIND, allowed.behind),
        (_with_sum_before, BEFORE, allowed.before),
        (_of_stream, KEPT, allowed.kept),
    )
    left, body = made.body, list[ast.stmt]()
    while left:
        for way, served, names in ways:
            replaced = way(left, names, found[served])
            if replaced is not None:
                count, new = replaced
                body += [ast.copy_location(one, left[count - 1]) for one in new]
                left = left[count:]
                break
        else:
            body.append(left[0])
            left = left[1:]
    made.body = body
    return Joined(*map(tuple, found.values()))


def results_of_calls(made: ast.FunctionDef) -> dict[str, int]:
    """Return how many results a forward takes of its modules, of those of which it takes
    several."""
    found = {}
    for node in ast.walk(made):
        match node:
            case ast.Assign(
                targets=[ast.Tuple(elts=results)],
                value=ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)),
            ):
                found[name] = len(results)
    return found


# ---- The statements that are replaced ------------------------------------------------------------


def _with_sum_behind(
    body: Sequence[ast.stmt], names: Sequence[str], found: list[str]
) -> Found | None:
    match body:
        case [
            ast.Assign(
                targets=[ast.Name(id=one)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=name) as norm,
                    args=[rows],
                    keywords=[],
                ),
            ),
            ast.Assign(
                targets=[ast.Name(id=two)],
                value=ast.BinOp(left=ast.Name() as left, op=ast.Add(), right=ast.Name() as right),
            ),
            *_,
        ] if one == two and (left.id == one) != (right.id == one) and name in names:
            found.append(name)
            stream = left if right.id == one else right
            return 2, [_assign([one], _call(BEHIND, norm, rows, stream))]
    return None


def _with_sum_before(
    body: Sequence[ast.stmt], names: Sequence[str], found: list[str]
) -> Found | None:
    match body:
        case [
            ast.Assign(
                targets=[ast.Name(id=total)],
                value=ast.BinOp(left=left, op=ast.Add(), right=right),
            ),
            *others,
        ] if isinstance(left, ast.Name) or isinstance(right, ast.Name):
            pass
        case _:
            return None
    match others:
        case [ast.Assign(targets=[ast.Name(id=kept)], value=ast.Name(id=same)), *_] if (
            same == total != kept
        ):
            count, others = 3, others[1:]
        case _:  # the sum stays under its own name
            count, kept = 2, total
    norm = _norm_of(others, total, names)
    if norm is None or norm[0] == kept:
        return None
    y, norm_of_rows = norm
    found.append(norm_of_rows.attr)
    new = [_assign([y, kept], _call(BEFORE, norm_of_rows, left, right))]
    if total not in (y, kept):
        new.append(_assign([total], ast.Name(kept, ast.Load())))
    return count, new


def _of_stream(body: Sequence[ast.stmt], names: Sequence[str], found: list[str]) -> Found | None:
    match body:
        case [ast.Assign(targets=[ast.Name(id=kept)], value=ast.Name(id=rows) as x), *others]:
            norm = _norm_of(others, rows, names)
            if norm is not None and kept not in (rows, norm[0]):
                found.append(norm[1].attr)
                return 2, [_assign([norm[0], kept], _call(KEPT, norm[1], x))]
    return None


def _norm_of(
    body: Sequence[ast.stmt], rows: str, names: Sequence[str]
) -> tuple[str, ast.Attribute] | None:
    """Return the name of a norm's result, and the norm, if the first statement is the norm of these
    rows."""
    match body:
        case [
            ast.Assign(
                targets=[ast.Name(id=y)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="self"), attr=name) as norm,
                    args=[ast.Name(id=given)],
                    keywords=[],
                ),
            ),
            *_,
        ] if given == rows and name in names:
            return y, norm
    return None


def _call(served: str, *given: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(served, ast.Load()), list(given), [])


def _assign(names: Sequence[str], value: ast.expr) -> ast.stmt:
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    if len(targets) > 1:
        targets = [ast.Tuple(targets, ast.Store())]
    return ast.Assign(targets, value)
