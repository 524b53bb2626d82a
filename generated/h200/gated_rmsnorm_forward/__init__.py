"""RMSNormGated for NVIDIA H200 SXM 141GB. Written by Normforge; tune again instead of editing."""

try:
    from normforge.packages import open_package
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the library normforge ({error}): install it, or make a package that "
        "stands alone with `python tune.py export --standalone`"
    ) from error

_package = open_package(__file__, __name__, "gated_rmsnorm_forward")

PROVENANCE = _package.provenance
explain = _package.explain
operators = _package.operators
patch = _package.patch
rms_norm_gated = _package.rms_norm_gated
unpatch = _package.unpatch

RMSNormGated = _package.RMSNormGated
RMSNormGated.__module__ = __name__  # where pickle finds it

__all__ = [
    "PROVENANCE",
    "RMSNormGated",
    "explain",
    "operators",
    "patch",
    "rms_norm_gated",
    "unpatch",
]
