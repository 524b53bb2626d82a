"""Watches which operators of PyTorch run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from normforge.frontends.library import namespace


class Operators(TorchDispatchMode):
    """Names of the operators that run. of_packages: of those of packages alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        self.of_packages: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.ran.append(func.overloadpacket.__name__)
        self.of_packages += self.ran[-1:] * (func.namespace == namespace)
        return func(*args, **(kwargs or {}))


def operators_of(call: Callable[[], object]) -> list[str]:
    with Operators() as seen:
        call()
    return seen.ran
