"""The kinds of calls that C++ serves, by the tensors of their operations: for each norm its
backward, and its forward without and with a third tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..launch.forward_call import TENSORS
from ..operations import LAYERNORM_BACKWARD, LAYERNORM_FORWARD, RMSNORM_BACKWARD
from ..operations.tensor import Tensor

BACKWARD, FORWARD, FORWARD_OF_THREE = range(3)  # as in native.h
_ROLES = {"rows": "X", "row": "r", "columns": "w"}


class Kind(NamedTuple):
    """A kind of call.

    operator: the one that makes such calls. given: the tensors that it takes, in the order of C++'s
    arguments, the first one of rows. made: those that it gives. numbers: what it takes by value,
    by its names. counted: the operation as which a call counts; "" for one that does not.
    """

    operator: str
    given: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    numbers: tuple[str, ...]
    counted: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors and numbers, in the order of their places."""
        return (*(tensor.name for tensor in (*self.given, *self.made)), *self.numbers)

    @property
    def described(self) -> tuple[str, ...]:
        """The kind as C++ takes it: see `Kind` in native.h."""
        names = " ".join(tensor.name for tensor in self.given)
        given, made = (
            "".join(_ROLES.get(tensor.role) or str(tensor.count) for tensor in tensors)
            for tensors in (self.given, self.made)
        )
        return self.operator, names, given, made, " ".join(self.numbers)


def _kind(
    operator: str,
    tensors: Iterable[Tensor],
    given: str,
    made: str,
    numbers: str = "",
    counted: str = "",
) -> Kind:
    of = {tensor.name: tensor for tensor in tensors}
    found = [tuple(of[name] for name in names.split()) for names in (given, made)]
    return Kind(operator, found[0], found[1], tuple(numbers.split()), counted)


Kinds = tuple[Kind, Kind, Kind]

_RMS, _LAYER, _FORWARD = (
    operation.signature.tensors
    for operation in (RMSNORM_BACKWARD, LAYERNORM_BACKWARD, LAYERNORM_FORWARD)
)
_NUMBERS = "eps weight_offset"
RMS_NORM: Kinds = (
    _kind("rms_norm_backward", _RMS, "dy x rstd weight", "dx dw", counted="rmsnorm_backward"),
    _kind("rms_norm", TENSORS, "x weight", "y rstd", _NUMBERS),
    _kind("add_rms_norm", TENSORS, "x weight residual", "y rstd residual_out", _NUMBERS),
)
LAYER_NORM: Kinds = (
    _kind(
        "layer_norm_backward",
        _LAYER,
        "dy x rstd weight mean",
        "dx dw",
        counted="layernorm_backward",
    ),
    _kind("layer_norm", _FORWARD, "x weight", "y mean rstd", "eps", "layernorm_forward"),
    _kind("layer_norm", _FORWARD, "x weight bias", "y mean rstd", "eps", "layernorm_forward"),
)
