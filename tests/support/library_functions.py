"""The functions of the library whose gradients have kernels of their own, each as a function of
leaves; and rotated norms as code of models has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from normforge import apply_rope, qk_norm_rope, rms_norm_gated, rms_norm_quantized, rms_norm_rope
from normforge.frontends import gated_node, quantized_node, rope_node, rotary_node
from normforge.frontends.rope_packed import qk_norm_rope_backward, qk_norm_rope_forward
from normforge.operations import FORMATS, OPERATIONS, RowOperation
from normforge.serve.rows import RowServer

EPS = 1e-3
B, D, GROUP = 2, 24, 8
HEAD, HEADS = 8, (4, 2)
KINDS = list(itertools.product(("silu", "sigmoid"), (True, False)))
"""Activations of a gate, and whether the norm comes before it."""
GROUPS = {
    "whole rows": (None, D),
    "groups": (GROUP, D),
    "one weight for all groups": (GROUP, GROUP),
}
"""The size of a group, and of the weight."""


def turns(
    *shape: int, dtype: torch.dtype = torch.float64, columns: int = HEAD
) -> list[torch.Tensor]:
    """cos and sin of random angles, the same for both halves of the columns that are rotated."""
    angles = torch.randn(*shape, columns // 2, generator=torch.manual_seed(7), dtype=torch.float64)
    whole = torch.cat((angles, angles), -1)
    return [whole.cos().to(dtype), whole.sin().to(dtype)]


@dataclass(frozen=True)
class Function:
    """One of the functions. run: gives its results, of which the last has gradients; shapes: those
    of its leaves, for a number of tokens; functions: what serves it in plain eager code; operators:
    those in the graph of a step; calls: what these ask `functions` for; turned: whether it takes
    cos and sin behind the leaves."""

    run: Callable[..., tuple[torch.Tensor, ...]]
    shapes: Callable[[int], list[tuple[int, ...]]]
    functions: Any
    operators: tuple[Any, ...]
    calls: tuple[str, ...] = ("forward", "backward")
    turned: bool = False

    def leaves(self, rows: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rows)
        made = [
            torch.randn(shape, generator=generator)
            if len(shape) > 1
            else torch.rand(shape, generator=generator) + 0.5
            for shape in self.shapes(rows)
        ]
        return [one.to(dtype).requires_grad_() for one in made]

    def rest(self, rows: int = 3, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return turns(1, rows, dtype=dtype) if self.turned else []

    def y(self, *given: torch.Tensor) -> torch.Tensor:
        return self.run(*given)[-1]


def gated(activation: str, norm_before_gate: bool, group: int | None, width: int) -> Function:
    def run(x: Any, z: Any, weight: Any) -> tuple[torch.Tensor, ...]:
        return (rms_norm_gated(x, z, weight, EPS, activation, norm_before_gate, group),)

    return Function(
        run,
        lambda rows: [(B, rows, D), (B, rows, D), (width,)],
        gated_node.SERVED("*/gated"),
        (gated_node.rms_norm_gated_backward,),
        ("backward",),
    )


def quantized(form: str) -> Function:
    def run(x: Any, weight: Any) -> tuple[torch.Tensor, ...]:
        return rms_norm_quantized(x, weight, EPS, format=form, keep_y=True)

    return Function(
        run,
        lambda rows: [(B, rows, 128), (128,)],
        quantized_node.SERVED("*/quantized"),
        (quantized_node.rms_norm_quantized_forward, quantized_node.rms_norm_quantized_backward),
    )


ROPE = Function(
    lambda x, weight, cos, sin: (rms_norm_rope(x, weight, cos, sin, EPS),),
    lambda rows: [(B, rows, 4, HEAD), (HEAD,)],
    rope_node.SERVED("*/rope"),
    (rope_node.rms_norm_rope_forward, rope_node.rms_norm_rope_backward),
    turned=True,
)
NEIGHBOURS = Function(
    lambda x, weight, cos, sin: (
        rms_norm_rope(x, weight, cos[..., :2], sin[..., :2], EPS, 4, interleaved=True),
    ),
    lambda rows: [(B, rows, 4, HEAD), (HEAD,)],
    rope_node.SERVED("*/rope+interleaved"),
    (rope_node.rms_norm_rope_forward, rope_node.rms_norm_rope_backward),
    turned=True,
)
PROJECTION = Function(
    lambda *given: (torch.cat(qk_norm_rope(*given, HEADS, EPS), -2),),
    lambda rows: [(B, rows, 8 * HEAD), (HEAD,), (HEAD,)],
    rope_node.SERVED("*/rope"),
    (qk_norm_rope_forward, qk_norm_rope_backward),
    ("forward", "forward", "backward", "backward"),
    turned=True,
)
ROTARY = Function(
    lambda x, cos, sin: (apply_rope(x, cos, sin),),
    lambda rows: [(B, rows, 4, HEAD)],
    rope_node.SERVED("*/rope"),
    (rotary_node.rope, rotary_node.rope),
    ("rotate", "rotate"),
    turned=True,
)
GATED = {
    f"{activation}, {'norm' if before else 'gate'} first, {groups}": gated(
        activation, before, *GROUPS[groups]
    )
    for (activation, before), groups in itertools.product(KINDS, GROUPS)
}
FUNCTIONS = {
    **GATED,
    **{"rope": ROPE, "neighbours": NEIGHBOURS, "projection": PROJECTION, "rotary": ROTARY},
    **{form: quantized(form) for form in FORMATS},
}
ONE_OF_EACH = ["silu, norm first, whole rows", "rope", "projection", *FORMATS, "rotary"]


def gradients(
    run: Callable[..., torch.Tensor], leaves: list[torch.Tensor], rest: Any = ()
) -> list[torch.Tensor]:
    return list(torch.autograd.grad(run(*leaves, *rest).float().square().sum(), leaves))


def check_rounded_once(
    norm: Callable[..., torch.Tensor],
    written: Callable[..., torch.Tensor],
    leaves: list[torch.Tensor],
) -> None:
    """Assert that y, and each gradient, is what `written` gives in float64, rounded once to the
    dtype of x, or of its leaf."""
    y, dtype = norm(*leaves), leaves[0].dtype
    exact = [one.detach().double().requires_grad_() for one in leaves]
    wanted = written(*exact)
    dy = torch.randn(y.shape, dtype=dtype)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    others = [wanted, *torch.autograd.grad(wanted, exact, dy.double())]
    for one, other, like in zip(found, others, [leaves[0], *leaves], strict=True):
        assert one.dtype == like.dtype
        slack = torch.finfo(one.dtype).eps / 2 * 1.01
        least = 1e-6 if one is y else 1e-5
        assert ((one.double() - other).abs() <= other.abs() * slack + least).all()


class Kernels:
    """Stands in for a server with kernels, by the formula, and keeps what it was given."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        operation: RowOperation = OPERATIONS[name]
        self._name, self._server, self._seen = name, RowServer(operation, "no kernels"), seen

    def is_without_kernels(self, x: torch.Tensor) -> bool:
        return False

    def __call__(self, tensors: Any, *offset: float, **how: Any) -> Any:
        self._seen.append((self._name, tensors))
        return self._server(tensors, *offset, **how)


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return x, and a weight for its rows."""
    torch.manual_seed(sum(shape))
    made = [torch.randn(*shape, dtype=dtype), torch.rand(shape[-1], dtype=dtype) + 0.5]
    return [one.requires_grad_() for one in made]


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Return the columns of each pair as code of models has them."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotated(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Return heads whose first columns are rotated, as code of models has it."""
    n, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:  # torchtitan's complex form
        half = cos.shape[-1] // 2
        of_pairs = torch.complex(cos[..., :half], sin[..., :half]).unsqueeze(-2)
        turned = torch.view_as_complex(n.unflatten(-1, (half, 2)).contiguous()) * of_pairs
        return torch.cat((torch.view_as_real(turned).flatten(-2), rest), -1)
    return torch.cat((n * cos.unsqueeze(-2) + rotate_half(n) * sin.unsqueeze(-2), rest), -1)


def rotated_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = EPS,
    interleaved: bool = False,
    offset: float = 0.0,
    heads: int | None = None,
) -> torch.Tensor:
    """Return the norm with the rotation behind it. heads: how many a row has, as in OLMo."""
    n = functional.rms_norm(x, x.shape[-1:], weight + offset, eps)
    n = n if heads is None else n.unflatten(-1, (heads, -1))
    return rotated(n, cos, sin, interleaved).reshape(x.shape)


def repeated(batch: int, tokens: int) -> list[tuple[int, ...]]:
    """Return the shapes of numbers that are repeated for some of (batch, tokens)."""
    return [(batch, tokens), (1, tokens), (tokens,), (batch, 1), (1, 1), (1,), ()]
