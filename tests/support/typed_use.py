"""A program that type checkers read and nobody runs: names of the library have types, and what is
wrong is refused. A checker that refuses nothing where `ignore` stands says so."""

from __future__ import annotations

from collections.abc import Callable

import torch
from typing_extensions import assert_type

import normforge
from normforge import RMSNorm, explain, install, patch, rms_norm
from normforge.batch_invariant import rms_norm as invariant
from normforge.layernorm import LayerNorm, layer_norm

Two = tuple[torch.Tensor, torch.Tensor]


def names() -> None:
    from normforge import nonsense  # type: ignore[attr-defined] # noqa: F401 # pyright: ignore
    from normforge.layernorm import nothing  # type: ignore[attr-defined] # noqa: F401 # pyright: ignore


def functions(x: torch.Tensor, weight: torch.nn.Parameter, other: torch.Tensor | None) -> None:
    assert_type(rms_norm(x, weight, 1e-6), torch.Tensor)
    assert_type(rms_norm(x, weight, residual=x, residual_dtype=torch.float32), Two)
    assert_type(rms_norm(x, residual=other), torch.Tensor | Two)
    assert_type(invariant(x, matches="vllm"), torch.Tensor)
    assert_type(layer_norm(x, weight, residual=x), Two)
    assert_type(normforge.layernorm.layer_norm(x), torch.Tensor)
    assert_type(explain(1, 64, "bf16")["how"], object)  # type: ignore[assert-type] # pyright: ignore
    rms_norm(x, (64,), weight, 1e-6)  # type: ignore[call-overload] # pyright: ignore
    rms_norm(x, matches="vllm")  # type: ignore[call-overload] # pyright: ignore
    install(torch.nn.Linear(1, 1))  # type: ignore[call-arg] # pyright: ignore


def layers(x: torch.Tensor, model: torch.nn.Module, kept: RMSNorm) -> None:
    norm = RMSNorm(64, eps=1e-6, batch_invariant=True)
    assert_type(norm, RMSNorm)
    assert_type(norm(x), torch.Tensor)
    assert_type(kept(x, x), Two)
    assert_type(LayerNorm(64)(x), torch.Tensor)
    assert_type(patch(model), list[str])
    make: Callable[[int], torch.nn.RMSNorm] = RMSNorm
    make(64)
    RMSNorm(64, epsilon=1e-6)  # type: ignore[call-arg] # pyright: ignore
