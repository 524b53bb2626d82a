"""`matches`: norms whose forward has the bits of another implementation."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from ..table import ForwardChoice, ForwardTable
from .rms_norm import Norm

_NAME = re.compile(r"vllm(?:-triton(\d+)\.(\d+))?")
_FORMS = {(3, 5): "tiles_in_turn", (3, 8): "tiles_in_pairs"}
"""The form of the kernels that add up as Triton does, by the first version that does so."""
_KNOWN = ((3, 5), (3, 9))
"""The first and the last version whose order was looked at."""
_WHOLE = 16
"""Triton's kernel for rows of a multiple of so many columns is another one."""
NO_OFFSET = "with `matches`, weight_offset must be 0: vLLM's kernel has none"
_CONTRACTS = {"TRITON_DEFAULT_FP_FUSION": True, "TRITON_FORCE_DISABLE_FP_FUSION": False}
"""The values that Triton's variables must have, and have if they are not set."""


def form_of(matches: str) -> str:
    """The form of the forward kernels for a `matches`. Raises ValueError for one that there is not,
    RuntimeError for "vllm" where no Triton is installed or its contractions are off."""
    found = _NAME.fullmatch(matches) if isinstance(matches, str) else None
    if found is None:
        raise ValueError(f'matches must be like "vllm" or "vllm-triton3.7", got {matches!r}')
    number = found[0].removeprefix("vllm-triton")
    if not found[1]:
        try:
            number = version("triton")
        except PackageNotFoundError as error:
            raise RuntimeError(
                'matches="vllm" follows the Triton that is installed here, and there is none: name '
                'the one that vLLM runs with, such as "vllm-triton3.7"'
            ) from error
        for name, wanted in _CONTRACTS.items():
            value = os.environ.get(name, "").lower()
            if value and (value in ("1", "true", "yes", "on", "y")) != wanted:
                raise RuntimeError(
                    f"with {name}={value}, Triton rounds in another way than these kernels: unset "
                    'it, or name a version, such as "vllm-triton3.7"'
                )
    first, second = map(int, number.split(".")[:2])
    if not _KNOWN[0] <= (first, second) <= _KNOWN[1]:
        raise ValueError(
            f"nobody has looked at the order in which Triton {number} adds, only at 3.5 to 3.9: "
            'name one of these, such as "vllm-triton3.7", or leave `matches` out'
        )
    return next(form for since, form in reversed(_FORMS.items()) if since <= (first, second))


class TileTable(ForwardTable):
    """The forward kernels with one order of Triton's, each for all rows of a kind."""

    def choose(
        self, M: int, N: int, dtype: str, weight_dtype: str, *_: Any, **__: Any
    ) -> ForwardChoice:
        """Choose a kernel as TableOf.choose does. Only the dtypes and N count: rows are at their
        alignment or copied."""
        for kernel in self.fallback:
            spec = kernel.spec
            in_vectors = spec.vector_bytes == 16
            if (spec.dtype, spec.weight_dtype) == (dtype, weight_dtype) and in_vectors == (
                N % _WHOLE == 0
            ):
                return ForwardChoice("fallback", "this kernel adds as Triton's does", kernel)
        return ForwardChoice("none", f"no kernel adds rows of {dtype} as Triton's does")


class MatchingNorm(Norm):
    """The norm of a package with another forward. Its gradients are the package's."""

    def __reduce__(self) -> tuple[Any, ...]:
        norm: Any = self._server._norm
        return norm.of_form, (self.operators.package.rpartition("+")[2],)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        bias: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        residual: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
    ) -> Any:
        """Compute RMSNorm as Norm.rms_norm does. Raises ValueError for what the other
        implementation does not have."""
        if out_dtype is not None or residual_dtype is not None:
            raise ValueError("with `matches`, y has x's dtype, and there is no residual")
        _check(x, weight, weight_offset, residual)
        return super().rms_norm(x, weight, eps, bias=bias, add=add)

    def rmsnorm_forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        weight_offset: float = 0.0,
        residual: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Compute the forward as Norm.rmsnorm_forward does. Raises ValueError as `rms_norm`
        does."""
        _check(x, weight, weight_offset, residual)
        return super().rmsnorm_forward(x, weight, eps, add=add)


def _check(x: Any, weight: Any, weight_offset: float, residual: Any) -> None:
    if weight_offset:
        raise ValueError(NO_OFFSET)
    if residual is not None:
        raise ValueError(
            "with `matches` there is no residual: vLLM adds it in another kernel. Add it before: "
            "h = x + residual, then rms_norm(h, ...)"
        )
    tensors = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor)
    if tensors and weight.dtype != x.dtype:  # torch.fx traces with objects that are none
        raise ValueError(
            f"with `matches`, the weight must have x's dtype, {x.dtype}, got {weight.dtype}"
        )
