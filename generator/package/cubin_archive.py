"""The archive of a package's machine code, as `normforge.cubins` reads it."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from tarfile import BLOCKSIZE, TarInfo
from typing import Any

from normforge.cubins import CUBINS, CUBINS_INDEX
from normforge.table import KernelOf

GROUP_BYTES = 240_000
"""Most that a stream unpacks to, unless it holds a single cubin. The first launch of a kernel waits
for its stream, about 1.5 ms. Larger streams are smaller in all: more cubins look alike."""
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 4, "pb": 4}]
"""LZMA filters for data in units of 16 bytes, the size of a GPU's instruction."""


def pack_cubins(cubins: Mapping[str, bytes]) -> tuple[bytes, dict[str, list[int]]]:
    """The .tar.xz of cubins by name, and its index: [offset, size, start, length] in bytes. Equal
    cubins give equal bytes under one version of liblzma."""
    groups: list[dict[str, bytes]] = [{}]
    for name, cubin in sorted(cubins.items()):  # names begin with what makes kernels alike
        if sum(map(len, groups[-1].values())) + len(cubin) > GROUP_BYTES:
            groups.append({})
        groups[-1][name] = cubin
    archive, index = b"", {}
    for group in groups:
        members, starts = b"", {}
        for name, cubin in group.items():
            members += _header(name, cubin)
            starts[name] = len(members)
            members += cubin + bytes(-len(cubin) % BLOCKSIZE)
        stream = lzma.compress(members, filters=_FILTERS)
        for name, start in starts.items():
            index[name] = [len(archive), len(stream), start, len(group[name])]
        archive += stream
    return archive + lzma.compress(bytes(2 * BLOCKSIZE)), index  # a tar ends with two empty blocks


def _header(name: str, cubin: bytes) -> bytes:
    about = TarInfo(f"{name}.cubin")  # its date is 1970, whenever it is written
    about.size = len(cubin)
    return about.tobuf()


def check_cubins(package: Path, kernels: Iterable[KernelOf[Any]]) -> None:
    """Raise OSError or ValueError unless the archive has the machine code of these kernels."""
    archive, content = ((package / name).read_bytes() for name in (CUBINS, CUBINS_INDEX))
    try:
        index = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{CUBINS_INDEX}: {error}") from error
    streams: dict[tuple[int, int], bytes] = {}
    for kernel in kernels:
        try:
            offset, size, start, length = index[kernel.file]
            if (offset, size) not in streams:
                streams[offset, size] = lzma.decompress(archive[offset : offset + size])
            cubin = streams[offset, size][start : start + length]
        except (lzma.LZMAError, EOFError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{kernel.file} is not in {CUBINS} where {CUBINS_INDEX} says ({error!r})"
            ) from error
        if sha256(cubin).hexdigest()[:16] != kernel.digest:
            raise ValueError(f"{kernel.file} in {CUBINS} is not the kernel of the table")
