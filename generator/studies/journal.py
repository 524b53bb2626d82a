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
from pathlib import Path
from typing import Any

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


class SealedJournal(JournalFileBackend):
    """Optuna's journal file at `path`, which is created when missing, with seals.

    Its records are checked, and a last one that a kill or a full disk tore is cut off. Raises
    NormforgeError, and leaves the file as it is, when any other part of it is no journal or is not
    what was written; OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._checked = 0  # bytes
        self._records = 0
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
            # What other processes have written since; a torn record is of one that is gone.
            if self._check():
                os.truncate(self._path, self._checked)
            before = self._digest.copy()
            try:
                content = b"".join(map(self._seal, logs))
                with self._path.open("ab") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            except BaseException:
                self._digest = before
                raise
            self._checked += len(content)
            self._records += len(logs)

    def _seal(self, log: dict[str, Any]) -> bytes:
        """The record as it is written, after everything that `_digest` has seen."""
        record = json.dumps(log, separators=(",", ":"))[:-1].encode()
        self._digest.update(record)
        field = _FIELD % self._digest.hexdigest()[:_DIGITS].encode()
        self._digest.update(field)
        return record + field

    def _cut(self) -> None:
        """Cut off a torn last record, because an append would join it."""
        with locked(self._path):
            if self._check():  # another run may have been in the middle of writing it
                os.truncate(self._path, self._checked)

    def _check(self) -> bool:
        """Check the records behind `_checked`, and whether a torn one follows them."""
        with self._path.open("rb") as file:
            file.seek(self._checked)
            for line in file:
                if not line.endswith(b"\n"):
                    record = line.rstrip(b"\0")  # which some file systems have after a power cut
                    if record.startswith(_RECORD_START) or _RECORD_START.startswith(record):
                        return True
                    raise corrupt_error(self._path, "its end is no record of an Optuna journal")
                self._check_record(line, self._records + 1)
                self._records += 1
                self._checked += len(line)
        return False

    def _check_record(self, line: bytes, number: int) -> None:
        """A record under its seal is what `_seal` wrote, and need not be read here: reading would
        take several times as long as the seal."""
        if line.endswith(b"\r\n"):  # which would hide a seal
            raise corrupt_error(self._path, f"line {number} ends in CRLF instead of LF")
        sealed = _SEAL.fullmatch(line, max(0, len(line) - _FIELD_BYTES))
        if sealed is None:
            self._check_form(line, number)
            self._digest.update(line)
            return
        self._digest.update(line[:-_FIELD_BYTES])
        if self._digest.hexdigest()[:_DIGITS].encode() != sealed[1]:
            self._check_form(line, number)
            raise corrupt_error(
                self._path, f"line {number} or one before it was changed, doubled or lost"
            )
        self._digest.update(line[-_FIELD_BYTES:])

    def _check_form(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise corrupt_error(self._path, f"line {number} is no JSON") from error
        if not isinstance(record, dict) or "op_code" not in record:
            raise corrupt_error(self._path, f"line {number} is no record of an Optuna journal")
