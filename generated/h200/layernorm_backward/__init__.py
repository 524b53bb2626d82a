"""LayerNorm for NVIDIA H200 SXM 141GB. Written by Normforge; tune again instead of editing."""

from pathlib import Path

from .runtime.frontends.layer_norm import LayerNormPackage

_package = LayerNormPackage(Path(__file__).resolve().parent)

PROVENANCE = _package.provenance
explain = _package.explain
layer_norm = _package.layer_norm
layer_norm_backward = _package.layer_norm_backward

LayerNorm = _package.LayerNorm
LayerNorm.__module__ = __name__  # where pickle finds it

__all__ = [
    "LayerNorm",
    "PROVENANCE",
    "explain",
    "layer_norm",
    "layer_norm_backward",
]
