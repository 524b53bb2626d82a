"""The options of a call of the backward, and how they are served: by the kernel itself, or by a
composition.

Every kernel takes as arguments of its launch: no weight, no dx, no dw, dw as fp32, dw added into an
fp32 buffer. A weight offset and a residual gradient are compiled into kernels that were tuned for
them. What the kernel of a call has not got is composed around one that has less: each function
below takes one option away and calls `backward` (that of the server) with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..spec import KernelSpec
from .reference import Results

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
"""The dtypes that kernels have, by their short names."""


@dataclass(frozen=True)
class Options:
    """The options of one call that are no tensors. dw_dtype: None for the weight's."""

    weight_offset: float = 0.0
    need_dx: bool = True
    need_dw: bool = True
    accumulate: bool = False
    dw_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class FormulaOptions(Options):
    """The options of a call that no kernel may serve; see SMALLEST_EPS."""


SMALLEST_EPS = 2.0**-96
"""The smallest eps of norms whose backward kernels serve; the formula serves those of a smaller
one.

The kernels compute rstd^2 * mean(g * xhat), with g = dy * weight, before they multiply it by x. At
this eps, rstd is at most 2^48, so that fp32 holds this up to a mean of 2^32, which no fp16 and no
sensible bf16 gradient reaches. Where rstd is 2^64 or more, as it may be with eps = 0, its square
alone is inf, while x * rstd is of ordinary size."""


def options_for(eps: float | None, weight_offset: float, need_dx: bool, need_dw: bool) -> Options:
    """Return the options of the backward of a norm with this eps."""
    tiny = eps is not None and eps < SMALLEST_EPS
    return (FormulaOptions if tiny else Options)(weight_offset, need_dx, need_dw)


@dataclass(frozen=True)
class Arguments:
    """The tensors of one call. mean: of each row, for a norm that takes it off; dw is (2, N) then,
    and its second row the gradient of a bias."""

    dy: torch.Tensor
    x: torch.Tensor
    rstd: torch.Tensor
    weight: torch.Tensor | None
    dresidual: torch.Tensor | None = None
    dw_out: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    dx_out: torch.Tensor | None = None


def dw_shape(given: Arguments) -> tuple[int, ...]:
    """Return the shape of dw, for a call with a weight."""
    assert given.weight is not None
    shape = tuple(given.weight.shape)
    return shape if given.mean is None else (2, *shape)


PLAIN = Options()

Backward = Callable[[Arguments, Options], Results]

Composition = Callable[[Backward, Arguments, Options], Results]


def composition(
    given: Arguments, options: Options, spec: KernelSpec | None, over_dy: bool = False
) -> Composition | None:
    """Return what to take away from a call before a kernel serves it, None when the kernel does all
    of it. Nothing else decides between fused and composed.

    spec: of the kernel that would serve the call, None when there is none. over_dy: whether that
    kernel may write dx over dy.
    """
    weight, dw_out, dx_out, dresidual = given.weight, given.dw_out, given.dx_out, given.dresidual
    if weight is not None and weight.dim() > 1:
        return per_head if dx_out is None else dx_elsewhere
    if dresidual is not None and (spec is None or DTYPES.get(dresidual.dtype) != spec.residual):
        return add_residual
    if options.weight_offset and not (spec is not None and spec.offset):
        # The weight becomes fp32 on the way, and dw_out may be of its former dtype.
        narrow = dw_out is not None and dw_out.dtype != torch.float32
        return dw_elsewhere if narrow else offset_in_weight
    if dw_out is not None and (spec is None or not _kernel_writes(dw_out, weight, options)):
        return dw_elsewhere
    if dx_out is not None and (spec is None or dx_out.data_ptr() % spec.vector_bytes):
        return dx_elsewhere
    if dx_out is not None and not over_dy and dx_out.data_ptr() == given.dy.data_ptr():
        return dx_elsewhere
    return None


def may_overwrite_dy(config: Mapping[str, Any], row_period: int = 1) -> bool:
    """Return True if a kernel that was rendered from this config may write dx over dy. row_period:
    that of its KernelSpec.

    It may if it reads every element of dy once and by an access that allows for writes. For what it
    writes to a row depends on all of that row, by the sum over it, so the read comes first. The
    sums of dw and the second kernel of `separate` read the workspace, and not dy.

    - async: it may. The thread that writes an element has copied it to shared memory itself, and
      has waited for that. What is read later, also by a reload, is the copy.
    - bulk, producer: it may. One copy brings a row, or a CTA's columns of it, and all threads that
      write there wait for it. Its completion comes with a fence between the async and the generic
      proxy.
    - direct: it may not. Each element is loaded once, by the thread that writes it. But the loads
      are `ld.global.nc`, for memory that nobody writes, and the assembler may repeat them.

    Copies under way are of later rows of the same team of threads, which no other team writes. That
    does not hold where rows are no whole vectors: a copy brings elements of its neighbours, too. So
    these kernels may not.
    """
    return row_period == 1 and config.get("pipeline") in ("async", "bulk", "producer")


