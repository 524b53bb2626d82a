"""Overrides for torchtitan: its RMSNorm and its rotary embeddings, alone or together in attention,
by the kernels of `normforge`.

    torchtitan_train ... --override.imports normforge.torchtitan.rms_norm

replaces every `RMSNorm` in the config of the trainer. `complex_rope` beside it replaces the rotary
embedding of Llama 3 and DeepSeek V3, `cos_sin_rope` that of gpt-oss. In Qwen 3, whose queries and
keys are normalized and rotated by one kernel, `attention` and `block_norms` replace all of it.
torchtitan refuses an override of what is inside another one, such as `rms_norm` beside `attention`.

Parameters, state dicts, initialisation and sharding stay as they are. With
`debug.spmd_typechecking`, results have the types of PyTorch's, unless `use_native()` was called.
Written for torchtitan 0.3, whose overrides are described in its torchtitan/overrides/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.nn_modules import RMSNorm as TorchtitanNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

from normforge import apply_rope, rms_norm_rope
from normforge import rms_norm as norm
from normforge.frontends import rope_node, rotary_node
from normforge.frontends.nodes import EagerNorm
from normforge.frontends.tried import has_hooks

try:
    from spmd_types import register_decomposition
except ImportError:  # nobody checks types
    register_decomposition = None

Turns = tuple[torch.Tensor, torch.Tensor]
"""cos and sin of every token, (1 or B, S, D / 2)."""


class NormforgeRMSNorm(TorchtitanNorm):
    """torchtitan's RMSNorm, with `normforge.rms_norm` in the place of PyTorch's function."""

    @dataclass(kw_only=True, slots=True)
    class Config(TorchtitanNorm.Config):
        """The fields of torchtitan's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = norm(x, self.weight, self.eps)
        return y

    # torchtitan finds layouts by the names of arguments, which differ from PyTorch to PyTorch.
    forward.__signature__ = signature(TorchtitanNorm.forward)  # type: ignore[attr-defined]


@override(
    target=TorchtitanNorm.Config, exact=True, description="RMSNorm by the kernels of normforge"
)
def rms_norm(config: Any) -> NormforgeRMSNorm.Config:
    """The config of the norm that takes the place of one of torchtitan's."""
    found: NormforgeRMSNorm.Config = derive(config, NormforgeRMSNorm.Config)
    return found


@override(
    target=TorchtitanNorm.Config,
    exact=True,
    fqns=["norm", "*.model.norm", "*.attention_norm", "*.ffn_norm"],
    description="RMSNorm outside attention, by the kernels of normforge",
)
def block_norms(config: Any) -> NormforgeRMSNorm.Config:
    """The config of the norm that takes the place of one outside attention."""
    return rms_norm(config)


def _turns_of(cache: torch.Tensor) -> tuple[Turns, bool]:
    """Return cos and sin in a cache of the tokens of heads (1 or B, S, 1, columns), and whether it
    rotates neighbours: one of complex numbers does. Another one holds both halves of cos, which are
    the same, and those of sin."""
    if cache.is_complex():
        parts = torch.view_as_real(cache.squeeze(2))
        return (parts[..., 0].contiguous(), parts[..., 1].contiguous()), True
    cos, _, sin, _ = cache.squeeze(2).chunk(4, -1)
    return (cos, sin), False


