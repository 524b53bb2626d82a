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

def override(*, target, description="", exact=False):
    def register(factory):
        registered[factory.__name__] = (target, exact, factory)
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
REGISTERED = """
from torchtitan.config import registered
target, exact, factory = registered["rms_norm"]
assert target is RMSNorm.Config and exact and factory is ours.rms_norm
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
((cls, made_of),) = registered.items()
assert cls is EagerNorm
weight = torch.randn(16)
torch.testing.assert_close(made_of(None, x, weight, 1e-3, 0.0), ours.norm(x, weight, 1e-3))
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
    with spmd.set_current_mesh(mesh), typecheck(local=local):
        rows = spmd.assert_type(torch.randn(4, 16).requires_grad_(), {group: placement})
        spmd.assert_type(norm.weight, {group: spmd.R})
        try:
            return spmd.get_local_type(norm(rows))
        except RuntimeError as error:
            return str(error).partition(". ")[0].partition(" on ")[0]

for placement in (spmd.S(0), spmd.S(1), spmd.R, spmd.P, spmd.V):
    for local in (True, False):
        wanted = types(RMSNorm(RMSNorm.Config(normalized_shape=16)), placement, local)
        found = ours.NormforgeRMSNorm.Config(normalized_shape=16)
        found = types(ours.NormforgeRMSNorm(found), placement, local)
        assert found == wanted, (placement, local, found, wanted)
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
    (tmp_path / "spmd_types.py").write_text(CHECKER)
    run(CHECK + REGISTERED + DECOMPOSED, tmp_path)
    (tmp_path / "spmd_types.py").write_text("raise ImportError")
    run(CHECK, tmp_path)


def test_it_fits_the_torchtitan_that_is_installed() -> None:
    pytest.importorskip(
        "torchtitan.models.common.nn_modules", reason="torchtitan 0.3 is not installed"
    )
    run(CHECK)


def test_types_are_those_of_torchtitans_norm() -> None:
    pytest.importorskip("torchtitan.models.common.nn_modules", reason="torchtitan is not installed")
    pytest.importorskip("spmd_types", reason="spmd_types is not installed")
    run(CHECK + TYPES)
