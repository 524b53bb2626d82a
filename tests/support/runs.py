"""Runs of the command line in processes of their own, to be looked into and to be killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from generator.paths import REPOSITORY
from generator.problem import RMSNORM_FORWARD
from generator.studies.storage import JOURNAL_NAME
from tests.support.patience import patience

ROOT = REPOSITORY


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "tune.py"), *arguments]


def trials(out: Path) -> list[dict[str, Any]]:
    """The finished trials in an output folder, oldest first: name of the study and config. Those
    of forwards are left out."""
    storage = JournalStorage(JournalFileBackend(str(out / JOURNAL_NAME)))
    return [
        {"study": name, **trial.params}
        for name in sorted(optuna.get_all_study_names(storage))
        if not name.startswith(RMSNORM_FORWARD)
        for trial in optuna.load_study(study_name=name, storage=storage).trials
    ]


def kill_and_resume(line: list[str], out: Path, count: int) -> dict[str, Any]:
    """Kill -9 a run of `count` trials of one shape in the middle, start it again, and return the
    JSON document of the second run, which has lost and repeated nothing."""
    journal = out / JOURNAL_NAME
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        until = time.monotonic() + patience(240)
        while not journal.exists() or journal.read_bytes().count(b'"origin"') < 5:
            assert run.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < until, "no trial was finished"
            time.sleep(0.005)
        run.kill()
    before = trials(out)
    assert 5 <= len(before) < count

    done = subprocess.run(line, capture_output=True, text=True, timeout=patience(400))
    assert done.returncode == 0, done.stderr
    after = trials(out)
    assert after[: len(before)] == before, "a finished trial was lost"
    assert len(after) == count
    assert len({json.dumps(trial) for trial in after}) == count, "a trial was repeated"
    document: dict[str, Any] = json.loads(done.stdout)
    return document
