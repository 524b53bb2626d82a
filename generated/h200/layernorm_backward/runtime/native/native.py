"""The C++ fast path of a package: built once per machine, loaded on request, taught by use.

Off, which is the default, nothing is compiled or loaded. On, `rms_norm` has an autograd node in
C++, the operators, which compiled code calls, have kernels in C++, and calls that Python's quick
path has served are launched without Python from then on (native.cpp says which). The two paths
share kernels, and nothing that a kernel writes to: plans.py.
"""

from __future__ import annotations

import ctypes
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
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..spec import Launch
from ..table import MAX_ALIGNMENT
from .plans import Plans, keep

SOURCES = ("native.cpp", "native.h", "operators.h")
_TORCH = Path(torch.__file__).resolve().parent


class Native:
    """The native path of one package; nothing but attributes that are None before `start`.

    norm: (x, weight, eps, offset) to y, the autograd node. backward: (dy, x, rstd, weight) to
    (dx, dw), or None for what it does not serve. take: for `Installation.use_native`, puts a kernel
    of PyTorch's backward before a function. learn: takes a quick call that has just served.
    reserve: (device, stream, launch) takes the memory that learning such a call would take.
    vary: (variant) chooses what was learned of backwards under this number, first 0.
    """

    def __init__(self) -> None:
        self.norm: Callable[..., torch.Tensor] | None = None
        self.backward: Callable[..., tuple[torch.Tensor, torch.Tensor] | None] | None = None
        self.take: Callable[[Callable[..., Any]], Any] | None = None
        self.learn: Callable[[Any], None] | None = None
        self.reserve: Callable[[int, int, Launch], None] | None = None
        self.vary: Callable[[int], None] | None = None
        self._lock = threading.Lock()

    def start(
        self,
        forward: Any,
        gradients: Callable[..., Any],
        namespace: str,
        module: Any = None,
        driver: Sequence[int] = (),
        on_cpu: bool = False,
    ) -> None:
        """Turn it on, once. forward and gradients: of `rms_norm`; namespace: of the operators.
        module, driver: the loaded extension and the addresses of its driver, by default those of
        this machine; on_cpu: serve CPU tensors, which only a driver that is none can do. Raises
        RuntimeError."""
        with self._lock:
            if self.norm is not None:
                return
            if module is None:
                driver, module = _driver_addresses(), load(build())
            store = module.Store(tuple(driver), on_cpu, forward, gradients)
            keep(store)
            plans = Plans(store)
            self.learn, self.reserve = plans.learn, plans.reserve
            forward.native, forward.learn = store.forward, plans.learn_forward
            store.take_operators(namespace)
            self.take, self.vary = store.take_backward, plans.vary
            self.backward, self.norm = store.backward, store.norm


def _driver_addresses() -> tuple[int, ...]:
    """Of what native.h's Driver has, in its order."""
    if torch.version.cuda is None:
        raise RuntimeError(
            f"use_native() needs CUDA, and PyTorch {torch.__version__} is built without it: go on "
            "without use_native()"
        )
    names = (
        (str(_TORCH / "lib" / "libtorch_cuda.so"), "aoti_torch_get_current_cuda_stream"),
        ("libcuda.so.1", "cuCtxGetDevice"),
        ("libcuda.so.1", "cuStreamIsCapturing"),
        ("libcuda.so.1", "cuLaunchKernelEx"),
    )
    found = []
    for library, name in names:
        try:
            entry = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError) as error:
            raise RuntimeError(
                f"use_native() found no {name} in {library} ({error}): go on without it"
            ) from error
        found.append(int(ctypes.cast(entry, ctypes.c_void_p).value or 0))
    return tuple(found)


# ---- Build and load ------------------------------------------------------------------------------


def build(flags: Sequence[str] = ("-O2",)) -> Path:
    """The compiled extension, from the cache of this machine when it is there. Several processes
    may build at the same time. Raises RuntimeError."""
    folder = Path(__file__).resolve().parent
    compiler = _compiler()
    command = [*_arguments(), *flags]
    machine = (platform.machine(), *platform.libc_ver())  # homes are shared
    parts = [*command, *compiler, torch.__version__, sys.version, *machine]
    content = "\0".join(parts).encode() + b"".join((folder / s).read_bytes() for s in SOURCES)
    digest = hashlib.sha256(content).hexdigest()[:16]
    cache = _cache()
    built = cache / f"native_{digest}.so"
    if built.exists():
        return built
    command = [*compiler, str(folder / SOURCES[0]), *command]
    command += [f"-DNORMFORGE_NAMESPACE=normforge_{digest}"]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as fresh:
            made = Path(fresh) / built.name
            done = subprocess.run([*command, "-o", made], capture_output=True, text=True)
            if done.returncode != 0:
                lines = (done.stderr or done.stdout).strip().splitlines()
                line = next((line for line in lines if "error" in line), " ".join(lines[-1:]))
                raise RuntimeError(
                    f"use_native() could not compile {folder / SOURCES[0]}: {line} (set CXX to "
                    "another compiler, or go on without it)"
                )
            made.replace(built)
    except OSError as error:
        raise RuntimeError(
            f"use_native() could not build in {cache} ({error}): set TORCH_EXTENSIONS_DIR to a "
            "folder that can be written"
        ) from error
    return built


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
    """What the compiler needs to know of Python and PyTorch."""
    python = Path(sysconfig.get_paths()["include"])
    for folder, file, advice in (
        (python, "Python.h", "install the development files of Python (python3-dev)"),
        (_TORCH / "include", "torch/csrc/autograd/custom_function.h", "install PyTorch's wheel"),
    ):
        if not (folder / file).exists():
            raise RuntimeError(f"use_native() needs {folder / file}, which is missing: {advice}")
    libraries = ["c10", "torch_cpu", "torch_python"]
    defines = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(getattr(torch._C, '_GLIBCXX_USE_CXX11_ABI', True))}",
        f"-DNORMFORGE_ALIGNMENT={MAX_ALIGNMENT}",
    ]
    if torch.version.cuda is not None:
        defines.append("-DNORMFORGE_CUDA")
        libraries.append("torch_cuda")
    return [
        *("-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", *defines),
        *("-isystem", str(_TORCH / "include"), "-isystem", str(python)),
        *(f"-L{_TORCH / 'lib'}", *(f"-l{name}" for name in libraries)),
    ]


def _cache() -> Path:
    """TORCH_EXTENSIONS_DIR, or where PyTorch keeps extensions by default."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(home) / "torch_extensions")
    return Path(root) / "normforge"
