"""The processes that compile: one that dies, one that is late, one that is not needed any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context
from multiprocessing.context import SpawnProcess
from operator import mul
from pathlib import Path
from typing import Any

import pytest

from generator.errors import CompilerError, CompilerFailedError, NormforgeError
from generator.evaluate.predict.evaluator import Predictor
from generator.kernels import compile_pool
from generator.kernels.compile_pool import (
    MAX_CRASHES,
    MAX_TIMEOUTS,
    CompilePool,
    compile_known_good,
)
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.paths import REPOSITORY
from generator.processes import end_pool
from generator.search.budget import Budget
from generator.search.search import search_problem
from generator.studies.records import study_name
from generator.studies.storage import open_storage
from generator.studies.study_log import StudyLog
from generator.target import find_target
from tests.support.patience import await_, patience
from tests.support.samples import plain_variant
from tests.support.stuck import stuck_at_first
from tests.support.synthetic import LEGAL, PROBLEM, TARGET

SHAPE = "4096x1024:bf16"


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[CompilePool]:
    with CompilePool("sm_90a", 1, tmp_path, compile=compile_variant) as pool:
        yield pool


def variants() -> list[Variant]:
    return [plain_variant(SHAPE, find_target("h200"), strategy=s) for s in ("atomic", "last_cta")]


def workers() -> list[int]:
    return [process.pid for process in active_children() if process.pid is not None]


def test_pool_survives_a_worker_that_is_killed_while_it_compiles(pool: CompilePool) -> None:
    before = set(workers())
    jobs = [(v, pool.submit(v)) for v in variants()]
    (worker,) = set(workers()) - before
    os.kill(worker, signal.SIGKILL)
    for v, future in jobs:
        assert pool.result(v, future).error == ""
    again = variants()[0]
    assert pool.result(again, pool.submit(again)).cubin


def test_processes_of_a_pool_in_which_one_died_end_with_it(tmp_path: Path) -> None:
    """They ignore the SIGTERM with which Python's pool would end them, and Python waits for them
    when it exits: the run would never end."""
    before = {*active_children()}
    with CompilePool("sm_90a", 2, tmp_path, compile=stuck_at_first) as pool:
        jobs = [(v, pool.submit(v)) for v in variants()]
        await_(lambda: len([*tmp_path.iterdir()]) == 2)
        # Python's pool has surely seen the one that it started first.
        first, second = sorted({*active_children()} - before, key=lambda one: one.pid or 0)
        first.kill()
        for v, future in jobs:
            assert pool.result(v, future).error == ""
        assert pool.result(v, pool.submit(v)).error == ""
        second.join(patience(10))
        assert not second.is_alive()


def test_a_sigterm_to_the_whole_run_leaves_the_compilers_alive(pool: CompilePool) -> None:
    """`timeout` and batch systems send it to every process, and the run ends as its parent says."""
    before = set(workers())
    first, second = variants()
    assert pool.result(first, pool.submit(first)).error == ""
    (worker,) = set(workers()) - before
    os.kill(worker, signal.SIGTERM)
    assert pool.result(second, pool.submit(second)).error == ""
    assert worker in workers()


def without_builtins(variant: Variant, arch: str, cache: Path) -> Compiled:
    raise CompilerError("NVRTC is not whole")


def test_a_compiler_that_does_not_work_is_no_fault_of_a_variant(tmp_path: Path) -> None:
    """A study would otherwise keep every config as one that does not compile."""
    (variant, other) = variants()
    with CompilePool("sm_90a", 1, tmp_path, compile=without_builtins, method="fork") as pool:
        with pytest.raises(CompilerError, match="not whole"):
            pool.result(variant, pool.submit(variant))
        with pytest.raises(CompilerError, match="not whole"):
            pool._alone(other, 60.0)


# A machine on which nothing compiles, for a while or for good.


@dataclass(frozen=True)
class Ill:
    """Compiles, and checks, as long as a file does not exist, and then fails in a way. Every try is
    a line of the file `log`. only: the variant that it fails on, and never on the check; lasts: the
    failures after which the file is gone, 0 where it stays."""

    folder: Path
    way: str
    only: str = ""
    lasts: int = 0

    def __call__(self, variant: Variant, arch: str, cache: Path) -> Compiled:
        with (self.folder / "log").open("a", encoding="utf-8") as log:
            log.write(f"{variant.id}\n")
        if not self.only or self.only == variant.id:
            self.fail()
        return Compiled(arch, "", b"cubin", {}, "0", False, "")

    def check(self, arch: str) -> None:
        if not self.only:
            self.fail()

    def fail(self) -> None:
        if not (self.folder / "ill").exists():
            return
        with (self.folder / "failures").open("a+", encoding="utf-8") as failures:
            failures.write("one\n")
            failures.seek(0)
            if len(failures.readlines()) == self.lasts:
                (self.folder / "ill").unlink()
        if self.way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "hangs":
            time.sleep(60)
        errors = {
            "memory": CompilerFailedError("NVRTC failed (NVRTC_ERROR_OUT_OF_MEMORY)"),
            "python": ImportError("cannot import name 'render'"),
            "files": FileNotFoundError(2, "No such file", "templates"),
            "bug": KeyError("no such template"),
            "refusal": NormforgeError("this cannot be rendered"),
        }
        raise errors[self.way]

    def pool(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> CompilePool:
        """Return the pool of an ill machine, which is given so many seconds."""
        (self.folder / "ill").touch()
        monkeypatch.setattr(compile_pool, "FIRST_PAUSE", 0.1)
        monkeypatch.setattr(compile_pool, "CHECK_SECONDS", 2.0)
        monkeypatch.setattr(compile_pool, "MACHINE_SECONDS", seconds)
        return CompilePool("sm_90a", 2, self.folder, compile=self, method="fork", check=self.check)

    def tries(self) -> int:
        return len((self.folder / "log").read_text(encoding="utf-8").splitlines())


WAYS = ["killed", "memory", "python", "files", "hangs"]


@pytest.mark.parametrize("way", WAYS)
def test_a_machine_that_recovers_costs_no_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Though one has failed more often than a variant that is at fault may."""
    lasts = 3 if way == "hangs" else 2 * (1 + MAX_CRASHES)  # a hang takes its deadline every time
    with Ill(tmp_path, way, lasts=lasts).pool(monkeypatch, patience(60)) as pool:
        jobs = [(v, pool.submit(v)) for v in variants()]
        for v, future in jobs:
            assert pool.result(v, future, timeout=2.0).error == ""
    assert not (tmp_path / "ill").exists(), "it never was as ill as that"


