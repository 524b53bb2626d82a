"""The machine code of a package: an archive, from which a kernel is read when it is loaded.

cubins.tar.xz is a tar of all cubins, compressed in groups: similar kernels share an xz stream, and
none of the other streams is unpacked for them. cubins.json says for each name where its stream is
(offset and size in bytes), and where it is in that stream (start and length in bytes, unpacked).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

AGAIN = "install the package again, or restore its folder"
"""The advice about a damaged package."""
CUBINS = "cubins.tar.xz"
CUBINS_INDEX = "cubins.json"


def read_cubin(package: Path, file: str, digest: str) -> bytes:
    """Read <file>.cubin of a package, whose sha256 has to begin with `digest`. Raises
    RuntimeError."""
    return read_cubins(package, {file: digest})[file]


def read_cubins(package: Path, digests: Mapping[str, str]) -> dict[str, bytes]:
    """Read the cubins of some files, each of which has its own digest, and unpack no stream twice.
    Raises RuntimeError for the first that is missing or damaged."""
    try:
        import lzma  # some Pythons are built without it, and packages are imported there, too
    except ImportError as error:
        raise RuntimeError(
            f"this Python cannot unpack kernels: it has no module lzma ({error}). Use another, or "
            "build it again where liblzma's headers are (liblzma-dev, xz-devel)"
        ) from error
    path = package / CUBINS
    index: Any = None
    groups: dict[tuple[int, int], bytes] = {}
    found: dict[str, bytes] = {}
    for file, digest in digests.items():
        try:
            index = index or json.loads((package / CUBINS_INDEX).read_bytes())
            offset, size, start, length = index[file]
            if (offset, size) not in groups:
                with path.open("rb") as archive:
                    archive.seek(offset)
                    groups[offset, size] = lzma.decompress(archive.read(size))
            cubin = groups[offset, size][start : start + length]
        except Exception as error:  # a damaged index can hold anything
            raise RuntimeError(f"cannot read {file} in {path} ({error!r}); {AGAIN}") from error
        if hashlib.sha256(cubin).hexdigest()[:16] != digest:
            raise RuntimeError(f"{file} in {path} is not the kernel of the table; {AGAIN}")
        found[file] = cubin
    return found
