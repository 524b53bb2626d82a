"""Some studies of a journal, to read: in a fraction of the time that all of them take.

A journal has the records of all studies one behind the other. All are checked against their seals,
and only those of the studies that are wanted reach Optuna.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage
from optuna.storages.journal import BaseJournalBackend

from generator.errors import NormforgeError
from generator.studies.journal import SealedRecords, corrupt_error, without_seal
from generator.studies.storage import Journal, prepare_optuna

_HEAD = re.compile(
    rb'\{"op_code":(?:0,"worker_id":"[^"]*","study_name"'
    rb'|[234],"worker_id":"[^"]*","study_id":(\d+))'
)
"""Matches the start of a record that creates a study, or that belongs to the study of a number."""


class _AllNeededError(Exception):
    """A record says of which trial of the whole journal it is, or ends a study."""


class _Excerpt(BaseJournalBackend):
    """A journal that is read once. wanted: says of the name of a study whether its records are;
    None for all of them; first: as in `read_journal`. Studies have the numbers that they have in
    the whole journal."""

    def __init__(
        self, path: Path, wanted: Callable[[str], bool] | None, first: int | None = None
    ) -> None:
        self._path, self._wanted, self._first = path, wanted, first
        self._names: dict[str, int] = {}
        self._kept: set[int] = set()
        self._read = False

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if self._read:
            return
        self._read = True
        for line in _lines(self._path, self._first):
            if self._wanted is None or self._belongs(line, self._wanted):
                yield json.loads(line)

    def _belongs(self, line: bytes, wanted: Callable[[str], bool]) -> bool:
        head = _HEAD.match(line)
        if head is None:
            raise _AllNeededError
        if head[1] is not None:
            return int(head[1]) in self._kept
        name = json.loads(line)["study_name"]
        if name not in self._names:
            self._names[name] = len(self._names)
            if wanted(name):
                self._kept.add(self._names[name])
        return True

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        raise RuntimeError("an excerpt is there to be read")


def read_journal(
    path: Path, wanted: Callable[[str], bool] | None = None, first: int | None = None
) -> BaseStorage:
    """The studies of a journal, packed or not, with the records of those whose names are wanted,
    by default all. first: of the journal's records only so many, which are the studies as they were
    before the others were appended. Nothing is written. Raises NormforgeError where any record of
    the journal is not what was written; OSError."""
    prepare_optuna()
    try:
        try:
            return Journal(_Excerpt(path, wanted, first))
        except _AllNeededError:
            return Journal(_Excerpt(path, None, first))
    except (NormforgeError, OSError):
        raise
    except (lzma.LZMAError, EOFError) as error:
        raise corrupt_error(path, str(error)) from error
    except Exception as error:  # Optuna raises whatever the content makes its replay stumble over
        for _ in _lines(path):
            pass  # a seal says more
        raise corrupt_error(path, f"Optuna cannot replay it ({type(error).__name__})") from error


def digest_of(path: Path, first: int | None = None) -> tuple[int, str]:
    """Count the records of a journal, packed or not, or its `first` ones; and give 16 hex digits
    that stand for them, whether or not others follow."""
    digest, count = sha256(), 0
    for line in _lines(path, first):
        digest.update(without_seal(line))
        count += 1
    return count, digest.hexdigest()[:16]


def _lines(path: Path, first: int | None = None) -> Iterator[bytes]:
    """All are read, because the seal of the last one covers them."""
    opener: Any = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rb") as file:
        for number, line in enumerate(SealedRecords(path).read(file)):
            if first is None or number < first:
                yield line
