"""rmsnorm_fp8_residual_forward for NVIDIA H200 SXM 141GB. Written by Normforge; tune again instead of editing."""

try:
    from normforge.packages import open_package
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the library normforge ({error}): install it, or make a package that "
        "stands alone with `python tune.py export --standalone`"
    ) from error

_package = open_package(__file__, __name__, "rmsnorm_fp8_residual_forward")

PROVENANCE = _package.provenance
explain = _package.explain
operators = _package.operators
rms_norm_backward_quantized = _package.rms_norm_backward_quantized
rms_norm_quantized = _package.rms_norm_quantized

__all__ = [
    "PROVENANCE",
    "explain",
    "operators",
    "rms_norm_backward_quantized",
    "rms_norm_quantized",
]
