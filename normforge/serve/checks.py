"""The checks of the arguments of the backward and of the forward, and of the device."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from ..table import runs_on
from ..torch_internals import driver_version
from .options import DTYPES, Arguments, Options, dw_shape
from .reference import wide_dtype

_DRIVER = 13000
"""The CUDA that a driver has to serve: of NVRTC, which made the kernels."""
Dtype = str | torch.dtype
"""A dtype, or a name of it that `dtype_name` knows."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_arguments(given: Arguments, options: Options) -> None:
    """Raise TypeError or ValueError, with one sentence, for arguments that do not fit together."""
    dy, x, rstd, weight = given.dy, given.x, given.rstd, given.weight
    _check_rows(x)
    if dy.dtype != x.dtype:
        raise TypeError(f"dy must have x's dtype {x.dtype}, got {dy.dtype}")
    if rstd.dtype not in (torch.float32, wide_dtype(x)):
        raise TypeError(f"rstd must be float32 as the forward saves it, got {rstd.dtype}")
    for name, tensor in vars(given).items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}")
    N = x.shape[-1]
    if dy.shape != x.shape:
        raise ValueError(f"dy must have x's shape {tuple(x.shape)}, got {tuple(dy.shape)}")
    _check_weight(x, weight, heads=given.mean is None)
    if rstd.numel() * N != x.numel():
        raise ValueError(
            f"rstd must have one value for each of the {x.numel() // N} rows of x, "
            f"got {rstd.numel()}"
        )
    mean = given.mean
    if mean is not None and (mean.dtype, mean.numel()) != (rstd.dtype, rstd.numel()):
        raise ValueError(
            f"mean must be like rstd ({rstd.numel()} of {rstd.dtype}), "
            f"got {mean.numel()} of {mean.dtype}"
        )
    check_options(given, options)


def _check_rows(x: torch.Tensor) -> None:
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be bfloat16, float16, float32 or float64, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be (..., N) with N >= 1, got shape {tuple(x.shape)}")


def _check_weight(
    x: torch.Tensor, weight: torch.Tensor | None, heads: bool = True, name: str = "weight"
) -> None:
    if weight is None:
        return
    if weight.dtype not in (x.dtype, torch.float32):
        raise TypeError(f"{name} must have x's dtype {x.dtype} or float32, got {weight.dtype}")
    if weight.shape != x.shape[-1:] and not (heads and weight.shape == x.shape[-2:]):
        other = f" or {tuple(x.shape[-2:])}" if heads and x.dim() > 1 else ""
        raise ValueError(
            f"x of shape {tuple(x.shape)} has rows of {x.shape[-1]}: {name} must have shape "
            f"({x.shape[-1]},){other}, got {tuple(weight.shape)}"
        )


def check_options(given: Arguments, options: Options) -> None:
    """Raise TypeError or ValueError, with one sentence, for options that do not fit."""
    x, weight, dresidual, dw_out = given.x, given.weight, given.dresidual, given.dw_out
    if dresidual is not None:
        if not options.need_dx:
            raise ValueError("dresidual is added to dx: need_dx must be True")
        if dresidual.shape != x.shape:
            raise ValueError(
                f"dresidual must have x's shape {tuple(x.shape)}, got {tuple(dresidual.shape)}"
            )
        if dresidual.dtype not in FLOATS:
            raise TypeError(f"dresidual must be of a floating dtype, got {dresidual.dtype}")
    wide = wide_dtype(x)
    kinds = (wide,) if weight is None else (weight.dtype, wide)
    if options.dw_dtype not in (None, *kinds):
        raise TypeError(f"dw_dtype must be the weight's or {wide}, got {options.dw_dtype}")
    if dw_out is None:
        if options.accumulate:
            raise ValueError("accumulate=True adds to dw_out: give the tensor to add to")
        return
    if weight is None or not options.need_dw:
        raise ValueError("dw_out is given, but dw is not computed: it needs a weight and need_dw")
    shape = dw_shape(given)
    if dw_out.shape != shape:
        whose = "the weight's shape" if given.mean is None else "shape"
        raise ValueError(f"dw_out must have {whose} {shape}, got {tuple(dw_out.shape)}")
    if dw_out.dtype not in kinds:
        raise TypeError(f"dw_out must have the weight's dtype or {wide}, got {dw_out.dtype}")
    if options.dw_dtype not in (None, dw_out.dtype):
        raise TypeError(f"dw_out must have dw_dtype {options.dw_dtype}, got {dw_out.dtype}")


