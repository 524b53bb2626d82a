"""Errors of ours beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.pages.text import read, table
from generator.problem import Problem


def errors() -> str:
    """Errors against float64 over PyTorch's, by dtypes."""

    def kind(row: Any) -> str:
        problem = Problem.parse(row["shape"])
        if problem.dtype == "fp32":
            return "fp32"
        return "bf16, fp16" + ("" if problem.weight_dtype == problem.dtype else ", fp32 weight")

    def span(rows: list[Any], peer: str, which: str) -> str:
        values = [row["ours over"][peer][which] for row in rows if peer in row["ours over"]]
        if not values:
            return ""
        least, most = min(values), max(values)
        text = f"{least:.2f}" if f"{least:.2f}" == f"{most:.2f}" else f"{least:.2f} to {most:.2f}"
        return text if least == most else f"{text}, median {median(values):.2f}"

    lines = []
    for name, note in (("errors_h200", ""), ("errors_dw_fp32_h200", ", dw in fp32")):
        every = read(name)["rows"]
        for wanted in ("bf16, fp16", "bf16, fp16, fp32 weight", "fp32"):
            rows = [row for row in every if kind(row) == wanted]
            if note and wanted != "bf16, fp16":
                continue  # with an fp32 weight dw is in fp32 anyway
            pairs = [(p, w) for p in ("aten", "composite") for w in ("dx", "dw")]
            lines.append((f"{wanted}{note} ({len(rows)})", *(span(rows, p, w) for p, w in pairs)))
    return table(
        ["dtypes (shapes)", "dx / fused", "dw / fused", "dx / operations", "dw / operations"], lines
    )


def errors_in_emulator() -> str:
    rows = read("errors_dw_fp32_emulator")["rows"]
    most = max(row["ours over"]["composite"]["dw"] for row in rows)
    return (
        f"In the emulator, dw in fp32 of {len(rows)} other random shapes has at most {most:.2f}"
        " times the error of\nPyTorch's operations (`errors_dw_fp32_emulator.json.xz`)."
    )


def dw_precision() -> str:
    """The error of dw in bf16 and in fp32, of the same shapes."""

    def typical(name: str) -> float:
        rows = [row for row in read(name)["rows"] if row["shape"].endswith(":bf16")]
        return median(row["errors"]["ours"]["dw"] for row in rows)

    return (
        "dw in fp32 matters where gradients are accumulated. In bf16, which is what PyTorch adds to"
        f" a `main_grad`,\nthe median of its relative error is {typical('errors_h200'):.1e}; in"
        f" fp32 it is {typical('errors_dw_fp32_h200'):.1e}."
    )


ACCURACY_BLOCKS: dict[str, Callable[[], str]] = {
    "errors": errors,
    "errors_in_emulator": errors_in_emulator,
    "dw_precision": dw_precision,
}
