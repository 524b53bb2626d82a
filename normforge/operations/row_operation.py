"""The description of what a row kernel computes: its signature and its mathematics in PyTorch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .signature import Signature

Terms = Mapping[str, tuple[Any, ...]]
"""The terms of the outputs by name: of rows, the terms whose sum it is; of sums, what is added up
over the rows, one tensor for every sum of a column."""


class Quantized(NamedTuple):
    """Rows in FP8, and their scales: (..., N) and (..., N / block)."""

    values: Any
    scales: Any


@dataclass(frozen=True)
class RowOperation:
    """One operation over rows. Raises ValueError, in one sentence, for parts that do not fit
    together.

    name: also of its template and its kernel. terms: takes the inputs by name, but for rows that
    are added, and a sum of inputs in the place of these, in fp32 or float64: rows as (..., N),
    numbers of a row as (..., 1), columns as (N,), numbers as they are; it returns Terms, is
    differentiable, and is the operation's formula and its reference.
    forward: the operation whose backward this is, in PyTorch: takes the tensors that `gradients`
    names and returns the result and, by name, the inputs that it saves for the backward. gradients:
    by argument of `forward`, the output that is its gradient. incoming: how many gradients come in,
    whose sum is that of the result. quantize: where the signature has what is quantized, its
    mathematics: takes the first output in fp32 and the numbers of the call. magnitudes: where what
    is added up over the rows is itself a sum whose parts may cancel, takes what `terms` takes and
    returns the sums of the parts' magnitudes, one tensor for every sum of a column. The error that
    a kernel may have is in units of these.
    """

    name: str
    signature: Signature
    terms: Callable[..., Terms]
    forward: Callable[..., tuple[Any, Mapping[str, Any]]] | None = None
    gradients: Mapping[str, str] = field(default_factory=dict)
    quantize: Callable[[Any, Mapping[str, float]], Quantized] | None = None
    incoming: int = 1
    magnitudes: Callable[..., tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        fault = next(self._faults(), None)
        if fault is not None:
            raise ValueError(f"operation {self.name}: {fault}")

    def _faults(self) -> Iterator[str]:
        if not re.fullmatch("[a-z][a-z0-9_]*", self.name):
            yield "a name has small letters, digits and underscores"
        signature = self.signature
        needed = [*signature.of_terms]
        for name, function in (("terms", self.terms), ("magnitudes", self.magnitudes)):
            takes = list(inspect.signature(function).parameters) if function else needed
            if sorted(takes) != sorted(needed):
                has = ", ".join(needed)
                yield f"{name}() takes {', '.join(takes)}, and the signature has {has}"
        if (self.quantize is None) != (signature.quantized is None):
            yield "quantize() is for what the signature says is quantized: give both"
        outputs = {tensor.name for tensor in (*signature.outputs, *_some(signature.sums))}
        if unknown := sorted(set(self.gradients.values()) - outputs):
            yield f"gradients names '{unknown[0]}', which is no output of the signature"
        if self.forward is not None:
            given = list(inspect.signature(self.forward).parameters)
            if given != list(self.gradients):
                has = ", ".join(self.gradients) or "nothing"
                yield f"forward() takes {', '.join(given)}, and gradients names {has}"

    @property
    def function(self) -> str:
        """The name of the function that users call: the operation's without `_backward`."""
        return self.name.removesuffix("_backward")


def _some(given: Any) -> tuple[Any, ...]:
    return () if given is None else (given,)
