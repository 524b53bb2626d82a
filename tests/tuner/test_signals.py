"""Signals to a run: which ones are the same request to end, and which one ends it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from generator.paths import REPOSITORY
from generator.tuner import lifecycle
from generator.tuner import run as tuning
from generator.tuner.display import Status
from tests.support.fake_devices import PROBLEMS, make_plan
from tests.support.fake_gpu import Landscape, born
from tests.support.fake_run import Run
from tests.support.patience import await_, patience


def started(run: Run) -> Any:
    """Its process, once the first trial is under way."""
    driver = run.start()
    await_(lambda: any(entry.get("event") == "begin" for entry in run.log.read()))
    return driver


def test_signals_in_quick_succession_are_one(tmp_path: Path) -> None:
    """`timeout` signals the run and then its process group, which is the run again."""
    run = Run(tmp_path, Landscape(), seconds=1.0)
    driver = started(run)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:  # the handler of one is running when the next one comes
        os.kill(driver.pid, signal.SIGTERM)
    driver.join(patience(60))
    assert run.said == "interrupted"
    assert len(run.records()) == run.answered() == 1


LATE_HANDLER = """
import signal, sys, threading, time
from pathlib import Path
from generator.tuner import lifecycle
from generator.tuner.lifecycle import exclusive_run

lifecycle.SAME_SIGNAL_SECONDS = float(sys.argv[2])
with exclusive_run(Path(sys.argv[1])) as stop:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    print("begun", flush=True)
    while stop.signal is None:
        time.sleep(0.01)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # other threads get it now
    print("first", flush=True)
    time.sleep(3)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        stop.check()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("same", "pause", "said"), [(2.5, 0.0, "interrupted"), (0.2, 0.8, "")], ids=["same", "second"]
)
def test_when_a_signal_came_counts_and_not_when_python_notices(
    tmp_path: Path, same: float, pause: float, said: str
) -> None:
    """Its handler runs when the trial under way has ended, 3 s after the first signal."""
    command = [sys.executable, "-c", LATE_HANDLER, str(tmp_path), str(same)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for expected in ("begun", "first"):
            assert run.stdout.readline() == f"{expected}\n"
            if expected == "first":
                time.sleep(pause)
            run.send_signal(signal.SIGTERM)
        assert run.stdout.read().strip() == said
    assert run.returncode == (0 if said else 128 + signal.SIGTERM)


def test_ctrl_c_does_not_wait_for_a_trial_that_takes_long(tmp_path: Path) -> None:
    run = Run(tmp_path, Landscape(), seconds=30.0)
    driver = started(run)
    start = time.monotonic()
    os.kill(driver.pid, signal.SIGINT)
    driver.join(60)
    assert time.monotonic() - start < 15, "a trial takes 30 s"
    assert run.said == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_behind_the_last_trial_is_told_to_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """There is no trial any more after which somebody would look."""
    monkeypatch.setattr(tuning, "run_tasks", lambda *_: signal.raise_signal(number))
    plan = make_plan(tmp_path, 1, problems=PROBLEMS[:1], devices=())
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            tuning.tune(plan, None, Status(1))
    else:
        assert tuning.tune(plan, None, Status(1)).interrupted


def test_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, Landscape(), seconds=30.0)
    driver = started(run)
    start = time.monotonic()
    os.kill(driver.pid, signal.SIGTERM)
    while driver.is_alive():
        os.kill(driver.pid, signal.SIGTERM)
        time.sleep(0.05)
    assert lifecycle.SAME_SIGNAL_SECONDS <= time.monotonic() - start < 25, "a trial takes 30 s"
    driver.join(patience(60))
    assert driver.exitcode == 128 + signal.SIGTERM
    workers = [entry for entry in run.log.read() if entry.get("role") == "worker"]
    await_(lambda: not any(born(w["pid"]) == w["born"] for w in workers))
