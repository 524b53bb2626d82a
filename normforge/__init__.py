"""RMSNorm by kernels that were tuned for the GPU that this runs on.

    from normforge import RMSNorm, rms_norm, install

These are the names of a package in generated/; `normforge.layernorm` has those of LayerNorm, and
`normforge.batch_invariant` those of norms whose bits do not depend on the batch. The package is
chosen when a name is first used, without initialising CUDA, so that a program can fork afterwards
(with several kinds of GPU, only if CUDA_DEVICE_ORDER=PCI_BUS_ID is set). NORMFORGE_GPU=h200
overrides the choice. Without a GPU any package works, through PyTorch on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from re import IGNORECASE, escape, fullmatch, search
from types import ModuleType
from typing import Any, NamedTuple

import torch

__version__ = "0.1.0"

__all__ = [
    "PROVENANCE",
    "RMSNorm",
    "explain",
    "graph_pass",
    "inductor_backend",
    "install",
    "installed",
    "operators",
    "patch",
    "rms_norm",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "uninstall",
    "unpatch",
    "use_batch_invariant",
    "use_native",
    "warmup",
]

_CHOICE = "NORMFORGE_GPU"


class Tuned(NamedTuple):
    """A package: its module, and the GPU that it was tuned for."""

    module: str
    arch: str
    title: str


class Gpu(NamedTuple):
    """The GPU of this process."""

    name: str
    capability: tuple[int, int]


def names_of(operation: str, module: str, names: Sequence[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names are those of an operation's package."""

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        package = chosen_package(operation)
        if not hasattr(package, name):
            raise AttributeError(
                f"{package.__name__}, which serves {module} here, has no {name!r}: go on without it"
            )
        value = getattr(package, name)
        setattr(sys.modules[module], name, value)
        return value

    return found


_operation = "rmsnorm_backward"  # whose package serves
_MODULES = ("batch_invariant", "layernorm")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    return names_of(_operation, __name__, __all__)(name)


def __dir__() -> list[str]:
    return __all__


def use_batch_invariant(enabled: bool = True) -> None:
    """Switch the names of `normforge`, except `use_native`, to those of
    `normforge.batch_invariant`, or back. Anything that was imported, built or installed before
    stays as it is, so call this first. Raises RuntimeError if there is no batch-invariant package
    for the GPU."""
    global _operation
    wanted = "rmsnorm_invariant_backward" if enabled else "rmsnorm_backward"
    chosen_package(wanted)
    _operation = wanted
    for name in __all__:
        if name != use_batch_invariant.__name__:
            globals().pop(name, None)


def chosen_package(operation: str) -> ModuleType:
    """The package of an operation for this process. Raises RuntimeError if there is none."""
    wanted = os.environ.get(_CHOICE, "")
    module = choose(tuned_packages(operation), None if wanted else find_gpu(), wanted)
    return import_module(module)


def tuned_packages(operation: str) -> dict[str, Tuned]:
    """The packages of an operation, by the name of their GPU. A wheel has them in this folder, a
    checkout beside it."""
    here = Path(__file__).resolve().parent
    found: dict[str, Tuned] = {}
    for root in (here, here.parent):
        for table in root.glob(f"generated/*/{operation}/table.json"):
            module = ".".join(table.parent.relative_to(here.parent).parts)
            try:
                target = json.loads(table.read_text())["target"]
                name, arch, title = (str(target[key]) for key in ("name", "arch", "title"))
            except (OSError, ValueError, LookupError, TypeError) as error:
                warnings.warn(
                    f"{table} is damaged ({error}): its package is left out", stacklevel=2
                )
                continue
            found.setdefault(name, Tuned(module, arch, title))
    return dict(sorted(found.items()))


def find_gpu() -> Gpu | None:
    """PyTorch's current GPU, or the one that it will use once CUDA is initialised. None without a
    GPU."""
    if torch.version.cuda is None:
        return None
    if not torch.cuda.is_initialized():
        try:
            return _first_visible(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip())
        except Exception:  # no NVML, or it cannot tell which device that is: ask CUDA itself
            pass
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Gpu(properties.name, (properties.major, properties.minor))


def _first_visible(device: str) -> Gpu | None:
    """A device by its index or UUID, asked of NVML, which initialises nothing of CUDA."""
    if device in ("", "-1"):
        return None
    import pynvml

    pynvml.nvmlInit()
    try:
        by_index = pynvml.nvmlDeviceGetHandleByIndex
        by_uuid = pynvml.nvmlDeviceGetHandleByUUID
        if device.isdigit() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            all_of_them = map(by_index, range(pynvml.nvmlDeviceGetCount()))
            if len(set(map(pynvml.nvmlDeviceGetName, all_of_them))) > 1:
                raise LookupError("CUDA has the fastest GPU first, and NVML counts along the bus")
        handle = by_index(int(device)) if device.isdigit() else by_uuid(device)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(str(pynvml.nvmlDeviceGetName(handle)), (major, minor))
    finally:
        pynvml.nvmlShutdown()


def choose(packages: Mapping[str, Tuned], gpu: Gpu | None, wanted: str = "") -> str:
    """The module of the package for a GPU, or of the one that is wanted. Raises RuntimeError, with
    what to do, where there is none."""
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
        return packages[wanted or next(iter(packages))].module
    fit = [name for name in packages if _runs_on(packages[name].arch, gpu.capability)]
    if not fit:
        major, minor = gpu.capability
        raise RuntimeError(
            f"Normforge has no kernels for {gpu.name} (sm_{major}{minor}), only for {there}. Tune "
            "some in a checkout (python tune.py --gpu auto), or set "
            f"{_CHOICE}={next(iter(packages))}: PyTorch's kernels then serve"
        )
    for name in fit:
        words = escape(name).replace(r"\-", "[- ]")  # rtx-5090: "NVIDIA GeForce RTX 5090"
        if search(rf"\b{words}\b", gpu.name, IGNORECASE):
            return packages[name].module
    warnings.warn(
        f"{gpu.name} runs the kernels that were tuned for {packages[fit[0]].title}: correct, "
        "perhaps slower than kernels of its own",
        stacklevel=_level_outside(),
    )
    return packages[fit[0]].module


def _level_outside() -> int:
    """The stack level, for the caller of this, of the first frame outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(f"{__name__}."):
        frame, level = frame.f_back, level + 1
    return level


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether machine code for an architecture loads on a device. With an "a" at the end it does on
    exactly one, else also on later minor versions."""
    match = fullmatch(r"sm_(\d+)(\d)(a?)", arch)
    if match is None:
        return False
    major, minor = int(match[1]), int(match[2])
    if match[3]:
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor
