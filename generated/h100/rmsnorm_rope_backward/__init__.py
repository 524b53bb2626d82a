"""rmsnorm_rope_backward for NVIDIA H100 SXM5 80GB HBM3. Written by Normforge; tune again instead of editing."""

try:
    from normforge.packages import open_package
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the library normforge ({error}): install it, or make a package that "
        "stands alone with `python tune.py export --standalone`"
    ) from error

_package = open_package(__file__, __name__, "rmsnorm_rope_backward")

PROVENANCE = _package.provenance
explain = _package.explain
operators = _package.operators
qk_norm_rope = _package.qk_norm_rope
rms_norm_rope = _package.rms_norm_rope

__all__ = [
    "PROVENANCE",
    "explain",
    "operators",
    "qk_norm_rope",
    "rms_norm_rope",
]
