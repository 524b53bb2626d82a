"""Registers how DTensor may split the operators of a package."""

from __future__ import annotations

import sys
from threading import Lock
from typing import Any

_known: set[Any] = set()
_lock = Lock()


def is_dtensor(given: Any) -> bool:
    """Return True for a DTensor. The class is compared by name, because a program without one need
    not wait for the import."""
    kind = type(given)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


def are_whole_rows(x: Any, weight: Any) -> bool:
    """Return True for DTensors of which each rank has whole rows, and all of the weight: what
    PyTorch's operators give of such is split like x, too."""
    last = x.dim() - 1
    rows = (
        one.is_replicate() or (one.is_shard() and not one.is_shard(last)) for one in x.placements
    )
    whole = weight is None or all(one.is_replicate() for one in weight.placements)
    return whole and all(rows)


def register_sharding(*operators: Any) -> None:
    """Tell DTensor how to run operators of RMSNorm on shards; nothing before DTensor has been
    imported, and nothing for others, of which it is not told.

    Rows may be split over any dimension but the last: every rank computes its own, the weight is
    on all of them, and dw is a partial sum that DTensor reduces. A weight per head may be split
    with the heads. Anything else is gathered first.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for operator in operators:
        if operator in _known:
            continue
        from torch.distributed.tensor.experimental import register_sharding as register

        with _lock:
            rule = _RULES.get(operator._schema.name.rpartition("::")[2])
            if rule is not None and operator not in _known:
                register(operator)(rule)
            _known.add(operator)


def _row_splits(x: Any, weight: Any) -> list[tuple[Any, Any, Any]]:
    """Placements of a tensor of rows, of the weight, and of dw."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    splits: list[tuple[Any, Any, Any]] = [(Replicate(), Replicate(), Replicate())]
    heads = x.ndim - 2
    per_head = weight is not None and weight.ndim == 2
    for dim in range(x.ndim - 1):
        if per_head and dim == heads:
            splits.append((Shard(dim), Shard(0), Shard(0)))
        else:
            splits.append((Shard(dim), Replicate(), Partial("sum")))
    return splits


def _dtype(given: Any) -> Any:
    """Return the dtype of a tensor, or of what DTensor knows about one."""
    return getattr(given, "tensor_meta", given).dtype


def _norm(x: Any, *others: Any) -> list[Any]:
    *residual, weight, _, _, _ = others
    return [
        (
            [rows] * (2 + len(residual)),
            [*[rows] * (1 + len(residual)), None if weight is None else scale, *[None] * 3],
        )
        for rows, scale, _ in _row_splits(x, weight)
    ]


def _norm_and_add(x: Any, _: Any, weight: Any, *others: Any) -> list[Any]:
    return [
        ([rows] * 2, [rows, rows, None if weight is None else scale, *[None] * len(others)])
        for rows, scale, _ in _row_splits(x, weight)
    ]


def _rms_norm_backward(*given: Any) -> list[Any]:
    _, x, _, weight, dresidual, _, _, need_dx, need_dw, _ = given
    whole = _row_splits(x, weight)[0][0]
    return [
        (
            # Results that are not wanted are empty tensors.
            [
                rows if need_dx else whole,
                summed if need_dw and weight is not None else whole,
                rows if dresidual is not None and _dtype(dresidual) != _dtype(x) else whole,
            ],
            [
                rows,
                rows,
                rows,
                None if weight is None else scale,
                None if dresidual is None else rows,
                *[None] * 5,
            ],
        )
        for rows, scale, summed in _row_splits(x, weight)
    ]


def _backward_of_sum(*given: Any) -> list[Any]:
    *gradients, x, _, weight, dresidual, offset, package = given
    known = (gradients[0], x, None, weight, dresidual, None, offset, True, True, package)
    return [
        (
            results,
            [*[None if one is None else dy for one in gradients], *others[:4], None, None],
        )
        for results, (dy, *others) in _rms_norm_backward(*known)
    ]


_RULES = {
    "rms_norm": _norm,
    "add_rms_norm": _norm,
    "rms_norm_and_add": _norm_and_add,
    "rms_norm_backward": _rms_norm_backward,
    "rms_norm_backward_of_sum": _backward_of_sum,
}
