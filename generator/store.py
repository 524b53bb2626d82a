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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial, TrialState

from generator.database import SharedStorage, is_outage, patiently, refused
from generator.errors import NormforgeError
from generator.problem import Problem
from generator.result import Result
from generator.space import Space
from generator.target import Target
from generator.variant import Config
from generator.winner import Winner, may_win

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


def study_name(problem: Problem, target: Target, evidence: str, space: Space) -> str:
    """Names the study of a problem: results that must not mix have different names. The number of
    SMs takes part because a slice of a GPU keeps its name. Templates and compiler take no part:
    each record says which code it was measured with."""
    return f"{problem}@{target}-{target.sms}sm:{evidence}:{space.hash}"


@dataclass(frozen=True)
class Record:
    """One finished trial.

    variant: its id; origin: the part of the search that chose it; elapsed: seconds of search in the
    study when it finished; code: digest of what was compiled (`generator.revision`); cubin: digest
    of the machine code; identity: digest of cubin and launch (equal ones are measured once);
    registers per thread and smem bytes per CTA of the main kernel, None without a cubin;
    shared_with: number of the trial whose result this one has, None when it has its own.
    """

    config: Config
    variant: str
    result: Result
    origin: str
    elapsed: float
    code: str = ""
    cubin: str = ""
    identity: str = ""
    registers: int | None = None
    smem: int | None = None
    shared_with: int | None = None

    @property
    def feasible(self) -> bool:
        return may_win(self.config, self.result)

    @property
    def ratio(self) -> float:
        """Ratio to the floor; infinite where no time is known."""
        return float("inf") if self.result.ratio is None else self.result.ratio

    def attributes(self) -> dict[str, Any]:
        """The user attributes of the trial, in which the whole record is stored. `outcome` and
        `feasible` repeat what follows from the others, for people who look at the study."""
        return {
            "variant": self.variant,
            "outcome": self.result.outcome,
            "feasible": self.feasible,
            "result": self.result.to_json(),
            "origin": self.origin,
            "elapsed": round(self.elapsed, 3),
            "code": self.code,
            "cubin": self.cubin,
            "identity": self.identity,
            "registers": self.registers,
            "smem": self.smem,
            "shared_with": self.shared_with,
        }

    @classmethod
    def from_trial(cls, trial: FrozenTrial) -> Record:
        stored = {
            name: value
            for name, value in trial.user_attrs.items()
            if name in cls.__dataclass_fields__
        }
        result = Result.from_json(stored["result"])
        return cls(**{**stored, "config": trial.params, "result": result})


class StudyLog:
    """The stored study of one problem. While a database is away its methods wait for it."""

    def __init__(self, storage: BaseStorage, name: str) -> None:
        self.name = name
        self._study = self._keep(lambda: _load_study(storage, name))

    def trials(self) -> list[FrozenTrial]:
        """Trials with a record, oldest first, also those that are out of date."""
        states = (TrialState.COMPLETE, TrialState.PRUNED)
        return self._keep(lambda: self._study.get_trials(deepcopy=False, states=states))

    def add(self, trial: FrozenTrial) -> None:
        """Write one finished trial in one record."""
        self._keep(lambda: self._study.add_trial(trial))

    @property
    def winner(self) -> Winner | None:
        """The winner of the last finals."""
        return _winner(self._attributes())

    @property
    def outdated(self) -> frozenset[int]:
        """Numbers of the trials whose configs gave other machine code when the study was last
        searched."""
        return frozenset(self._attributes().get("outdated", ()))

    def mark_outdated(self, numbers: Collection[int]) -> None:
        """Keep which trials are out of date, for those who only read the study."""
        if self.outdated != frozenset(numbers):
            self._keep(lambda: self._study.set_user_attr("outdated", sorted(numbers)))

    @property
    def trials_at_finals(self) -> int:
        """Trials that the study had at its last finals, 0 before there were any."""
        attributes = self._attributes()
        counted = attributes.get("trials_at_finals")
        if counted is None:  # written before finals were counted
            winner = _winner(attributes)
            return winner.trials if winner else int(attributes.get("barren", 0))
        return int(counted)

    @property
    def machine(self) -> Mapping[str, Any]:
        """Facts about the machine that held the finals; empty where it said none."""
        return dict(self._attributes().get("machine") or {})

    def save_finals(
        self,
        winner: Winner | None,
        finals: Sequence[tuple[Config, Result]],
        trials: int,
        machine: Mapping[str, Any],
    ) -> None:
        """Keep the finals and their winner as attributes of the study. The one that says that they
        are over, after `trials` trials in all, is written last."""
        entries = [{"config": dict(c), "result": r.to_json()} for c, r in finals]
        attributes: dict[str, Any] = {"finals": entries, "machine": dict(machine)}
        attributes["winner"] = winner and winner.to_json()
        attributes["trials_at_finals"] = trials
        for key, value in attributes.items():
            self._keep(lambda key=key, value=value: self._study.set_user_attr(key, value))  # type: ignore[misc]

    def _attributes(self) -> Mapping[str, Any]:
        return self._keep(lambda: self._study.user_attrs)

    def _keep(self, work: Callable[[], _Answer]) -> _Answer:
        try:
            return work()
        except OSError as error:
            raise self._lost(error) from error
        except StorageInternalError as error:
            if not is_outage(error):
                raise self._lost(error) from error
        return patiently(work)

    def _lost(self, error: Exception) -> NormforgeError:
        return NormforgeError(
            f"cannot write to study {self.name} ({error}): finished trials are kept; "
            "put the storage right and run the same command to continue"
        )


def _load_study(storage: BaseStorage, name: str) -> optuna.Study:
    try:
        return optuna.load_study(study_name=name, storage=storage)
    except KeyError:
        return optuna.create_study(
            storage=storage, study_name=name, direction="minimize", load_if_exists=True
        )


def stored_winners(storage: BaseStorage) -> list[Winner]:
    """Winners of every study in the storage, oldest first."""
    found = [_winner(study.user_attrs) for study in storage.get_all_studies()]
    return sorted((winner for winner in found if winner), key=lambda winner: winner.date)


def _winner(attributes: Mapping[str, Any]) -> Winner | None:
    try:
        return Winner.from_json(attributes["winner"])
    except (KeyError, TypeError):
        # No finals yet, none won, or another version of this program wrote them.
        return None
