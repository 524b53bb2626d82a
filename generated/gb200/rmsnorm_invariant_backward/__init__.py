"""RMSNorm for NVIDIA GB200 (one Blackwell GPU of the Grace Blackwell Superchip). Unverified: its kernels were chosen by a model and have not run on this GPU. Written by Normforge; tune again instead of editing."""

try:
    from normforge.packages import open_package
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the library normforge ({error}): install it, or make a package that "
        "stands alone with `python tune.py export --standalone`"
    ) from error

_package = open_package(__file__, __name__, "rmsnorm_invariant_backward")

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
set_sm_margin = _package.set_sm_margin
uninstall = _package.uninstall
unpatch = _package.unpatch
warmup = _package.warmup

RMSNorm = _package.RMSNorm
RMSNorm.__module__ = __name__  # where pickle finds it

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
