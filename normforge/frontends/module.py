"""RMSNorm as a module: a drop-in for torch.nn.RMSNorm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch

from ..torch_internals import float_of
from .main_grad import main_grad_norm
from .matching import NO_OFFSET
from .norm_add import check_add
from .rms_norm import NO_INVARIANT_BIAS, Norm


class RMSNorm(torch.nn.RMSNorm):
    """A torch.nn.RMSNorm that this package runs, with the same arguments and state dict. The result
    has x's dtype.

    Args:
        bias: have a bias as well, initialised to 0. PyTorch adds it to y, and sums its gradient
            over the rows. Without elementwise_affine there is none. Raises ValueError in a
            batch-invariant norm.
        weight_offset: a number added to the weight in fp32, for models that store w - 1. The weight
            is initialised to 1 - weight_offset. Raises ValueError without elementwise_affine.
        main_grad: for trainers that accumulate gradients in a buffer, such as Megatron. The kernel
            adds dw to weight.main_grad (fp32, or the weight's dtype), or stores it there if
            weight.overwrite_main_grad is set. The buffer must exist when the backward runs.
            torch.compile runs such a norm outside its graphs.
        batch_invariant: use kernels whose bits do not depend on the batch. The norm is then an
            RMSNorm of `normforge.batch_invariant`, and no instance of this class. Raises
            RuntimeError if there are none.
        matches: "vllm" for a batch-invariant norm whose forward has the bits of vLLM's; see
            docs/determinism.md. Raises ValueError for a norm that is not batch-invariant.

    With main_grad, and if the weight has an attribute grad_added_to_main_grad, that is set to True
    and autograd gets a dummy gradient: zeros if weight.zero_out_wgrad is set, else uninitialised
    memory. Without the attribute, autograd gets no gradient.
    """

    _package_norm: ClassVar[Norm]
    """The norm of the package. Every package has a subclass of this class."""
    _package_invariant: ClassVar[bool] = False
    """True when its kernels are batch-invariant."""
    _invariant_class: ClassVar[Callable[[], Any]]
    """Returns the class of the batch-invariant package for the same GPU."""
    weight_offset: float = 0.0
    main_grad: bool = False
    matches: str | None = None
    _simple: bool = False
    """True for one normalised dimension and a weight. The package then checks the shape itself."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        weight_offset: float = 0.0,
        main_grad: bool = False,
        batch_invariant: bool = False,
        matches: str | None = None,
    ) -> None:
        if batch_invariant and not self._package_invariant:
            kind = self.__class__ = self._class_that_is_invariant()
            given = (normalized_shape, eps, elementwise_affine, device, dtype)
            options = {"weight_offset": weight_offset, "main_grad": main_grad, "matches": matches}
            kind.__init__(self, *given, bias=bias, **options)
            return
        if bias and self._package_invariant:
            raise ValueError(NO_INVARIANT_BIAS)
        self.matches = matches
        self._norm()  # raises ValueError for what cannot be matched
        if matches is not None and weight_offset:
            raise ValueError(NO_OFFSET)
        if weight_offset and not elementwise_affine:
            raise ValueError("weight_offset is added to a weight, and elementwise_affine is False")
        self.weight_offset = float(weight_offset)
        super().__init__(normalized_shape, float_of(eps), elementwise_affine, device, dtype)
        self.main_grad = main_grad and elementwise_affine
        self._simple = len(self.normalized_shape) == 1 and elementwise_affine
        self.register_parameter("bias", None)
        if bias and elementwise_affine:
            self.bias = torch.nn.Parameter(torch.zeros_like(self.weight))

    @classmethod
    def _class_that_is_invariant(cls) -> Any:
        if "_package_norm" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} cannot become batch-invariant: derive it from the RMSNorm of "
                "normforge.batch_invariant"
            )
        return cls._invariant_class()

    def _norm(self) -> Norm:
        if self.matches is None:
            return self._package_norm
        return self._package_norm.matching(self.matches)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if getattr(self, "bias", None) is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
    ) -> Any:
        """Return y, or (y, x + residual) with a residual, or y + add; see `rms_norm`."""
        norm: Any = self._package_norm if self.matches is None else self._norm()
        # A bias and main_grad may be given later, and what wraps parameters, as DataParallel and
        # parametrizations do, keeps a bias elsewhere.
        if self._simple and not self.main_grad and self._parameters.get("bias", ...) is None:
            return norm.rms_norm(
                x,
                self.weight,
                self.eps,
                weight_offset=self.weight_offset,
                residual=residual,
                add=add,
            )
        if add is not None:
            check_add(x, add, residual)
            if self.main_grad or isinstance(getattr(self, "bias", None), torch.Tensor):
                return add + self.forward(x)
        tensors = (x, residual, self.weight, getattr(self, "bias", None), add)
        rows, other, weight, bias, added = flat(self.normalized_shape, *tensors)
        if self.main_grad and weight is not None:
            results = main_grad_norm(
                norm, rows, other, weight, self.weight, self.eps, self.weight_offset
            )
        else:
            results = norm.rms_norm(
                rows, weight, self.eps, weight_offset=self.weight_offset, residual=other, add=added
            )
        if bias is not None:
            results = self._package_norm.add_bias(results, bias, weight)
        return like(x, results, self.normalized_shape)

    if TYPE_CHECKING:

        @overload
        def __call__(
            self, x: torch.Tensor, residual: None = None, add: torch.Tensor | None = None
        ) -> torch.Tensor: ...

        @overload
        def __call__(
            self, x: torch.Tensor, residual: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]: ...

        def __call__(self, *given: Any, **named: Any) -> Any: ...

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        main_grad = ", main_grad=True" if self.main_grad else ""
        bias = ", bias=True" if getattr(self, "bias", None) is not None else ""
        matches = f", matches={self.matches!r}" if self.matches else ""
        invariant = ", batch_invariant=True" if self._package_invariant else ""
        return super().extra_repr() + bias + offset + main_grad + invariant + matches


def flat(shape: tuple[int, ...], x: Any, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """The tensors with their normalised dimensions flattened into one. Raises ValueError if x does
    not end in these dimensions."""
    dims = len(shape)
    if dims == 0:
        raise ValueError("normalized_shape must have at least one dimension, got ()")
    # torch.fx traces with objects that are not tensors.
    if isinstance(x, torch.Tensor) and x.shape[-dims:] != shape:
        raise ValueError(
            f"x must have shape (..., {', '.join(map(str, shape))}), got {tuple(x.shape)}"
        )
    if dims == 1:
        return x, *others
    return tuple(None if given is None else given.flatten(-dims) for given in (x, *others))


def like(x: Any, results: Any, shape: tuple[int, ...]) -> Any:
    """Return results for `flat` rows, one tensor or several, in the shape of x."""
    if len(shape) == 1:
        return results
    if isinstance(results, tuple):
        return tuple(result.view(x.shape) for result in results)
    return results.view(x.shape)