def check_dx_out(given: Arguments, options: Options) -> None:
    """Raise TypeError or ValueError, with one sentence, for a dx_out that does not fit."""
    x, dx_out = given.x, given.dx_out
    assert dx_out is not None
    if not options.need_dx:
        raise ValueError("dx_out is given, but dx is not computed: need_dx must be True")
    if dx_out.dtype != x.dtype:
        raise TypeError(f"dx_out must have x's dtype {x.dtype}, got {dx_out.dtype}")
    if dx_out.shape != x.shape:
        raise ValueError(f"dx_out must have x's shape {tuple(x.shape)}, got {tuple(dx_out.shape)}")
    if not dx_out.is_contiguous():
        raise ValueError(f"dx_out must be contiguous, got strides {dx_out.stride()}")


def check_overlap(given: Arguments) -> None:
    """Raise ValueError, with one sentence, if dx_out overlaps another tensor and is not dy. Every
    call asks: no address is part of a signature. A tensor with gaps counts as if it had none."""
    dx_out = given.dx_out
    assert dx_out is not None
    if dx_out.device.type == "meta":
        return
    first, end = _span(dx_out)
    for name, tensor in vars(given).items():
        if tensor is None or name == "dx_out":
            continue
        start, behind = _span(tensor)
        if behind <= first or end <= start:
            continue
        if name != "dy":
            raise ValueError(f"dx_out overlaps {name}, which must keep its numbers")
        if start != first or not tensor.is_contiguous() or tensor.shape != dx_out.shape:
            raise ValueError("dx_out overlaps dy but is not dy: give dy itself, or other memory")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the one behind its last."""
    first = tensor.data_ptr()
    if tensor.numel() == 0:
        return first, first
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return first, first + (last + 1) * tensor.element_size()


def check_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    bias: torch.Tensor | None = None,
    heads: bool = True,
) -> None:
    """Raise TypeError or ValueError, with one sentence, for arguments that do not fit together.
    heads: whether there may be a weight for each head."""
    _check_rows(x)
    for name, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device} and x on {x.device}")
    _check_weight(x, weight, heads)
    _check_weight(x, bias, heads=False, name="bias")
    if residual is not None:
        if residual.dtype not in FLOATS or wide_dtype(residual) != wide_dtype(x):
            raise TypeError(f"residual must be a float like x ({x.dtype}), got {residual.dtype}")
        if residual.shape != x.shape:
            raise ValueError(
                f"residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}"
            )


def foreign_device(target: dict[str, Any], device: int) -> str:
    """Return why the kernels of a table's target do not run on a CUDA device or with its driver, ""
    when they do."""
    driver = driver_version()
    if torch.version.hip is None and driver < _DRIVER:
        served = f"{driver // 1000}.{driver % 1000 // 10}"
        return (
            f"the NVIDIA driver is for CUDA {served}, and these kernels need one for CUDA 13: "
            "install version 580 or newer"
        )
    properties = torch.cuda.get_device_properties(device)
    # AMD's GPUs have capabilities, too: those of gfx90a say 9.0.
    capability = (properties.major, properties.minor)
    if torch.version.hip is None and runs_on(target["arch"], capability):
        return ""
    made_for = f"these kernels are for {target['title']} ({target['arch']})"
    return f"{made_for} and do not run on {properties.name}"


def dtype_name(dtype: Dtype) -> str:
    """Return bf16, fp16 or fp32, also for "bfloat16" and so on. Raises ValueError for any other
    dtype."""
    kind: Any = getattr(torch, str(dtype).removeprefix("torch."), None)
    name = DTYPES.get(kind, str(dtype))
    if name not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {dtype}")
    return name


def explained(M: int, N: int, dtype: Dtype, weight_dtype: Dtype | None) -> tuple[str, str]:
    """Return the names of both dtypes of a shape that `explain` is asked about; that of a weight
    without one is x's. Raises ValueError for an impossible shape or dtype."""
    if not (isinstance(M, Integral) and isinstance(N, Integral) and M >= 1 and N >= 1):
        raise ValueError(f"M and N must be at least 1, got M={M} and N={N}")
    name = dtype_name(dtype)
    return name, dtype_name(weight_dtype) if weight_dtype else name
