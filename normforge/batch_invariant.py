"""RMSNorm whose bits do not depend on the batch, by kernels for the GPU that this runs on.

    from normforge.batch_invariant import RMSNorm, rms_norm, install

Names and arguments are those of `normforge`. y, rstd and dx of a row depend only on that row, its
width, the dtypes and the options; dw depends only on the rows and their order.
docs/determinism.md has the details.
"""

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
    "set_sm_margin",
    "uninstall",
    "unpatch",
    "warmup",
]

if TYPE_CHECKING:
    from .frontends.batch_invariant import BatchInvariantPackage
    from .frontends.module import RMSNorm

    _package = BatchInvariantPackage(Path())
    PROVENANCE = _package.provenance
    explain = _package.explain
    graph_pass = _package.graph_pass
    inductor_backend = _package.inductor_backend
    install = _package.install
    installed = _package.installed
    operators = _package.operators
    patch = _package.patch
    rms_norm = _package._norm.rms_norm
    rmsnorm_backward = _package.rmsnorm_backward
    rmsnorm_forward = _package.rmsnorm_forward
    set_sm_margin = _package.set_sm_margin
    uninstall = _package.uninstall
    unpatch = _package.unpatch
    warmup = _package.warmup
else:
    __getattr__ = names_of(chosen_package, "rmsnorm_invariant_backward", __name__, __all__)


def __dir__() -> list[str]:
    return __all__
