"""The override module for torchtitan, on a stand-in with the names that it uses, and on the real
one where that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from generator.paths import REPOSITORY

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
    assert type(found) is ours.RMSNorm.Config and isinstance(found, RMSNorm.Config)
    assert (found.normalized_shape, found.eps, found.param_init) == (16, 1e-6, init)
    norm, plain = ours.RMSNorm(found), RMSNorm(config)
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
"""


def run(program: str, *paths: Path) -> None:
    path = os.pathsep.join(map(str, (*paths, REPOSITORY)))
    environment = {**os.environ, "PYTHONPATH": path, "NORMFORGE_GPU": "h200"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_norms_of_a_config_become_the_packages(tmp_path: Path) -> None:
    common = tmp_path / "torchtitan" / "models" / "common"
    common.mkdir(parents=True)
    for folder in (common, common.parent, common.parent.parent):
        (folder / "__init__.py").touch()  # so that one that is installed does not come before
    (tmp_path / "torchtitan" / "config.py").write_text(CONFIG)
    (common / "nn_modules.py").write_text(NORMS)
    run(CHECK + REGISTERED, tmp_path)


def test_it_fits_the_torchtitan_that_is_installed() -> None:
    pytest.importorskip(
        "torchtitan.models.common.nn_modules", reason="torchtitan 0.3 is not installed"
    )
    run(CHECK)
