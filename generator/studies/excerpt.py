"""Some studies of a journal, to read: in a fraction of the time that all of them take.

A journal has the records of all studies one behind the other. All are checked against their seals,
and only those of the studies that are wanted reach Optuna.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend

from generator.errors import NormforgeError
from generator.studies.journal import SealedRecords, corrupt_error
from generator.studies.storage import prepare_optuna

_HEAD = re.compile(
    rb'\{"op_code":(?:0,"worker_id":"[^"]*","study_name"'
    rb'|[234],"worker_id":"[^"]*","study_id":(\d+))'
)
"""Matches the start of a record that creates a study, or that belongs to the study of a number."""


class _AllNeededError(Exception):
    """A record says of which trial of the whole journal it is, or ends a study."""


class _Excerpt(BaseJournalBackend):
    """A journal that is read once. wanted: says of the name of a study whether its records are;
    None for all of them. Studies have the numbers that they have in the whole journal."""

    def __init__(self, path: Path, wanted: Callable[[str], bool] | None) -> None:
        self._path, self._wanted = path, wanted
        self._names: dict[str, int] = {}
        self._kept: set[int] = set()
        self._read = False

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        if self._read:
            return
        self._read = True
        for line in _lines(self._path):
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


def read_journal(path: Path, wanted: Callable[[str], bool] | None = None) -> BaseStorage:
    """The studies of a journal, packed or not, with the records of those whose names are wanted,
    by default all. Nothing is written. Raises NormforgeError where any record of the journal is not
    what was written; OSError."""
    prepare_optuna()
    try:
        try:
            return JournalStorage(_Excerpt(path, wanted))
        except _AllNeededError:
            return JournalStorage(_Excerpt(path, None))
    except (NormforgeError, OSError):
        raise
    except (lzma.LZMAError, EOFError) as error:
        raise corrupt_error(path, str(error)) from error
    except Exception as error:  # Optuna raises whatever the content makes its replay stumble over
        for _ in _lines(path):
            pass  # a seal says more
        raise corrupt_error(path, f"Optuna cannot replay it ({type(error).__name__})") from error


def _lines(path: Path) -> Iterator[bytes]:
    opener: Any = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rb") as file:
        yield from SealedRecords(path).read(file)
