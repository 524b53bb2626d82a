"""RMSNorm by the kernels that were tuned for the GPU that this runs on: the names of `normforge`,
whatever `use_batch_invariant` says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from normforge import chosen_package, names_of

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
    "use_native",
    "warmup",
]

if TYPE_CHECKING:
    from .api import Package
    from .frontends.module import RMSNorm

    _package = Package(Path())
    PROVENANCE = _package.provenance
    explain = _package.explain
    graph_pass = _package.graph_pass
    inductor_backend = _package.inductor_backend
    install = _package.install
    installed = _package.installed
    operators = _package.operators
    patch = _package.patch
    rms_norm = _package.rms_norm
    rmsnorm_backward = _package.rmsnorm_backward
    rmsnorm_forward = _package.rmsnorm_forward
    uninstall = _package.uninstall
    unpatch = _package.unpatch
    use_native = _package.use_native
    warmup = _package.warmup
else:
    __getattr__ = names_of(chosen_package, "rmsnorm_backward", __name__, __all__)


def __dir__() -> list[str]:
    return __all__
