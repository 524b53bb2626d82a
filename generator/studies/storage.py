"""Opens the storage of studies: an Optuna journal file, or any database that Optuna knows.
SQLAlchemy is imported for a database alone.

A trial is written when it is finished, in one record. A killed run therefore leaves no half-known
trial behind, and what it had under way is simply tried again.
"""

from __future__ import annotations

import lzma
import shutil
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import optuna
import optuna.storages.journal
from optuna.storages import BaseStorage, JournalStorage
from optuna.study._frozen import FrozenStudy

from generator.disk import replacing, sync
from generator.errors import NormforgeError
from generator.studies.journal import SealedJournal, corrupt_error
from generator.studies.outage import open_error

JOURNAL_NAME = "studies.journal"
"""The study file in the folder of a GPU; optuna-dashboard opens it."""


class Journal(JournalStorage):
    """A journal that lists its studies at once. Optuna copies all that is in every attribute of
    every study, such as the configs of all finals: every search asks which studies there are, so
    most of the time of a run that had nothing to measure went there. Nothing here changes what an
    attribute has. The names that start with an underscore are private to Optuna; without the first,
    Optuna's copies are returned."""

    def get_all_studies(self) -> list[FrozenStudy]:
        replay = getattr(self, "_replay_result", None)
        if replay is None:
            return super().get_all_studies()
        with self._thread_lock:
            self._sync_with_backend()
            studies = [copy(study) for study in replay.get_all_studies()]
            for study in studies:
                study.user_attrs = dict(study.user_attrs)
        return studies


def is_shared(where: str | Path | None) -> bool:
    """Return True if several runs on any machines may use the storage at `where` at the same
    time."""
    return str(where).startswith(("postgresql://", "postgresql+"))


def database_file(where: str | Path | None) -> Path | None:
    """The file of a database that has one (SQLite), which one run at a time may use; else None.

    Raises NormforgeError for a URL that is none, and for a database in memory, which ends with the
    run."""
    if "://" not in str(where) or is_shared(where):
        return None
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(str(where))
    except (ArgumentError, ValueError) as error:
        raise open_error(str(where), error) from error
    if url.get_backend_name() != "sqlite":
        return None
    name = url.database or ":memory:"
    if "uri" in url.query and name.startswith("file:"):  # https://sqlite.org/uri.html
        name = unquote(urlsplit(name).path)
    if name == ":memory:" or url.query.get("mode") == "memory":
        raise NormforgeError(
            f"the storage {where} is in memory and ends with this program: name a file, for "
            "example sqlite:///studies.db"
        )
    return Path(name).resolve()


def open_storage(where: str | Path) -> BaseStorage:
    """The storage at `where`: the URL of a database (with "://") or the path of a journal file,
    which is created with its folder when missing.

    Where the journal is missing and lies packed beside its place (`<name>.xz`, the form in which
    the repository keeps it), it is unpacked first. The last record of a journal that a kill or a
    full disk tore is cut off. Raises NormforgeError, and leaves the file as it is, when any other
    part of it is no journal or is not what was written.
    """
    prepare_optuna()
    if "://" in str(where):
        return _open_database(str(where))
    path = Path(where)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _unpack(path)
        backend = SealedJournal(path)
    except OSError as error:
        raise NormforgeError(
            f"cannot use {path} for the studies ({error.strerror}): choose another output folder"
        ) from error
    try:
        return Journal(backend)
    except Exception as error:  # Optuna raises whatever the content makes its replay stumble over
        raise corrupt_error(path, f"Optuna cannot replay it ({type(error).__name__})") from error


def prepare_optuna() -> None:
    """Make Optuna silent and its replay of journals faster. It reports every new study on stderr,
    which belongs to the progress line. Its replay parses the distribution of every knob anew for
    every trial, more than half the time of a long journal: here equal ones are one object, which
    neither Optuna nor this project ever changes. The name is private to Optuna; without it, the
    replay is as before."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    replay: Any = getattr(optuna.storages.journal, "_storage", None)
    parse = getattr(replay, "json_to_distribution", None)
    if parse is not None and not hasattr(parse, "cache_info"):
        replay.json_to_distribution = cache(parse)


def _unpack(path: Path) -> None:
    """Unpack `<path>.xz` to `path`, if there is one; the journal appears whole or not at all."""
    packed = path.with_name(path.name + ".xz")
    if not packed.exists():
        return
    try:
        with replacing(path) as part:
            with lzma.open(packed) as source, part.open("wb") as to:
                shutil.copyfileobj(source, to)
            sync(part)
        sync(path.parent)
    except (lzma.LZMAError, EOFError) as error:
        raise corrupt_error(packed, str(error)) from error


def _open_database(url: str) -> BaseStorage:
    database_file(url)  # refuses what no run can use
    from generator.studies.postgres import GrowingStorage, SharedStorage

    try:
        return SharedStorage(url) if is_shared(url) else GrowingStorage(url)
    except NormforgeError:
        raise
    except Exception as error:  # whatever the driver raises, import errors included
        raise open_error(url, error) from error