def _cache_of(rope: Any, x: torch.Tensor, positions: torch.Tensor | None) -> Any:
    """Return the cache of the tokens of heads, as torchtitan broadcasts it, and that of the tokens
    of this rank, None where it is no such cache, or not of whole heads."""
    cache = rope._reshape_cache(x, positions)
    mine = cache.to_local() if isinstance(cache, DTensor) else cache
    B, S, _, D = (x.to_local() if isinstance(x, DTensor) else x).shape
    fits = mine.shape[0] in (1, B) and mine.shape[1:3] == (S, 1)
    fits = fits and mine.shape[3] == (D // 2 if mine.is_complex() else 2 * D)
    if isinstance(x, DTensor) and any(one.is_partial() for one in x.placements):
        fits = False
    return cache, mine if fits else None


def _rotated(x: torch.Tensor, turns: Turns, interleaved: bool) -> torch.Tensor:
    """Rotate heads (B, S, H, D), of a DTensor those of this rank."""
    if not isinstance(x, DTensor):
        return apply_rope(x, *turns, interleaved=interleaved)
    mine = apply_rope(x.to_local(), *turns, interleaved=interleaved)
    like = torch.empty(x.shape, device="meta")  # ranks may have unequally many
    return DTensor.from_local(
        *(mine, x.device_mesh, x.placements),
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _rotate(rope: Any, query: Any, key: Any, positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the forward of a rotary embedding of torchtitan."""
    cache, mine = _cache_of(rope, query, positions)
    if mine is None:
        both: tuple[torch.Tensor, torch.Tensor] = rope.apply_rotary_emb(query, key, cache)
        return both
    turns = _turns_of(mine)
    return _rotated(query, *turns), _rotated(key, *turns)


class NormforgeComplexRoPE(ComplexRoPE):
    """torchtitan's rotary embedding by complex numbers, with `normforge.apply_rope` in its
    place."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        """The fields of torchtitan's."""

    def forward(self, query: Any, key: Any, positions: Any = None) -> Any:
        return _rotate(self, query, key, positions)


@override(
    target=ComplexRoPE.Config,
    exact=True,
    description="rotary embedding by complex numbers, by the kernels of normforge",
)
def complex_rope(config: Any) -> NormforgeComplexRoPE.Config:
    """The config of the rotary embedding that takes the place of one by complex numbers."""
    found: NormforgeComplexRoPE.Config = derive(config, NormforgeComplexRoPE.Config)
    return found


class NormforgeCosSinRoPE(CosSinRoPE):
    """torchtitan's rotary embedding of halves, with `normforge.apply_rope` in its place."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """The fields of torchtitan's."""

    def forward(self, query: Any, key: Any, positions: Any = None) -> Any:
        return _rotate(self, query, key, positions)


@override(
    target=CosSinRoPE.Config,
    exact=True,
    description="rotary embedding of halves, by the kernels of normforge",
)
def cos_sin_rope(config: Any) -> NormforgeCosSinRoPE.Config:
    """The config of the rotary embedding that takes the place of one of halves."""
    found: NormforgeCosSinRoPE.Config = derive(config, NormforgeCosSinRoPE.Config)
    return found


class NormforgeAttention(GQAttention):
    """torchtitan's attention, with `normforge.rms_norm_rope` in the place of the norms of queries
    and keys and their rotary embedding. Where these are other modules, have hooks, or get and give
    tensors of other layouts, each runs by itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """The fields of torchtitan's."""

    # The name of the first argument is that of torchtitan's layouts.
    def forward(self, x_BLD: Any, attention_masks: Any, positions: Any = None) -> Any:
        if not self._is_joined():
            return super().forward(x_BLD, attention_masks, positions)
        query, key, value = self.qkv_linear(x_BLD)
        _, cache = _cache_of(self.rope, query, positions)
        if cache is None:  # torchtitan says why
            query, key = self.rope(self.q_norm(query), self.k_norm(key), positions)
        else:
            turns = _turns_of(cache)
            query = _normalized(query, self.q_norm, *turns)
            key = _normalized(key, self.k_norm, *turns)
        mixed = self.inner_attention(
            *(query, key, value),
            attention_masks=attention_masks,
            scale=self.scaling,
            enable_gqa=self.enable_gqa,
        )
        return self.wo(mixed.contiguous().flatten(2))

    def _is_joined(self) -> bool:
        norms = (self.q_norm, self.k_norm)
        if type(self.rope) not in _ROTATIONS or any(type(n) is not NormforgeRMSNorm for n in norms):
            return False
        if any(isinstance(one.weight, DTensor) for one in norms):
            return False
        return all(map(_does_no_more, (*norms, self.rope)))


def _normalized(x: Any, norm: Any, turns: Turns, interleaved: bool) -> torch.Tensor:
    eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps  # as in rms_norm
    return rms_norm_rope(x, norm.weight, *turns, eps, interleaved=interleaved)


def _does_no_more(part: Any) -> bool:
    """Return True if a module's call is its forward: nobody has hooks, and what `parallelize` has
    wrapped it in, as torchtitan does by default, leaves its tensors as they are."""
    if has_hooks(part) or ("forward" in part.__dict__ and not part._parallelized):
        return False
    layouts = part._sharding_config
    if layouts is None:
        return True
    ends = (
        (layouts.in_src_shardings, layouts.in_dst_shardings),
        (layouts.out_src_shardings, layouts.out_dst_shardings),
    )
    return layouts.local_map is None and all(dst in (None, src) for src, dst in ends)


_ROTATIONS = (NormforgeComplexRoPE, NormforgeCosSinRoPE)


@override(
    target=GQAttention.Config,
    exact=True,
    description="norms of queries and keys and their rotary embedding, by the kernels of normforge",
)
def attention(config: Any) -> NormforgeAttention.Config:
    """The config of the attention that takes the place of one of torchtitan's, and of what is in
    it."""
    replaced = {name: _replaced(getattr(config, name)) for name in ("qk_norm", "rope")}
    found: NormforgeAttention.Config = derive(config, NormforgeAttention.Config, **replaced)
    return found


def _replaced(config: Any) -> Any:
    """Return the config that takes the place of one, or itself where it is of another class."""
    factories = {
        TorchtitanNorm.Config: rms_norm,
        ComplexRoPE.Config: complex_rope,
        CosSinRoPE.Config: cos_sin_rope,
    }
    factory = factories.get(type(config))
    return config if factory is None else factory(config)


def _pytorchs(
    _: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float | None, __: float
) -> torch.Tensor:
    """Compute a node of `rms_norm`, by the function that the checker of types knows."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


if register_decomposition is not None:
    register_decomposition(EagerNorm, _pytorchs)
    register_decomposition(rotary_node.RotaryNode, rotary_node.by_formula)
    register_decomposition(rope_node.RotatedNode, rope_node.by_formula)