def _kernel_writes(dw_out: torch.Tensor, weight: torch.Tensor | None, options: Options) -> bool:
    if not dw_out.is_contiguous() or dw_out.data_ptr() % 16:
        return False
    if dw_out.dtype == torch.float32:
        return True
    return weight is not None and dw_out.dtype == weight.dtype and not options.accumulate


def per_head(backward: Backward, given: Arguments, options: Options) -> Results:
    """Serve a weight (H, N) with x (..., H, N) by one call per head, on its slice of the rows."""
    weight, x = given.weight, given.x
    assert weight is not None
    rstd = given.rstd.reshape(x.shape[:-1])
    heads = [
        backward(
            Arguments(
                given.dy[..., h, :],
                x[..., h, :],
                rstd[..., h].contiguous(),
                weight[h],
                dresidual=None if given.dresidual is None else given.dresidual[..., h, :],
                dw_out=None if given.dw_out is None else given.dw_out[h],
            ),
            options,
        )
        for h in range(len(weight))
    ]
    results: list[torch.Tensor | None] = []
    for i, parts in enumerate(zip(*heads, strict=True)):
        kept = [part for part in parts if part is not None]
        if not kept:
            results.append(None)
        elif i == 1:
            results.append(torch.stack(kept) if given.dw_out is None else given.dw_out)
        elif i == 2 and kept[0].dtype == x.dtype:
            results.append(results[0])
        else:
            results.append(torch.stack(kept, -2))
    return tuple(results)


def add_residual(backward: Backward, given: Arguments, options: Options) -> Results:
    """Add dresidual to the rounded dx in fp32."""
    dresidual = given.dresidual
    assert dresidual is not None
    dx, dw = backward(replace(given, dresidual=None), options)
    assert dx is not None
    if dresidual.dtype == dx.dtype:
        dx.add_(dresidual)  # one pass: PyTorch adds narrow types in fp32, too
        return dx, dw, dx
    total = dx + dresidual
    return dx.copy_(total), dw, total.to(dresidual.dtype)


def offset_in_weight(backward: Backward, given: Arguments, options: Options) -> Results:
    """Serve weight_offset by an fp32 weight that has it, and round dw to the dtype of the given
    one."""
    weight, x = given.weight, given.x
    if weight is None:
        wide = torch.full(
            (x.shape[-1],), 1.0 + options.weight_offset, dtype=torch.float32, device=x.device
        )
        plain = replace(options, weight_offset=0.0, need_dw=False)
        results = backward(replace(given, weight=wide), plain)
        return (results[0], None, *results[2:])
    plain = replace(options, weight_offset=0.0, dw_dtype=None)
    wide = weight.float() + options.weight_offset
    dx, dw, *third = backward(replace(given, weight=wide), plain)
    if dw is not None and given.dw_out is None:
        dw = dw.to(options.dw_dtype or weight.dtype)
    return (dx, dw, *third)


def dw_elsewhere(backward: Backward, given: Arguments, options: Options) -> Results:
    """Serve a dw_out that no kernel writes (its dtype, layout or address) by computing dw in fp32
    first."""
    dw_out = given.dw_out
    assert dw_out is not None
    plain = replace(options, accumulate=False, dw_dtype=torch.float32)
    dx, dw, *third = backward(replace(given, dw_out=None), plain)
    assert dw is not None
    return (dx, dw_out.add_(dw) if options.accumulate else dw_out.copy_(dw), *third)


def dx_elsewhere(backward: Backward, given: Arguments, options: Options) -> Results:
    """Serve a dx_out that no kernel may write (its address, or dy under a kernel that may read dy
    later) by computing dx in a tensor of its own first."""
    dx_out = given.dx_out
    assert dx_out is not None
    dx, dw, *third = backward(replace(given, dx_out=None), options)
    assert dx is not None
    dx_out.copy_(dx)
    return (dx_out, dw, *(dx_out if result is dx else result for result in third))
