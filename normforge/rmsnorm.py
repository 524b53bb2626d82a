"""RMSNorm by the kernels that were tuned for the GPU that this runs on: the names of `normforge`,
whatever `use_batch_invariant` says."""

from __future__ import annotations

from normforge import names_of

_NAMES = (
    *("PROVENANCE", "RMSNorm", "explain", "graph_pass", "inductor_backend", "install"),
    *("installed", "operators", "patch", "rms_norm", "rmsnorm_backward", "rmsnorm_forward"),
    *("uninstall", "unpatch", "use_native", "warmup"),
)
__all__ = list(_NAMES)

__getattr__ = names_of("rmsnorm_backward", __name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
