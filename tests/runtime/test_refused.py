"""Calls that do not fit together are refused in one sentence: those of the library's functions that
have no package of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from normforge import RMSNormGated, qk_norm_rope, rms_norm_gated, rms_norm_quantized, rms_norm_rope
from tests.support.library_functions import turns

X, D = torch.ones(3, 24), 24
HEADS, WEIGHT = torch.ones(2, 5, 3, 8), torch.ones(8)
COS, SIN = turns(5, dtype=torch.float32)
BLOCKS, MX = torch.ones(2, 256), {"format": "mxfp8_1x32"}


def gated(**change: Any) -> Callable[[], Any]:
    return partial(rms_norm_gated, **{"x": X, "z": X, "weight": torch.ones(D), **change})


def rope(x: Any = HEADS, weight: Any = WEIGHT, cos: Any = COS, sin: Any = SIN, **more: Any) -> Any:
    return partial(rms_norm_rope, x, weight, cos, sin, **more)


def projection(qkv: Any = torch.ones(2, 5, 64), heads: Any = (4, 2)) -> Callable[[], Any]:  # noqa: B008
    return partial(qk_norm_rope, qkv, WEIGHT, WEIGHT, COS, SIN, heads)


def quantized(x: Any = BLOCKS, *weight: Any, **options: Any) -> Callable[[], Any]:
    return partial(rms_norm_quantized, x, *weight, **options)


OF_ANOTHER_TYPE: list[tuple[str, Callable[[], Any]]] = [
    ("x must be a torch.Tensor, got list", gated(x=[1.0])),
    ("z must be a torch.Tensor, got NoneType", gated(z=None)),
    ("z must have x's dtype torch.float32, got torch.bfloat16", gated(z=X.bfloat16())),
    ("must be of a floating dtype, got", gated(weight=torch.ones(D).int())),
    ("norm_before_gate must be True or False, got 'first'", gated(norm_before_gate="first")),
    ("eps must be a number, got None", gated(eps=None)),
    ("eps must be a number or None, got str", gated(eps="small")),
    ("cos must be a torch.Tensor, got int", rope(cos=3)),
    ("cos must be of a floating dtype, got torch.int32", rope(cos=COS.int())),
    ("eps must be a number, got None", rope(eps=None)),
    ("rotary_dim must be an int or None, got float", rope(rotary_dim=4.0)),
    ("interleaved must be True or False, got 'yes'", rope(interleaved="yes")),
    ("qkv must be a torch.Tensor, got int", projection(3)),
    ("x must be a torch.Tensor, got float", quantized(3.0)),
    ("weight must be a torch.Tensor, got float", quantized(BLOCKS, 1.0)),
]
OF_ANOTHER_VALUE: list[tuple[str, Callable[[], Any]]] = [
    ("z must have x's shape (3, 24), got (2, 24)", gated(z=X[:2])),
    ("x must be floating rows of at least one element", gated(x=X.int())),
    ("x must be floating rows of at least one element", gated(x=torch.ones(3, 0))),
    ("weight must have shape (24,), got (8,)", gated(weight=torch.ones(8))),
    ("weight must have shape (24,) or (8,), got (12,)", gated(weight=torch.ones(12), group_size=8)),
    ("activation must be one of silu, sigmoid, swish; got None", gated(activation=None)),
    ("activation must be one of silu, sigmoid, swish; got 'gelu'", gated(activation="gelu")),
    ("x has 24 columns, no multiple of group_size, 0", gated(group_size=0)),
    ("x has 24 columns, no multiple of group_size, 7", gated(group_size=7)),
    ("z is on meta and x on cpu", gated(z=X.to("meta"))),
    ("of shape (..., H, D), got torch.float32 of shape", rope(HEADS[0, 0, 0])),
    ("x must be floating heads", rope(HEADS.int())),
    ("an even number of columns", rope(HEADS[..., :7])),
    ("weight must have shape (8,), got (4,)", rope(weight=WEIGHT[:4])),
    ("cos must have the shape (2, 5, 8) of x without", rope(cos=COS[:, :2])),
    ("sin must have the shape (2, 5, 8) of x without", rope(sin=SIN[:4])),
    ("got (5, 3, 8)", rope(cos=COS[:, None].expand(5, 3, 8))),
    ("cos must have the shape", rope(cos=COS[None, None, None])),
    ("cos must have the shape (2, 5, 4) of x's tokens and rotary_dim", rope(rotary_dim=4)),
    ("cos must have the shape (2, 5, 8) of x without", rope(cos=COS[..., :6])),
    ("an even number from 2 to the 8 columns of a head, got 10", rope(rotary_dim=10)),
    ("an even number from 2 to the 8 columns of a head, got 3", rope(rotary_dim=3)),
    ("an even number from 2 to the 8 columns of a head, got 0", rope(rotary_dim=0)),
    ("give sin.detach()", rope(sin=SIN.clone().requires_grad_())),
    ("cos is on meta and x on cpu", rope(cos=COS.to("meta"))),
    (
        "heads must be the numbers of heads of the queries and of the keys, got 4",
        projection(heads=4),
    ),
    ("heads must be the numbers of heads", projection(heads=(4, 0))),
    ("qkv has 64 columns, no multiple of 5 + 2 * 2 heads", projection(heads=(5, 2))),
    (
        "x must be floating rows of a multiple of 128 columns, as so many share a scale in "
        "fp8_1x128, got torch.float32 of shape (2, 200)",
        quantized(BLOCKS[:, :200]),
    ),
    ("a multiple of 32 columns", quantized(BLOCKS[:, :48], **MX)),
    ("of shape (2, 0)", quantized(BLOCKS[:, :0])),
    ("got torch.int32", quantized(BLOCKS.int())),
    ("weight is on meta and x on cpu", quantized(BLOCKS, torch.ones(256, device="meta"))),
    ("weight must have shape (256,), got (2,", quantized(BLOCKS, BLOCKS)),
    ("format is one of fp8_1x128, mxfp8_1x32, got 'fp8'", quantized(format="fp8")),
    (
        "via is x's dtype torch.float32, or None to round once, got torch.bfloat16",
        quantized(via=torch.bfloat16),
    ),
    (
        "the scales of mxfp8_1x32 are powers of two: leave power_of_two_scales out",
        quantized(power_of_two_scales=True, **MX),
    ),
]


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize(
    ("kind", "said", "call"),
    [
        *((TypeError, *case) for case in OF_ANOTHER_TYPE),
        *((ValueError, *case) for case in OF_ANOTHER_VALUE),
    ],
)
def test_what_does_not_fit_together_is_one_sentence(
    kind: type[Exception], said: str, call: Callable[[], Any], transformed: bool
) -> None:
    def calling(one: torch.Tensor) -> torch.Tensor:
        call()
        return one

    with pytest.raises(kind, match=re.escape(said)) as error:
        torch.func.vjp(calling, X) if transformed else call()
    words = str(error.value).replace("(...", "")
    assert "\n" not in words and ". " not in words


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("hidden_size is 24, no multiple of group_size, 7", {"group_size": 7}),
        ("hidden_size must be a whole number of at least 1, got 0", {"hidden_size": 0}),
        ("hidden_size must be a whole number of at least 1, got (8,)", {"hidden_size": (8,)}),
        ("activation must be one of silu, sigmoid, swish; got 'tanh'", {"activation": "tanh"}),
        ("norm_before_gate must be True or False, got None", {"norm_before_gate": None}),
        ("eps must be a number, got None", {"eps": None}),
    ],
)
def test_a_module_that_there_cannot_be_is_one_sentence(said: str, change: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        RMSNormGated(**{"hidden_size": D, **change})
    assert str(error.value) == said


def test_a_module_says_which_rows_and_gates_it_takes() -> None:
    norm = RMSNormGated(D, group_size=8)
    for given in ([torch.ones(3, 16)], [torch.ones(3, 16)] * 2):
        said = re.escape("weight must have shape (16,) or (8,), got")
        with pytest.raises(ValueError, match=said):
            norm(*given)
    with pytest.raises(ValueError, match="z must have x's shape"):
        norm(X, X[:2])
