"""RMSNorm with bits that do not depend on the batch, by kernels for the GPU that this runs on.

    from normforge.batch_invariant import RMSNorm, rms_norm, install

Names and arguments are those of `normforge`. y, rstd and dx of a row depend on that row, its
width, the dtypes and the options alone; dw on the rows in their order. docs/determinism.md says it
in full.
"""

from __future__ import annotations

from typing import Any

from normforge import chosen_package

_NAMES = (
    *("PROVENANCE", "RMSNorm", "explain", "graph_pass", "inductor_backend", "install"),
    *("installed", "patch", "rms_norm", "rmsnorm_backward", "rmsnorm_forward", "uninstall"),
    *("unpatch", "warmup"),
)
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(chosen_package("rmsnorm_invariant_backward"), name)
    return found


def __dir__() -> list[str]:
    return __all__
