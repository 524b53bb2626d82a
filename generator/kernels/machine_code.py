"""A fault of the compiler that only the machine code shows."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_INSTRUCTION = 16  # bytes of one, on sm_70 and later
_OPCODE = 0xFFF
_COPY_AT_UNIFORM = 0xDAE  # LDGSTS [R + UR], desc[UR]; that of [R] is 0xFAE


def illegal_copies(cubin: bytes) -> int:
    """Counts the asynchronous copies to shared memory (`cp.async`) that no GPU executes.

    For a copy with a cache policy whose address in shared memory has a warp-uniform part, NVRTC
    (13.0 for sm_90a, 13.5 for sm_100a) sometimes writes `LDGSTS [R3+UR0+0x6280],
    desc[UR1][R14.64]`. The policy needs an even register, and every copy of this form had an odd
    one: an H200 ends the kernel with "an illegal instruction was encountered".
    """
    return sum(
        struct.unpack_from("<H", code, at)[0] & _OPCODE == _COPY_AT_UNIFORM
        for code in _code(cubin)
        for at in range(0, len(code) - _INSTRUCTION + 1, _INSTRUCTION)
    )


def _code(cubin: bytes) -> Iterator[bytes]:
    """The sections of an ELF file that hold instructions."""
    if cubin[:5] != b"\x7fELF\x02":
        return
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    strings = headers[names][4]
    for name, _, _, _, offset, length in headers:
        if cubin.startswith(b".text.", strings + name):
            yield cubin[offset : offset + length]
