"""Writes a stored kernel again: its source, and the variant that it was rendered from.

A source includes its headers by name: those of templates/, which exist once. A copy of a package
that leaves this repository has them beside its sources.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from generator.kernels.code_digest import AnyVariant, compiler_input
from generator.kernels.forward import ForwardVariant
from generator.kernels.render import headers, without_comments
from generator.kernels.variant import Variant, shape_fields
from normforge.spec import ForwardSpec
from normforge.table import ForwardKernel, Kernel

_HEADER = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_REVISION = re.compile(r"^// Headers: templates/\*\.cuh, revision (\w+)$", re.MULTILINE)
_OLD_HEADER = re.compile(r'^#include "\.\./include/(\w+)/([\w.]+)"$', re.MULTILINE)
"""Matches includes of sources that had a folder of headers of their own."""


def header_revision(source: str) -> str:
    """Twelve hex digits over the code of the headers that an emitted source includes, as they are
    today. Comments take no part. Raises LookupError for a header that there is not."""
    texts = headers()
    code = [(name, without_comments(texts[name])) for name in _HEADER.findall(source)]
    return hashlib.sha256(repr(code).encode()).hexdigest()[:12]


def source_of(variant: AnyVariant) -> str:
    """The source of a variant as it is emitted to kernels/. Its last line names the revision of the
    headers."""
    source, _ = compiler_input(variant, include=True)
    return f"{source}\n// Headers: templates/*.cuh, revision {header_revision(source)}\n"


def is_same_code(source: str, todays: str, folders: dict[str, dict[str, str]]) -> bool:
    """Return True if an emitted source is the same code as one of today's. folders: for sources
    that had a folder of headers of their own, the texts of each."""
    if found := _REVISION.search(source):
        same = found[1] == header_revision(todays)
        return same and without_comments(source) == without_comments(todays)
    return _pasted(source, folders) == without_comments(
        _HEADER.sub(lambda match: headers()[match[1]], without_comments(todays))
    )


def old_headers(package: Path) -> dict[str, dict[str, str]]:
    """The headers of a package that has folders of them, by the name of the folder."""
    folders = [path for path in (package / "include").glob("*") if path.is_dir()]
    return {
        folder.name: {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
        for folder in folders
    }


def _pasted(source: str, folders: dict[str, dict[str, str]]) -> str:
    code = _OLD_HEADER.sub(lambda match: folders[match[1]][match[2]], without_comments(source))
    return without_comments(code)


def with_old_headers(source: str, folders: dict[str, dict[str, str]]) -> str:
    """A source that had a folder of headers of its own, with their texts in it."""
    return _OLD_HEADER.sub(lambda match: folders[match[1]][match[2]].rstrip("\n"), source)


def config_of(variant: AnyVariant) -> dict[str, Any]:
    """All that a variant was made from beside the facts of its spec, as JSON values: every knob,
    and of a fallback kernel whether it adds rows in blocks."""
    if isinstance(variant, ForwardVariant) or variant.exact:
        return dict(variant.config)
    return {**variant.config, "in_blocks": variant.in_blocks}


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
