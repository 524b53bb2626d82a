"""Faults and what becomes of them, on a GPU that does not exist."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.exceptions import StorageInternalError

from generator.errors import NormforgeError, ProblemError
from generator.evaluate.gpu.evaluator import INTERLEAVINGS, MeasuredEvaluator
from generator.evaluate.gpu.noise import drifted
from generator.evaluate.gpu.protocol import NoGpuError, WorkerLostError
from generator.evaluate.gpu.supervisor import RETRY_PAUSES, STARVED, Supervisor
from generator.kernels.compile_pool import CompilePool
from generator.kernels.geometry import Config
from generator.kernels.variant import Variant, make_variant
from generator.result import Result
from generator.space.legal_configs import LegalConfigs
from generator.space.load import SPACE_FILE
from generator.studies.records import Record
from generator.studies.storage import JOURNAL_NAME, database_file
from generator.target import find_target
from generator.tuner import lifecycle
from generator.tuner.display import Status
from generator.tuner.lifecycle import LOCK_NAME, exclusive_run
from generator.tuner.plan import Plan
from generator.tuner.run import Outcome, tune
from tests.support.fake_gpu import OUTCOME, FakeCompiler, FakeGpu, Landscape, Log, born, key
from tests.support.fake_run import Killer, Run, little_space
from tests.support.patience import await_, patience
from tests.support.synthetic import PROBLEM, TARGET

CONFIGS: list[Config] = LegalConfigs(little_space(), PROBLEM, TARGET).first(1000)  # type: ignore[assignment]
SOUND = [config for config in CONFIGS if make_variant(config, PROBLEM).determinism != "none"]


class Bench:
    """An evaluator on the fake GPU, in which the n-th sound config has the n-th of `faults`.
    pauses: what it would have slept."""

    def __init__(self, folder: Path, *faults: str, **options: Any) -> None:
        self.broken = folder / "broken"
        self.log = Log(folder / "log")
        landscape = Landscape(faults={key(c): f for c, f in zip(SOUND, faults, strict=False) if f})
        self.gpu = FakeGpu(self.log, landscape, **options)
        self.compiler = FakeCompiler(self.log, landscape)
        self.pauses: list[float] = []

    @contextmanager
    def evaluator(self, seconds: float = 20.0) -> Iterator[MeasuredEvaluator]:
        supervisor = Supervisor(
            0, seconds, open_handler=self.gpu, method="forkserver", sleep=self.pauses.append
        )
        with MeasuredEvaluator(TARGET, supervisor) as evaluator:
            yield evaluator

    def entry(self, place: int) -> tuple[Variant, Any]:
        variant = make_variant(SOUND[place], PROBLEM)
        return variant, self.compiler(variant, "sm_90a", Path())

    def evaluate(self, evaluator: MeasuredEvaluator, place: int) -> Result:
        return evaluator.evaluate(PROBLEM, *self.entry(place), None)

    def times_measured(self, place: int) -> int:
        name = key(SOUND[place])
        return sum(e.get("key") == name and e["event"] == "begin" for e in self.log.read())


# ---- A candidate that fails is an outcome -------------------------------------------------------


@pytest.mark.parametrize("fault", ["wrong", "unsteady", "refused", "segfault", "sticky"])
def test_fault_is_an_outcome_and_the_next_candidate_is_measured(tmp_path: Path, fault: str) -> None:
    bench = Bench(tmp_path, fault)
    with bench.evaluator() as evaluator:
        result = bench.evaluate(evaluator, 0)
        assert result.outcome == OUTCOME[fault]
        assert result.note
        assert not result.may_win
        assert bench.evaluate(evaluator, 1).outcome == "ok"
        assert evaluator.lost == (fault in ("segfault", "sticky"))
    assert bench.times_measured(0) == 1, "what failed by itself has no second chance"


def test_hang_is_killed_at_its_deadline_and_costs_no_other_candidate(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "hang")
    with bench.evaluator(seconds=1.5) as evaluator:
        assert bench.evaluate(evaluator, 0).outcome == "timeout"
        assert bench.evaluate(evaluator, 1).outcome == "ok"
    assert bench.times_measured(0) == 1


def test_memory_that_comes_back_costs_a_worker_and_no_candidate(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "memory")
    with bench.evaluator() as evaluator:
        assert bench.evaluate(evaluator, 0).outcome == "ok"
        assert evaluator.lost == 1
        assert len(evaluator._supervisor.pids) == 1, "a reserve would hold memory, too"


def test_candidate_that_never_has_the_memory_is_a_launch_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "hog")
    with bench.evaluator() as evaluator:
        result = bench.evaluate(evaluator, 0)
        assert result.outcome == "launch_error"
        assert "memory" in result.note
        assert bench.times_measured(0) == len(RETRY_PAUSES) + 1
        assert bench.evaluate(evaluator, 1).outcome == "ok"
    assert [pause for pause in bench.pauses if pause] == list(RETRY_PAUSES[1:])


def test_memory_that_no_candidate_has_ends_the_problem(tmp_path: Path) -> None:
    bench = Bench(tmp_path, *["hog"] * (STARVED + 1), "", *["hog"] * STARVED)
    with bench.evaluator() as evaluator:
        for place in (0, 1, STARVED + 1, STARVED + 2, STARVED + 3):
            bench.evaluate(evaluator, place)
        with pytest.raises(ProblemError, match=r"CUDA out of memory.*holds the GPU's memory"):
            bench.evaluate(evaluator, STARVED + 4)


@pytest.mark.parametrize("fault", ["late_sticky", "late_hang"])
def test_finalist_that_breaks_the_worker_is_found_and_the_others_are_timed(
    tmp_path: Path, fault: str
) -> None:
    bench = Bench(tmp_path, "", fault, "moody")
    with bench.evaluator(seconds=1.5 if fault == "late_hang" else 20) as evaluator:
        results = evaluator.finals(PROBLEM, [bench.entry(place) for place in range(4)])
    expected = "timeout" if fault == "late_hang" else "crashed"
    assert [r.outcome for r in results] == ["ok", expected, "nondeterministic", "ok"]
    assert [r.ratio is not None for r in results] == [True, False, True, True]
    assert results[2].note == "other bits in a fresh process"
    assert "fresh process" in results[0].checks


def test_shortlisting_that_breaks_the_worker_leaves_it_to_the_finals(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "", "late_sticky")
    with bench.evaluator() as evaluator:
        entries = [bench.entry(place) for place in range(4)]
        assert evaluator.shortlist(PROBLEM, entries) == []
        assert evaluator.lost == 1
        assert len(evaluator.shortlist(PROBLEM, [entries[0], *entries[2:]])) == 3
        results = evaluator.finals(PROBLEM, entries)
    assert [r.outcome for r in results] == ["ok", "crashed", "ok", "ok"]


def test_crash_of_the_compiler_costs_only_the_variant_that_causes_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "compile_crash", "compile_error")
    with CompilePool("sm_90a", 2, tmp_path, compile=bench.compiler, method="forkserver") as pool:
        jobs = [(v, pool.submit(v)) for v in (make_variant(c, PROBLEM) for c in SOUND[:6])]
        errors = [pool.result(*job).error for job in jobs]
    assert errors[0] == "NVRTC crashed on this variant 3 times"
    assert "planted" in errors[1]
    assert errors[2:] == [""] * 4


def unrenderable(variant: Variant, arch: str, folder: Path) -> Any:
    raise KeyError("no such template")


def test_variant_that_cannot_be_rendered_is_a_compile_error(tmp_path: Path) -> None:
    with CompilePool("sm_90a", 1, tmp_path, compile=unrenderable, method="fork") as pool:
        variant = make_variant(SOUND[0], PROBLEM)
        assert "no such template" in pool.result(variant, pool.submit(variant)).error


# ---- What is no candidate's doing is tried again, and then said ---------------------------------


def test_worker_killed_from_outside_is_replaced_and_the_trial_repeated(tmp_path: Path) -> None:
    bench = Bench(tmp_path, seconds=0.5)
    with bench.evaluator() as evaluator, ThreadPoolExecutor(1) as thread:
        trial = thread.submit(bench.evaluate, evaluator, 0)
        await_(lambda: bench.times_measured(0) == 1)
        os.kill(evaluator._supervisor.pids[0], signal.SIGKILL)
        assert trial.result().outcome == "ok"
        assert evaluator.lost == 1
    assert bench.times_measured(0) == 2


def test_worker_that_is_killed_every_time_ends_the_problem_with_a_sentence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "taken")
    with bench.evaluator() as evaluator:
        with pytest.raises(ProblemError, match=r"5 times in a row.*exit -9.*trials are kept"):
            bench.evaluate(evaluator, 0)
        assert bench.evaluate(evaluator, 1).outcome == "ok"


@pytest.mark.parametrize("how", ["die", "CUDA driver version is insufficient", "no answer"])
def test_worker_that_cannot_be_replaced_ends_the_run_and_blames_no_candidate(
    tmp_path: Path, how: str
) -> None:
    """A worker with "no answer" starts, and finds a GPU on which nothing works any more."""
    bench = Bench(tmp_path, "segfault", "", "segfault")
    with bench.evaluator() as evaluator:
        assert bench.evaluate(evaluator, 1).outcome == "ok"
        (reserve,) = evaluator._supervisor._reserves
        reserve.ready()
        bench.broken.write_text(how)
        if how != "no answer":
            assert bench.evaluate(evaluator, 2).outcome == "crashed", "the reserve was sound"
        with pytest.raises(NormforgeError, match=r"worker cannot be replaced: .*trials are kept"):
            bench.evaluate(evaluator, 0)
        bench.broken.unlink()
        assert bench.evaluate(evaluator, 1).outcome == "ok", "the GPU came back"


def test_reserves_take_over_one_after_the_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.evaluator() as evaluator:
        supervisor = evaluator._supervisor
        supervisor.spare(3)
        first, *reserves = supervisor.pids
        assert len(reserves) == 3
        supervisor.spare()
        for pid in reserves:
            supervisor.renew(None)
            assert supervisor.pids[0] == pid
        assert supervisor.pids == reserves[-1:]
        supervisor.renew(None)
        assert supervisor.pids[0] not in (first, *reserves), "a new one when none is left"
        supervisor.spare(2)
        pids = supervisor.pids
    assert [born(pid) for pid in pids] == [None] * 3, "all end with it"


def test_worker_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.broken.write_text("die")
    with pytest.raises(NormforgeError, match=r"cannot start: .*exit -11"), bench.evaluator():
        pass
    workers = [entry for entry in bench.log.read() if entry.get("role") == "worker"]
    assert len(workers) == len(RETRY_PAUSES) + 1, "a death at the start may be chance"


def test_no_gpu_at_all_is_told_apart_from_one_that_cannot_be_used(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.broken.write_text("absent")
    with pytest.raises(NoGpuError), bench.evaluator():
        pass
    bench.broken.write_text("CUDA out of memory")
    with pytest.raises(NormforgeError, match="CUDA out of memory") as caught, bench.evaluator():
        pass
    assert not isinstance(caught.value, NoGpuError)


def test_finals_that_break_for_no_known_reason_are_given_up_with_a_sentence(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.evaluator() as evaluator:
        entries = [bench.entry(place) for place in range(2)]
        together: list[int] = []
        call = evaluator._supervisor.call

        def breaking(job: Any) -> Any:
            if job.kind == "interleave" and len(job.candidates) == 2:
                together.append(1)
                raise WorkerLostError("crashed", "planted")
            return call(job)

        evaluator._supervisor.call = breaking  # type: ignore[method-assign]
        with pytest.raises(ProblemError, match="timing the finalists failed: planted"):
            evaluator.finals(PROBLEM, entries)
    assert len(together) == INTERLEAVINGS


# ---- Endings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_ends_the_run_after_the_trial_under_way(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = Run(tmp_path, Landscape(key(SOUND[5])), seconds=0.015)
    driver = run.start()
    await_(lambda: run.answered() >= 5)
    # Terminals and batch systems send it to all processes of a run.
    for entry in run.log.read():
        if entry.get("role") and born(entry["pid"]):
            os.kill(entry["pid"], number)
    driver.join(patience(60))
    assert run.said == "interrupted"
    known = run.records()
    assert 5 <= len(known) == run.answered() < 96
    run.start().join(patience(60))
    assert run.said == run.landscape.champion
    assert run.records()[: len(known)] == known
    check_log(run, Counter(), run.records())


@pytest.mark.slow
def test_disk_that_fills_up_in_the_middle_of_a_record_costs_that_record_only(
    tmp_path: Path,
) -> None:
    run = replace(Run.planted(tmp_path, 3), file_bytes=60_000)
    run.start().join(patience(60))
    assert "cannot write to study" in run.said
    assert "File too large" in run.said
    assert (tmp_path / JOURNAL_NAME).stat().st_size == 60_000, "torn in the middle"
    known = run.records()
    assert 10 < len(known) < 96
    again = replace(run, file_bytes=0)
    again.start().join(patience(60))
    assert again.said == run.landscape.champion
    assert again.records()[: len(known)] == known
    check_log(again, Counter(driver=1), again.records())


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device", "/data/x"), StorageInternalError("gone")],
)
def test_failing_storage_becomes_one_sentence(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(NormforgeError, match=r"No space left|gone") as caught,
        exclusive_run(tmp_path),
    ):
        raise error
    assert "finished trials are kept" in str(caught.value)
    assert not (tmp_path / LOCK_NAME).exists()


def test_other_errors_pass_the_guard_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), exclusive_run(tmp_path):
        raise FileNotFoundError(errno.ENOENT, "a mistake in the program")


def test_full_disk_refuses_the_lock_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NormforgeError, match="No space left on device"), exclusive_run(tmp_path):
        pass


def test_a_run_makes_the_folders_that_it_writes_to(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with exclusive_run(out):
        assert (out / LOCK_NAME).exists()
    with exclusive_run(out):  # which is there now
        pass
    assert list(out.iterdir()) == []


def test_second_run_on_a_folder_is_refused_and_told_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "GRACE_SECONDS", 0.1)
    for shared in (False, True):
        refused = pytest.raises(NormforgeError, match=rf"process {os.getpid()} on .* --out")
        with exclusive_run(tmp_path, shared), refused, exclusive_run(tmp_path):
            pass
        with exclusive_run(tmp_path):
            pass
    with exclusive_run(tmp_path, shared=True):
        with exclusive_run(tmp_path, shared=True):
            pass
        with pytest.raises(NormforgeError, match="another run writes"), exclusive_run(tmp_path):
            pass  # one of the two goes on
    assert list(tmp_path.iterdir()) == []


def test_second_run_on_an_sqlite_file_is_refused_whatever_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs on one file would search the same study twice. A database server leases studies."""
    monkeypatch.setattr(lifecycle, "GRACE_SECONDS", 0.1)
    url = f"sqlite:///{tmp_path}/studies.db"

    def one(out: str, storage: str, gpu: str = "gb200") -> Outcome:
        plan = Plan(find_target(gpu), (PROBLEM,), SPACE_FILE, tmp_path / out, 1, storage=storage)
        return tune(plan, None, Status(1))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "alias.db").symlink_to(tmp_path / "studies.db")
    with exclusive_run(tmp_path / "a", database=database_file(url)):
        uri = f"sqlite:///file:{tmp_path}/studies.db?uri=true"
        for same in (url, "sqlite:///studies.db", "sqlite:///alias.db", uri):
            with pytest.raises(NormforgeError, match=r"studies\.db .*process \d+ .*PostgreSQL"):
                one("b", same)
        with exclusive_run(tmp_path / "c", database=database_file("sqlite:///other.db")):
            pass
    with exclusive_run(tmp_path / "b", database=database_file(url)):
        pass
    assert not list(tmp_path.glob("*.running"))
    assert not (tmp_path / "file:").exists()
    for where in (None, "postgresql+psycopg://h/db", "mysql://h/db", "/a/b"):
        assert database_file(where) is None


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"{}", b"7", b"\xff", b'{"pid": 7}'])
def test_a_lock_that_is_not_written_yet_is_of_an_unknown_process(
    tmp_path: Path, content: bytes | None
) -> None:
    """Its holder makes the file empty first."""
    lock = tmp_path / LOCK_NAME
    if content is not None:
        lock.write_bytes(content)
    assert lifecycle._holder(lock) == "unknown process"


