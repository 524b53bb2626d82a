"""The one library of operators that this process has of this code; packages add what serves their
calls.

An operator is `normforge::<name>` with the overload VERSION, such as `normforge::rms_norm.v2`. It
is registered once, whatever the number of packages, and its last argument names the package that
serves a call. So a saved graph, and what a compiler keeps on disk, is good for any table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import RLock
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..identity import NAMESPACE

VERSION = "v2"
"""Changes with the schema of an operator, with what an argument or a result means, and with what is
traced around the operators. Compilers keep backwards on disk that were traced by an older version
of this code: the calls in them have the older VERSION, which nothing serves any more."""

TRACED: list[Callable[[], None]] = []
"""Functions that are called when a tracer meets an operator."""

Implementation = Callable[..., "tuple[torch.Tensor, ...]"]


def _own_library() -> tuple[torch.library.Library, str]:
    """A namespace that nobody has: a second copy of a package in one process gets a number."""
    number = 1
    while True:
        namespace = NAMESPACE if number == 1 else f"{NAMESPACE}_{number}"
        try:
            return torch.library.Library(namespace, "DEF"), namespace
        except RuntimeError as error:
            if "single TORCH_LIBRARY" not in str(error):
                raise
        number += 1


_library, namespace = _own_library()


def define(name: str, schema: str, run: Implementation, fake: Implementation) -> Any:
    """The operator of this name. schema: its arguments and results; run: computes them; fake: says
    what they look like."""
    overload = f"{name}.{VERSION}"
    _library.define(overload + schema)
    for device in ("CPU", "CUDA"):
        _library.impl(overload, run, device)
    operator = getattr(getattr(getattr(torch.ops, namespace), name), VERSION)

    def trace(*args: Any) -> tuple[torch.Tensor, ...]:
        _tell_inductor(operator)
        for learn in TRACED:
            learn()
        return fake(*args)

    torch.library.register_fake(f"{namespace}::{overload}", trace, lib=_library)
    return operator


def _tell_inductor(operator: Any) -> None:
    """Let Inductor, where it is at work, call an operator as it calls any that it does not know.
    Without a word it does so too, but not if the operator is registered with a formula and the
    environment has CI: it takes that for a mistake of PyTorch's own."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or not os.environ.get("CI"):
        return
    with suppress(AttributeError):  # another thread is importing it
        if operator not in lowering.lowerings:
            layout = torch._library.utils.get_layout_constraint_tag(operator, with_default=True)
            constraint = lowering.tag_to_layout_constraint(layout)
            lowering.make_fallback(operator, layout_constraint=constraint, warn=False)


def differentiate(operator: Any, kernel: Implementation) -> None:
    """Give an operator its kernel for autograd, which takes the dispatch keys of a call first."""
    name = operator._schema.name.rpartition("::")[2]
    _library.impl(f"{name}.{VERSION}", kernel, "Autograd", with_keyset=True)


def decompose(operator: Any, formula: Implementation) -> None:
    """Say what an operator is made of, for exporters that ask, such as ONNX's. Nothing else does: a
    graph keeps the operator."""
    torch._decomp.register_decomposition(operator)(formula)


class OfPackage(Protocol):
    """The interface of what serves the calls that ask for one package."""

    def retire(self) -> None:
        """Learn that another package has taken the name."""

    def of_form(self, form: str) -> Any:
        """Return what serves the calls that ask for a form of this package. Raises LookupError."""


T = TypeVar("T", bound=OfPackage)


class Served(Generic[T]):
    """The servers of the calls of some operators, by the name of the package that they ask for,
    which may have a form behind it: `<package>+<form>`.

    find: what makes the one of a name that nobody has added, or raises LookupError. Who finds
    packages by the names of their GPUs sets it. known: those that were added or found.
    """

    def __init__(self) -> None:
        self.find: Callable[[str], T] = _nobody
        self.known: dict[str, T] = {}
        self._finding = RLock()

    def add(self, package: str, what: T) -> None:
        """A package that is loaded again takes the place of its former self."""
        former, self.known[package] = self.known.get(package), what
        if former is not None:
            former.retire()

    def __call__(self, package: str) -> T:
        """Raises RuntimeError for a package that there is not."""
        known = self.known.get(package)
        if known is not None:
            return known
        try:
            with self._finding:
                return self._find(package)
        except LookupError:
            raise RuntimeError(
                f"this process has no package {package!r}, which a graph asks for: import it before"
            ) from None

    def _find(self, package: str) -> T:
        if package in self.known:
            return self.known[package]
        base, plus, form = package.rpartition("+")  # a package may be named by a path with more
        found: T = self._find(base).of_form(form) if plus else self.find(package)
        return found


def _nobody(package: str) -> Any:
    raise LookupError(package)
