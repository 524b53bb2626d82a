"""Compares outputs with float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from generator.evaluate.verify.bench import Bench
from generator.operations.operation import CHUNK_ELEMENTS, Bound


@dataclass
class Accuracy:
    """Errors of the outputs as ||out - ref|| / ||ref||; fault is "" or the sentence that says what
    is wrong."""

    errors: dict[str, float]
    fault: str


def compare(
    name: str, out: torch.Tensor, ref: torch.Tensor, unit: float, slack: torch.Tensor
) -> tuple[float, str]:
    """The relative error of `out` and "" or the first element outside `unit * |ref| + slack`. out,
    ref: same shape; slack broadcasts against them. Works in chunks of rows."""
    square_error = square_ref = 0.0
    fault, off = "", 0
    rows = max(1, CHUNK_ELEMENTS // out[0].numel()) if out.dim() > 1 else out.numel()
    for start in range(0, out.shape[0], rows):
        part = slice(start, start + rows)
        wide = ref[part].to(torch.float64 if ref.dtype == torch.float64 else torch.float32)
        error = (out[part].to(wide.dtype) - wide).abs()
        if out.dtype == torch.float16:  # may overflow, and rightly so
            rounded = wide.to(out.dtype)
            error = error.masked_fill(rounded.isinf() & (out[part] == rounded), 0.0)
        limit = wide.abs() * (unit * 1.001) + slack[part].to(wide.dtype)
        bad = ~(error <= limit)
        off += int(bad.sum())
        if not fault and off:
            first = bad.flatten().to(torch.uint8).argmax()
            at = tuple(map(int, torch.unravel_index(first, bad.shape)))
            index = [at[0] + start, *at[1:]]
            fault = (
                f"{name}{index} is {float(out[part][at]):.9g}, float64 gives {float(wide[at]):.9g}"
            )
        square_error += float(error.double().square().sum())
        square_ref += float(wide.double().square().sum())
    fault += f"; {off} elements are off" if fault else ""
    return (square_error / max(square_ref, 1e-300)) ** 0.5, fault


def compare_all(outputs: Mapping[str, torch.Tensor], expected: Mapping[str, Bound]) -> Accuracy:
    """The errors of all outputs, and the first that is not what it has to be."""
    errors, fault = {}, ""
    for name, bound in expected.items():
        errors[name], found = compare(name, outputs[name], bound.reference, bound.unit, bound.slack)
        fault = fault or found
    return Accuracy(errors, fault)


def check_accuracy(bench: Bench, inputs: Any, expected: Mapping[str, Bound]) -> Accuracy:
    """Compare one run on poisoned outputs and workspace with what every output has to be."""
    bench.arm()
    bench.poison()
    bench.run(inputs)
    outputs = {name: guarded.tensor for name, guarded in bench.outputs.items()}
    accuracy = compare_all(outputs, expected)
    accuracy.fault = accuracy.fault or bench.fault()
    return accuracy
