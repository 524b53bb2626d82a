"""Every option of the public functions counts: another value changes the results, or is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import normforge
from normforge import batch_invariant, layernorm, quantized
from tests.support.entry_points import randn
from tests.support.operators import Operators

M, H, N = 16, 4, 128
BF16, FP32 = torch.bfloat16, torch.float32
Given = dict[str, Any]


def rows(seed: int) -> torch.Tensor:
    return randn(M, H, N, seed=seed, dtype=BF16)


def columns(seed: int) -> torch.Tensor:
    return (randn(N, seed=seed) / 4 + 1).to(BF16)


def angles(seed: int) -> torch.Tensor:
    return torch.cat([randn(M, N // 2, seed=seed).sin()] * 2, -1)


NORM = {"x": rows(0), "weight": columns(1), "eps": 1e-3}
BACKWARD = {
    "dy": rows(2),
    "x": rows(0),
    "rstd": rows(3)[..., :1].float().abs() + 0.5,
    "weight": columns(1),
}
CENTRED = {**BACKWARD, "mean": rows(4)[..., :1].float()}
HEADS = {"x": rows(0), "weight": columns(1), "cos": angles(5), "sin": angles(6), "eps": 1e-3}
PACKED = {
    "qkv": rows(0).flatten(-2),
    "q_weight": columns(1),
    "k_weight": columns(2),
    "cos": angles(5),
    "sin": angles(6),
    "heads": (2, 1),
    "eps": 1e-3,
}
DW = {"dw_out": columns(7)}
OTHERS: Given = {
    **dict.fromkeys(("x", "z", "dy", "residual", "add", "dresidual", "dx_out"), rows(8)),
    **dict.fromkeys(("weight", "bias", "q_weight", "k_weight", "dw_out"), columns(9)),
    **dict.fromkeys(("rstd", "mean"), rows(10)[..., :1].float().abs() + 0.2),
    "cos": angles(11),
    "sin": angles(12),
    "qkv": rows(8).flatten(-2),
    "heads": (1, 1),
    "eps": 0.5,
    "weight_offset": 1.0,
    "out_dtype": FP32,
    "residual_dtype": FP32,
    "dw_dtype": FP32,
    "need_dx": False,
    "need_dw": False,
    "accumulate": True,
    "activation": "sigmoid",
    "norm_before_gate": False,
    "group_size": N // 2,
    "interleaved": True,
    "rotary_dim": N // 2,
    "format": "mxfp8_1x32",
    "keep_y": True,
    "via": BF16,
    "power_of_two_scales": True,
}
"""Another value of every option, by name."""


def calls() -> dict[str, tuple[Callable[..., Any], Given]]:
    """Return the functions, each with its arguments, by name. The arguments of one function with
    and without some options are two calls."""
    norm: Any = batch_invariant.rms_norm
    matching = norm.__self__.matching("vllm-triton3.7")
    gated = {**NORM, "z": rows(13)}
    found: dict[str, tuple[Callable[..., Any], Given]] = {
        "rms_norm_gated": (normforge.rms_norm_gated, gated),
        "apply_rope": (normforge.apply_rope, {name: HEADS[name] for name in ("x", "cos", "sin")}),
        "rms_norm_rope": (normforge.rms_norm_rope, HEADS),
        "qk_norm_rope": (normforge.qk_norm_rope, PACKED),
        "rms_norm_quantized": (quantized.rms_norm_quantized, NORM),
        "rms_norm_quantized, MX": (
            quantized.rms_norm_quantized,
            {**NORM, "format": "mxfp8_1x32"},
        ),
        "rms_norm_backward_quantized": (quantized.rms_norm_backward_quantized, BACKWARD),
        "layer_norm": (layernorm.layer_norm, {**NORM, "bias": columns(14)}),
        "layer_norm, residual": (layernorm.layer_norm, {**NORM, "residual": rows(15)}),
        "layer_norm_backward, dw_out": (
            layernorm.layer_norm_backward,
            {**CENTRED, "dw_out": torch.stack([columns(7)] * 2)},
        ),
        "layer_norm_forward": (layernorm.layer_norm_forward, {**NORM, "bias": columns(14)}),
    }
    for name, of in (("", normforge), ("invariant ", batch_invariant), ("matching ", matching)):
        for more in ({}, {"residual": rows(15)}, {"add": rows(16)}):
            if name == "matching " and "residual" in more:
                continue
            said = "".join(f", {one}" for one in more)
            found[f"{name}rms_norm{said}"] = of.rms_norm, {**NORM, **more}
            found[f"{name}rmsnorm_forward{said}"] = of.rmsnorm_forward, {**NORM, **more}
        for more in ({}, DW, {"dresidual": rows(17)}):
            said = "".join(f", {one}" for one in more)
            if of is not matching:
                found[f"{name}rmsnorm_backward{said}"] = of.rmsnorm_backward, {**BACKWARD, **more}
            if of is normforge and more is not DW:
                found[f"layer_norm_backward{said}"] = (
                    layernorm.layer_norm_backward,
                    {**CENTRED, **more},
                )
    return found


CALLS = calls()


def results(run: Callable[..., Any], given: Given) -> list[Any]:
    """Return what a call of copies gives: of each result the dtype, the numbers and the argument
    whose memory it is."""
    copies = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
    places = {v.data_ptr(): n for n, v in copies.items() if isinstance(v, torch.Tensor)}
    found = run(**copies)
    return [
        one if one is None else (one.dtype, places.get(one.data_ptr()), one.float().tolist())
        for one in (found if isinstance(found, tuple) else (found,))
    ]


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_every_option_counts(name: str, seen: bool) -> None:
    run, given = CALLS[name]
    lost = []
    with torch.no_grad(), Operators() if seen else torch.no_grad():
        before = results(run, given)
        for parameter in inspect.signature(run).parameters.values():
            option = parameter.name
            if parameter.kind == parameter.VAR_POSITIONAL or option == "matches":
                continue  # `matches` chooses among kernels
            if option in given and (option == "dw_out" or given[option] is OTHERS[option]):
                continue
            try:
                if results(run, {**given, option: OTHERS[option]}) == before:
                    lost.append(option)
            except (TypeError, ValueError):
                continue  # refused beside the others
    assert lost == []


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_modes_see_one_operator(name: str, grad: bool) -> None:
    """A gated norm's forward is left to what compiles PyTorch's operators."""
    run, given = CALLS[name]
    leaves = {
        n: v.clone().requires_grad_(grad and n in ("x", "qkv") and "backward" not in name)
        if isinstance(v, torch.Tensor)
        else v
        for n, v in given.items()
    }
    with Operators() as seen:
        run(**leaves)
    assert len(seen.of_packages) == (name != "rms_norm_gated"), seen.of_packages
