"""The file of the problems that reached the norms of a program: what is in it, and what of it takes
longest.

A file that `collect` writes looks like this, and may be edited or put together by hand:

    collected:
      rmsnorm_backward:
        8192x4096:bf16: 6400
        8192x4096:bf16+residual: 200

The number is how often the norm's backward was called. Nothing here needs PyTorch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .operations import OPERATIONS
from .table import ITEMSIZE

Counts = Mapping[tuple[str, str], int]
"""Calls by operation and shape, as `shape_name` writes it."""

KEY = "collected"
_HEAD = f"""\
# Calls of norms, which a program made and Normforge counted: python tune.py --shapes THIS_FILE
{KEY}:
"""
_OPERATION = re.compile(r"  ([a-z]\w*):")
_CALLS = re.compile(r"    (\d+x\d+:[\w:+]*\w): (\d+)")
_SHAPE = re.compile(
    r"(\d+)x(\d+):([a-z]+\d+)(?::\w+)?(?:\+offset)?(?:\+residual(?:_(\w+))?)?"
    r"(?:\+(?:rotary|joined)\d+)?(?:\+interleaved)?"
)


def moved_bytes(operation: str, shape: str) -> int:
    """Return the fewest bytes of rows that one call moves: each is read or written once. It is 0
    for text that is no shape. An operation that this process does not know counts as RMSNorm's
    backward."""
    match = _SHAPE.fullmatch(shape)
    if match is None or match[3] not in ITEMSIZE:
        return 0
    signature = OPERATIONS.get(operation, OPERATIONS["rmsnorm_backward"]).signature
    itemsize, elements = ITEMSIZE[match[3]], int(match[1]) * int(match[2])
    written = sum(not tensor.extra for tensor in signature.outputs)
    moved = itemsize * (len(signature.early) + written) + (signature.quantized is not None)
    if "+residual" in shape:
        added = ITEMSIZE.get(match[4] or match[3], itemsize)
        moved += added * (len(signature.late) + (added != itemsize) * len(signature.copies))
    return elements * moved


def longest_first(operation: str, calls: Mapping[str, int]) -> list[str]:
    """Shapes by the time that all calls of each take: by calls times moved bytes, because these
    kernels are limited by memory."""
    return sorted(calls, key=lambda shape: (-calls[shape] * moved_bytes(operation, shape), shape))


def written(counts: Counts) -> str:
    """The content of a file."""
    lines = []
    for operation in sorted({operation for operation, _ in counts}):
        calls = {shape: count for (of, shape), count in counts.items() if of == operation}
        lines.append(f"  {operation}:\n")
        lines += [f"    {s}: {calls[s]}\n" for s in longest_first(operation, calls)]
    return _HEAD + "".join(lines)


def read(text: str) -> dict[tuple[str, str], int]:
    """Parse the text of `written`. Raises ValueError, which names the line, for any other text."""
    counts: dict[tuple[str, str], int] = {}
    operation = begun = ""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        of, calls = _OPERATION.fullmatch(line), _CALLS.fullmatch(line)
        if line == f"{KEY}:" and not begun:
            begun = line
        elif begun and of:
            operation = of[1]
        elif operation and calls:
            key = (operation, calls[1])
            counts[key] = counts.get(key, 0) + int(calls[2])
        else:
            raise ValueError(f"line {number} is '{line[:80]}'")
    if text.strip() and not begun:
        raise ValueError("it has no calls")
    return counts


def add_to_file(path: Path, counts: Counts, lock_seconds: float = 10.0) -> None:
    """Add calls to those of a file, which is made where there is none. Any number of processes may
    do so at once: a lock on a file beside it lets one in after the other, and the new file takes
    the place of the old one whole. Raises ValueError for a file of something else, OSError where
    it cannot be read or written or the lock is not to be had."""
    if path.exists() and not path.is_file():  # a pipe would never end, and a device be replaced
        raise ValueError("it is no file")
    with _locked(path.with_name(f".{path.name}.lock"), lock_seconds):
        known = read(path.read_text(encoding="utf-8")) if path.exists() else {}
        for key, count in counts.items():
            known[key] = known.get(key, 0) + count
        part = path.with_name(f".{path.name}.part")
        part.write_text(written(known), encoding="utf-8")
        part.replace(path)


@contextmanager
def _locked(path: Path, seconds: float) -> Iterator[None]:
    """The system drops the lock with its holder, so that kill -9 leaves nothing stale."""
    try:
        import fcntl
    except ImportError:  # Windows, where one GPU is usual
        yield
        return
    until = time.monotonic() + seconds
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"another process has held {path} for {seconds:g} s"
                    ) from None
                time.sleep(0.02)
        try:
            yield
        finally:  # a process that was forked meanwhile has the handle, too, and would keep the lock
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)