@pytest.mark.parametrize("way", WAYS)
def test_a_machine_that_stays_ill_is_a_sentence_and_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    with Ill(tmp_path, way).pool(monkeypatch, 0.5) as pool:
        late = partial(pool.result, timeout=1.0)
        monkeypatch.setattr(pool, "result", late)
        storage = open_storage(tmp_path / "studies.journal")
        with pytest.raises(CompilerError, match=r"compiled nothing for 0 s .*same command"):
            search_problem(LEGAL, pool, Predictor(TARGET), storage, Budget(trials=5))
    name = study_name(PROBLEM, TARGET, "predicted")
    assert StudyLog(storage, name).trials() == []


@pytest.mark.parametrize(
    ("way", "tries", "says"),
    [
        ("killed", 1 + MAX_CRASHES, "NVRTC crashed on this variant 3 times"),
        ("memory", MAX_CRASHES, "NVRTC failed (NVRTC_ERROR_OUT_OF_MEMORY)"),
        ("bug", MAX_CRASHES, "KeyError: 'no such template'"),
        ("refusal", MAX_CRASHES, "this cannot be rendered"),
        ("hangs", MAX_TIMEOUTS, "NVRTC took more than 1 s"),
    ],
)
def test_what_fails_alone_on_a_sound_machine_is_the_variants_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, tries: int, says: str
) -> None:
    v = variants()[0]
    ill = Ill(tmp_path, way, only=v.id)
    with ill.pool(monkeypatch, 0.0) as pool:
        assert pool.result(v, pool.submit(v), timeout=1.0).error == says
    assert ill.tries() == tries


