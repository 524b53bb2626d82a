"""Many runs on one PostgreSQL database: a real server, which these tests start and stop."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy as sql
from optuna.storages import RDBStorage

from generator.errors import NormforgeError
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.studies import leases, outage
from generator.studies.leases import Lease, LeaseLostError
from generator.studies.postgres import SharedStorage, connect
from generator.studies.records import Record
from generator.studies.storage import open_storage
from generator.studies.study_log import StudyLog, stored_winners
from generator.studies.work_queue import SharedQueue
from generator.target import find_target
from generator.tuner.lifecycle import Stop
from generator.tuner.plan import Plan
from generator.tuner.task_list import TaskList
from generator.tuner.task_runner import TaskRunner, run_tasks
from tests.support.fake_devices import (
    FACTS,
    PROBLEMS,
    TRIALS,
    DevicePool,
    LoggingEvaluator,
    Quiet,
    lines,
    make_plan,
    open_frail,
    search_plan,
)
from tests.support.growth import old_study, space_of_before
from tests.support.patience import patience
from tests.support.runs import command
from tests.support.searches import NAME, search
from tests.support.synthetic import LEGAL, SPACE, FakeEvaluator, FakePool, make_winner

# What is tried does not matter here, and processes are forks.
pytestmark = pytest.mark.usefixtures("quick_proposals")
LEASE_SECONDS = 2.0


class Server:
    """A private cluster. As root it runs as `nobody`, because PostgreSQL refuses root."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._as = ["runuser", "-u", "nobody", "--"] if os.geteuid() == 0 else []
        if self._as:
            shutil.chown(folder, "nobody")
        self._run("initdb", "-U", "tuner", "-A", "trust", "--no-sync", "--no-instructions")
        self.start()
        self._count = 0

    def _run(self, program: str, *arguments: str) -> None:
        line = [*self._as, self._programs / program, "-D", self._folder / "data", *arguments]
        # The server keeps its standard output for good: it must not be a pipe of ours.
        with (self._folder / "log").open("a") as log:
            subprocess.run(line, check=True, stdout=log, stderr=log, timeout=patience(60), cwd="/")

    def start(self) -> None:
        options = f"-p {self.port} -k '' -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("pg_ctl", "start", "-w", "-o", options)

    def stop(self) -> None:
        """Stop at once, as a crash would."""
        self._run("pg_ctl", "stop", "-m", "immediate")

    def url(self) -> str:
        """Create a new, empty database and return its URL."""
        self._count += 1
        base = f"postgresql+psycopg://tuner@127.0.0.1:{self.port}"
        engine = sql.create_engine(f"{base}/postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(sql.text(f"CREATE DATABASE normforge{self._count}"))
        engine.dispose()
        return f"{base}/normforge{self._count}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("psycopg", reason="needs psycopg: pip install 'psycopg[binary]'")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))
    on_path = shutil.which("pg_ctl")
    if not found and not on_path:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    if os.geteuid() == 0 and not shutil.which("runuser"):
        pytest.skip("needs runuser: PostgreSQL does not run as root")
    folder = Path(tempfile.mkdtemp(prefix="normforge-postgres-"))
    try:
        own = Server(Path(found[-1] if found else str(on_path)).parent, folder)
        yield own
        own.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(server: Server) -> str:
    return server.url()


def records(url: str, plan: Plan) -> dict[str, list[Record]]:
    storage = open_storage(url)
    return {
        str(problem): [
            Record.from_trial(trial) for trial in StudyLog(storage, plan.study(problem)).trials()
        ]
        for problem in plan.problems
    }


def runner(url: str, plan: Plan, evaluator: FakeEvaluator) -> TaskRunner:
    return TaskRunner(plan, FakePool(), evaluator, FACTS, open_storage(url))


# ---- Many processes ------------------------------------------------------------------------------

AUDIT = """
CREATE TABLE concluded (study_id integer, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN INSERT INTO concluded VALUES (NEW.study_id); RETURN NEW; END $$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON study_user_attributes
FOR EACH ROW WHEN (NEW.key = 'winner') EXECUTE FUNCTION audit();
"""


@pytest.mark.slow
def test_five_processes_two_killed_conclude_every_problem_exactly_once(
    url: str, tmp_path: Path
) -> None:
    trials, delay, problems = 16, 0.005, PROBLEMS[:7]
    SharedStorage(url)
    with connect(url).begin() as connection:
        connection.exec_driver_sql(AUDIT)
    plan = make_plan(tmp_path, trials, storage=url, problems=problems)
    context = multiprocessing.get_context("fork")
    runs = [
        context.Process(target=search_plan, args=(plan, LEASE_SECONDS, delay)) for _ in range(5)
    ]
    started = time.monotonic()
    for run in runs:
        run.start()
    killed = runs[:2]
    logs = {run: tmp_path / f"{run.pid}.log" for run in runs}
    for run in killed:
        while not logs[run].exists() or logs[run].read_text().count("trial") < 10:
            assert run.is_alive(), "it ended before it could be killed"
            assert time.monotonic() - started < patience(60)
            time.sleep(0.005)
        time.sleep(random.random() * 0.1)
        run.kill()
    for run in runs:
        run.join(patience(120))
    assert [run.exitcode for run in runs] == [-signal.SIGKILL] * 2 + [0] * 3

    stored = records(url, plan)
    for problem, done in stored.items():
        assert len(done) == trials, problem
        assert len({LEGAL.key(record.config) for record in done}) == trials, problem
    with connect(url).begin() as connection:
        concluded = Counter(connection.scalars(sql.text("SELECT study_id FROM concluded")))
    assert sorted(concluded.values()) == [1] * len(problems), "concluded twice, or never"
    told = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert len(told) == 3
    assert all(winners == told[0] for winners in told), "runs disagree about the winners"
    assert told[0].keys() == {str(problem) for problem in problems}
    assert all(told[0].values())

    # A trial that was under way at a kill, and its last one whose commit the kill cut off.
    measured = Counter(tuple(words[1:]) for words in lines(tmp_path) if words[0] == "trial")
    assert sum(measured.values()) - len(measured) <= 2 * len(killed)


@pytest.mark.slow
def test_run_that_joins_continues_the_problem_of_a_dead_one(url: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, 30, storage=url, problems=PROBLEMS[:1])

    class DeadError(Exception):
        pass

    class Dying(LoggingEvaluator):
        def evaluate(self, *arguments: Any) -> Any:
            if len(self.evaluated) == 12:
                raise DeadError
            return super().evaluate(*arguments)

    dead = SharedQueue(url, 3)  # shorter ones lapse by themselves on a busy machine
    with pytest.raises(DeadError):
        run_tasks(runner(url, plan, Dying(tmp_path, 0.0)), TaskList(plan, dead), Stop(), Quiet())
    stop_heart(dead)
    before = records(url, plan)[str(PROBLEMS[0])]
    assert len(before) >= 12

    watcher, queue = Quiet(), SharedQueue(url, 30)
    evaluator = FakeEvaluator()
    run_tasks(runner(url, plan, evaluator), TaskList(plan, queue), Stop(), watcher)
    queue.close()
    after = records(url, plan)[str(PROBLEMS[0])]
    assert after[: len(before)] == before
    assert len(after) == 30
    assert len(evaluator.evaluated) <= 30 - len(before)
    assert watcher.waits, "it did not wait for the lease to end"


def stop_heart(queue: SharedQueue) -> None:
    """Do what kill -9 does to a queue: no heartbeat any more, and nothing given back."""
    queue._closed.set()
    queue._heart.join()


@pytest.mark.slow
def test_two_machines_with_two_gpus_each_share_a_run(url: str, tmp_path: Path) -> None:
    """One of the four processes is killed; its parent gives the problem back at once."""
    problems = PROBLEMS[:6]
    plan = make_plan(tmp_path, TRIALS, storage=url, devices=(0, 1), problems=problems)
    (tmp_path / f"flag {problems[0]}").write_text("kill")
    told: dict[int, Quiet] = {}

    def machine(number: int, pool: Any) -> None:
        queue, watcher = SharedQueue(url, 60), Quiet()
        with pool:
            pool.search(plan, TaskList(plan, queue), Stop(), watcher)
        queue.close()
        told[number] = watcher

    pools = [DevicePool(plan.devices, partial(open_frail, tmp_path)) for _ in range(2)]
    machines = [threading.Thread(target=machine, args=pair) for pair in enumerate(pools)]
    for thread in machines:
        thread.start()
    for thread in machines:
        thread.join(patience(60))
    assert told[0].winners == told[1].winners
    assert told[0].winners.keys() == set(problems)
    assert all(told[0].winners.values())
    for problem, done in records(url, plan).items():
        assert len({LEGAL.key(record.config) for record in done}) == TRIALS == len(done), problem
    finals = Counter(words[1] for words in lines(tmp_path) if words[0] == "finals")
    assert finals == {str(problem): 1 for problem in problems}


# ---- Leases --------------------------------------------------------------------------------------


def test_study_is_claimed_by_one_and_again_when_it_was_given_back(url: str) -> None:
    one, two = SharedQueue(url), SharedQueue(url)
    first = one.claim(["a", "b"])
    assert first == Lease("a", 1)
    assert two.claim(["a", "b"]) == Lease("b", 1)
    assert two.claim(["a", "b"]) is None
    with connect(url).begin() as connection:
        leases.insert_missing(connection, ["c"])
        assert leases.claim(connection, ["c"], "of a run that was killed", 0.0)
    assert set(two.holders(["a", "b", "c"])) == {"a", "b"}
    one.release(first)
    again = two.claim(["a", "b"])
    assert again is not None
    assert again.study == "a"
    assert again.token > first.token
    two.close()
    assert one.claim(["a"]) is not None, "closing gives back"
    one.close()


@pytest.mark.slow
def test_order_of_the_asker_decides_what_is_claimed(url: str) -> None:
    queue = SharedQueue(url)
    assert [queue.claim(["z", "a", "m"]).study for _ in range(3)] == ["z", "a", "m"]  # type: ignore[union-attr]
    queue.close()


@pytest.mark.slow
def test_heartbeats_keep_a_lease_and_silence_ends_it(url: str) -> None:
    alive, silent, asker = SharedQueue(url, 2), SharedQueue(url, 2), SharedQueue(url)
    kept, lost = alive.claim(["kept"]), silent.claim(["lost"])
    assert kept is not None
    assert lost is not None
    stop_heart(silent)
    until = time.monotonic() + patience(20)
    while (taken := asker.claim(["kept", "lost"])) is None:
        assert time.monotonic() < until, "a dead holder keeps its lease"
        time.sleep(0.05)
    assert taken.study == "lost", "a living holder loses its lease"
    time.sleep(3)
    assert asker.claim(["kept"]) is None
    alive.close()
    asker.close()


@pytest.mark.slow
def test_late_heartbeat_does_not_bring_back_what_was_given_back(url: str) -> None:
    queue, other = SharedQueue(url), SharedQueue(url)
    lease = queue.claim(["a"])
    assert lease is not None
    queue.release(lease)
    with connect(url).begin() as connection:
        assert not leases.renew(connection, lease, 100)
    assert other.claim(["a"]) is not None
    queue.close()
    other.close()


@pytest.mark.slow
def test_no_clock_of_this_machine_reaches_the_database(url: str) -> None:
    engine = connect(url)
    sent: list[object] = []
    sql.event.listen(engine, "before_cursor_execute", lambda *call: sent.append(call[3]))
    with engine.begin() as connection:
        leases.create_table(connection)
        leases.insert_missing(connection, ["a"])
        lease = leases.claim(connection, ["a"], "me", 30)
        assert lease is not None
        assert leases.renew(connection, lease, 30)
        leases.release(connection, lease)
    values = [value for call in sent for value in dict(call or {}).values()]  # type: ignore[call-overload]
    assert values
    assert not [v for v in values if isinstance(v, (datetime, float)) and v != 30]


def test_holder_that_was_overtaken_can_write_nothing(url: str, tmp_path: Path) -> None:
    """It was suspended for longer than its lease, and somebody else went on meanwhile."""
    plan = make_plan(tmp_path, 40, storage=url, problems=PROBLEMS[:1])
    study = plan.study(PROBLEMS[0])
    slow, fast = SharedQueue(url, 0.2), SharedQueue(url, 30)
    task = TaskList(plan, slow).claim()
    assert task is not None
    stop_heart(slow)
    overtaken = []

    class Suspended(FakeEvaluator):
        def evaluate(self, *arguments: Any) -> Any:
            result = super().evaluate(*arguments)
            if len(self.evaluated) == 10:
                time.sleep(0.4)
                overtaken.append(fast.claim([study]))
            return result

    with pytest.raises(LeaseLostError):
        runner(url, plan, Suspended()).search(task, lambda event: None)
    assert overtaken[0] == Lease(study, task.lease.token + 1)
    before = records(url, plan)[str(PROBLEMS[0])]

    zombie = SharedStorage(url)
    log = StudyLog(zombie, study)
    zombie.lease = task.lease
    trial = optuna.create_trial(values=[1.0])
    with pytest.raises(LeaseLostError):
        log.add(trial)
    with pytest.raises(LeaseLostError):
        log.save_finals(make_winner(before[0].config), [], 40, {})
    assert records(url, plan)[str(PROBLEMS[0])] == before
    assert stored_winners(open_storage(url)) == []
    zombie.lease = overtaken[0]
    log.add(trial)
    assert len(StudyLog(zombie, study)._study.trials) == len(before) + 1
    fast.close()


@pytest.mark.slow
def test_nobody_claims_a_study_while_a_write_checks_its_lease(url: str) -> None:
    """A lease that has just ended stays its holder's to the end of a transaction that has asked."""
    engine = connect(url)
    with engine.begin() as connection:
        leases.create_table(connection)
        leases.insert_missing(connection, ["a"])
        lease = leases.claim(connection, ["a"], "me", 0.0)
    assert lease is not None
    with engine.begin() as writing:
        assert writing.execute(leases.holds(lease)).first() is not None
        with connect(url).begin() as asking:
            assert leases.claim(asking, ["a"], "you", 30) is None
    with engine.begin() as connection:
        assert leases.claim(connection, ["a"], "you", 30) == Lease("a", lease.token + 1)


@pytest.mark.slow
def test_runs_for_two_gpu_models_have_nothing_to_do_with_each_other(
    url: str, tmp_path: Path
) -> None:
    here = make_plan(tmp_path, 5, storage=url, problems=PROBLEMS[:2])
    cut = replace(here, target=replace(here.target, sms=66))
    other = replace(here, target=find_target("h100"))
    queue = SharedQueue(url)
    claimed = [TaskList(plan, queue).claim() for plan in (here, cut, other)]
    assert len({task.lease.study for task in claimed if task}) == 3
    assert {task.problem for task in claimed if task} == {claimed[0] and claimed[0].problem}
    queue.close()


# ---- The studies ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_trial_is_stored_as_optuna_itself_stores_it(url: str, server: Server) -> None:
    storage = optuna.storages.InMemoryStorage()
    legal = LegalConfigs(LEGAL.space, PROBLEMS[0], LEGAL.target)
    pool = FakePool(broken=lambda config: config["stages"] == 3)
    winner = search_problem(legal, pool, FakeEvaluator(), storage, plan_budget(25))
    assert winner is not None
    source = StudyLog(storage, winner.study).trials()
    logs = StudyLog(SharedStorage(url), "quick"), StudyLog(RDBStorage(server.url()), "theirs")
    for trial in source:
        for log in logs:
            log.add(trial)
    for ours, theirs, trial in zip(*(log.trials() for log in logs), source, strict=True):
        ours._trial_id = theirs._trial_id = trial._trial_id
        assert ours == theirs
        assert ours.user_attrs == json.loads(json.dumps(trial.user_attrs))
        assert ours.constraints == trial.constraints
    assert {trial.state for trial in source} == {
        optuna.trial.TrialState.COMPLETE,
        optuna.trial.TrialState.PRUNED,
    }


def plan_budget(trials: int) -> Any:
    plan = make_plan(Path(), trials)
    return plan.budget(plan.problems[0])


def test_trial_whose_commit_was_not_confirmed_is_not_stored_twice(url: str) -> None:
    """Its number in the memory of a search does not matter: the study has trials of old code as
    well."""
    log = StudyLog(SharedStorage(url), "study")
    trials = [optuna.create_trial(values=[float(n)]) for n in range(3)]
    for number, trial in enumerate(trials):
        trial.number = max(0, number - 1)
        log.add(trial)
        log.add(trial)
    assert [trial.value for trial in log.trials()] == [0.0, 1.0, 2.0]
    other = optuna.create_trial(values=[9.0])
    other.number = 2
    log.add(other)
    assert [trial.value for trial in log.trials()] == [0.0, 1.0, 2.0, 9.0]


# ---- A server that goes away ---------------------------------------------------------------------


@pytest.mark.slow
def test_lost_connection_in_the_middle_of_a_run_loses_and_repeats_nothing(
    server: Server, url: str, tmp_path: Path
) -> None:
    plan = make_plan(tmp_path, 40, storage=url, problems=PROBLEMS[:1])

    class Crashing(LoggingEvaluator):
        def evaluate(self, *arguments: Any) -> Any:
            if len(self.evaluated) in (8, 20):
                server.stop()
                server.start()
            return super().evaluate(*arguments)

    queue, watcher = SharedQueue(url), Quiet()
    own = runner(url, plan, Crashing(tmp_path, 0.0))
    run_tasks(own, TaskList(plan, queue), Stop(), watcher)
    queue.close()
    done = records(url, plan)[str(PROBLEMS[0])]
    assert len(done) == 40
    assert len({LEGAL.key(record.config) for record in done}) == 40
    assert len(lines(tmp_path)) <= 41, "a trial was measured again"
    assert watcher.winners[PROBLEMS[0]] is not None


@pytest.mark.slow
def test_server_that_stays_away_ends_the_run_with_a_sentence_and_loses_nothing(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(tmp_path, 30, storage=url, problems=PROBLEMS[:1])
    monkeypatch.setattr(outage, "MAX_OUTAGE_SECONDS", 0.5)
    monkeypatch.setattr("optuna.storages._rdb.storage.random.random", lambda: 0.0)  # its pauses

    class Crashing(FakeEvaluator):
        def evaluate(self, *arguments: Any) -> Any:
            if len(self.evaluated) == 10:
                server.stop()
            return super().evaluate(*arguments)

    queue = SharedQueue(url, 1.0)
    own = runner(url, plan, Crashing())
    try:
        with pytest.raises(
            NormforgeError, match=r"did not answer .* run the same command"
        ) as caught:
            run_tasks(own, TaskList(plan, queue), Stop(), Quiet())
        assert "\n" not in str(caught.value)
        queue.close()
    finally:
        server.start()
    before = records(url, plan)[str(PROBLEMS[0])]
    assert len(before) >= 10
    queue, watcher = SharedQueue(url), Quiet()
    run_tasks(runner(url, plan, FakeEvaluator()), TaskList(plan, queue), Stop(), watcher)
    queue.close()
    after = records(url, plan)[str(PROBLEMS[0])]
    assert after[: len(before)] == before
    assert len(after) == 30


# ---- The command line ----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_command_lines_share_a_run_and_write_the_same_module(url: str, tmp_path: Path) -> None:
    options = ["--gpu", "gb200", "--shapes", "512x256:bf16,256x256:bf16", "--trials", "3"]
    options += ["--fallbacks", "none"]
    runs = []
    for name in ("one", "two"):
        line = command(*options, "--json", "--storage", url, "--out", str(tmp_path / name))
        runs.append(
            subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [run.communicate(timeout=patience(200)) for run in runs]
    finally:
        for run in runs:
            run.kill()  # none outlives the test
    assert [run.returncode for run in runs] == [0, 0], said
    documents = [json.loads(stdout) for stdout, _ in said]
    assert documents[0]["shapes"] == documents[1]["shapes"]
    assert [row["trials"] for row in documents[0]["shapes"]] == [3, 3]
    tables = [tmp_path / name / "rmsnorm_backward" / "table.json" for name in ("one", "two")]
    tuned = [json.loads(path.read_text())["tuned"] for path in tables]
    assert tuned[0] == tuned[1]
    operations = [winner.problem.operation for winner in stored_winners(open_storage(url))]
    assert sorted(operations) == ["rmsnorm_backward"] * 2 + ["rmsnorm_forward"] * 2


def test_studies_of_before_are_continued_in_the_database(url: str) -> None:
    """There are two spaces, of which today's has other values of knobs."""
    storage = open_storage(url)
    known = old_study(storage, "aaaa", space_of_before(), 20, seed=1)
    known += old_study(storage, "bbbb", SPACE, 15, seed=2)
    evaluator = FakeEvaluator()
    winner = search(storage, evaluator, trials=len(known) + 5)
    assert winner is not None and winner.study == f"{NAME}:bbbb" and winner.trials == 40
    log = StudyLog(open_storage(url), NAME)
    assert [trial.number for trial in log.trials()] == list(range(40))
    configs = [LEGAL.complete(record.config) for record in known]
    assert len(evaluator.evaluated) <= 5
    assert not any(config in configs for config in evaluator.evaluated)
