"""RMSNorm's backward of a gradient that is a sum of two or three, as a pass over a graph finds it:
what serves the operator `rms_norm_backward_of_sum`, and the functions of a package of its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch

from ..operations import GRADIENTS, RMSNORM_SUM_BACKWARDS, SUMMED
from ..serve.kernels import Source
from ..serve.options import DTYPES, Arguments, Options
from ..serve.reference import Results
from ..serve.row_checks import check_tensors
from ..serve.rows import RowServer
from ..torch_internals import nothing_like, served_dtype
from .gradients import autograd_of_backward
from .graph_values import same_size
from .library import define, differentiate
from .operators import SCHEMAS, Operators, fake_backward
from .row_functions import OneOperation, asked_of, has_kernel


class SumBackward:
    """The backwards of sums by the kernels of these operations, which are looked for at the first
    question. Safe to use from several threads.

    sources: by operation, where the kernels are, or why there are none.
    """

    def __init__(self, sources: Callable[[str], Source | str]) -> None:
        self._sources = sources
        self._servers: dict[int, RowServer] = {}

    def server(self, count: int) -> RowServer:
        """Return the server of calls with so many gradients."""
        found = self._servers.get(count)
        if found is None:
            operation = RMSNORM_SUM_BACKWARDS[count]
            made = RowServer(operation, self._sources(operation.name))
            found = self._servers.setdefault(count, made)
        return found

    @property
    def missing(self) -> str:
        """The reasons why there are no kernels of an operation, "" where all have some."""
        return " ".join(filter(None, (self.server(c).missing for c in RMSNORM_SUM_BACKWARDS)))

    def serves(
        self,
        count: int,
        x: torch.Tensor,
        weight: torch.Tensor,
        dresidual: torch.Tensor | None,
        offset: bool,
    ) -> bool:
        """Return True if there is a kernel for so many gradients and rows like x, which may be a
        fake of sizes that tracing does not know."""
        asked, server = asked_of(x, weight), self.server(count)
        if asked is None or server.missing:
            return False
        if weight.dim() != 1 or not same_size(weight.shape[0], asked[1]):
            return False
        residual = "" if dresidual is None else DTYPES.get(dresidual.dtype, "none")
        return has_kernel(server, *asked, offset=offset, residual=residual)

    @staticmethod
    def may_serve(x: torch.Tensor) -> bool:
        """Return True if there may be a kernel for rows like x."""
        return x.is_cuda and x.dtype in DTYPES and x.numel() > 0

    def by_kernel(
        self, gradients: Sequence[torch.Tensor], tensors: Mapping[str, Any], offset: float
    ) -> dict[str, torch.Tensor] | None:
        """Return dx, dw and, where that has another dtype, dresidual_out; None where no kernel
        serves the call. tensors: the other ones by name. Raises TypeError or ValueError for those
        that do not fit together."""
        x, weight, server = tensors["x"], tensors["weight"], self.server(len(gradients))
        given = {**dict(zip(GRADIENTS, gradients, strict=False)), **tensors}
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        if weight.dim() > 1:
            return None
        known = server.again(given, offset) if self.may_serve(x) else None
        if known is not None:
            return known
        _check_gradients(gradients, x)
        check_tensors(server.operation, given)
        server.count_call(x, given, offset)
        if not self.may_serve(x):
            return None
        found = server.by_kernel(given, offset)
        return None if isinstance(found, str) else found


# ---- The operator --------------------------------------------------------------------------------


_NAME = "rms_norm_backward_of_sum"


def _backward_of_sum(
    dy: torch.Tensor,
    dy2: torch.Tensor,
    dy3: torch.Tensor | None,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    dresidual: torch.Tensor | None,
    offset: float,
    package: str,
) -> tuple[torch.Tensor, ...]:
    operators = Operators.served.known.get(package) or Operators.served(package)
    gradients = (dy, dy2) if dy3 is None else (dy, dy2, dy3)
    served: SumBackward | None = operators.sum_backward
    tensors = {"x": x, "rstd": rstd, "weight": weight, "dresidual": dresidual}
    found = served and served.by_kernel(gradients, tensors, offset)
    if found:
        third = found.get("dresidual_out")
        return found["dx"], found["dw"], nothing_like(x) if third is None else third
    _check_gradients(gradients, x)
    given = Arguments(reduce(add, gradients), x, rstd, weight, dresidual)
    dx, dw, *more = operators._backward(given, Options(offset))
    assert dx is not None and dw is not None
    narrow = dresidual is None or dresidual.dtype == x.dtype
    return dx, dw, nothing_like(x) if narrow or more[0] is None else more[0]


def _check_gradients(gradients: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    for name, one in zip(GRADIENTS, gradients, strict=False):
        if one.dtype != x.dtype:
            raise TypeError(f"{name} must have x's dtype {x.dtype}, got {one.dtype}")
        if one.shape != x.shape:
            raise ValueError(f"{name} must have x's shape {tuple(x.shape)}, got {tuple(one.shape)}")


def _fake(*given: Any) -> tuple[torch.Tensor, ...]:
    dy, _, _, x, rstd, weight, dresidual, offset, package = given
    return fake_backward(dy, x, rstd, weight, dresidual, None, offset, True, True, package)


Operators.backward_of_sum = define(
    _NAME,
    SCHEMAS[_NAME],
    _backward_of_sum,
    _fake,
)
differentiate(
    Operators.backward_of_sum, autograd_of_backward(Operators.backward_of_sum, _backward_of_sum)
)
Operators.all = (*Operators.all, Operators.backward_of_sum)


# ---- The functions of a package ------------------------------------------------------------------


class SumBackwardPackage:
    """The functions of a package of one of these operations. Making one compiles nothing and does
    not touch CUDA."""

    def __init__(self, of: Path, name: str = "") -> None:
        """Raises ValueError for a damaged package and one of another operation, OSError for
        none."""
        self.folder, self.name = of, name or str(of)
        self._kernels = OneOperation(of, SUMMED, "RMSNorm's backward of a sum")
        self.gradients = 2 + SUMMED.index(self._kernels.operation)
        """The number of gradients that its kernels add."""
        self._server = RowServer(RMSNORM_SUM_BACKWARDS[self.gradients], self._kernels.source)

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        return self._kernels.provenance

    def explain(
        self,
        M: int,
        N: int,
        dtype: str | torch.dtype,
        weight_dtype: str | torch.dtype = "",
        *,
        offset: bool = False,
        residual: str = "",
    ) -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and why.
        residual: the dtype of `dresidual`."""
        asked = {"offset": offset, "residual": residual}
        return self._server.explain(M, N, dtype, weight_dtype, **asked)

    def rmsnorm_backward(
        self,
        gradients: Sequence[torch.Tensor],
        x: torch.Tensor,
        rstd: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        weight_offset: float = 0.0,
        dresidual: torch.Tensor | None = None,
    ) -> Results:
        """Return (dx, dw), and with dresidual also dx in its dtype, as `rmsnorm_backward` of the
        packages of RMSNorm does, of the sum of the gradients, each in x's shape and dtype, which is
        in fp32. dw is None without a weight. No gradient flows through the results.

        Raises TypeError or ValueError for arguments that do not fit together, and for another
        number of gradients.
        """
        if len(gradients) != self.gradients:
            raise ValueError(
                f"{self.name} adds {self.gradients} gradients, and got {len(gradients)}"
            )
        given: dict[str, Any] = dict(zip(GRADIENTS, gradients, strict=False))
        given |= {"x": x, "rstd": rstd, "weight": served_dtype(weight, x), "dresidual": dresidual}
        found = self._server({k: v for k, v in given.items() if v is not None}, weight_offset)
        dx, dw = found["dx"], None if weight is None else found["dw"]
        return (dx, dw) if dresidual is None else (dx, dw, found.get("dresidual_out", dx))
