"""LayerNorm by the kernels that were tuned for the GPU that this runs on.

    from normforge.layernorm import LayerNorm, layer_norm, install

What is here is what a package of LayerNorm in generated/ has; which one is as for `normforge`.
"""

from __future__ import annotations

from normforge import names_of

_NAMES = (
    *("LayerNorm", "PROVENANCE", "explain", "graph_pass", "inductor_backend", "install"),
    *("installed", "layer_norm", "layer_norm_backward", "operators", "patch", "uninstall"),
    "unpatch",
)
__all__ = list(_NAMES)

__getattr__ = names_of("layernorm_backward", __name__, _NAMES)


def __dir__() -> list[str]:
    return __all__
