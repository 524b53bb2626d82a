"""RMSNorm whose bits do not depend on the batch, by kernels for the GPU that this runs on.

    from normforge.batch_invariant import RMSNorm, rms_norm, install

Names and arguments are those of `normforge`. y, rstd and dx of a row depend only on that row, its
width, the dtypes and the options; dw depends only on the rows and their order.
docs/determinism.md has the details.
"""

from __future__ import annotations

from normforge import names_of

_NAMES = (
    *("PROVENANCE", "RMSNorm", "explain", "graph_pass", "inductor_backend", "install"),
    *("installed", "operators", "patch", "rms_norm", "rmsnorm_backward", "rmsnorm_forward"),
    *("set_sm_margin", "uninstall", "unpatch", "warmup"),
)
__all__ = list(_NAMES)

__getattr__ = names_of("rmsnorm_invariant_backward", __name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