def test_ctrl_c_while_the_folder_is_locked_leaves_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = lifecycle._acquire

    def interrupted(path: Path, shared: bool) -> int:
        handle = acquire(path, shared)
        signal.raise_signal(signal.SIGINT)
        return handle

    monkeypatch.setattr(lifecycle, "_acquire", interrupted)
    with exclusive_run(tmp_path) as stop:
        assert stop.at_once
        assert (tmp_path / LOCK_NAME).exists()
        with pytest.raises(KeyboardInterrupt):
            stop.check()
    assert list(tmp_path.iterdir()) == []


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with exclusive_run(tmp_path) as stop:
        stop.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            stop.check()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# ---- Kill -9, at random moments -----------------------------------------------------------------

RUNS = 6
STRIKES = {"driver": 6, "worker": 6, "compiler": 6}


def tortured(folder: Path, seed: int) -> tuple[Run, Counter[str], list[Record]]:
    folder.mkdir()
    rng = random.Random(seed)
    killer = Killer(Run.planted(folder, seed), rng, Counter())
    roles = [role for role, count in STRIKES.items() for _ in range(count)]
    rng.shuffle(roles)
    records = killer.torture(roles)
    return killer.run, killer.kills, records


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing_repeat_nothing_and_change_no_winner(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        runs = list(threads.map(lambda seed: tortured(tmp_path / str(seed), seed), range(RUNS)))
    kills: Counter[str] = sum((kills for _, kills, _ in runs), Counter())
    assert sum(kills.values()) >= 100
    assert set(kills) == set(STRIKES)
    for run, killed, records in runs:
        assert run.said == run.landscape.champion, run.folder
        assert len(records) == len({key(record.config) for record in records}) == len(CONFIGS)
        check_outcomes(run, records)
        check_log(run, killed, records)


def check_outcomes(run: Run, records: list[Record]) -> None:
    """A planted fault is recorded as what it is; nothing else is a fault."""
    for record in records:
        fault = run.landscape.fault(record.config)
        unordered = record.config["strategy"] == "atomic"
        expected = OUTCOME.get(fault, "nondeterministic" if unordered else "ok")
        assert record.result.outcome == expected, (fault, record)


def check_log(run: Run, killed: Counter[str], records: list[Record]) -> None:
    """The device's own log against the study: whatever was measured twice was under way at a kill
    (nothing else was begun in between), and what was answered last is what is stored."""
    trials = [entry for entry in run.log.read() if entry.get("kind") == "evaluate"]
    begun = [entry["key"] for entry in trials if entry["event"] == "begin"]
    # Noisy trials are meant to be measured again, before the finals: those that said so, and those
    # whose floor turned out to be slow, which only later trials tell.
    timed = [e for e in trials if e.get("outcome") == "ok" and not e["noisy"]]
    fastest = min((entry["floor_us"] for entry in timed), default=0.0)
    noisy = {entry["key"] for entry in trials if entry.get("noisy")}
    noisy |= {entry["key"] for entry in timed if drifted(entry["floor_us"], fastest)}
    repeats = 0
    last: dict[str, int] = {}
    for place, name in enumerate(begun):
        if name in last and name not in noisy:
            assert last[name] == place - 1, f"{name} was measured again without a kill"
            repeats += 1
        last[name] = place
    short = sum(fault == "memory" for fault in run.landscape.faults.values())
    assert repeats <= killed["driver"] + killed["worker"] + short
    stored = {key(record.config): record.result.ratio for record in records}
    for entry in trials:
        if entry["event"] == "answer" and not entry["last"] and entry["key"] not in noisy:
            assert entry["key"] in stored, "an answer was lost"
    answers = {e["key"]: e["ratio"] for e in trials if e["event"] == "answer" and not e["last"]}
    for name, ratio in answers.items():
        if name not in noisy:
            said = f"{name}: another answer is stored than the last one"
            assert stored[name] == (ratio and round(ratio, 6)), said


def test_the_check_of_the_log_knows_a_trial_whose_floor_turned_out_to_be_slow(
    tmp_path: Path,
) -> None:
    for again in ("a", "b"):
        run = Run(tmp_path / again, Landscape())
        run.folder.mkdir()
        for name, floor_us in (("a", 120.0), ("b", 80.0), ("c", 80.0), (again, 80.0)):
            run.log.write(kind="evaluate", key=name, event="begin")
            answer = {"outcome": "ok", "ratio": 1.0, "noisy": False, "floor_us": floor_us}
            run.log.write(kind="evaluate", key=name, event="answer", **answer, last=False)
        reports = pytest.raises(AssertionError, match="b was measured again without a kill")
        with reports if again == "b" else pytest.raises(AssertionError, match="an answer was lost"):
            check_log(run, Counter(), [])


def test_the_check_of_the_log_finds_a_trial_that_was_measured_twice(tmp_path: Path) -> None:
    run = Run(tmp_path, Landscape())
    for name in ("a", "b", "a"):
        run.log.write(kind="evaluate", key=name, event="begin")
    with pytest.raises(AssertionError, match="measured again without a kill"):
        check_log(run, Counter(driver=9, worker=9), [])
    run = Run(tmp_path / "lost", Landscape())
    run.folder.mkdir()
    run.log.write(kind="evaluate", key="a", event="begin")
    run.log.write(kind="evaluate", key="a", event="answer", ratio=1.0, noisy=False, last=False)
    with pytest.raises(AssertionError, match="an answer was lost"):
        check_log(run, Counter(), [])
