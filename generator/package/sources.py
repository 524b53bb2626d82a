"""How a stored kernel is written again: its source, and the variant that it was rendered from."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from generator.kernels.code_digest import AnyVariant, compiler_input
from generator.kernels.forward import ForwardVariant
from generator.kernels.render import headers, without_comments
from generator.kernels.variant import Variant, shape_fields
from generator.runtime.spec import ForwardSpec
from generator.runtime.table import ForwardKernel, Kernel

INCLUDE = "include"
"""Folder of the headers in a package: one folder for each revision, since the kernels that a
package keeps may be older than the others."""
_INCLUDED = re.compile(rf'^#include "\.\./{INCLUDE}/(\w+)/', re.MULTILINE)
_HEADER = re.compile(rf'^#include "\.\./{INCLUDE}/(\w+)/([\w.]+)"$', re.MULTILINE)
_FORWARD_KNOBS = (
    *("form", "threads_per_row", "rows_per_cta", "rows_in_flight", "vector_bytes"),
    *("cluster", "ctas_per_sm"),
)


def header_revision(texts: Mapping[str, str]) -> str:
    """Twelve hex digits over the names and the content of headers."""
    return hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:12]


def included_revisions(source: str) -> list[str]:
    """The revisions of the headers that an emitted source includes."""
    return list(dict.fromkeys(_INCLUDED.findall(source)))


def source_of(variant: AnyVariant) -> str:
    """The source of a variant as it is emitted to kernels/, with today's headers included."""
    include = f"../{INCLUDE}/{header_revision(headers())}"
    source, _ = compiler_input(variant, include=include)
    return source


def same_but_for_comments(source: str, other: str, texts: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether two emitted sources are the same code. texts: the headers of each revision."""

    def code(of: str) -> str:
        pasted = _HEADER.sub(lambda match: texts[match[1]][match[2]], without_comments(of))
        return without_comments(pasted)

    return source == other or code(source) == code(other)


def config_of(variant: AnyVariant) -> dict[str, Any]:
    """All that a variant was made from beside the facts of its spec, as JSON values: every knob,
    and of a fallback kernel whether it adds rows in blocks."""
    if isinstance(variant, ForwardVariant):
        return {knob: getattr(variant, knob) for knob in _FORWARD_KNOBS}
    return {**variant.config, **({} if variant.exact else {"in_blocks": variant.in_blocks})}


def variant_of(kernel: Kernel | ForwardKernel) -> AnyVariant:
    """The variant that a stored kernel was rendered from. Raises TypeError for a config that was
    made for other templates."""
    spec, config = kernel.spec, dict(kernel.config)
    if isinstance(spec, ForwardSpec):
        return ForwardVariant(
            N=spec.N, dtype=spec.dtype, weight_dtype=spec.weight_dtype, exact=spec.exact, **config
        )
    in_blocks, least = config.pop("in_blocks", True), 1 if spec.exact else spec.least
    shape = shape_fields(spec)
    return Variant(config, exact=spec.exact, least=least, in_blocks=in_blocks, **shape)
