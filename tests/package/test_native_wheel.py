"""A wheel with the extension of `use_native()`, which needs no compiler where it is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from normforge.native import build


def python(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code, or a module with its arguments, in another process."""
    return subprocess.run(
        [sys.executable, *(["-m", *code.split()] if code.startswith("pip ") else ["-c", code])],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


BUILD = "from setuptools import build_meta; build_meta.build_wheel('.')"


def test_what_it_needs_is_said_when_it_is_asked_for(wheel_sources: Path) -> None:
    hidden = "import sys; sys.modules['torch'] = None; "
    for_cpu = "import torch; torch.version.cuda = None; "
    for asked, code, environment, sentence in (
        ("1", hidden + BUILD, {}, "the PyTorch that is installed (import of torch halted"),
        ("1", for_cpu + BUILD, {}, "this PyTorch is not for CUDA: build with one that is"),
        ("cpu", BUILD, {"CXX": "no-such-compiler"}, "a C++ compiler, and there is no no-such-comp"),
    ):
        done = python(code, wheel_sources, NORMFORGE_NATIVE=asked, **environment)
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and not list(wheel_sources.glob("*.whl"))
        assert last.startswith(f"NORMFORGE_NATIVE={asked}") and sentence in last


USE = """
import torch
from importlib import import_module
{change}
packages = [
    import_module("normforge.generated.h200." + name)._package
    for name in ("rmsnorm_backward", "rmsnorm_invariant_backward")
]
for package in packages:
    package._start_native(None, (0, 0, 0, 0))
    norm = package.RMSNorm(64)
    norm(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert norm.weight.grad is not None
maps = open("/proc/self/maps").read().split()
print(*sorted({{path for path in maps if "/native_" in path}}))
"""
"""Loads the extension as on a GPU, where nothing is launched: all goes on to Python."""


@pytest.mark.slow
def test_extension_of_the_wheel_is_loaded_where_it_fits(
    wheel_sources: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pip")
    try:
        build._compiler(), build._arguments()
    except RuntimeError as error:
        pytest.skip(str(error))
    left = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    stale = wheel_sources / "build" / left / "normforge" / "native" / "native_0.so"
    stale.parent.mkdir(parents=True)
    stale.touch()  # a build for another PyTorch left it
    offline = "--no-index --no-deps --no-cache-dir"
    wheel_of = f"pip wheel --no-build-isolation {offline} -w {tmp_path} {wheel_sources}"
    done = python(wheel_of, tmp_path, NORMFORGE_NATIVE="cpu")
    assert done.returncode == 0, done.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    assert f"cp{sys.version_info.major}{sys.version_info.minor}" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    site = tmp_path / "site"
    assert python(f"pip install {offline} --target {site} {wheel}", tmp_path).returncode == 0
    (extension,) = site.rglob("*.so")

    def use(change: str = "") -> subprocess.CompletedProcess[str]:
        nothing = tmp_path / "nothing"
        return python(
            USE.format(change=change),
            tmp_path,
            **{
                "PYTHONPATH": str(site),
                "PATH": "",
                "CXX": "",
                "TORCH_EXTENSIONS_DIR": str(nothing),
            },
        )

    done = use()
    assert done.stdout.strip() == str(extension), done.stderr[-3000:]
    for change in ("torch.__version__ += '1'", "torch.version.cuda = '13.0'"):
        done = use(change)
        assert "needs a C++ compiler" in done.stderr and not done.stdout
    extension.write_bytes(b"no library")
    assert "needs a C++ compiler" in use().stderr
