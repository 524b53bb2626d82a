"""RMSNorm as a module, in the place of torch.nn.RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from .dtensor import register_sharding
from .main_grad import main_grad_norm
from .rms_norm import Norm


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, with its arguments and its state dict, run by this package.

    weight_offset: a number added to the weight in fp32, for models that store w - 1; the weight
    starts at 1 - weight_offset. The result has x's dtype.

    main_grad: for trainers that accumulate gradients in a buffer, as Megatron does. The kernel adds
    dw to weight.main_grad (fp32, or of the weight's dtype), or stores it there where
    weight.overwrite_main_grad is set. Where the weight has an attribute grad_added_to_main_grad,
    that becomes True and the gradient that autograd sees is a dummy: zeros where
    weight.zero_out_wgrad is set, else memory as it comes. Otherwise autograd sees none. The buffer
    must be there when the backward runs; torch.compile runs such a norm outside its graphs.
    """

    _package_norm: ClassVar[Norm]
    """Of the package: every one has a subclass of this class."""
    weight_offset: float = 0.0
    main_grad: bool = False
    _simple: bool = False
    """One normalised dimension and a weight, whose shape the package checks against x's."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        main_grad: bool = False,
    ) -> None:
        register_sharding(self._package_norm.operators)
        self.weight_offset = float(weight_offset)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.main_grad = main_grad and elementwise_affine
        self._simple = len(self.normalized_shape) == 1 and elementwise_affine and not main_grad

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """y; with a residual (y, x + residual), see `rms_norm`."""
        if self._simple:
            return self._package_norm.rms_norm(
                x, self.weight, self.eps, weight_offset=self.weight_offset, residual=residual
            )
        dims = len(self.normalized_shape)
        # torch.fx traces with what is no tensor.
        if isinstance(x, torch.Tensor) and x.shape[-dims:] != self.normalized_shape:
            raise ValueError(
                f"x must have shape (..., {', '.join(map(str, self.normalized_shape))}), "
                f"got {tuple(x.shape)}"
            )
        weight: torch.Tensor | None = self.weight
        rows, other = x, residual
        if dims > 1:
            weight = None if weight is None else weight.flatten()
            rows, other = x.flatten(-dims), None if residual is None else residual.flatten(-dims)
        if self.main_grad and weight is not None:
            results = main_grad_norm(
                self._package_norm, rows, other, weight, self.weight, self.eps, self.weight_offset
            )
        else:
            results = self._package_norm.rms_norm(
                rows, weight, self.eps, weight_offset=self.weight_offset, residual=other
            )
        if dims == 1:
            return results
        if residual is None:
            return results.view(x.shape)
        return tuple(result.view(x.shape) for result in results)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        main_grad = ", main_grad=True" if self.main_grad else ""
        return super().extra_repr() + offset + main_grad
