"""The forward of a package with bits that do not depend on the batch, and what its calls share with
the backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..launch.forward_call import ForwardCall
from ..launch.row_layout import alignment_of, row_layout
from ..serve.checks import check_forward
from ..serve.forward import Forward
from ..serve.kernels import Kernels, Source
from ..serve.options import DTYPES
from ..table import ForwardTable
from .matching import TileTable

_BITS = "the bits of any other kernel may depend on the batch"
ADVICE = f"{_BITS}: take the package whose kernels do not promise it"
"""The advice for a call for which no kernel can be tuned."""


def advice_for(x: torch.Tensor, weight: torch.Tensor | None) -> str:
    """Return the advice for a call for which there is no kernel."""
    dtypes = [DTYPES.get(tensor.dtype) for tensor in (x, weight) if tensor is not None]
    if None in dtypes:
        return ADVICE
    shape = f"{x.numel() // x.shape[-1]}x{x.shape[-1]}:{':'.join(map(str, dict.fromkeys(dtypes)))}"
    return (
        f"{_BITS}. Tune this width (python tune.py --op rmsnorm_invariant_backward --gpu auto "
        f"--shapes {shape}; docs/determinism.md says more), or take the package whose kernels do "
        "not promise it"
    )


class _NoKernelError(RuntimeError):
    """No kernel keeps the promise for a call; the message says why."""


class BatchInvariantForward(Forward):
    """A Forward with these kernels or none: y and rstd of a row depend on that row, N, the dtypes
    and the options alone. Raises RuntimeError where there is no kernel for a CUDA call."""

    def _table_of(self, kernels: Kernels) -> ForwardTable | None:
        table = kernels.forward  # its kernels for any row are those of `matches`
        return None if table is None else replace(table, fallback=())

    def _prepare(
        self, x: torch.Tensor, weight: torch.Tensor | None, residual: torch.Tensor | None
    ) -> ForwardCall:
        check_forward(x, weight, residual)
        if x.device.type == "cuda" and any(map(misplaced, (x, weight, residual))):
            return self._copied
        try:
            return super()._prepare(x, weight, residual)
        except _NoKernelError as error:
            raise RuntimeError(f"{error}, and {self._advice_for(x, weight)}") from None

    def _advice_for(self, x: torch.Tensor, weight: torch.Tensor | None) -> str:
        return advice_for(x, weight)

    def _copied(self, x: Any, weight: Any, eps: Any, offset: float, residual: Any) -> Any:
        """Serve a call by the same kernel on copies, where another kernel would be needed."""
        x, weight, residual = map(placed, (x, weight, residual))
        return self(x, weight, eps, offset, residual)

    def _fallback(self, reason: str) -> ForwardCall:
        raise _NoKernelError(reason)


class MatchingForward(BatchInvariantForward):
    """The forward of a package that adds as Triton does. form: as of `form_of`."""

    def __init__(self, source: Source, form: str) -> None:
        super().__init__(source)
        self._form = form

    def _advice_for(self, x: torch.Tensor, weight: torch.Tensor | None) -> str:
        return (
            "no other adds as vLLM's does. Leave `matches` out, or tune this operation again for a "
            "GPU of sm_90a, for which alone that order was read off"
        )

    def _table_of(self, kernels: Kernels) -> ForwardTable | None:
        table = kernels.forward
        if table is None:
            return None
        tiles = tuple(k for k in table.fallback if k.config["form"] == self._form)
        return TileTable(table.target, fallback=tiles)


def misplaced(tensor: torch.Tensor | None) -> bool:
    """Return True if the rows of a tensor lie worse than those of a copy: not at one stride or two,
    or not at multiples of the power of two, up to MAX_ALIGNMENT, that divides a row."""
    if tensor is None:
        return False
    rows = row_layout(tensor)
    if rows is None:
        return True
    size = tensor.element_size()
    places = tensor.data_ptr() | (rows.stride | rows.outer) * size
    return places % alignment_of(tensor.shape[-1] * size) != 0


def placed(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return a tensor with the same numbers, a copy where the given one is misplaced."""
    if tensor is None or not misplaced(tensor):
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)
