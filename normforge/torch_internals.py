"""The few things that a call asks PyTorch about CUDA, in their cheapest form.

The first three are what torch.cuda's functions of similar names call after a check that CUDA is
initialised, which it is once there is a CUDA tensor; `empty_strided` is what code written by
TorchInductor allocates with. A PyTorch that lacks one gets the public function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils import _python_dispatch


def _public_stream(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _public_empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _find(name: str, otherwise: Callable[..., Any], module: Any = torch._C) -> Callable[..., Any]:
    return getattr(module, name, otherwise)


current_device: Callable[[], int] = _find("_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = _find("_cuda_getCurrentRawStream", _public_stream)
"""The raw handle of PyTorch's current stream on a device."""
is_capturing: Callable[[], bool] = _find(
    "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
empty_strided: Callable[..., torch.Tensor] = _find(
    "_empty_strided_cuda",
    _public_empty,
    getattr(getattr(torch._C, "_dynamo", None), "guards", None),
)
"""Memory on the current device. Not filled under torch.use_deterministic_algorithms, as every
element gets written by a kernel."""


driver_version: Callable[[], int] = _find("_cuda_getDriverVersion", lambda: 13000)
"""The newest CUDA that the driver serves, 13000 for 13.0."""

_forward_ad = torch.autograd.forward_ad
_SEE_WATCHERS = (
    hasattr(torch._C, "_len_torch_dispatch_stack")
    and hasattr(torch._C, "_are_functorch_transforms_active")
    and hasattr(_forward_ad, "_current_level")
)
"""True when this PyTorch says who sees operators. If not, a mode may always be there, and every
call goes to the operators, which then find out by public means."""

# Counts modes that see every operator (a tracer, fake tensors, selective checkpointing).
_modes_active: Callable[[], int] = _find("_len_torch_dispatch_stack", lambda: 1)

transforms_active: Callable[[], bool] = _find("_are_functorch_transforms_active", lambda: False)
"""Returns True while torch.func is transforming what runs (grad, vmap, …). Where nobody says so,
torch.func refuses a node of autograd by itself."""

hooks_for_all: Callable[[], Any] = _find(
    "_has_any_global_hook", lambda: True, torch.nn.modules.module
)
"""Returns what is true while there are hooks for all modules, as profilers register them."""

disable_modes: Callable[[], AbstractContextManager[Any]] = _find(
    "_disable_current_modes", nullcontext, _python_dispatch
)
"""A context without the modes that see operators, for computing with real tensors inside one."""

tracing: Callable[[], Any] = _find("_get_tracing_state", lambda: torch.jit.is_tracing() or None)
"""Returns what torch.jit.trace writes to, None while it does not run."""


def _watched() -> bool:
    # Dynamo first: it cannot trace the other questions.
    return bool(
        is_dynamo_compiling()
        or _modes_active()
        or transforms_active()
        or _forward_ad._current_level >= 0
        or tracing() is not None
    )


watched: Callable[[], bool] = _watched if _SEE_WATCHERS else lambda: True
"""Returns True if a compiler, a mode, a transform, a tracer or forward mode may see operators."""


def has_tangent(*values: Any) -> bool:
    """Return True if one of these is a dual tensor of the level that is open."""
    return (not _SEE_WATCHERS or _forward_ad._current_level >= 0) and any(
        _forward_ad.unpack_dual(value).tangent is not None
        for value in values
        if isinstance(value, torch.Tensor)
    )


def _has_no_address(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() < 0
    except RuntimeError:
        return True


is_batched: Callable[[Any], bool] = _find(
    "is_legacy_batchedtensor", _has_no_address, getattr(torch._C, "_functorch", None)
)
"""Returns True for a tensor of autograd's own vmap (is_grads_batched=True), of which neither its
type nor a transform tells."""


def _keys_of(device: str) -> int:
    keys, all_keys = torch._C.DispatchKeySet, torch._C.DispatchKey
    found = keys(getattr(all_keys, device)) | keys(getattr(all_keys, f"Autograd{device}"))
    return int(found.raw_repr())


def _plain_keys() -> frozenset[int]:
    try:
        return frozenset(map(_keys_of, ("CPU", "CUDA")))
    except AttributeError:  # every call then goes through the dispatcher once more
        return frozenset()


PLAIN_KEYS = _plain_keys()
"""`raw_repr()` of what the dispatcher gives a kernel for `Autograd` where the kernel of a device
would be next: no mode, transform, subclass, lazy view or other wrapper is in the way."""


def without_inference(error: RuntimeError, *given: Any) -> tuple[Any, ...]:
    """Return the values, with copies in the place of tensors that were made in inference mode,
    which autograd cannot save. Raises the error that it gave where there is none."""
    with torch._C.DisableTorchFunction():  # a mode that sees functions may have raised it
        found = [isinstance(value, torch.Tensor) and value.is_inference() for value in given]
    if not any(found):
        raise error
    return tuple(v.clone() if made else v for v, made in zip(given, found, strict=True))


def nothing_like(x: torch.Tensor) -> torch.Tensor:
    """An empty vector of x's dtype on its device, of its own."""
    if x.is_cuda and current_device() == x.get_device():
        return empty_strided((0,), (1,), x.dtype)
    return x.new_empty(0)


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


def is_plain(tensor: torch.Tensor | None) -> bool:
    """Return False for a subclass, which has its own way with operators (DTensor, fake tensors);
    True for what is no tensor at all."""
    # PyTorch takes a while to say that None is no tensor.
    return type(tensor) in PLAIN_TYPES or tensor is None or not isinstance(tensor, torch.Tensor)


def check_scale(scale: Any) -> None:
    """Raise TypeError for a weight or bias that is no tensor, as the shape is that PyTorch's norms
    take in its place."""
    if scale is not None and not hasattr(scale, "dtype"):
        raise TypeError(
            f"weight and bias must be tensors or None, got {type(scale).__name__}: the norm is "
            "over the last dimension of x and takes no normalized_shape, so write rms_norm(x, "
            "weight, eps) or layer_norm(x, weight, bias, eps)"
        )


def served_dtype(scale: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """A weight or bias in a dtype that goes with x: fp32, unless it has x's. Raises
    TypeError for what is no tensor, and for one of whole or complex numbers."""
    check_scale(scale)
    if scale is None:
        return None
    if not scale.dtype.is_floating_point:
        raise TypeError(f"weight and bias must be of a floating dtype, got {scale.dtype}")
    return scale if scale.dtype in (x.dtype, torch.float32) else scale.float()


def float_of(eps: Any) -> Any:
    """An eps as operators take it: a number of NumPy or a tensor without dimensions as a float.
    Raises TypeError for what is no number, and for a tensor that wants a gradient."""
    # isinstance would not do: to Dynamo a numpy.float64 is a float, but a tensor in its graph.
    if eps is None or type(eps) in (float, int, bool, torch.SymFloat):
        return eps
    if isinstance(eps, torch.Tensor) and (eps.requires_grad or eps.dim() > 0):
        raise TypeError("eps must be a number, got a tensor with a dimension or a gradient")
    if isinstance(eps, torch.Tensor) or hasattr(eps, "__float__"):
        return float(eps)
    raise TypeError(f"eps must be a number or None, got {type(eps).__name__}: {eps!r}")


def resolved(tensor: Any) -> Any:
    """The tensor itself, or a copy of a lazily negated view (such as the imaginary part of a
    conjugate), whose memory has other numbers than it. Anything else is returned as it is."""
    return tensor.resolve_neg() if isinstance(tensor, torch.Tensor) and tensor.is_neg() else tensor


def same_kind(*tensors: torch.Tensor) -> Callable[..., bool]:
    """A function that says whether other tensors have the type, dtype, device, sizes, strides,
    requires_grad and dispatch keys of these: the check that code compiled by torch.compile makes of
    its inputs, in a seventh of the time that reading all of it in Python takes. Where PyTorch has
    no such check, or it refuses these (one tensor given twice), it is read in Python."""
    guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    try:
        built = guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if built.check(*tensors) is True:
            check: Callable[..., bool] = built.check
            return check
    except (AttributeError, TypeError, RuntimeError):
        pass
    kinds = [_kind(tensor) for tensor in tensors]
    return lambda *others: [_kind(other) for other in others] == kinds


def _kind(tensor: Any) -> tuple[Any, ...] | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    layout = (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
    return type(tensor), *layout, tensor.requires_grad, tensor.is_neg(), is_batched(tensor)


Size = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype."""


def contiguous(shape: Sequence[int], dtype: torch.dtype) -> Size:
    """Return the arguments of `empty_strided` for a contiguous tensor."""
    return tuple(shape), torch.empty(tuple(shape), device="meta").stride(), dtype
