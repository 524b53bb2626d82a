"""A folder that is replaced by one rename: a reader, a crash and a power cut see either the whole
old one or the whole new one."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from generator.disk import locked, sync
from generator.errors import NormforgeError


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raise NormforgeError unless `folder` can be written or replaced; creates its parent. option:
    that of the command line which names it."""
    try:
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent):
            pass
    except OSError as error:
        raise NormforgeError(
            f"cannot write {folder} ({error.strerror or error}): "
            f"choose another folder with {option}"
        ) from error


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Let one writer in at a time, so that two that extend one folder see what the other wrote. A
    folder that was renamed by a writer, which was then killed before its second rename, gets its
    name back."""
    with locked(folder.parent):
        if _backup(folder).exists() and not folder.exists():
            _backup(folder).rename(folder)
        yield


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder beside `folder`, which takes its place when the body ends. Hold
    `writer_lock(folder)`. Raises NormforgeError, and leaves `folder` as it is, for any OSError
    before that, also in the body."""
    fresh = folder.parent / f".{folder.name}.part"
    try:
        shutil.rmtree(fresh, ignore_errors=True)  # a run that was killed here left it
        fresh.mkdir()
        yield fresh
        for path in [*fresh.rglob("*"), fresh]:
            sync(path)
        _swap(fresh, folder)
    except OSError as error:
        raise NormforgeError(
            f"cannot write {folder} ({error.strerror or error}); what was there is unchanged"
        ) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    try:
        sync(folder.parent)
    except OSError as error:
        raise NormforgeError(
            f"{folder} is written, but a power cut may lose it ({error.strerror or error})"
        ) from error


def _swap(fresh: Path, folder: Path) -> None:
    """Put `fresh` where `folder` is; the old folder may be left at `fresh`."""
    if not folder.exists():
        fresh.rename(folder)
        return
    try:
        _exchange(fresh, folder)
    except OSError:
        # A file system without the exchange: two renames, undone if the second one fails, and by
        # the next run if this one is killed between them.
        old = _backup(folder)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        try:
            fresh.rename(folder)
        except OSError:
            old.rename(folder)
            raise
        shutil.rmtree(old, ignore_errors=True)


def _backup(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.old"


def _exchange(one: Path, other: Path) -> None:
    """Swap two names in one step (Linux renameat2 with RENAME_EXCHANGE). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError("this system cannot exchange two names")
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if libc.renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
