"""LayerNorm by the kernels that were tuned for the GPU that this runs on.

    from normforge.layernorm import LayerNorm, layer_norm, install

What is here is what a package of LayerNorm in generated/ has; which one is as for `normforge`.
"""

from __future__ import annotations

from typing import Any

from normforge import chosen_package

_NAMES = (
    *("LayerNorm", "PROVENANCE", "explain", "graph_pass", "inductor_backend", "install"),
    *("installed", "layer_norm", "layer_norm_backward", "patch", "uninstall", "unpatch"),
)
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(chosen_package("layernorm_backward"), name)
    return found


def __dir__() -> list[str]:
    return __all__
