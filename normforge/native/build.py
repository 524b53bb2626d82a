"""The extension in C++: that of the wheel where it fits, else compiled once per machine.

What was built for another PyTorch is never loaded: PyTorch's C++ interface is one per version.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..serve.options import SMALLEST_EPS
from ..table import MAX_ALIGNMENT

SOURCES = ("native.cpp", "native.h", "operators.h", "installed.h")
_OPTIMISED = ("-O2",)
_FOLDER = Path(__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent


def load_extension() -> Any:
    """The module. Raises RuntimeError."""
    prebuilt = _FOLDER / prebuilt_name()
    if prebuilt.exists():
        with suppress(RuntimeError):  # its C library is newer than this machine's
            return load(prebuilt)
    return load(build())


def prebuilt_name() -> str:
    """The file name of an extension that serves any machine with this PyTorch, Python and
    processor."""
    version = torch.version
    python = sysconfig.get_config_var("SOABI")  # version, flags and platform
    parts = (torch.__version__, version.git_version, version.cuda, python, platform.machine())
    return f"native_{_digest(*map(str, parts), *_defines())}.so"


def prebuild(folder: Path) -> None:
    """Compile the extension of a wheel into a folder, and remove others from there. Raises
    RuntimeError."""
    name = prebuilt_name()
    for other in folder.glob("native_*.so"):
        other.unlink()
    _compile(_compiler(), [*_arguments(), *_OPTIMISED], folder / name)


def build(flags: Sequence[str] = _OPTIMISED) -> Path:
    """The compiled extension, from the cache of this machine when it is there. Several processes
    may build at the same time. Raises RuntimeError."""
    compiler = _compiler()
    arguments = [*_arguments(), *flags]
    machine = (platform.machine(), *platform.libc_ver())  # homes are shared
    digest = _digest(*arguments, *compiler, torch.__version__, sys.version, *machine)
    built = _cache() / f"native_{digest}.so"
    if not built.exists():
        try:
            _compile(compiler, arguments, built)
        except OSError as error:
            raise RuntimeError(
                f"use_native() could not build in {built.parent} ({error}): set "
                "TORCH_EXTENSIONS_DIR to a folder that can be written"
            ) from error
    return built


def _digest(*parts: str) -> str:
    content = "\0".join(parts).encode() + b"".join((_FOLDER / s).read_bytes() for s in SOURCES)
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(compiler: Sequence[str], arguments: Sequence[str], built: Path) -> None:
    """Raises RuntimeError with what the compiler says, and OSError."""
    source = str(_FOLDER / SOURCES[0])
    command = [*compiler, source, *arguments, f"-DNORMFORGE_NAMESPACE=normforge_{built.stem}"]
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as fresh:
        made = Path(fresh) / built.name
        done = subprocess.run([*command, "-o", made], capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            line = next((line for line in lines if "error" in line), " ".join(lines[-1:]))
            raise RuntimeError(
                f"use_native() could not compile {source}: {line} (set CXX to another compiler, "
                "or go on without it)"
            )
        made.replace(built)


def load(path: Path) -> Any:
    """The module of a compiled extension. Raises RuntimeError."""
    name = "normforge_native"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise RuntimeError(
            f"use_native() could not load {path} ({error}): remove it to build it again"
        ) from error
    return module


def _compiler() -> list[str]:
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise RuntimeError(f"use_native() cannot read the command in CXX ({error})") from error
    for command in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    looked = named[0] if named else "c++, g++ or clang++"
    raise RuntimeError(
        f"use_native() needs a C++ compiler, and there is no {looked}: install one or set CXX"
    )


def _arguments() -> list[str]:
    """Return the compiler's arguments for Python and PyTorch."""
    python = Path(sysconfig.get_paths()["include"])
    for folder, file, advice in (
        (python, "Python.h", "install the development files of Python (python3-dev)"),
        (_TORCH / "include", "torch/csrc/autograd/custom_function.h", "install PyTorch's wheel"),
    ):
        if not (folder / file).exists():
            raise RuntimeError(f"use_native() needs {folder / file}, which is missing: {advice}")
    libraries = ["c10", "torch_cpu", "torch_python"]
    if torch.version.cuda is not None:
        libraries.append("torch_cuda")
    return [
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-fvisibility=hidden",
        *_defines(),
        "-isystem",
        str(_TORCH / "include"),
        "-isystem",
        str(python),
        f"-L{_TORCH / 'lib'}",
        *(f"-l{name}" for name in libraries),
    ]


def _defines() -> list[str]:
    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(getattr(torch._C, '_GLIBCXX_USE_CXX11_ABI', True))}",
        f"-DNORMFORGE_ALIGNMENT={MAX_ALIGNMENT}",
        f"-DNORMFORGE_SMALLEST_EPS={SMALLEST_EPS!r}",
        *(["-DNORMFORGE_CUDA"] if torch.version.cuda is not None else []),
    ]


def _cache() -> Path:
    """Return TORCH_EXTENSIONS_DIR, or where PyTorch keeps extensions by default."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(home) / "torch_extensions")
    return Path(root) / "normforge"
