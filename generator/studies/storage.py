"""Where studies live: an Optuna journal file, or any database that Optuna knows.

A trial is written when it is finished, in one record. A killed run therefore leaves no half-known
trial behind, and what it had under way is simply tried again.
"""

from __future__ import annotations

import fcntl
import json
import lzma
import os
import shutil
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from generator.errors import NormforgeError
from generator.studies.postgres import SharedStorage, refused

JOURNAL_NAME = "studies.journal"
"""The study file in the folder of a GPU; optuna-dashboard opens it."""


_RECORD_START = b'{"op_code":'


_Answer = TypeVar("_Answer")


class _KernelLock(JournalFileOpenLock):
    """flock on the journal itself. The kernel drops it with its holder, so kill -9 leaves nothing
    stale; Optuna's own locks are files that outlive their holder and stall the next run until a
    grace period ends."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._handle = -1

    def acquire(self) -> bool:
        self._handle = os.open(self._path, os.O_RDWR)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._handle)


def is_shared(where: str | Path | None) -> bool:
    """Whether several runs on any machines may use the storage at `where` at the same time."""
    return str(where).startswith(("postgresql://", "postgresql+"))


def open_storage(where: str | Path) -> BaseStorage:
    """The storage at `where`: the URL of a database (with "://") or the path of a journal file,
    which is created with its folder when missing.

    Where the journal is missing and lies packed beside its place (`<name>.xz`, the form in which
    the repository keeps it), it is unpacked first. The last record of a journal that a kill or a
    full disk tore is cut off. Raises NormforgeError, and leaves the file as it is, when any other
    part of it is no journal.
    """
    # Optuna reports every new study on stderr, which belongs to the progress line.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if "://" in str(where) or is_shared(where):
        return _open_database(str(where))
    path = Path(where)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _unpack(path)
        if path.exists():
            _check_journal(path)
        backend = JournalFileBackend(str(path), lock_obj=_KernelLock(path))
    except OSError as error:
        raise NormforgeError(
            f"cannot use {path} for the studies ({error.strerror}): choose another output folder"
        ) from error
    try:
        return JournalStorage(backend)
    except Exception as error:  # Optuna raises whatever the content makes its replay stumble over
        raise _corrupt(path, f"Optuna cannot replay it ({type(error).__name__})") from error


def _unpack(path: Path) -> None:
    """Unpack `<path>.xz` to `path`, if there is one; the journal appears whole or not at all."""
    packed = path.with_name(path.name + ".xz")
    if not packed.exists():
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with lzma.open(packed) as source, part.open("wb") as to:
            shutil.copyfileobj(source, to)
        part.replace(path)
    except (lzma.LZMAError, EOFError) as error:
        raise _corrupt(packed, str(error)) from error
    finally:
        part.unlink(missing_ok=True)


def _open_database(url: str) -> BaseStorage:
    try:
        return SharedStorage(url) if is_shared(url) else RDBStorage(url)
    except NormforgeError:
        raise
    except Exception as error:  # whatever the driver raises, import errors included
        raise refused(url, error) from error


def _check_journal(path: Path) -> None:
    """Check every record. Only a torn last one is repaired, because an append would join it."""
    complete, torn = _read_journal(path)
    if not torn:
        return
    lock = _KernelLock(path)
    lock.acquire()
    try:
        # Another run may have been in the middle of writing it.
        complete, torn = _read_journal(path)
        if torn:
            os.truncate(path, complete)
    finally:
        lock.release()


def _read_journal(path: Path) -> tuple[int, bool]:
    """Bytes of complete records, and whether a torn one follows."""
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:complete].split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise _corrupt(path, f"line {number} is no JSON") from error
        if not isinstance(record, dict) or "op_code" not in record:
            raise _corrupt(path, f"line {number} is no record of an Optuna journal")
    torn = content[complete:]
    if torn and not torn.startswith(_RECORD_START) and not _RECORD_START.startswith(torn):
        raise _corrupt(path, "its end is no record of an Optuna journal")
    return complete, bool(torn)


def _corrupt(path: Path, reason: str) -> NormforgeError:
    return NormforgeError(
        f"the study file {path} is corrupt: {reason}; restore it, or move it away to start anew"
    )
