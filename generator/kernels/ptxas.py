"""Reads the resources of the kernels that ptxas has assembled from its log (`-v`)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Resources:
    """The resources that ptxas reports for one kernel. Bytes are per thread, smem per CTA (static
    part); barriers: CTA barriers, of which an SM has a limited number for all its CTAs."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    barriers: int = 1


def read_resources(log: str) -> dict[str, Resources]:
    """Registers, spills, stack and static smem of every kernel in a ptxas -v log."""
    kernels: dict[str, Resources] = {}
    blocks = re.split(r"Compiling entry function '(\w+)'", log)
    for name, block in zip(blocks[1::2], blocks[2::2], strict=True):
        used = re.search(r"Used (\d+) registers", block)
        frame = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
        )
        smem = re.search(r"(\d+) bytes smem", block)
        barriers = re.search(r"used (\d+) barriers", block)
        if used and frame:
            kernels[name] = Resources(
                registers=int(used[1]),
                spill_bytes=int(frame[2]) + int(frame[3]),
                stack_bytes=int(frame[1]),
                smem_bytes=int(smem[1]) if smem else 0,
                barriers=int(barriers[1]) if barriers else 0,
            )
    return kernels


def overrides_cap(log: str) -> bool:
    """Return True if a kernel's launch bounds took the place of the register cap."""
    return "Overriding global maxrregcount" in log
