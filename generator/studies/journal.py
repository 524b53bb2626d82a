"""The journal of studies: a file of one JSON record a line, each of which seals all before it.

Optuna appends to such a file and replays it. Its records say nothing about themselves, so that one
doubled line or one flipped bit is another search with another winner. Here the last field of every
record is a `seal`: the first 16 hex digits of the sha256 over everything in the file before the
field. Records without one are read as they are, and the next seal covers them: those of another
program (optuna-dashboard adds notes), and those of before there were seals.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from optuna.storages.journal import JournalFileBackend

from generator.disk import locked, sync
from generator.errors import NormforgeError

_RECORD_START = b'{"op_code":'
_DIGITS = 16
_SEAL = re.compile(rb',"seal":"([0-9a-f]{%d})"\}\n' % _DIGITS)
_FIELD = b',"seal":"%s"}\n'
_FIELD_BYTES = len(_FIELD % bytes(_DIGITS))


def corrupt_error(path: Path, reason: str) -> NormforgeError:
    """The error for a study file that cannot be trusted."""
    return NormforgeError(
        f"the study file {path} is corrupt: {reason}; restore it, or move it away to start anew"
    )


class SealedRecords:
    """The records of the journal at `path`, packed or not, as they are read and checked.

    digest: of all that were read; bytes, count: how many; torn: whether one follows of which a kill
    or a full disk left a part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.digest = hashlib.sha256()
        self.bytes = self.count = 0
        self.torn = False

    def read(self, file: BinaryIO) -> Iterator[bytes]:
        """The lines behind those that were read. What they hold may be used when all have come:
        a seal covers those before it, and of those behind the last one it is seen whether they are
        records. Raises NormforgeError where any is not what was written."""
        file.seek(self.bytes)
        self.torn = False
        bare = self.bytes, self.count  # no seal covers the records from here on
        for line in file:
            if not line.endswith(b"\n"):
                self._check_torn(line)
                break
            number = self.count + 1
            if line.endswith(b"\r\n"):  # these line ends would hide a seal
                raise corrupt_error(self._path, f"line {number} ends in CRLF instead of LF")
            sealed = _SEAL.fullmatch(line, max(0, len(line) - _FIELD_BYTES))
            if sealed is None:
                self.digest.update(line)
            else:
                self.digest.update(line[:-_FIELD_BYTES])
                if self.digest.hexdigest()[:_DIGITS].encode() != sealed[1]:
                    self._check_forms(file, *bare, number)
                    raise corrupt_error(
                        self._path, f"line {number} or one before it was changed, doubled or lost"
                    )
                self.digest.update(line[-_FIELD_BYTES:])
            self.bytes += len(line)
            self.count = number
            if sealed is not None:
                bare = self.bytes, self.count
            yield line
        self._check_forms(file, *bare, self.count)

    def _check_torn(self, line: bytes) -> None:
        record = line.rstrip(b"\0")  # some file systems append NULs in a power cut
        if not record.startswith(_RECORD_START) and not _RECORD_START.startswith(record):
            raise corrupt_error(self._path, "its end is no record of an Optuna journal")
        self.torn = True

    def _check_forms(self, file: BinaryIO, start: int, before: int, last: int) -> None:
        """Check that the lines from the byte `start` are records: from the one behind `before` to
        the `last`. A seal says more in a fraction of the time."""
        if before == last:
            return
        file.seek(start)
        for number, line in enumerate(islice(file, last - before), before + 1):
            try:
                record = json.loads(line)
            except ValueError as error:
                raise corrupt_error(self._path, f"line {number} is no JSON") from error
            if not isinstance(record, dict) or "op_code" not in record:
                raise corrupt_error(self._path, f"line {number} is no record of an Optuna journal")


class SealedJournal(JournalFileBackend):
    """Optuna's journal file at `path`, which is created when missing, with seals.

    Its records are checked, and a last one that a kill or a full disk tore is cut off. Raises
    NormforgeError, and leaves the file as it is, when any other part of it is no journal or is not
    what was written; OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = SealedRecords(path)
        if not path.exists():
            path.touch()
            sync(path.parent)
        if self._check():
            self._cut()
        super().__init__(str(path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        # Optuna's own locks are files that outlive their holder and stall the next run until a
        # grace period ends.
        with locked(self._path):
            # Other processes may have written since; a torn record is of one that is gone.
            if self._check():
                os.truncate(self._path, self._records.bytes)
            before = self._records.digest.copy()
            try:
                content = b"".join(map(self._seal, logs))
                with self._path.open("ab") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                self._records.digest = before
                raise
            self._records.bytes += len(content)
            self._records.count += len(logs)

    def _seal(self, log: dict[str, Any]) -> bytes:
        """The record as it is written, after everything that `_digest` has seen."""
        record = json.dumps(log, separators=(",", ":"))[:-1].encode()
        digest = self._records.digest
        digest.update(record)
        field = _FIELD % digest.hexdigest()[:_DIGITS].encode()
        digest.update(field)
        return record + field

    def _cut(self) -> None:
        """Cut off a torn last record, because an append would join it."""
        with locked(self._path):
            if self._check():  # another run may have been in the middle of writing it
                os.truncate(self._path, self._records.bytes)

    def _check(self) -> bool:
        """Check the records behind those that were checked, and whether a torn one follows."""
        with self._path.open("rb") as file:
            for _ in self._records.read(file):
                pass
        return self._records.torn
