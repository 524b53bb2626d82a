"""rope for NVIDIA H200 SXM 141GB. Written by Normforge; tune again instead of editing."""

try:
    from normforge.packages import open_package
except ImportError as error:
    raise ImportError(
        f"{__name__} needs the library normforge ({error}): install it, or make a package that "
        "stands alone with `python tune.py export --standalone`"
    ) from error

_package = open_package(__file__, __name__, "rope")

PROVENANCE = _package.provenance
apply_rope = _package.apply_rope
explain = _package.explain
operators = _package.operators

__all__ = [
    "PROVENANCE",
    "apply_rope",
    "explain",
    "operators",
]
