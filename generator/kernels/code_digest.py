"""The digest of the code that is compiled, which a measurement depends on, whatever files it is
written in.

Variants with equal digests are compiled from the same tokens, with the same options, by the same
compiler, and so are the same machine code. Comments, the names and places of template files, and
the Python that renders them take no part: editing those makes no record out of date.
"""

from __future__ import annotations

import hashlib

from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import compile_options, nvrtc_version
from generator.kernels.render import render, render_forward
from generator.kernels.variant import AnyVariant

_digests: dict[tuple[str, str], str] = {}  # by id, which is unique to the source, and arch


def compiler_input(
    variant: AnyVariant, *, comments: bool = True, include: bool = False
) -> tuple[str, int]:
    """The source of a variant and its register cap. comments, include: as in `render`."""
    if isinstance(variant, ForwardVariant):
        return render_forward(variant, comments=comments, include=include), 0
    return render(variant, comments=comments, include=include), int(variant["register_cap"])


def code_digest(variant: AnyVariant, arch: str) -> str:
    """Sixteen hex digits over the source without its comments, NVRTC's options and its version."""
    if (variant.id, arch) not in _digests:
        source, register_cap = compiler_input(variant, comments=False)
        lines = [line for line in source.splitlines() if line.strip()]
        options = compile_options(arch, register_cap)
        text = "\n".join([nvrtc_version(), *options, *lines])
        _digests[variant.id, arch] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return _digests[variant.id, arch]
