"""LayerNorm by the kernels that were tuned for the GPU that this runs on.

    from normforge.layernorm import LayerNorm, layer_norm, install

What is here is what a package of LayerNorm in generated/ has; which one is as for `normforge`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from normforge import chosen_package, names_of

__all__ = [
    "PROVENANCE",
    "LayerNorm",
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

if TYPE_CHECKING:
    from .frontends.layer_norm import LayerNormPackage
    from .frontends.layer_norm_module import LayerNorm

    _package = LayerNormPackage(Path())
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
else:
    __getattr__ = names_of(chosen_package, "layernorm_backward", __name__, __all__)


def __dir__() -> list[str]:
    return __all__
