"""Ctrl-C in every phase of real runs: an answer at once, and the next run goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from generator.emulate.build import find_compiler
from generator.paths import REPOSITORY
from generator.problem import RMSNORM_BACKWARD as PACKAGE_NAME
from normforge.table import ForwardTable, Table
from tests.support.runs import trials

MOST_SECONDS = 2.0
"""Seconds from Ctrl-C to the end of the process, without the time in which others have the
cores."""
SAYING = """
import runpy, sys, time
from generator.tuner.display import Status

WANTED = sys.argv[1]

def tell(method, name_of):
    def told(self, *arguments):
        phase = name_of(*arguments)
        print("phase:", phase, flush=True)
        if phase == WANTED:
            time.sleep(0.3)  # so that the signal comes in this phase, which may be short
        return method(self, *arguments)
    return told

if sys.argv[1] != "imports":
    Status.phase = tell(Status.phase, lambda name, done, total: name)
    Status.progress = tell(
        Status.progress, lambda i, event: "finals" if event.phase == "finals" else "searching"
    )
else:
    print("phase: imports", flush=True)
sys.argv[:2] = ["tune.py"]
runpy.run_path("tune.py", run_name="__main__")
"""
"""tune.py, which says on stdout in which phase it is."""
IMPORTS = "import sys; print('phase: imports', flush=True)\n" + SAYING.replace(
    "from generator.tuner.display import Status", ""
)
COUNT = 6


def waited(pid: int) -> float:
    """Seconds for which the main thread of a process was ready to run and another one ran."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def interrupted_in(phase: str, arguments: list[str]) -> tuple[int, str, float]:
    """Exit code and stderr of a run that Ctrl-C ends when it comes to a phase, and how long that
    took."""
    code = IMPORTS if phase == "imports" else SAYING
    with subprocess.Popen(
        [sys.executable, "-c", code, phase, *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal sends Ctrl-C to a process group
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        for line in run.stdout:
            if line == f"phase: {phase}\n":
                break
        else:
            raise AssertionError(f"the run never came to {phase}: {run.stderr.read()}")
        if phase == "imports":
            time.sleep(0.3)
        others, start = waited(run.pid), time.monotonic()
        os.killpg(run.pid, signal.SIGINT)
        os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT)
        seconds = time.monotonic() - start - (waited(run.pid) - others)
        said = run.stderr.read()
    return run.returncode, said, seconds


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.skipif(find_compiler() is None, reason="the finals need a C++ compiler to take time")
@pytest.mark.slow
def test_ctrl_c_is_answered_in_every_phase_and_the_run_can_be_continued(tmp_path: Path) -> None:
    out = tmp_path / "gb200"
    arguments = ["--gpu", "gb200", "--shapes", "512x256:bf16", "--trials", str(COUNT)]
    arguments += ["--out", str(out)]
    known: list[object] = []
    phases = ("imports", "planning", "searching", "finals", "fallback kernels")
    for phase in (*phases, "forward kernels", "writing"):
        code, said, seconds = interrupted_in(phase, arguments)
        assert code == 130, f"{phase}: {said}"
        assert said.splitlines()[-1].startswith("tune.py: interrupted"), f"{phase}: {said}"
        for trouble in ("Traceback", "leaked", "Error"):
            assert trouble not in said, f"{phase}: {said}"
        assert seconds < MOST_SECONDS, f"{phase}: {seconds:.1f} s"
        assert not (out / ".running").exists()
        if out.exists() and phase not in ("imports", "planning"):
            now = trials(out)
            assert now[: len(known)] == known, f"{phase}: a finished trial was lost"
            known = list(now)
    assert len(known) == COUNT
    line = [sys.executable, "tune.py", *arguments]
    done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert trials(out) == known
    package = out / PACKAGE_NAME
    (tuned,) = Table.load(package).tuned
    assert (tuned.M, tuned.N, tuned.provenance["trials"]) == (512, 256, COUNT)

    arguments[arguments.index("512x256:bf16")] += ",512x512:bf16"
    before = contents(package)
    assert interrupted_in("forward kernels", arguments)[0] == 130
    assert contents(package) == before


@pytest.mark.slow
def test_sigterm_writes_the_winners_at_once_and_leaves_the_forwards(tmp_path: Path) -> None:
    """They are searched behind all shapes, and batch systems soon send SIGKILL."""
    out = tmp_path / "gb200"
    line = [sys.executable, "tune.py", "--gpu", "gb200", "--shapes", "512x256:bf16,512x512:bf16"]
    line += ["--trials", "3", "--out", str(out)]
    with subprocess.Popen(line, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        next(said for said in run.stderr if said.startswith("[1/4]"))
        run.terminate()
        said = run.stderr.read()
    assert run.returncode == 1, said
    package = out / PACKAGE_NAME
    assert [entry.N for entry in Table.load(package).tuned] == [256]
    assert ForwardTable.load(package).tuned == ()
    assert ForwardTable.load(package).fallback
    subprocess.run(line, cwd=REPOSITORY, check=True, capture_output=True, timeout=500)
    for table in (Table.load(package), ForwardTable.load(package)):
        assert sorted(entry.N for entry in table.tuned) == [256, 512]
