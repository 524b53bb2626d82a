"""RMSNorm by kernels that were tuned for the GPU that this runs on.

    from normforge import RMSNorm, rms_norm, install

Each call is served by the package in generated/ for the GPU that its tensors are on, and without a
GPU by PyTorch on the CPU. `normforge.layernorm` has the functions of LayerNorm, `normforge.gated`
those of gated RMSNorms, `normforge.rope` those of RMSNorm with the rotary embedding behind it,
`normforge.quantized` those of RMSNorm that is quantized to FP8, and `normforge.batch_invariant`
those of norms whose bits do not depend on the batch.

A package is chosen when a name is first used, without initialising CUDA, so that a program can fork
afterwards (with several kinds of GPU, only if CUDA_DEVICE_ORDER=PCI_BUS_ID is set).
NORMFORGE_GPU=h200 overrides the choice for all GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "PROVENANCE",
    "RMSNorm",
    "RMSNormGated",
    "apply_rope",
    "collect",
    "explain",
    "graph_pass",
    "inductor_backend",
    "install",
    "installed",
    "operators",
    "patch",
    "qk_norm_rope",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_quantized",
    "rms_norm_rope",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "uninstall",
    "unpatch",
    "use_batch_invariant",
    "use_native",
    "warmup",
]


def names_of(
    find: Callable[[str], Any], of: str, module: str, names: Sequence[str]
) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose names are those of what `find` finds, asked for `of` when
    one is first used."""

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        package = find(of)
        value = package.provenance if name == "PROVENANCE" else getattr(package, name)
        setattr(sys.modules[module], name, value)
        return value

    return found


_FUNCTIONS = ("gated_packages", "rope_packages", "quantized_packages")
"""Modules whose functions serve with the packages of several operations."""


_serving = "rmsnorm"  # the module whose names these are
_MODULES = ("batch_invariant", "gated", "layernorm", "quantized", "rmsnorm", "rope")
_ELSEWHERE = {
    **dict.fromkeys(("RMSNormGated", "rms_norm_gated"), "gated"),
    **dict.fromkeys(("apply_rope", "qk_norm_rope", "rms_norm_rope"), "rope"),
    "rms_norm_quantized": "quantized",
}

if TYPE_CHECKING:
    from . import batch_invariant as batch_invariant
    from . import gated as gated
    from . import layernorm as layernorm
    from . import quantized as quantized
    from . import rmsnorm as rmsnorm
    from . import rope as rope
    from .gated import RMSNormGated, rms_norm_gated
    from .quantized import rms_norm_quantized
    from .rmsnorm import (
        PROVENANCE,
        RMSNorm,
        explain,
        graph_pass,
        inductor_backend,
        install,
        installed,
        operators,
        patch,
        rms_norm,
        rmsnorm_backward,
        rmsnorm_forward,
        uninstall,
        unpatch,
        use_native,
        warmup,
    )
    from .rope import apply_rope, qk_norm_rope, rms_norm_rope
    from .serve.collect import Recorder
else:

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = _ELSEWHERE.get(name, _serving)
        value = globals()[name] = getattr(import_module(f"{__name__}.{module}"), name)
        return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES, "__version__"]


def use_batch_invariant(enabled: bool = True) -> None:
    """Switch the names of `normforge`, except `use_native`, to those of
    `normforge.batch_invariant`, or back. Anything that was imported, built or installed before
    stays as it is, so call this first. Raises RuntimeError if there is no batch-invariant package
    for the GPU."""
    global _serving
    chosen_package("rmsnorm_invariant_backward" if enabled else "rmsnorm_backward")
    _serving = "batch_invariant" if enabled else "rmsnorm"
    for name in __all__:
        if name not in (use_batch_invariant.__name__, collect.__name__):
            globals().pop(name, None)


def collect(path: str | PathLike[str] | None = None) -> Recorder:
    """Count the backward calls of all norms of Normforge, from now on, by shape, dtypes and options
    (weight offset, dtype of a residual's gradient), and add them to a file for
    `tune.py --shapes FILE`. docs/tuning.md says what counts.

    Args:
        path: the file, which is made, or to which the calls are added. By default that of the
            environment variable NORMFORGE_COLLECT, which has the effect of this function, or
            that of the call before. Processes may share it.

    Returns:
        What counts. The file is written every half minute and at the end of the process; its
            `write()` does so at once, and `stop()` writes and ends the counting.

    Raises:
        ValueError: if no file is named.
    """
    found: Recorder = import_module(f"{__name__}.serve.collect").collect(path)
    return found


def functions_of(module: str) -> Any:
    """Return the functions of one of _FUNCTIONS."""
    return import_module(f"{__name__}.{module}").functions


def chosen_package(operation: str) -> Any:
    """The functions of an operation. Raises RuntimeError if there is no package of it for the
    GPU."""
    return import_module(f"{__name__}.packages").chosen(operation)


# The operators, which a saved graph asks for before anybody has used a name. The tuner's compilers
# have no use for them, and none for PyTorch, whose import takes seconds.
if not getattr(sys.modules.get("generator"), "IMPORTS_PYTORCH_LATER", False):
    for _name in _FUNCTIONS:
        import_module(f"{__name__}.{_name}")
