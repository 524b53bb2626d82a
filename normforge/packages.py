"""The packages that come with this library: which there are, and which one serves a GPU.

A wheel has them in this folder, a checkout in `generated/` beside it. Those of one operation make
one set of functions (`chosen`), which takes the kernels of a call from the package of the GPU that
its tensors are on.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from re import IGNORECASE, escape, search
from typing import Any, NamedTuple

import torch

from .api import Package
from .frontends.batch_invariant import BatchInvariantPackage
from .frontends.layer_norm import LayerNormPackage
from .frontends.layer_norm_forward import LayerNormForwardPackage
from .frontends.layer_norm_operators import LayerNormOperators
from .frontends.norm_add import NormAddPackage
from .frontends.operators import Operators
from .frontends.package import NormPackage
from .frontends.row_packages import ROW_PACKAGES
from .own import NAME, OwnPackage
from .serve.kernels import Kernels, Source
from .serve.warn_once import WarnOnce
from .table import TABLE, runs_on
from .this_gpu import Gpu, find_gpu, gpu_of

_CHOICE = "NORMFORGE_GPU"
_HERE = Path(__file__).resolve().parent
_LIBRARY: dict[str, tuple[type[NormPackage], str]] = {
    "rmsnorm_backward": (Package, "normforge.rmsnorm"),
    "rmsnorm_invariant_backward": (BatchInvariantPackage, "normforge.batch_invariant"),
    "layernorm_backward": (LayerNormPackage, "normforge.layernorm"),
}
"""The functions of packages by operation, and the module that has those of all of them."""


class Tuned(NamedTuple):
    """A package: its folder, and the GPU that it was tuned for, with its number of SMs."""

    folder: Path
    arch: str
    title: str
    sms: int = 0


def _roots() -> tuple[Path, ...]:
    """Return the folders where packages may be: that of an installed library, and that of a
    checkout."""
    return tuple((folder / "generated").resolve() for folder in (_HERE, _HERE.parent))


def tuned_packages(operation: str) -> dict[str, Tuned]:
    """The packages of an operation, by the name of their GPU."""
    found: dict[str, Tuned] = {}
    for root in _roots():
        for table in sorted(root.glob(f"*/{operation}/{TABLE}")):
            try:
                target = json.loads(table.read_text(encoding="utf-8"))["target"]
                name, arch, title = (str(target[key]) for key in ("name", "arch", "title"))
                sms = int(target.get("sms", 0))
            except (OSError, ValueError, LookupError, TypeError) as error:
                warnings.warn(
                    f"{table} is damaged ({error}): its package is left out", stacklevel=2
                )
                continue
            found.setdefault(name, Tuned(table.parent, arch, title, sms))
    return dict(sorted(found.items()))


def choose(
    packages: Mapping[str, Tuned],
    gpu: Gpu | None,
    wanted: str = "",
    warn: Callable[[str], None] | None = None,
) -> str:
    """Return the name of the package for a GPU, or of the one that is wanted. warn: is told where
    it was tuned for another GPU, or has no kernels that run there. Raises RuntimeError, with what
    to do, where there is no package, or not the one that is wanted."""
    warn = warn or WarnOnce()
    there = ", ".join(f"{name} ({tuned.arch})" for name, tuned in packages.items())
    # Several where no GPU has packages of all operations.
    names = [name.strip().lower() for name in wanted.split(",")]
    wanted = next((name for name in names if name in packages), wanted)
    if wanted not in ("", *packages):
        raise RuntimeError(f"{_CHOICE} is {wanted}, and the packages here are: {there or 'none'}")
    if not packages:
        raise RuntimeError(
            "this copy of Normforge has no tuned package: run `pip install .` in a checkout that "
            "has generated/"
        )
    if wanted or gpu is None:
        return wanted or next(iter(packages))
    fit = [name for name in packages if runs_on(packages[name].arch, gpu.capability)]
    if not fit:
        major, minor = gpu.capability
        warn(
            f"Normforge has no kernels for {gpu.name} (sm_{major}{minor}), only for {there}: "
            "PyTorch's operators serve. Tune some in a checkout: python tune.py --gpu auto"
        )
        return next(iter(packages))
    for name in fit:
        words = escape(name).replace(r"\-", "[- ]")  # rtx-5090: "NVIDIA GeForce RTX 5090"
        if search(rf"\b{words}\b", gpu.name, IGNORECASE):
            tuned = packages[name]
            # Another card, or a part of one, may have the same name.
            if gpu.sms and tuned.sms and gpu.sms != tuned.sms:
                warn(
                    f"{gpu.name} has {gpu.sms} SMs, and its kernels were tuned for the {tuned.sms} "
                    f"of {tuned.title}: correct, perhaps slower than kernels of its own"
                )
            return name
    warn(
        f"{gpu.name} runs the kernels that were tuned for {packages[fit[0]].title}: correct, "
        "perhaps slower than kernels of its own"
    )
    return fit[0]


class Chosen:
    """The kernels of an operation, from the package of each GPU. Thread-safe.

    Making one chooses for the GPU that this process uses, without initialising CUDA. Raises
    RuntimeError, with what to do, where there is no package at all. A GPU on which the kernels of
    none run gets one of them: PyTorch then serves, with a warning.
    """

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._packages = tuned_packages(operation)
        self._wanted = os.environ.get(_CHOICE, "")
        self._warn = WarnOnce()
        self._by_name: dict[str, Kernels] = {}
        self._by_device: dict[int, Kernels] = {}
        self._current = self._kernels_for(None if self._wanted else find_gpu())

    def __call__(self, device: int | None) -> Kernels:
        """The kernels for the GPU of an index, or with None for the one that this process uses:
        once CUDA is initialised PyTorch's current one."""
        if device is None:
            if self._wanted or not torch.cuda.is_initialized():
                return self._current
            device = torch.cuda.current_device()
        found = self._by_device.get(device)
        if found is None:
            found = self._by_device.setdefault(device, self._kernels_of(device))
        return found

    def _kernels_of(self, device: int) -> Kernels:
        if torch.version.cuda is None:
            return self._current
        return self._kernels_for(gpu_of(device))

    def _kernels_for(self, gpu: Gpu | None) -> Kernels:
        name = choose(self._packages, gpu, self._wanted, self._warn)
        known = self._by_name.get(name)
        if known is None:  # no lock, as a forked child might find it taken
            known = self._by_name.setdefault(
                name, Kernels(self._packages[name].folder, self._operation)
            )
        return known


def source_by_gpu(operation: str) -> Source | str:
    """The kernels of an operation, by the GPU, or why there are none."""
    if not tuned_packages(operation):
        return f"there is no tuned package of {operation}"
    try:
        return Chosen(operation)
    except RuntimeError as error:
        return str(error)


_chosen: dict[str, NormPackage] = {}
_choosing = threading.RLock()


def chosen(operation: str) -> NormPackage:
    """The functions of an operation, by the kernels of each GPU: one object in a process. Raises
    RuntimeError where there is no package for the GPU, ValueError for a damaged one."""
    with _choosing:
        if operation not in _chosen:
            _chosen[operation] = _choose(operation)
        return _chosen[operation]


def _choose(operation: str) -> NormPackage:
    functions, module = _LIBRARY[operation]
    name = f"*/{operation}" if operation == "rmsnorm_invariant_backward" else ""
    made: Any = functions(Chosen(operation), name)
    if isinstance(made, Package):
        made.beside = "normforge.batch_invariant"
    if operation == "rmsnorm_backward":
        made.gated = made.ops.gated = "normforge.gated_packages"
        made.ops.rotated = "normforge.rope_packages"
        made.ops.quantized = "normforge.quantized_packages"
        made.add_by(partial(source_by_gpu, NormAddPackage.operation))
        made.add_gradients_by(source_by_gpu)
    if operation == "layernorm_backward":
        made._kernels.by(partial(source_by_gpu, LayerNormForwardPackage.operation))
    getattr(made, made._layer).__module__ = module  # pickle finds it there
    return made


_opened: dict[tuple[str, str], Path] = {}


def open_package(file: str, module: str, operation: str) -> Any:
    """The functions of the package whose `__init__.py` is `file`, for whatever GPU. module: its
    name; operation: what it computes. Operators know one that came with this library as
    `<gpu>/<operation>`, so that a graph finds it in another process, and any other by its module;
    of two modules of one name the second by its folder. Raises ImportError for an operation that
    the library does not know, ValueError and OSError for a damaged package."""
    if operation not in _LIBRARY and (Path(file).resolve().parent / NAME).exists():
        return OwnPackage(Path(file).resolve().parent, module)
    if operation not in (*_LIBRARY, *ROW_PACKAGES):
        raise ImportError(
            f"{module} is a package of {operation}, which this version of Normforge does not know: "
            f"install one that does. It knows {', '.join((*_LIBRARY, *ROW_PACKAGES))}"
        )
    folder = Path(file).resolve().parent
    name = "/".join(folder.parts[-2:]) if folder.parent.parent in _roots() else module
    if _opened.setdefault((operation, name), folder) != folder:
        name = str(folder)
    return (ROW_PACKAGES.get(operation) or _LIBRARY[operation][0])(folder, name)


# ---- Packages that a graph asks for --------------------------------------------------------------


def open_named(name: str, known: Collection[str]) -> Any:
    """Return the functions of package `<gpu>/<operation>`, one of `known`. Raises LookupError."""
    gpu, _, operation = name.rpartition("/")
    if operation not in known:
        raise LookupError(name)
    here = tuned_packages(operation).values()
    folder = {tuned.folder.parent.name: tuned.folder for tuned in here}[gpu]
    return open_package(str(folder / "__init__.py"), name, operation)


def _operators_of(name: str) -> Any:
    """Return the operators of a package here, by the name that an operator was called with: "" or
    `<gpu>/<operation>`, where a GPU of * is that of the tensors. Raises LookupError."""
    gpu, slash, operation = (name or "*/rmsnorm_backward").rpartition("/")
    if not slash or operation not in _LIBRARY:
        raise LookupError(name)
    if gpu == "*":
        return chosen(operation).ops
    return open_named(name, _LIBRARY).ops


Operators.served.find = _operators_of
LayerNormOperators.served.find = lambda name: _operators_of(name or "*/layernorm_backward")
