"""Measured numbers about layers of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.pages.text import paragraph, read, table
from benchmarks.training.layer_models import TITLES
from benchmarks.training.layers import WAYS


def layers_with_sums() -> str:
    """Milliseconds of the kernels beside products and attention in a layer's step on an H200, whose
    packages add gradients in the norms' backwards; in parentheses without these."""
    return _by_way(read("layers_h200")["layers"], read("layers_without_sums_h200")["layers"])


def layers_rotated() -> str:
    """Milliseconds of those kernels on an H200, since there are kernels for the heads of Gemma 3
    and OLMo 2."""
    return _by_way(read("layers_rotated_h200")["layers"], every=False)


def layers_more() -> str:
    """Milliseconds of those kernels on an H200, in layers with a gate and with complex numbers."""
    return _by_way(read("layers_more_h200")["layers"])


def layers_autotuned() -> str:
    """Milliseconds of those kernels on an H200, where Inductor tunes its own."""
    return _by_way(read("layers_autotuned_h200")["layers"])


def layers_fp8() -> str:
    """Milliseconds of those kernels on an H200, where linear layers multiply in FP8."""
    return _by_way(read("layers_fp8_h200")["layers"])


def layers_with_sums_h100() -> str:
    """Milliseconds of those kernels on an H100, which has no packages of its own for them."""
    return _by_way(read("layers_with_sums_h100")["layers"])


def layers_on_ranks() -> str:
    """Milliseconds of those kernels, and of a step, on one H200 and on two that share a layer."""
    kinds = {
        "one GPU": "layers_one_rank_h200",
        "two": "layers_two_ranks_h200",
        "two, tokens split": "layers_two_ranks_sequence_h200",
    }
    found = {kind: read(name)["layers"] for kind, name in kinds.items()}
    models = list(found["one GPU"])
    header = [f"{TITLES[model]}, {kind}" for model in models for kind in kinds]
    lines = [
        [
            WAYS[way].title,
            *(
                f"{(cell := found[kind][model][way])['others_ms']:.2f} ({cell['step_ms']:.2f})"
                for model in models
                for kind in kinds
            ),
        ]
        for way in found["one GPU"][models[0]]
    ]
    return table(["ms per step", *header], lines)


def layers_native() -> str:
    """Milliseconds of steps of a layer that two GPUs share, with calls launched from C++."""
    (found,) = read("layers_two_ranks_native_h200")["layers"].values()
    plain, *ours = ((WAYS[way].title, cell["step_ms"]) for way, cell in found.items())
    said = "; ".join(f"{ms:.2f} ms by {title}" for title, ms in ours)
    return paragraph(
        "With [`use_native()`](adopting.md#use_native), which launches norms and their backwards"
        f" from C++, a step of Qwen's layer on two GPUs took {said}; and {plain[1]:.2f} ms by plain"
        f" {plain[0]} (`--native`, `layers_two_ranks_native_h200.json`)."
    )


def host_of_rows() -> str:
    """Microseconds on the host of one call of the other operations, and of what else computes
    them."""
    ways = {"ours": "Normforge", "triton": "one plain Triton kernel"}
    ways |= {"inductor": "Inductor", "eager": "eager PyTorch"}
    lines = []
    for row in read("host_rows_h200")["rows"]:
        cells = [row["cells"].get(way, {}).get("host_us") for way in ways]
        times = ("" if us is None else f"{us:.0f}" for us in cells)
        lines.append((f"`{row['shape'].partition(':')[0]}`", *times))
    return table(["operation", *ways.values()], lines)


def _by_way(found: dict[str, Any], before: dict[str, Any] | None = None, every: bool = True) -> str:
    """Tabulate models by ways. every: without ways in which a model was not measured."""

    def cell(model: str, way: str) -> str:
        if way not in found[model]:
            return ""
        time = f"{found[model][way]['others_ms']:.2f}"
        other = (before or {}).get(model, {}).get(way)
        return f"{time} ({other['others_ms']:.2f})" if other else time

    have = all if every else any
    ways = [way for way in WAYS if have(way in measured for measured in found.values())]
    lines = [(WAYS[way].title, *(cell(model, way) for model in found)) for way in ways]
    return table(["ms per step", *(TITLES[model] for model in found)], lines)


LAYERS_BLOCKS: dict[str, Callable[[], str]] = {
    "layers_with_sums": layers_with_sums,
    "layers_rotated": layers_rotated,
    "layers_more": layers_more,
    "layers_autotuned": layers_autotuned,
    "layers_fp8": layers_fp8,
    "layers_on_ranks": layers_on_ranks,
    "layers_native": layers_native,
    "host_of_rows": host_of_rows,
    "layers_with_sums_h100": layers_with_sums_h100,
}
