"""RMSNorm backward for NVIDIA GB200 (one Blackwell GPU of the Grace Blackwell Superchip). Written by Normforge; tune again instead of editing."""

from pathlib import Path

from .runtime.api import Package

_package = Package(Path(__file__).resolve().parent)

PROVENANCE = _package.provenance
explain = _package.explain
rmsnorm_backward = _package.rmsnorm_backward
warmup = _package.warmup

__all__ = ["PROVENANCE", "explain", "rmsnorm_backward", "warmup"]
