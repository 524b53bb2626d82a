"""RMSNorm of heads with the rotary embedding behind it: the functions of a package of it or its
backward, or of those of all GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..operations import RMSNORM_ROPE_BACKWARD, RMSNORM_ROPE_FORWARD, ROPE, ROTATED
from ..serve.checks import explained
from ..serve.options import SMALLEST_EPS
from ..shape_names import rotation_name
from ..torch_internals import float_of, served_dtype
from .rope_checks import (
    check_heads,
    check_rotary_dim,
    check_rotated,
    checked_heads,
    columns_of,
    turns_of,
)
from .rope_node import Gradients, PackedGradients, formula, gradients_by_formula, rotated_norm
from .rope_packed import packed_norms, parts_of
from .rotary import RotaryFunctions
from .row_functions import OneOperation


class RotatedFunctions(RotaryFunctions):
    """The functions of RMSNorm with the rotary embedding, and of this alone. Safe to use from
    several threads."""

    with_norms = True
    """True where `explain` speaks of norms if it is not told."""

    def explain(
        self,
        M: int,
        N: int,
        dtype: str | torch.dtype,
        weight_dtype: str | torch.dtype = "",
        *,
        forward: bool = False,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        offset: bool = False,
        heads: int | None = None,
        norm: bool | None = None,
    ) -> dict[str, Any]:
        """Say which kernel serves the backward (or the forward) of M aligned heads of N columns
        ("bf16", "fp16" or "fp32"), and why. rotary_dim, interleaved: as of `rms_norm_rope`; offset:
        whether the calls have a weight_offset; heads: of M rows of N columns, how many heads each
        is, as there; norm: False for `apply_rope`, whose directions have one kernel, which is what
        a package of that says by itself. Raises TypeError or ValueError for what no call is."""
        norm = self.with_norms if norm is None else norm
        if heads is not None:
            check_heads(N, heads, rotary_dim)
        elif rotary_dim is not None:
            check_rotary_dim(N, rotary_dim)
        names = explained(M, N, dtype, weight_dtype)
        if not norm and (heads is not None or offset):
            raise ValueError("apply_rope has no weight_offset, and no heads that a norm joins")
        operation = RMSNORM_ROPE_FORWARD if forward else RMSNORM_ROPE_BACKWARD
        server = self.server(operation if norm else ROPE)
        rotated = columns_of(N, rotary_dim, heads)
        rotation = rotation_name(rotated, N, interleaved, heads is not None)
        of_weight = names[1] if norm else ""  # there is none
        return server.explain(M, N, names[0], of_weight, rotation=rotation, offset=offset)

    def rms_norm_rope(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float = 1e-6,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        weight_offset: float = 0.0,
        heads: int | None = None,
    ) -> torch.Tensor:
        """Compute n * cos + rotate_half(n) * sin with n = norm(x) * (weight + weight_offset), as
        attention does with its queries and keys in Qwen 3 and Gemma 3, and with `heads` in OLMo 2
        and 3. Differentiable in x and weight.

        Both directions are kernels where such were tuned, else the formula in PyTorch. Under
        torch.compile both are operators. Works under autocast (which changes nothing here),
        activation checkpointing and CUDA graphs. Second derivatives, torch.func and tensor
        subclasses use PyTorch's operators.

        Args:
            x: (..., H, D), bf16, fp16 or fp32: H heads of each token. Heads of a packed projection
                are read where they lie. With `heads`, (..., heads * D): tokens.
            weight: (D,), or (heads * D,) with `heads`, or None for ones. Its gradient has its
                dtype.
            cos, sin: (..., R), or (..., R / 2) for the first half of the columns, which is read
                alone: that of the second half is the same. Their other dimensions are those of the
                tokens, or 1 where they are repeated. They have no gradient.
            eps: added to the mean square. Below 2^-96 the backward is PyTorch's operators.
            rotary_dim: R, how many columns are rotated: the first ones. Those behind them are n, as
                in Qwen3-Next. None for all D.
            interleaved: whether columns 2i and 2i + 1 are a pair, as in GPT-J and in torchtitan's
                complex form, and not i and i + R / 2. cos and sin are the same: a number for each
                pair, or as many again behind these, which are not read.
            weight_offset: added to the weight in fp32, for models that store w - 1, such as Gemma.
            heads: how many heads a row of x is. The norm is of all its columns, as in OLMo 2 and 3,
                and each head is rotated, all D columns of it. None for rows that are one head.

        Returns:
            y in x's shape and dtype, computed in fp32 and rounded once.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        eps = float_of(eps)
        heads = int(heads) if isinstance(heads, torch.SymInt) else heads
        check_rotated(x, weight, cos, sin, eps, rotary_dim, interleaved, heads)
        weight, joined = served_dtype(weight, x), heads is not None
        of_turns = turns_of(x, cos, sin, columns_of(x.shape[-1], rotary_dim, heads))
        rest = (*of_turns, eps, float(weight_offset), self.form_named(joined, interleaved))
        if not joined:
            return rotated_norm(x, weight, *rest)
        return rotated_norm(x.unsqueeze(-2), weight, *rest).squeeze(-2)

    def qk_norm_rope(
        self,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        heads: tuple[int, int],
        eps: float = 1e-6,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        weight_offset: float = 0.0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute `rms_norm_rope` of the queries and of the keys in a packed projection, without a
        copy of them. Differentiable in qkv and the weights; the gradients of q, k and v are written
        where they lie in that of qkv.

        Args:
            qkv: (..., (Hq + 2 * Hkv) * D): the heads of the queries, of the keys, and of the
                values.
            q_weight, k_weight: (D,), or None for ones.
            cos, sin: as of `rms_norm_rope`.
            heads: Hq and Hkv.
            eps, rotary_dim, interleaved, weight_offset: as of `rms_norm_rope`.

        Returns:
            q of shape (..., Hq, D), k of (..., Hkv, D), and v, a view of qkv, of (..., Hkv, D).

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        of_queries, of_keys = checked_heads(qkv, heads)
        eps = float_of(eps)
        q, k, _ = parts_of(qkv, of_queries, of_keys)
        check_rotated(q, q_weight, cos, sin, eps, rotary_dim, interleaved)
        check_rotated(k, k_weight, cos, sin, eps, rotary_dim)
        weights = (served_dtype(q_weight, qkv), served_dtype(k_weight, qkv))
        of_turns = turns_of(q, cos, sin, columns_of(q.shape[-1], rotary_dim))
        rest = (
            of_queries,
            of_keys,
            eps,
            float(weight_offset),
            self.form_named(interleaved=interleaved),
        )
        return packed_norms(qkv, *weights, *of_turns, *rest)

    def serves(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        rotation: str,
        offset: bool,
        trains: bool,
    ) -> bool:
        """Return True if there are kernels for rows like x, which may be a fake of sizes that
        tracing does not know. rotation: as shape_names.py has it; trains: backwards, too."""
        directions = (RMSNORM_ROPE_FORWARD, RMSNORM_ROPE_BACKWARD)[: 1 + trains]
        return self.have_kernels(x, weight, directions, offset=offset, rotation=rotation)

    def forward(self, *given: Any) -> torch.Tensor:
        """Return y without gradients, of arguments as of RotatedNorms."""
        x, weight, cos, sin, eps, offset = given
        server = self.server(RMSNORM_ROPE_FORWARD)
        tensors = {"x": x, "weight": weight, "cos": cos, "sin": sin, "eps": eps, **self.flags}
        if server.is_without_kernels(x):
            server.count_call(x, tensors, offset)
            with torch.no_grad():
                return formula(x, weight, cos, sin, eps, offset, **self.flags)
        return server(tensors, offset)["y"]

    def backward(self, *given: Any, into: torch.Tensor | None = None) -> Gradients:
        """Return dx and dw, of arguments as of RotatedNorms. into: where dx is to be written."""
        dy, x, weight, cos, sin, eps, offset = given
        server = self.server(RMSNORM_ROPE_BACKWARD)
        tensors = {"x": x, "dy": dy, "weight": weight, "cos": cos, "sin": sin, "eps": eps}
        tensors |= self.flags
        served = eps >= SMALLEST_EPS
        if served and server.is_without_kernels(x):
            server.count_call(x, tensors, offset)
            served = False
        if not served:
            with torch.no_grad():
                rest = (cos, sin, eps, offset)
                dx, dw = gradients_by_formula(dy, x, weight, *rest, **self.flags)
                return dx if into is None else into.copy_(dx), dw
        found = server(tensors, offset, into={} if into is None else {"dx": into})
        return found["dx"], None if weight is None else found["dw"]

    def forward_packed(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return q and k without gradients, of arguments as of `packed_norms`."""
        qkv, q_weight, k_weight, cos, sin, of_queries, of_keys, *numbers = given
        q, k, _ = parts_of(qkv, of_queries, of_keys)
        turned = self.forward(q, q_weight, cos, sin, *numbers)
        return turned, self.forward(k, k_weight, cos, sin, *numbers)

    def backward_packed(self, *given: Any) -> PackedGradients:
        """Return the gradients of q, k and v where they lie in that of qkv, and those of the
        weights, of dq, dk, dv and arguments as of `packed_norms`."""
        dq, dk, dv, qkv, q_weight, k_weight, cos, sin, *heads, eps, offset = given
        with torch.no_grad():
            made = qkv.new_empty(qkv.shape)
            (q, k, _), (to_q, to_k, to_v) = parts_of(qkv, *heads), parts_of(made, *heads)
            _, of_q = self.backward(dq, q, q_weight, cos, sin, eps, offset, into=to_q)
            _, of_k = self.backward(dk, k, k_weight, cos, sin, eps, offset, into=to_k)
            to_v.copy_(dv)
        return made, of_q, of_k


class RotatedPackage(RotatedFunctions):
    """The functions of a package of RMSNorm with the rotary embedding, or of its backward. The
    other direction is PyTorch's operators in it. Making one compiles nothing and does not touch
    CUDA."""

    def __init__(self, of: Path, name: str = "") -> None:
        """Raises ValueError for a damaged package and one of another operation, OSError for
        none."""
        what = "RMSNorm with the rotary embedding, nor of its backward"
        self._kernels = OneOperation(of, ROTATED, what)
        super().__init__(self._kernels.source_for(name or str(of)), name or str(of))
        self.with_norms = self._kernels.operation != ROPE.name

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        return self._kernels.provenance
