"""Renders what docs/api.md says of a function: its signature and its docstring, as Markdown.

Both are read from the source, so nothing is imported. A docstring has paragraphs, and sections such
as "Args:" whose items are indented.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from generator.paths import REPOSITORY

FUNCTION = re.compile(r"(<!-- function: ([\w.]+) -->\n).*?(<!-- end of function -->)", re.S)
"""Matches the generated text, from a mark with the path of a function or class to the next mark."""
TITLES = {"Args": "Arguments", "Returns": "Returns", "Raises": "Raises"}
PREFIXES = {
    "batch_invariant": "batch_invariant.",
    "layer_norm": "layernorm.",
    "layer_norm_module": "layernorm.",
    "gated": "gated.",
    "rope": "rope.",
    "rotary": "rope.",
    "quantized": "quantized.",
}
"""Modules of users, by a part of the path of what is in them."""
Definition = ast.FunctionDef | ast.ClassDef


def public_name(path: str) -> str:
    """The name by which a user knows what is at a path of the library: `rms_norm`, or in a module
    of its own `layernorm.patch`."""
    *parts, name = path.split(".")
    if name == "provenance":
        return "PROVENANCE"
    return "".join(PREFIXES.get(part, "") for part in parts) + name


def described(path: str) -> str:
    """A heading, the signature and the docstring of what is at a path of the library. Raises
    LookupError if there is nothing, or no docstring."""
    source, found = _definitions(path)
    name, last = public_name(path), found[-1]
    docstring = ast.get_docstring(last)
    if docstring is None:
        raise LookupError(f"{path} has no docstring")
    called = [node for node in found if _is_overload(node)] or [last]
    shown = "\n\n".join(_signature(source, node, name.rpartition(".")[2]) for node in called)
    code = f"```python\n{shown}\n```\n\n" if shown else ""
    return f"### `{name}`\n\n{code}{as_markdown(docstring)}"


def as_markdown(docstring: str) -> str:
    """A docstring with filled paragraphs, its sections as lists, and links to pages."""
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", docstring)
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    title, _, body = text.partition(":\n    ")
    if title not in TITLES:
        return _filled(text)
    items = re.split(r"\n(?! )", textwrap.dedent(f"    {body}"))
    if title == "Returns":
        return _filled(f"**{TITLES[title]}** {items[0]}")
    lines = []
    for item in items:
        names, _, said = item.partition(": ")
        named = ", ".join(f"`{name}`" for name in names.split(", "))
        lines.append(_filled(f"- {named}: {said}", "  "))
    return "\n".join((f"**{TITLES[title]}**", "", *lines))


def _filled(text: str, indent: str = "") -> str:
    """A paragraph in lines of the pages' length."""
    return textwrap.fill(
        " ".join(text.split()),
        width=120,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


# ---- The source ----------------------------------------------------------------------------------


@cache
def _module(file: Path) -> tuple[str, ast.Module]:
    text = file.read_text(encoding="utf-8")
    return text, ast.parse(text)


def _definitions(path: str) -> tuple[str, list[Definition]]:
    """The source of a module, and the definitions of that name in it: overloads, then itself."""
    parts = path.split(".")
    for n in range(len(parts) - 1, 0, -1):
        folder = REPOSITORY.joinpath(*parts[:n])
        for file in (folder.with_suffix(".py"), folder / "__init__.py"):
            if file.exists():
                text, inside = _module(file)
                found = list(_named(inside, parts[n:]))
                if found:
                    return text, found
    raise LookupError(f"there is no {path}")


def _named(inside: ast.Module | Definition, names: list[str]) -> Iterator[Definition]:
    for node in inside.body:
        if isinstance(node, Definition) and node.name == names[0]:
            if names[1:]:
                yield from _named(node, names[1:])
            else:
                yield node


def _decorators(node: Definition) -> set[str]:
    return {name.id for name in node.decorator_list if isinstance(name, ast.Name)}


def _is_overload(node: Definition) -> bool:
    return "overload" in _decorators(node)


def _signature(source: str, node: Definition, name: str) -> str:
    """A call with the types of its arguments; nothing for a property."""

    def text(part: ast.AST) -> str:
        return " ".join((ast.get_source_segment(source, part) or "").split())

    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(text, node.bases))
        made = next(_named(node, ["__init__"]), None)
        if not isinstance(made, ast.FunctionDef):
            return f"class {name}({bases})"
        return _broken(name, _parameters(made.args, text), "")
    if "property" in _decorators(node):
        return ""
    returned = text(node.returns) if node.returns else "None"
    if "contextmanager" in _decorators(node):
        returned = "AbstractContextManager[None]"
    return _broken(name, _parameters(node.args, text), f" -> {returned}")


def _parameters(given: ast.arguments, text: Callable[[ast.AST], str]) -> list[str]:
    """Each parameter but self, with its type and its default."""

    def one(parameter: ast.arg, default: ast.AST | None, stars: str = "") -> str:
        typed = f": {text(parameter.annotation)}" if parameter.annotation else ""
        equal = " = " if typed else "="
        return f"{stars}{parameter.arg}{typed}{equal + text(default) if default else ''}"

    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    told = [one(*pair) for pair in zip(positional, defaults, strict=True) if pair[0].arg != "self"]
    if given.vararg:
        told.append(one(given.vararg, None, "*"))
    elif given.kwonlyargs:
        told.append("*")
    told += [one(*pair) for pair in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return told + ([one(given.kwarg, None, "**")] if given.kwarg else [])


def _broken(name: str, parameters: list[str], returned: str) -> str:
    """Return a signature in one line, or with a line for each parameter."""
    line = f"{name}({', '.join(parameters)}){returned}"
    if len(line) <= 100:
        return line
    return "\n".join(
        [f"{name}(", *(f"    {parameter}," for parameter in parameters), f"){returned}"]
    )
