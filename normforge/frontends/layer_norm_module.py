"""LayerNorm as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch

from ..torch_internals import float_of
from .layer_norm_main_grad import main_grad_layer_norm
from .module import flat, like


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm that this package runs, with its arguments and its state dict. The result
    has x's dtype. Takes a residual, as `layer_norm` does.

    Args:
        main_grad: for trainers that accumulate gradients in buffers, such as Megatron. dw and db
            are added to weight.main_grad and bias.main_grad in fp32 (buffers are fp32, or of the
            parameter's dtype), as in RMSNorm(main_grad=True). Raises RuntimeError in the backward
            if there is no buffer.
    """

    _package: ClassVar[Any]
    """The functions of a package. Every package has a subclass of this class."""
    main_grad: bool = False

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        main_grad: bool = False,
    ) -> None:
        given: Any = normalized_shape
        super().__init__(given, eps, elementwise_affine, bias, device, dtype)
        self.main_grad = main_grad and elementwise_affine

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        shape = self.normalized_shape
        rows, other, weight, bias = flat(shape, input, residual, self.weight, self.bias)
        if self.main_grad:
            parameters, eps = (self.weight, self.bias), float_of(self.eps)
            y = main_grad_layer_norm(self._package, rows, other, weight, bias, parameters, eps)
        else:
            y = self._package.layer_norm(rows, weight, bias, self.eps, residual=other)
        return like(input, y, shape)

    if TYPE_CHECKING:

        @overload
        def __call__(self, input: torch.Tensor, residual: None = None) -> torch.Tensor: ...

        @overload
        def __call__(
            self, input: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]: ...

        def __call__(self, *given: Any, **named: Any) -> Any: ...

    def extra_repr(self) -> str:
        return super().extra_repr() + (", main_grad=True" if self.main_grad else "")
