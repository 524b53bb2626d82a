"""The ways to compute the norms of a model: PyTorch's, other libraries', and this project's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch.nn.functional import rms_norm as pytorch_rms_norm

from benchmarks.training.model import EPS, Norm

BASELINE = "pytorch"
MODES = {"eager": "eager", "blocks": "compiled by blocks", "whole": "compiled as a whole"}
"""The ways in which a model runs, in words."""


def pytorch_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return pytorch_rms_norm(x, weight.shape, weight, EPS)


@dataclass(frozen=True)
class Way:
    """A way to compute the norms of a step. inside: what a step runs in; backend: for
    torch.compile, None for Inductor."""

    norm: Norm = pytorch_norm
    inside: Callable[[], AbstractContextManager[object]] = nullcontext
    backend: Callable[..., object] | None = None


@dataclass(frozen=True)
class Named:
    """A way that is loaded only where it is measured. modes: in which it is."""

    title: str
    load: Callable[[], Way]
    modes: tuple[str, ...] = tuple(MODES)


def _of(module: str) -> Way:
    """The `rms_norm` of one of our modules."""
    rms_norm = import_module(module).rms_norm
    return Way(lambda x, weight: rms_norm(x, weight, EPS))


def _install() -> Way:
    from normforge import installed

    return Way(inside=installed)


def _backend() -> Way:
    from normforge import inductor_backend

    return Way(backend=inductor_backend())


def _liger() -> Way:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Working in place is its default: nothing else uses the gradient of a norm's result.
        return LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", True)

    return Way(norm)


def _quack() -> Way:
    from quack.rmsnorm import rmsnorm

    return Way(lambda x, weight: rmsnorm(x, weight, eps=EPS))


WAYS = {
    BASELINE: Named("PyTorch", Way),
    "again": Named("PyTorch once more (noise)", Way),
    "liger": Named("Liger", _liger, ("eager",)),
    "quack": Named("QuACK", _quack),
    "rms_norm": Named("Normforge, `RMSNorm`", partial(_of, "normforge")),
    "install": Named("Normforge, `install()`", _install, ("eager",)),
    "backend": Named("Normforge, `inductor_backend()`", _backend, ("blocks", "whole")),
    "batch_invariant": Named(
        "Normforge, batch-invariant", partial(_of, "normforge.batch_invariant")
    ),
}
"""The ways to compute norms, in the order of the tables. `again` is the baseline as a contender of
its own."""
