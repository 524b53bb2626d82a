"""The machine code of a package: an archive, from which a kernel is read when it is loaded.

cubins.tar.xz is a tar of all cubins, compressed in groups: similar kernels share an xz stream, and
none of the other streams is unpacked for them. cubins.json says for each name where its stream is
(offset and size in bytes), and where it is in that stream (start and length in bytes, unpacked).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

AGAIN = "install the package again, or restore its folder"
"""The advice about a damaged package."""
CUBINS = "cubins.tar.xz"
CUBINS_INDEX = "cubins.json"


def read_cubin(package: Path, file: str, digest: str) -> bytes:
    """Read <file>.cubin of a package, whose sha256 has to begin with `digest`. Raises
    RuntimeError."""
    try:
        import lzma  # some Pythons are built without it, and packages are imported there, too
    except ImportError as error:
        raise RuntimeError(
            f"this Python cannot unpack kernels: it has no module lzma ({error}). Use another, or "
            "build it again where liblzma's headers are (liblzma-dev, xz-devel)"
        ) from error
    path = package / CUBINS
    try:
        offset, size, start, length = json.loads((package / CUBINS_INDEX).read_bytes())[file]
        with path.open("rb") as archive:
            archive.seek(offset)
            group = lzma.decompress(archive.read(size))
        cubin = group[start : start + length]
    except Exception as error:  # a damaged index can hold anything
        raise RuntimeError(f"cannot read {file} in {path} ({error!r}); {AGAIN}") from error
    if hashlib.sha256(cubin).hexdigest()[:16] != digest:
        raise RuntimeError(f"{file} in {path} is not the kernel of the table; {AGAIN}")
    return cubin
