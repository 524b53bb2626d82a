"""LayerNorm for NVIDIA H200 SXM 141GB. Written by Normforge; tune again instead of editing."""

try:
    from normforge.packages import open_package
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the library normforge ({error}): install it, or make a package that "
        "stands alone with `python tune.py export --standalone`"
    ) from error

_package = open_package(__file__, __name__, "layernorm_backward")

PROVENANCE = _package.provenance
explain = _package.explain
graph_pass = _package.graph_pass
inductor_backend = _package.inductor_backend
install = _package.install
installed = _package.installed
layer_norm = _package.layer_norm
layer_norm_backward = _package.layer_norm_backward
layer_norm_forward = _package.layer_norm_forward
operators = _package.operators
patch = _package.patch
uninstall = _package.uninstall
unpatch = _package.unpatch
use_native = _package.use_native
warmup = _package.warmup

LayerNorm = _package.LayerNorm
LayerNorm.__module__ = __name__  # where pickle finds it

__all__ = [
    "LayerNorm",
    "PROVENANCE",
    "explain",
    "graph_pass",
    "inductor_backend",
    "install",
    "installed",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "operators",
    "patch",
    "uninstall",
    "unpatch",
    "use_native",
    "warmup",
]
