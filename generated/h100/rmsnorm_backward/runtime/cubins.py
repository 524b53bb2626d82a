"""The machine code of a package: one zip file, from which a kernel is read when it is loaded.

Python's `zipfile` first makes an object of every name in the file, which takes 3 ms for 458 kernels
and would be a part of the first launch. Here the list is searched for one name, as bytes.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from pathlib import Path

CUBINS = "cubins.zip"

# Parts of a zip file (PKWARE's APPNOTE, 4.3): its last bytes, a member in the list, and the head of
# the member itself. Members are deflated, and no comments are written.
_END = struct.Struct("<4s4H2IH")
_LISTED = struct.Struct("<4s6H3I5H2I")
_HEAD = struct.Struct("<4s5H3I2H")


def read_cubin(package: Path, file: str, digest: str) -> bytes:
    """<file>.cubin of a package, whose sha256 has to begin with `digest`. Raises RuntimeError."""
    path = package / CUBINS
    try:
        cubin = _member(path, f"{file}.cubin".encode())
    except (OSError, ValueError, struct.error, zlib.error) as error:
        raise RuntimeError(f"cannot read {file} in {path} ({error}); emit it again") from error
    if hashlib.sha256(cubin).hexdigest()[:16] != digest:
        raise RuntimeError(
            f"{file} in {path} is not the kernel of the table; emit the package again"
        )
    return cubin


def _member(path: Path, name: bytes) -> bytes:
    """Raises ValueError where there is none, and for a damaged file any error of `read_cubin`."""
    with path.open("rb") as container:
        container.seek(-_END.size, 2)
        *_, size, start, _ = _END.unpack(container.read())
        container.seek(start)
        members = container.read(size)
        at = members.index(name)
        # The name may also be the end of a longer one.
        while (listed := _LISTED.unpack_from(members, at - _LISTED.size))[10] != len(name):
            at = members.index(name, at + 1)
        container.seek(listed[16])
        *_, name_size, extra_size = _HEAD.unpack(container.read(_HEAD.size))
        container.seek(name_size + extra_size, 1)
        return zlib.decompress(container.read(listed[8]), wbits=-zlib.MAX_WBITS)
