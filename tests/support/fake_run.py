"""Whole runs on the fake GPU, each in a process of its own, and a killer that strikes them.

Processes come from one fork server that has everything imported (tests/conftest.py), so that a kill
costs a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.compile_pool import CompilePool
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space
from generator.space.space import Space
from generator.studies.records import Record, study_name
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog
from generator.tuner.lifecycle import exclusive_run
from tests.support.fake_gpu import FakeCompiler, FakeGpu, Landscape, Log, Weather, born, key, plant
from tests.support.patience import patience
from tests.support.searches import quick_proposals
from tests.support.synthetic import PROBLEM, TARGET, shrink

SECONDS = 4.0
"""Deadline of a job: far more than any takes on a busy machine, and a hang costs it whole."""
STORMY = Weather(storms=0.03)
OPEN = {
    "strategy": ["column_slices", "separate", "atomic", "last_cta"],
    "store_hint": ["default", "streaming"],
    "grid": ["full", "even"],
    "slice_columns": [32, 64],
    "weight_in": ["registers", "smem"],
    "stages": [3, 2],
}


@cache
def little_space() -> Space:
    """96 legal configs, which a search sweeps."""
    keep = LegalConfigs(load_space(), PROBLEM, TARGET).first(1)[0]
    with tempfile.TemporaryDirectory() as folder:
        return shrink(Path(folder), keep, **OPEN)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Run:
    """One run in a folder: what goes wrong there."""

    folder: Path
    landscape: Landscape
    weather: Weather = STORMY
    seconds: float = 0.002
    file_bytes: int = 0
    """No file may grow beyond this, 0 for no limit: a full disk, without filling one."""

    @classmethod
    def planted(cls, folder: Path, seed: int) -> Run:
        configs = LegalConfigs(little_space(), PROBLEM, TARGET).first(1000)
        return cls(folder, plant([dict(config) for config in configs], seed))

    @property
    def log(self) -> Log:
        return Log(self.folder / "log")

    @property
    def said(self) -> str:
        """Return what the last driver that came to an end said: the id of the winner, or a
        sentence."""
        path = self.folder / "said"
        return path.read_text() if path.exists() else ""

    def answered(self) -> int:
        """Trials that a worker has finished."""
        return sum(entry.get("event") == "answer" for entry in self.log.read())

    def start(self) -> Any:
        driver = multiprocessing.get_context("forkserver").Process(target=drive, args=(self,))
        driver.start()
        return driver

    def records(self) -> list[Record]:
        """The finished trials; for when no driver runs."""
        journal = self.folder / JOURNAL_NAME
        if not journal.exists():
            return []
        name = study_name(PROBLEM, TARGET, "measured")
        return [
            Record.from_trial(trial) for trial in StudyLog(open_storage(journal), name).trials()
        ]


def nap(seconds: float) -> None:
    """The pauses of the tuner, a hundred times shorter."""
    time.sleep(seconds / 100)


def drive(run: Run) -> None:
    """Search one problem as tune.py does, a space that a search sweeps whatever it proposes."""
    # The server that forks this process has its signal mask from whoever needed it first, which may
    # have been a shielded start of a worker. A shell gives tune.py an open one.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    run.log.hello("driver")
    if run.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (run.file_bytes, resource.RLIM_INFINITY))
    gpu = FakeGpu(run.log, run.landscape, run.weather, run.seconds)
    compiler = FakeCompiler(run.log, run.landscape)
    try:
        with (
            quick_proposals(),
            exclusive_run(run.folder) as stop,
            CompilePool("sm_90a", 2, run.folder, compile=compiler, method="fork") as pool,
            MeasuredEvaluator(
                TARGET, Supervisor(0, SECONDS, open_handler=gpu, method="fork", sleep=nap)
            ) as evaluator,
        ):
            winner = search_problem(
                LegalConfigs(little_space(), PROBLEM, TARGET),
                pool,
                evaluator,
                open_storage(run.folder / JOURNAL_NAME),
                Budget(trials=200),
                on_progress=lambda event: stop.check(),
            )
        said = key(winner.config) if winner else "none"
    except NormforgeError as error:
        said = str(error)
    except KeyboardInterrupt:
        said = "interrupted"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (run.folder / "said").write_text(said)


@dataclass
class Killer:
    """Kills driver, GPU workers and compilers of a run at random moments."""

    run: Run
    rng: random.Random
    kills: dict[str, int]

    def strike(self, role: str) -> bool:
        """Kill the youngest living process of that role, and only if it is still the one that said
        hello: process ids are used again."""
        for entry in reversed([e for e in self.run.log.read() if e.get("role") == role]):
            try:
                handle = os.pidfd_open(entry["pid"])
            except OSError:
                continue
            try:
                if born(entry["pid"]) == entry["born"]:
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
                    self.kills[role] += 1
                    return True
            except OSError:
                continue
            finally:
                os.close(handle)
        return False

    def torture(self, roles: list[str]) -> list[Record]:
        """Run to the end, striking once for each of `roles`. The trials that a driver leaves behind
        must all be there when the next one has ended."""
        known: list[Record] = []
        deadline = time.monotonic() + patience(120)
        while True:
            driver = self.run.start()
            while driver.is_alive():
                assert time.monotonic() < deadline, "the run does not end"
                if roles:
                    driver.join(self.rng.uniform(0, 0.12))
                    if driver.is_alive() and self.strike(roles[-1]):
                        roles.pop()
                else:
                    driver.join(deadline - time.monotonic())
            driver.join()
            stored = self.run.records()
            assert stored[: len(known)] == known, "a finished trial was lost or changed"
            known = stored
            if driver.exitcode == 0:
                return known
