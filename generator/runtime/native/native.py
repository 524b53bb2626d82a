"""The C++ fast path of a package: built once per machine, loaded on request, taught by use.

Off, which is the default, nothing is compiled or loaded. On, `rms_norm` has an autograd node in
C++ and the operator of the backward, which compiled code calls, a kernel in C++. Calls that
Python's quick path has served are launched without Python from then on
(native.cpp and native.h say which). The two paths share kernels, and nothing that a kernel writes
to.

Why a native launch is ordered with all others of its stream:
- Its workspaces are its own, one per stream and package, and one lock of that stream spans both
  kernels of a call. So no other call that uses the same scratch comes between the two, and a call
  through Python may, as it uses other memory.
- Counters and mailboxes are zero before a kernel and left zero by it, and kernels of one stream
  run one after the other: every launch finds zeros, whoever launched the one before. A plan keeps
  the counters that it was made with; they are never given back. A later plan of the stream that
  needs more gets others.
- Scratch may hold anything at the start of a call. While a plan is made, or room for one, the
  stream is paused: that waits for a launch under way, and calls go to Python meanwhile. An old
  block that is too small is freed in stream order, behind all kernels that use it, and the new one
  allocated in stream order, before all that will. Then the stream resumes, and all its plans use
  the new address, because they read it at every launch.
  Where there is no memory for the new block, one as large as the old is asked for; without that the
  stream stays paused until there is a block that is large enough for all of its plans.
- A stream that is being captured is served by Python, and so is the per-thread default stream,
  whose handle names another stream in every thread.
- A refused launch is done again by Python, both kernels of it.
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
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..launch.binding import argument_block
from ..launch.launch import DW_IN_WEIGHT_DTYPE
from ..launch.workspace import PER_THREAD, StreamWorkspace, Workspaces
from ..spec import Launch
from ..table import MAX_ALIGNMENT
from ..torch_internals import current_device, is_capturing, raw_stream

SOURCES = ("native.cpp", "native.h")
_MOST_PLANS = 1024
_TORCH = Path(torch.__file__).resolve().parent
_kept: list[Any] = []
"""What C++ has addresses of, for the life of the process."""


class Native:
    """The native path of one package; nothing but four attributes that are None before `start`.

    norm: (x, weight, eps, offset) to y, the autograd node. backward: (dy, x, rstd, weight) to
    (dx, dw), or None for what it does not serve. learn: takes a quick call that has just served.
    reserve: (device, stream, launch) takes the memory that learning such a call would take.
    """

    def __init__(self) -> None:
        self.norm: Callable[..., torch.Tensor] | None = None
        self.backward: Callable[..., tuple[torch.Tensor, torch.Tensor] | None] | None = None
        self.learn: Callable[[Any], None] | None = None
        self.reserve: Callable[[int, int, Launch], None] | None = None
        self._lock = threading.Lock()

    def start(
        self,
        forward: Callable[..., Any],
        gradients: Callable[..., Any],
        operator: Any,
        module: Any = None,
        driver: Sequence[int] = (),
        on_cpu: bool = False,
    ) -> None:
        """Turn it on, once. forward and gradients: of `rms_norm`; operator: of the backward.
        module, driver: the loaded extension and the addresses of its driver, by default those of
        this machine; on_cpu: serve CPU tensors, which only a driver that is none can do. Raises
        RuntimeError."""
        with self._lock:
            if self.norm is not None:
                return
            if module is None:
                driver, module = _driver_addresses(), load(build())
            store = module.Store(tuple(driver), on_cpu, forward, gradients)
            _kept.append(store)
            store.take_operator(*operator._schema.name.split("::"))
            plans = _Plans(store)
            self.learn, self.reserve = plans.learn, plans.reserve
            self.backward, self.norm = store.backward, store.norm


class _Plans:
    """Describes calls to a store: those of one signature on one stream, once each."""

    def __init__(self, store: Any) -> None:
        self._store, self._workspaces = store, Workspaces()
        self._seen: set[tuple[Any, int]] = set()
        self._needed: dict[tuple[int, int], int] = {}  # words of scratch, by device and stream

    def learn(self, quick: Any) -> None:
        """Let later calls like the one just served on the current stream be served natively. Does
        nothing for a call of another kind, or beyond a number of plans.

        quick: what `recent` of the call cache has for such a call, or None."""
        call = getattr(quick, "slow", None)
        if call is None or current_device() != call.device:
            return
        stream = raw_stream(call.device)
        if (call, stream) in self._seen or len(self._seen) >= _MOST_PLANS:
            return
        if stream == PER_THREAD or not _is_dense(call) or is_capturing():
            return
        self._seen.add((call, stream))
        with suppress(RuntimeError):  # no memory for another workspace: Python has one
            self._add(call, stream)

    def reserve(self, device: int, stream: int, launch: Launch) -> None:
        """Make room for a launch on a stream, so that learning it takes no memory. Where there is
        none, Python serves such calls, as after learning in vain."""
        if stream == PER_THREAD or is_capturing():
            return
        with suppress(RuntimeError), self._paused(device, stream, launch):
            pass

    def _add(self, call: Any, stream: int) -> None:
        kernel, launch, device = call.kernel, call.launch, call.device
        with self._paused(device, stream, launch) as workspace:
            main, second = kernel.load(device)
            block = argument_block(launch, call.extent, workspace.zeros, workspace.scratch)
            config = kernel.main_config(launch.grid, stream)
            main_words = (int(config.getPtr()), int(main), _words(block.main_at))
            sum_config, sum_words = None, (0, 0, b"")
            if second is not None:
                sum_config = kernel.sum_config(launch.sum_grid, stream)
                sum_words = (int(sum_config.getPtr()), int(second), _words(block.sum_at))
            _kept.append((config, main, sum_config, second))
            rows, columns = call.extent.rows, call.extent.columns
            dtypes = (call.dx_size[2], call.dw_size[2])
            arguments = (block.values.raw, _words(block.scratch_at))
            self._store.add(
                device, stream, rows, columns, *dtypes, *arguments, main_words, sum_words
            )

    @contextmanager
    def _paused(self, device: int, stream: int, launch: Launch) -> Iterator[StreamWorkspace]:
        """The workspace of a stream, with room for a launch. Calls go to Python until the end."""
        workspace = self._workspaces.of_stream(device, stream)
        with workspace.lock:
            needed = self._needed.get((device, stream), 0)
            self._store.set_scratch(device, stream, None)
            try:
                workspace.fit(replace(launch, scratch=max(needed, launch.scratch)))
                needed = self._needed[device, stream] = max(needed, launch.scratch)
                yield workspace
            finally:
                if workspace.scratch_words < needed:  # given back for more, which there is not
                    with suppress(RuntimeError):
                        workspace.fit(replace(launch, scratch=needed))
                if workspace.scratch_words >= needed:
                    self._store.set_scratch(device, stream, workspace.scratch)


def _is_dense(call: Any) -> bool:
    extent = call.extent
    strides = {extent.x_stride, extent.dy_stride, extent.dx_stride}
    return (
        strides == {extent.columns}
        and extent.gaps == 0
        and extent.dw_mode == DW_IN_WEIGHT_DTYPE
        and extent.weight_offset == 0
        and call.dw_size[0] == (extent.columns,)
    )


def _words(numbers: Sequence[int]) -> bytes:
    return array("Q", numbers).tobytes()


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