def test_a_machine_that_starts_no_process_is_waited_for(
    pool: CompilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_pool, "FIRST_PAUSE", 0.01)
    starts = iter([True, True, True])

    def start(process: Any) -> None:
        if next(starts, False):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        real(process)

    real = SpawnProcess.start
    monkeypatch.setattr(SpawnProcess, "start", start)
    v = variants()[0]
    assert pool.result(v, pool.submit(v)).cubin
    assert not next(starts, False), "the processes were never refused"


def test_known_good_kernel_compiles() -> None:
    for target in ("h200", "gb200", "a100"):
        compile_known_good(find_target(target).arch)
    with pytest.raises(CompilerError):
        compile_known_good("sm_12")


def test_compilation_past_its_deadline_is_an_error_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for one of the two processes, which are ended."""
    late, other = variants()
    with Ill(tmp_path, "hangs", only=late.id).pool(monkeypatch, 0.0) as pool:
        jobs = [(v, pool.submit(v)) for v in (late, late, other, other, other)]
        found = pool.result(*jobs[0], timeout=0.5)
        assert "took more than" in found.error
        assert found.cubin == b""
        for v, future in jobs[2:]:
            assert pool.result(v, future).cubin == b"cubin"


def test_compilation_that_was_cancelled_is_made_when_it_is_asked_for(pool: CompilePool) -> None:
    jobs = [(v, pool.submit(v)) for v in (*variants(), *variants())]
    v, future = jobs[-1]
    assert future.cancel()
    assert pool.result(v, future).cubin


def test_deadlines_missed_together_end_one_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool that takes its place serves other threads. What only waited goes on there."""
    v, _ = variants()
    done = compile_variant(v, "sm_90a", tmp_path)
    ended: list[object] = []
    monkeypatch.setattr(compile_pool, "end_pool", ended.append)
    with CompilePool("sm_90a", 1, tmp_path) as pool:
        old = pool._pool
        monkeypatch.setattr(old, "submit", lambda *arguments: Future())
        monkeypatch.setattr(pool, "_alone", lambda variant, *_: pool._failed("late"))
        hung, as_well, waiting = (pool.submit(v) for _ in range(3))
        assert pool.result(v, hung, timeout=0).error == "late"
        monkeypatch.setattr(pool._pool, "submit", lambda *arguments: answered(done))
        assert pool.result(v, as_well, timeout=0).error == "late"
        assert waiting.cancel()
        assert pool.result(v, waiting) is done
        assert ended == [old]


def answered(compiled: Compiled) -> Future[Compiled]:
    future: Future[Compiled] = Future()
    future.set_result(compiled)
    return future


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ended_pool_leaves_no_thread_that_waits_for_the_rest_of_a_result(method: str) -> None:
    """Python would wait for such a thread when it exits, for ever."""
    for _ in range(3):
        pool = ProcessPoolExecutor(2, get_context(method))
        # Results larger than a pipe, like a kernel's, by a function that takes no import.
        jobs = [pool.submit(mul, bytes([number]), 1_000_000) for number in range(30)]
        manager = pool._executor_manager_thread
        assert jobs[0].result() == bytes(1_000_000)
        end_pool(pool)
        assert manager is not None
        manager.join(patience(10))
        assert not manager.is_alive()


ORPHAN = """
import time
from multiprocessing import active_children
from pathlib import Path
from generator.kernels.cubin_cache import compile_variant
from generator.kernels.compile_pool import CompilePool
from generator.target import find_target
from tests.support.samples import plain_variant
from tests.support.stuck import stuck_at_first
pool = CompilePool("sm_90a", 1, Path({folder!r}), compile=compile_variant)
v = plain_variant("4096x1024:bf16", find_target("h200"), strategy="atomic")
assert pool.result(v, pool.submit(v)).cubin
print(active_children()[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    root = REPOSITORY
    code = ORPHAN.format(folder=str(tmp_path))
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until = time.monotonic() + patience(10)
    while alive(worker):
        assert time.monotonic() < until, f"worker {worker} outlives its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Return True if a process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
