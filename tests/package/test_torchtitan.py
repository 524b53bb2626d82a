"""The override module for torchtitan, on a stand-in with the names that it uses, and on the real
one where that is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from generator.paths import REPOSITORY
from tests.support.fresh import INDUCTOR, run_fresh

CONFIG = """
from dataclasses import fields

registered = {}

names_of = {}

def override(*, target, description="", exact=False, fqns=None):
    def register(factory):
        registered[factory.__name__] = (target, exact, factory)
        names_of[factory.__name__] = fqns
        return factory
    return register

def derive(source, kind, **changes):
    names = [field.name for field in fields(kind)]
    return kind(**{name: getattr(source, name) for name in names} | changes)
"""
NORMS = """
from dataclasses import dataclass
import torch

class RMSNorm(torch.nn.RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config:
        normalized_shape: int
        eps: float = 1e-5
        elementwise_affine: bool = True
        param_init: dict | None = None

    def __init__(self, config):
        super().__init__(config.normalized_shape, config.eps, config.elementwise_affine)
"""
ROPE = """
from dataclasses import dataclass
import torch

class Rotary(torch.nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        max_seq_len: int
        theta: float = 10000.0

    def __init__(self, config):
        super().__init__()
        angles = torch.arange(config.max_seq_len)[:, None] * torch.linspace(0.1, 1, config.dim // 2)
        self.register_buffer("cache", self.of(angles), persistent=False)

    def _reshape_cache(self, query, positions=None):
        if positions is None:
            return self.cache[None, : query.shape[1], None]
        return self.cache[positions][:, :, None]

    def forward(self, query, key, positions=None):
        cache = self._reshape_cache(query, positions)
        return self.apply_rotary_emb(query, key, cache)

class ComplexRoPE(Rotary):
    @dataclass(kw_only=True, slots=True)
    class Config(Rotary.Config):
        pass

    @staticmethod
    def of(angles):
        return torch.polar(torch.ones_like(angles), angles)

    @staticmethod
    def apply_rotary_emb(query, key, cache):
        def turned(x):
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * cache).flatten(-2).type_as(x)

        return turned(query), turned(key)

class CosSinRoPE(Rotary):
    @dataclass(kw_only=True, slots=True)
    class Config(Rotary.Config):
        pass

    @staticmethod
    def of(angles):
        both = torch.cat((angles, angles), -1)
        return torch.cat((both.cos(), both.sin()), -1)

    @staticmethod
    def apply_rotary_emb(query, key, cache):
        def turned(x):
            (first, second), (cos, sin) = x.chunk(2, -1), cache.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        return turned(query), turned(key)
"""
ATTENTION = """
from dataclasses import dataclass
import torch

class GQAttention(torch.nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        qk_norm: object
        rope: object
"""
CHECK = """
import torch
from torchtitan.models.common.nn_modules import RMSNorm
import normforge.torchtitan as ours

init = {"weight": torch.nn.init.ones_}
for affine in (True, False):
    config = RMSNorm.Config(
        normalized_shape=16, eps=1e-6, elementwise_affine=affine, param_init=init
    )
    found = ours.rms_norm(config)
    assert type(found) is ours.NormforgeRMSNorm.Config and isinstance(found, RMSNorm.Config)
    assert (found.normalized_shape, found.eps, found.param_init) == (16, 1e-6, init)
    norm, plain = ours.NormforgeRMSNorm(found), RMSNorm(config)
    assert isinstance(norm, RMSNorm) and norm.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(4, 16, requires_grad=True)
    y = norm(x)
    assert "EagerNorm" in type(y.grad_fn).__name__  # the package's autograd node
    torch.testing.assert_close(y, plain(x))
"""
ROTATED = """
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

torch.manual_seed(0)
for plain, factory in ((ComplexRoPE, ours.complex_rope), (CosSinRoPE, ours.cos_sin_rope)):
    config = plain.Config(dim=16, max_seq_len=9)
    found = factory(config)
    assert isinstance(found, plain.Config) and found.max_seq_len == 9
    kind = vars(ours)[type(found).__qualname__.split(".")[0]]
    served, given = kind(found), plain(config)
    assert isinstance(served, plain) and served.state_dict().keys() == given.state_dict().keys()
    for positions in (None, torch.arange(5).expand(1, 5) + 2, torch.tensor([[1] * 5, [4] * 5])):
        q, k = (torch.randn(2, 5, heads, 16, requires_grad=True) for heads in (4, 2))
        y, wanted = served(q, k, positions), given(q, k, positions)
        assert ["RotaryNode" in type(one.grad_fn).__name__ for one in y] == [True, True]
        torch.testing.assert_close(y, wanted)
        dy = [torch.randn_like(one) for one in y]
        torch.testing.assert_close(
            torch.autograd.grad(y, (q, k), dy), torch.autograd.grad(wanted, (q, k), dy)
        )
        narrow = [one.detach().bfloat16() for one in (q, k)]
        assert {one.dtype for one in served(*narrow, positions)} == {torch.bfloat16}
"""
REPLACED = """
from torchtitan.models.common.attention import GQAttention
norm = RMSNorm.Config(normalized_shape=16)
for qk_norm, rope, kinds in (
    (norm, CosSinRoPE.Config(dim=16, max_seq_len=9), ("NormforgeRMSNorm", "NormforgeCosSinRoPE")),
    (None, ComplexRoPE.Config(dim=16, max_seq_len=9), ("None", "NormforgeComplexRoPE")),
    ("other", "another", ("str", "str")),
):
    found = ours.attention(GQAttention.Config(qk_norm=qk_norm, rope=rope))
    assert type(found) is ours.NormforgeAttention.Config
    for one, kind in zip((found.qk_norm, found.rope), kinds):
        assert type(one).__qualname__.removesuffix(".Config").removesuffix("Type") == kind, one
"""
REGISTERED = """
from torchtitan.config import registered
target, exact, factory = registered["rms_norm"]
assert target is RMSNorm.Config and exact and factory is ours.rms_norm
assert registered["attention"][:2] == (GQAttention.Config, True)
assert registered["complex_rope"][:2] == (ComplexRoPE.Config, True)
assert registered["cos_sin_rope"][:2] == (CosSinRoPE.Config, True)
from fnmatch import fnmatch
from torchtitan.config import names_of
model = "model_spec.model"
norms = ["norm", f"{model}.norm", "layers.0.ffn_norm", f"{model}.layers.7.attention_norm"]
others = ["layers.0.attention.qk_norm", f"{model}.tok_embeddings.norm", "layers.0.attention.q_norm"]
globs = names_of["block_norms"]
taken = [one for one in norms + others if any(fnmatch(one, each) for each in globs)]
assert taken == norms, taken
config = RMSNorm.Config(normalized_shape=16)
found = ours.block_norms(config)
assert type(found).__qualname__ != type(config).__qualname__  # what its log calls them
"""
CHECKER = """
registered = {}

def register_decomposition(cls, made_of):
    registered[cls] = made_of
"""
DECOMPOSED = """
from spmd_types import registered
from normforge.frontends.nodes import EagerNorm
from normforge.frontends.rope_node import RotatedNode
from normforge.frontends.rotary_node import RotaryNode
assert registered.keys() == {EagerNorm, RotaryNode, RotatedNode}
weight = torch.randn(16)
wanted = ours.norm(x, weight, 1e-3)
torch.testing.assert_close(registered[EagerNorm](None, x, weight, 1e-3, 0.0), wanted)
turns = torch.randn(2, 5, 1, 8), torch.randn(2, 5, 1, 8)
wanted = ours.apply_rope(q, *(one[:, :, 0] for one in turns), interleaved=True)
given = (q, *turns, 1.0, "*/rope+interleaved")
torch.testing.assert_close(registered[RotaryNode](*given), wanted)
wanted = ours.rms_norm_rope(q, weight, *(one[:, :, 0] for one in turns), 1e-3)
given = (q, weight, *turns, 1e-3, 0.0, "*/rope")
torch.testing.assert_close(registered[RotatedNode](*given), wanted)
"""
TYPES = """
import torch.distributed as dist
import spmd_types as spmd
from spmd_types.checker import typecheck
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
group = mesh.get_group("dp")

def types(norm, placement, local):
    return types_of(norm, norm.weight, [torch.randn(4, 16)], placement, local)

def types_of(module, scale, given, placement, local):
    with spmd.set_current_mesh(mesh), typecheck(local=local):
        given = [spmd.assert_type(x.requires_grad_(), {group: placement}) for x in given]
        spmd.assert_type(scale, {group: spmd.R})
        try:
            y = module(*given)
            return [spmd.get_local_type(one) for one in (y if isinstance(y, tuple) else [y])]
        except RuntimeError as error:
            return str(error).partition(". ")[0].partition(" on ")[0]

for placement in (spmd.S(0), spmd.S(1), spmd.R, spmd.P, spmd.V):
    for local in (True, False):
        wanted = types(RMSNorm(RMSNorm.Config(normalized_shape=16)), placement, local)
        found = ours.NormforgeRMSNorm.Config(normalized_shape=16)
        found = types(ours.NormforgeRMSNorm(found), placement, local)
        assert found == wanted, (placement, local, found, wanted)

def check_alike(found, wanted, *where):
    both_refuse = isinstance(found, str) and isinstance(wanted, str)
    assert found == wanted or both_refuse, (*where, found, wanted)

numbers = torch.polar(torch.ones(1, 5, 1, 8), torch.rand(1, 5, 1, 8))
halves = torch.cat([numbers.real] * 2 + [numbers.imag] * 2, -1)
for plain, cache in ((ours.ComplexRoPE, numbers), (ours.CosSinRoPE, halves)):
    for placement in (spmd.S(0), spmd.S(1), spmd.S(2), spmd.S(3), spmd.R, spmd.P, spmd.V):
        for local in (True, False):
            wanted, found = (
                types_of(way, cache, [torch.randn(2, 5, n, 16) for n in (4, 2)], placement, local)
                for way in (
                    lambda q, k: plain.apply_rotary_emb(q, k, cache),
                    lambda q, k: tuple(ours._rotated(x, *ours._turns_of(cache)) for x in (q, k)),
                )
            )
            check_alike(found, wanted, placement, local)

def turned(x):
    (cos, sin), _ = ours._turns_of(halves)
    return ours.rms_norm_rope(x, norm.weight, cos, sin)

for placement in (spmd.S(0), spmd.R, spmd.P, spmd.V):
    for local in (True, False):
        norm = ours.NormforgeRMSNorm(ours.NormforgeRMSNorm.Config(normalized_shape=16))
        found, wanted = (
            types_of(way, norm.weight, [torch.randn(2, 5, 4, 16)], placement, local)
            for way in (turned, norm)
        )
        check_alike(found, wanted, placement, local)
"""


JOINED = """
from dataclasses import dataclass
from unittest.mock import patch

from torchtitan.config import override
import sys
from torchtitan.models import llama3, qwen3
from torchtitan.protocols.module import Module

overrides = sys.modules["torchtitan.config.override"]

class Inner(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config):
        super().__init__()

    def forward(self, q, k, v, *, attention_masks=None, scale=None, enable_gqa=False):
        return q + (0.5 * k + v).repeat_interleave(q.shape[2] // k.shape[2], 2)

def layer_of(model, *names):
    config = model._debugmodel("flex")
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = Inner.Config()
    imports = [f"normforge.torchtitan.{name}" for name in names]
    overrides.apply_overrides(overrides.OverrideConfig(imports=imports), config)
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model.layers["0"]

def step(layer, positions):
    x = torch.randn(2, 9, 256, generator=torch.Generator().manual_seed(1))
    loss = layer(x, None, positions).square().mean()
    return [loss, *torch.autograd.grad(loss, list(layer.parameters()))]

def nodes_of(layer):
    y = layer(torch.randn(2, 9, 256), None)
    found, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [one for one, _ in node.next_functions]
    return sorted(n.name() for n in found if "Rotat" in n.name() or "Rotary" in n.name())

ways = (
    (llama3, ("rms_norm", "complex_rope"), ["RotaryNodeBackward"] * 2),
    (qwen3, ("rms_norm", "cos_sin_rope"), ["RotaryNodeBackward"] * 2),
    (qwen3, ("block_norms", "attention"), ["RotatedNodeBackward"] * 2),
    (llama3, ("block_norms", "attention"), ["RotaryNodeBackward"] * 2),
)
for model, names, nodes in ways:
    layer, plain = layer_of(model, *names), layer_of(model)
    layer.load_state_dict(plain.state_dict())
    assert nodes_of(layer) == nodes, (names, nodes_of(layer))
    for positions in (None, torch.arange(9).expand(1, 9) + 1, torch.arange(9).expand(2, 9) + 1):
        torch.testing.assert_close(step(layer, positions), step(plain, positions))
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(compiled, None), step(plain, None))

small = 0.05 * torch.randn(2, 9, 4, 32, dtype=torch.bfloat16)
norm = torch.nn.RMSNorm(32, eps=None, dtype=torch.bfloat16)
turns = torch.ones(1, 9, 16), torch.zeros(1, 9, 16)
torch.testing.assert_close(ours._normalized(small, norm, turns, False), norm(small))
wide, angles = small.float(), torch.randn(1, 9, 16)
turns, norm = (angles.cos(), angles.sin()), norm.float()
for interleaved in (False, True):
    wanted = ours.apply_rope(norm(wide), *turns, interleaved=interleaved)
    torch.testing.assert_close(ours._normalized(wide, norm, turns, interleaved), wanted)

import inspect

def names_of(kind):
    return [*inspect.signature(kind.forward).parameters]

# torchtitan finds layouts by the names of arguments.
for kind in (ours.NormforgeRMSNorm, ours.NormforgeAttention, ours.NormforgeComplexRoPE,
             ours.NormforgeCosSinRoPE):
    assert names_of(kind) == names_of(kind.__mro__[1]), kind

layer = layer_of(qwen3, "block_norms", "attention")
for part in (layer.attention.q_norm, layer.attention.k_norm, layer.attention.rope):
    seen = []
    for hook in (
        part.register_forward_hook(lambda *given: seen.append(given)),
        part.register_forward_pre_hook(lambda *given: seen.append(given)),
        torch.nn.modules.module.register_module_forward_hook(lambda *given: seen.append(given)),
    ):
        assert nodes_of(layer) == ["RotaryNodeBackward"] * 2 and seen
        hook.remove()
        seen.clear()
    for hook in (
        part.register_full_backward_hook(lambda *given: seen.append(given)),
        part.register_full_backward_pre_hook(lambda *given: seen.append(given)),
    ):
        layer(torch.randn(2, 9, 256), None).sum().backward()
        assert seen
        hook.remove()
        seen.clear()
    with patch.object(part, "forward", part.forward):  # as where torchtitan splits it over ranks
        assert nodes_of(layer) == ["RotaryNodeBackward"] * 2
assert nodes_of(layer) == ["RotatedNodeBackward"] * 2
layer.attention.k_norm = torch.nn.RMSNorm(layer.attention.k_norm.normalized_shape)
assert nodes_of(layer) == ["RotaryNodeBackward"] * 2

layer = layer_of(qwen3, "block_norms", "attention")
layer.attention.rope.cache = layer.attention.rope.cache[:, :64]  # of heads of other columns
try:
    layer(torch.randn(1, 9, 256), None)
    raise AssertionError
except RuntimeError as error:  # torchtitan's own
    assert "must match the size" in str(error), error
"""
PARALLEL = """
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
import torchtitan.tools.utils
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed import utils
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.attention import ScaledDotProductAttention

torchtitan.tools.utils.device_type = torchtitan.distributed.parallel_dims.device_type = "cpu"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

@dataclass
class Trainer:
    parallelism: ParallelismConfig

for backend in (ParallelismConfig().spmd_backend, "full_dtensor"):
    utils.set_spmd_backend(backend)
    sizes = {name: 1 for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size")}
    dims = ParallelDims(**sizes, spmd_backend=backend)
    dims.build_mesh()
    config = qwen3._debugmodel("flex")
    config.layers = config.layers[:1]
    config.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=Trainer(ParallelismConfig(spmd_backend=backend)))
    imports = [f"normforge.torchtitan.{name}" for name in ("block_norms", "attention")]
    overrides.apply_overrides(overrides.OverrideConfig(imports=imports), config)
    model = config.build()
    model.init_states()
    model.parallelize(dims)
    attention = model.layers["0"].attention
    assert "forward" in vars(attention.q_norm) and "forward" in vars(attention.rope)
    assert attention._is_joined() == (backend != "full_dtensor"), backend
    layouts = attention.q_norm._sharding_config
    for name in ("in_dst_shardings", "out_dst_shardings", "local_map"):
        with patch.object(layouts, name, "another"):
            assert not attention._is_joined(), name
"""
SPLIT = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def split(x, placement):
    return DTensor.from_local(x, mesh, [placement], run_check=False)

for plain, kind in (
    (ComplexRoPE, ours.NormforgeComplexRoPE), (CosSinRoPE, ours.NormforgeCosSinRoPE)
):
    config = plain.Config(dim=16, max_seq_len=12)
    served, given = (one(config) for one in (kind, plain))
    q, k = (torch.randn(2, 5, heads, 16, requires_grad=True) for heads in (4, 2))
    for module in (served, given):
        module.cache = split(module.cache, Replicate())
    local = plain(config)(q, k)
    for placement in (Shard(2), Replicate(), Shard(0)):
        y = served(split(q, placement), split(k, placement))
        assert all(one.placements == (placement,) for one in y)
        torch.testing.assert_close([one.to_local() for one in y], [*local])
        ends = (y[0].to_local(), local[0])
        of_both = [torch.autograd.grad(one.square().sum(), q, retain_graph=True) for one in ends]
        torch.testing.assert_close(*of_both)
    unequal = DTensor.from_local(
        q, mesh, [Shard(2)], run_check=False, shape=(2, 5, 7, 16), stride=(560, 112, 16, 1)
    )
    assert served(unequal, unequal)[0].shape == unequal.shape  # another rank has three
    with patch.object(ours, "apply_rope", None):  # it is not called
        for placement in (Shard(1), Shard(3), Partial()):
            columns = 8 if placement == Shard(3) else 16
            try:
                served(*(split(one[..., :columns], placement) for one in (q, k)))
            except Exception as error:
                assert "NoneType" not in str(error), error
"""


def run(program: str, *paths: Path) -> None:
    where = (paths or (REPOSITORY,))[0]
    how = {"imported": INDUCTOR, "NORMFORGE_GPU": "h200"}
    done = run_fresh(program, where, [*paths, REPOSITORY], **how)
    assert done.returncode == 0, done.stderr[-3000:]


def test_norms_of_a_config_become_the_packages(tmp_path: Path) -> None:
    common = tmp_path / "torchtitan" / "models" / "common"
    common.mkdir(parents=True)
    for folder in (common, common.parent, common.parent.parent):
        (folder / "__init__.py").touch()  # so that one that is installed does not come before
    (tmp_path / "torchtitan" / "config.py").write_text(CONFIG)
    (common / "nn_modules.py").write_text(NORMS)
    (common / "rope.py").write_text(ROPE)
    (common / "attention.py").write_text(ATTENTION)
    (tmp_path / "spmd_types.py").write_text(CHECKER)
    run(CHECK + ROTATED + REPLACED + REGISTERED + DECOMPOSED, tmp_path)
    (tmp_path / "spmd_types.py").write_text("raise ImportError")
    run(CHECK, tmp_path)


def test_it_fits_the_torchtitan_that_is_installed() -> None:
    pytest.importorskip(
        "torchtitan.models.common.nn_modules", reason="torchtitan 0.3 is not installed"
    )
    run(CHECK + ROTATED)


def test_layers_of_torchtitan_compute_the_same() -> None:
    pytest.importorskip("torchtitan.models.qwen3", reason="torchtitan 0.3 is not installed")
    run(CHECK + JOINED)


def test_attention_is_joined_also_where_torchtitan_has_wrapped_it() -> None:
    """It does so by default, on one rank, too."""
    pytest.importorskip("torchtitan.models.qwen3", reason="torchtitan 0.3 is not installed")
    run(CHECK + JOINED.partition("ways = (")[0] + PARALLEL)


def test_heads_that_are_split_over_ranks_are_rotated_where_they_are() -> None:
    pytest.importorskip("torchtitan.models.common.rope", reason="torchtitan 0.3 is not installed")
    run(CHECK + ROTATED + "from unittest.mock import patch\n" + SPLIT)


def test_types_are_those_of_torchtitans_norm() -> None:
    pytest.importorskip("torchtitan.models.common.nn_modules", reason="torchtitan is not installed")
    pytest.importorskip("spmd_types", reason="spmd_types is not installed")
    run(CHECK + TYPES)
