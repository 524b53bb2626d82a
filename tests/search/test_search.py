"""The search on a made-up cost: what it tries, what it stores, who wins, and what a kill costs."""

from __future__ import annotations

import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import optuna
import pytest
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from generator.errors import NormforgeError
from generator.kernels.geometry import Config, determinism_class, launches
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant, make_variant
from generator.paths import REPOSITORY
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import Budget, Progress
from generator.search.choose_winner import choose
from generator.search.finals import SHORTLIST, SHORTLIST_US
from generator.search.proposals import warm_starts
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import Record, Winner, keep_measured, study_name
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.studies.study_log import StudyLog, stored_winners
from tests.support.synthetic import (
    FLOOR_US,
    LEGAL,
    PROBLEM,
    SPACE,
    TARGET,
    FakeEvaluator,
    FakePool,
    cost,
    make_winner,
    shrink,
    timed,
)

ROOT = REPOSITORY
NAME = study_name(PROBLEM, TARGET, "measured", SPACE)
DETERMINISTIC = [config for config in LEGAL.reduction_kinds if determinism_class(config) != "none"]


@pytest.fixture
def storage(tmp_path: Path) -> BaseStorage:
    return open_storage(tmp_path / "studies.journal")


def search(
    storage: BaseStorage,
    evaluator: FakeEvaluator | None = None,
    trials: int = 40,
    pool: FakePool | None = None,
    problem: Problem = PROBLEM,
    **options: Any,
) -> Winner | None:
    """`search_problem` with what most tests have in common."""
    budget = options.pop("budget", None) or Budget(trials=trials)
    place = (problem, TARGET, options.pop("space", SPACE))
    return search_problem(
        *place, pool or FakePool(), evaluator or FakeEvaluator(), storage, budget, **options
    )


def won(winner: Winner | None) -> Winner:
    assert winner is not None
    return winner


def records(storage: BaseStorage, name: str = NAME) -> list[Record]:
    return [Record.from_trial(trial) for trial in StudyLog(storage, name).trials()]


def ratio_of(config: Config) -> float:
    return cost(make_variant(config, PROBLEM))


# What it tries


def test_it_finds_better_than_random_search(tmp_path: Path) -> None:
    gains = []
    for seed in range(4):
        found = search(open_storage(tmp_path / f"{seed}"), trials=120, seed=seed)
        rng = random.Random(seed)
        drawn = [LEGAL.draw(rng, (), deterministic=True) for _ in range(120)]
        gains.append(min(ratio_of(c) for c in drawn if c) - ratio_of(won(found).config))
    assert min(gains) > 0, "a lucky draw is as good as the best at most"
    assert sum(gains) / len(gains) > 0.01


def test_only_legal_configs_and_none_twice(storage: BaseStorage) -> None:
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=100)
    tried = [record.config for record in records(storage)]
    assert len(tried) == 100
    assert all(SPACE.reject(config, PROBLEM, TARGET) is None for config in tried)
    assert len({LEGAL.key(config) for config in tried}) == 100
    assert len({LEGAL.key(config) for config in evaluator.evaluated}) == len(evaluator.evaluated)


def test_every_reduction_kind_has_a_seed_in_the_shape_of_the_best(storage: BaseStorage) -> None:
    known = LEGAL.draw(random.Random(1), (), deterministic=True)
    assert known is not None
    start = replace(make_winner(known), problem=Problem.parse("8192x1024:bf16"))
    search(storage, trials=20, incumbent=start)
    seeds = [record.config for record in records(storage) if record.origin == "seed"]
    assert seeds[0] == known
    assert {(c["strategy"], c["order"]) for c in seeds} == {
        (c["strategy"], c["order"]) for c in LEGAL.reduction_kinds
    }
    shape = ("threads_per_row", "rows_per_cta", "rows_in_flight", "ctas_per_sm")
    kept = [all(seed[knob] == known[knob] for knob in shape) for seed in seeds]
    assert sum(kept) > len(kept) / 2


def test_the_phases_follow_each_other(storage: BaseStorage) -> None:
    search(storage, trials=100)
    origins = [record.origin for record in records(storage)]
    order = list(dict.fromkeys(origins))
    assert order == ["seed", "tpe", "surrogate", "overhead"]
    counts = Counter(origins)
    assert 20 <= counts["tpe"] <= 40
    assert counts["surrogate"] >= 45


def test_reduction_kinds_that_cannot_win_get_a_small_share(storage: BaseStorage) -> None:
    search(storage, FakeEvaluator(lambda v: cost(v) - (v.determinism == "none")), trials=100)
    ineligible = [r for r in records(storage) if determinism_class(r.config) == "none"]
    assert {r.origin for r in ineligible} == {"seed", "overhead"}
    assert 4 <= len(ineligible) <= 10


def test_most_surrogate_proposals_are_near_the_best(storage: BaseStorage) -> None:
    search(storage, trials=100)
    done = records(storage)

    def change(number: int) -> int:
        """Knobs in which a trial differs from the closest of the five best before it."""
        best = sorted((r for r in done[:number] if r.feasible), key=lambda r: r.ratio)[:5]
        config = done[number].config
        return min(sum(r.config[knob] != config[knob] for knob in config) for r in best)

    changes = [change(n) for n, record in enumerate(done) if record.origin == "surrogate"]
    assert sum(changed <= 4 for changed in changes) > len(changes) / 2
    assert min(changes) == 1


def test_a_small_space_is_swept_in_the_order_of_the_file(
    storage: BaseStorage, tmp_path: Path
) -> None:
    space = shrink(
        tmp_path,
        LEGAL.first(1)[0],
        strategy=["column_slices", "separate", "atomic"],
        store_hint=["default", "streaming"],
        grid=["full", "even"],
    )
    winner = won(search(storage, space=space, trials=50))
    legal = LegalConfigs(space, PROBLEM, TARGET)
    every = legal.first(1000)
    tried = [record.config for record in records(storage, winner.study)]
    assert 8 <= len(every) < 50
    assert tried == every
    assert winner.trials == len(every)
    assert cost(make_variant(winner.config, PROBLEM)) <= 1.01 * min(
        ratio_of(config) for config in every if determinism_class(config) != "none"
    )


def test_a_space_larger_than_the_budget_is_not_swept(storage: BaseStorage, tmp_path: Path) -> None:
    space = shrink(tmp_path, LEGAL.first(1)[0], slice_columns=[32, 64, 128, 16])
    winner = won(search(storage, space=space, trials=3))
    assert winner.trials == 3
    assert "sweep" not in {record.origin for record in records(storage, winner.study)}


def test_the_search_ends_when_nothing_is_left(storage: BaseStorage, tmp_path: Path) -> None:
    space = shrink(tmp_path, LEGAL.first(1)[0], store_hint=["default", "streaming"])
    winner = won(search(storage, space=space, budget=Budget(trials=500, sweep_limit=1)))
    assert winner.trials == 2


def test_seconds_end_a_search(storage: BaseStorage) -> None:
    started = time.monotonic()
    winner = won(search(storage, FakeEvaluator(delay=0.02), budget=Budget(seconds=0.8)))
    assert 5 <= winner.trials <= 40
    assert time.monotonic() - started < 3
    again = FakeEvaluator()
    # What counts ends with the last trial: the first run may have ended on its way to another.
    assert search(storage, again, budget=Budget(seconds=0.4)) == winner
    assert again.evaluated == [], "the seconds of the first run count"


def test_a_shape_without_a_legal_config_is_refused(storage: BaseStorage) -> None:
    with pytest.raises(NormforgeError, match="no legal config for 64x131071:fp32 on h200"):
        search(storage, problem=Problem.parse("64x131071:fp32"))


@pytest.mark.parametrize("budget", [{}, {"trials": 0}, {"seconds": -1.0}])
def test_a_budget_of_nothing_is_refused(budget: dict[str, Any]) -> None:
    with pytest.raises(NormforgeError):
        Budget(**budget)


def test_compilation_runs_ahead_of_measurement(storage: BaseStorage) -> None:
    pool = FakePool()
    ahead: list[int] = []

    class Watching(FakeEvaluator):
        def evaluate(self, *arguments: Any) -> Result:
            ahead.append(pool.submitted - done[0])
            return super().evaluate(*arguments)

    done = [1]
    search(
        storage,
        Watching(),
        trials=30,
        pool=pool,
        on_progress=lambda event: done.__setitem__(0, event.done + 1),
    )
    assert Counter(ahead).most_common(1)[0][0] == pool.processes
    assert max(ahead) == pool.processes


def test_progress_tells_how_far_and_how_good(storage: BaseStorage) -> None:
    events: list[Progress] = []
    winner = won(search(storage, trials=25, on_progress=events.append))
    assert [event.done for event in events] == [*range(1, 26), 25]
    assert events[-1].phase == "finals"
    assert all(event.total == 25 and event.problem == PROBLEM for event in events)
    bests = [event.best_ratio for event in events if event.best_ratio is not None]
    assert bests == sorted(bests, reverse=True)
    assert sum(events[-1].counts.values()) == 25
    assert events[-1].counts == winner.counts


# What it stores


def test_a_trial_carries_what_a_reader_of_the_study_needs(storage: BaseStorage) -> None:
    pool = FakePool(
        broken=lambda config: config["strategy"] == "last_cta",
        spilling=lambda config: config["strategy"] == "semaphore",
    )
    search(storage, trials=60, pool=pool)
    trials = StudyLog(storage, NAME).trials()
    outcomes = {trial.user_attrs["outcome"] for trial in trials}
    assert {"ok", "nondeterministic", "compile_error", "resource"} <= outcomes
    for trial in trials:
        attributes = trial.user_attrs
        result = Result.from_json(attributes["result"])
        feasible = attributes["outcome"] == "ok"
        assert attributes["feasible"] is feasible
        assert trial.constraints == {"infeasible": 0.0 if feasible else 1.0}
        assert attributes["variant"].startswith(trial.params["strategy"])
        if result.ratio is None:
            assert trial.state == TrialState.PRUNED
            assert result.note
        else:
            assert trial.value == result.ratio
        if attributes["outcome"] == "compile_error":
            assert result.note == "rmsnorm_backward.cu(7): error: planted"
            assert attributes["cubin"] == ""
        else:
            assert attributes["registers"] > 0
            assert attributes["smem"] > 0
            assert attributes["cubin"]


def test_optuna_opens_the_journal_and_names_the_same_best(
    storage: BaseStorage, tmp_path: Path
) -> None:
    search(storage, trials=40)
    own = JournalStorage(JournalFileBackend(str(tmp_path / "studies.journal")))
    study = optuna.load_study(study_name=NAME, storage=own)
    assert study.best_value == min(r.ratio for r in records(storage) if r.feasible)


def test_one_cubin_with_one_launch_is_measured_once(storage: BaseStorage, tmp_path: Path) -> None:
    space = shrink(
        tmp_path,
        LEGAL.first(1)[0],
        strategy=["column_slices", "semaphore"],
        store_hint=["default", "streaming"],
    )
    evaluator = FakeEvaluator()
    pool = FakePool(unseen=("store_hint",))
    winner = won(search(storage, evaluator, pool=pool, space=space))
    done = records(storage, winner.study)
    assert [record.shared_with for record in done] == [None, 0, None, 2]
    assert [record.config for record in done[::2]] == evaluator.evaluated
    for record in done[1::2]:
        origin = done[record.shared_with or 0]
        assert (origin.identity, origin.cubin) == (record.identity, record.cubin)
        assert origin.result == record.result
    assert len(evaluator.finalists[0]) == 2, "one measurement is one finalist"


def test_one_cubin_with_another_launch_is_another_measurement(
    storage: BaseStorage, tmp_path: Path
) -> None:
    keep = {**LEGAL.first(1)[0], "strategy": "separate", "slice_columns": 32}
    space = shrink(tmp_path, keep, overlap=["dependent", "none"])
    evaluator = FakeEvaluator()
    search(storage, evaluator, space=space)
    assert len(evaluator.evaluated) == 2
    assert len({make_variant(config, PROBLEM).id for config in evaluator.evaluated}) == 1


def test_studies_that_must_not_mix_have_different_names(tmp_path: Path) -> None:
    other_space = shrink(tmp_path, LEGAL.first(1)[0])
    names = [
        NAME,
        study_name(replace(PROBLEM, M=8192), TARGET, "measured", SPACE),
        study_name(PROBLEM, replace(TARGET, name="h100"), "measured", SPACE),
        study_name(PROBLEM, replace(TARGET, sms=66), "measured", SPACE),
        study_name(PROBLEM, TARGET, "predicted", SPACE),
        study_name(PROBLEM, TARGET, "measured", other_space),
    ]
    assert len(set(names)) == len(names)
    assert all(part in NAME for part in ("4096x1024:bf16", "h200", "measured", SPACE.hash))


def test_a_database_url_is_passed_through(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path}/studies.db")
    winner = won(search(storage, trials=8))
    again = open_storage(f"sqlite:///{tmp_path}/studies.db")
    assert stored_winners(again) == [winner]


def test_a_database_that_cannot_be_opened_is_named_without_its_password() -> None:
    with pytest.raises(NormforgeError, match=r"nosuchdb://db\.local/studies") as caught:
        open_storage("nosuchdb://user:secret@db.local/studies")
    assert "secret" not in str(caught.value)


def test_a_full_disk_ends_the_search_with_a_sentence(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: JournalFileBackend, logs: object) -> None:
        raise OSError(28, "No space left on device")

    search(storage, trials=5)
    monkeypatch.setattr(JournalFileBackend, "append_logs", full)
    with pytest.raises(NormforgeError, match="No space left on device"):
        search(storage, trials=10)


# Resuming


def test_a_finished_study_answers_without_measuring(storage: BaseStorage, tmp_path: Path) -> None:
    first = won(search(storage, trials=30))
    evaluator = FakeEvaluator()
    again = search(open_storage(tmp_path / "studies.journal"), evaluator, trials=30)
    assert again == first
    assert evaluator.evaluated == []
    assert evaluator.finalists == []


def test_finals_are_held_again_for_other_machine_code(storage: BaseStorage) -> None:
    first = won(search(storage, trials=30))
    pool = FakePool(version="another compiler")
    evaluator = FakeEvaluator()
    again = won(search(storage, evaluator, trials=30, pool=pool))
    assert len(evaluator.finalists) == 1
    assert again.cubin != first.cubin


def test_a_larger_budget_continues_a_study(storage: BaseStorage) -> None:
    search(storage, trials=30)
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=50))
    assert winner.trials == 50
    assert len(evaluator.evaluated) <= 20
    assert len({LEGAL.key(record.config) for record in records(storage)}) == 50


def test_who_fails_the_last_check_gives_way_until_somebody_passes(storage: BaseStorage) -> None:
    class Strict(FakeEvaluator):
        asked: ClassVar[list[Config]] = []

        def confirm(self, problem: Problem, variant: Variant, result: Result) -> Result:
            self.asked.append(variant.config)
            if len(self.asked) <= 7:
                return replace(result, outcome="wrong", note="planted")
            return replace(result, checks=(*result.checks, "last"))

    evaluator = Strict()
    winner = won(search(storage, evaluator, trials=30))
    assert winner.config == evaluator.asked[-1]
    assert winner.result.checks[-1] == "last"
    assert len(evaluator.asked) == len(set(map(repr, evaluator.asked))) == 8
    assert len(evaluator.finalists) == 2  # all of the first six failed


def test_finals_lost_to_a_kill_are_held_on_resume(storage: BaseStorage) -> None:
    class Killed(FakeEvaluator):
        def finals(self, *arguments: Any) -> list[Result]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(storage, Killed(), trials=20)
    evaluator = FakeEvaluator()
    assert won(search(storage, evaluator, trials=20)).trials == 20
    assert evaluator.evaluated == []
    assert len(evaluator.finalists) == 1


def test_kill_9_at_any_moment_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    journal, evaluations = tmp_path / "studies.journal", tmp_path / "evaluations"
    command = [
        sys.executable,
        "-m",
        "tests.support.synthetic",
        str(journal),
        str(evaluations),
        "130",
    ]
    rng = random.Random(os.getpid())
    known: list[dict[str, int | str]] = []
    kills = 0

    def finished() -> int:
        return journal.read_bytes().count(b'"origin"') if journal.exists() else 0

    for _ in range(3):
        before = finished()
        process = subprocess.Popen(command, cwd=ROOT)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline and finished() == before:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        stored = [dict(r.config) for r in records(open_storage(journal))]
        assert stored[: len(known)] == known, "a finished trial was lost"
        assert len(stored) > len(known)
        known = stored
    assert kills >= 2
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)

    done = records(open_storage(journal))
    assert len(done) == 130
    assert [dict(record.config) for record in done][: len(known)] == known
    assert len({LEGAL.key(record.config) for record in done}) == 130
    # Only a trial that was under way when the run was killed may have been measured again.
    lines = Counter(evaluations.read_text().splitlines())
    assert sum(lines.values()) - len(lines) <= kills
    [winner] = stored_winners(open_storage(journal))
    assert winner.trials == 130


# The journal file


def test_a_torn_last_record_costs_that_record_only(storage: BaseStorage, tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=6)
    whole = journal.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for end in (start + 1, start + 9, start + 30, (start + len(whole)) // 2, len(whole) - 1):
        journal.write_bytes(whole[:end])
        study = StudyLog(open_storage(journal), NAME)
        assert journal.read_bytes() == whole[:start]
        assert len(study.trials()) == 6
    evaluator = FakeEvaluator()
    winner = won(search(open_storage(journal), evaluator, trials=6))
    assert evaluator.evaluated == []
    assert stored_winners(open_storage(journal)) == [winner]


@pytest.mark.parametrize(
    "content",
    [
        b"no journal at all",
        b"{}\n",
        b"[1, 2]\n",
        b'{"op_code":0,"worker_id":"a"\n{"op_code":1}\n',
        b'{"op_code":0,"worker_id":"a"}\n',
        b'{"op_code":99,"worker_id":"a"}\n',
        b"\x00\xff\xfe\x80" * 100,
        b"SQLite format 3\x00" + bytes(100) + b"\n",
    ],
)
def test_a_corrupt_journal_is_one_sentence_and_stays_as_it_is(
    tmp_path: Path, content: bytes
) -> None:
    journal = tmp_path / "studies.journal"
    journal.write_bytes(content)
    before = journal.stat().st_mtime_ns
    with pytest.raises(NormforgeError, match="corrupt") as caught:
        open_storage(journal)
    assert str(journal) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert journal.read_bytes() == content
    assert journal.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.iterdir()] == ["studies.journal"]


def test_damage_in_the_middle_is_reported_with_its_line(
    storage: BaseStorage, tmp_path: Path
) -> None:
    journal = tmp_path / "studies.journal"
    search(storage, trials=4)
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:50] + b"\n"
    journal.write_bytes(b"".join(lines))
    with pytest.raises(NormforgeError, match="line 3 is no JSON"):
        open_storage(journal)


def test_an_unusable_folder_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NormforgeError, match="choose another output folder"):
        open_storage(tmp_path / "file" / "studies.journal")


@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_locks_left_behind_by_a_kill_do_not_stop_the_next_run(tmp_path: Path, kind: str) -> None:
    journal = tmp_path / "studies.journal"
    lock = Path(f"{journal}.lock")  # the name that Optuna's own locks have
    if kind == "symlink":
        lock.symlink_to(journal)
    else:
        lock.touch()
    started = time.monotonic()
    search(open_storage(journal), trials=5)
    assert time.monotonic() - started < 3


def test_a_writer_killed_with_the_lock_in_hand_does_not_block(tmp_path: Path) -> None:
    journal = tmp_path / "studies.journal"
    open_storage(journal)
    hold = (
        "import fcntl, os, sys, time\n"
        f"handle = os.open({str(journal)!r}, os.O_RDWR)\n"
        "fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        process.kill()
    started = time.monotonic()
    search(open_storage(journal), trials=5)
    assert time.monotonic() - started < 3


# Who wins


def test_the_winner_is_the_best_of_the_finals(storage: BaseStorage) -> None:
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=60))
    [finalists] = evaluator.finalists
    deterministic = [c for c in finalists if determinism_class(c) != "none"]
    best = sorted((r for r in records(storage) if r.feasible), key=lambda r: r.ratio)
    assert len(deterministic) == 6
    assert {LEGAL.key(best[0].config)} <= {LEGAL.key(config) for config in deterministic}
    assert winner.result.ratio <= 1.01 * min(map(ratio_of, deterministic))
    assert {entry.variant for entry in winner.tied} <= {
        make_variant(config, PROBLEM).id for config in deterministic
    }
    assert winner.variant in {entry.variant for entry in winner.tied}


class Shortlister(FakeEvaluator):
    """Trials scatter by several per cent, and only side by side the truth is seen."""

    def __init__(self, clean: bool = True) -> None:
        super().__init__(final=lambda variant: timed(cost(variant)))
        self.clean = clean
        self.shortlisted: list[list[Config]] = []
        noise = random.Random(3)
        self.cost = lambda variant: cost(variant) * (1 + abs(noise.gauss(0, 0.03)))

    def shortlist(
        self, problem: Problem, entries: Sequence[tuple[Variant, Compiled]]
    ) -> list[float]:
        self.shortlisted.append([variant.config for variant, _ in entries])
        return [cost(variant) for variant, _ in entries] if self.clean else []


def test_who_is_among_the_best_is_found_side_by_side(storage: BaseStorage) -> None:
    evaluator = Shortlister()
    search(storage, evaluator, trials=120)
    [shortlisted], [finalists] = evaluator.shortlisted, evaluator.finalists
    assert 6 < len(shortlisted) <= SHORTLIST
    assert all(determinism_class(config) != "none" for config in shortlisted)
    best = sorted(shortlisted, key=ratio_of)[:6]
    called = [LEGAL.key(c) for c in finalists if determinism_class(c) != "none"]
    assert called == [LEGAL.key(config) for config in best]
    by_trial = [LEGAL.key(config) for config in shortlisted[:6]]
    assert called != by_trial, "the trials alone would have called up others"


def test_without_clean_times_side_by_side_the_trials_decide(storage: BaseStorage) -> None:
    evaluator = Shortlister(clean=False)
    search(storage, evaluator, trials=120)
    [shortlisted], [finalists] = evaluator.shortlisted, evaluator.finalists
    called = [LEGAL.key(c) for c in finalists if determinism_class(c) != "none"]
    assert called == [LEGAL.key(config) for config in shortlisted[:6]]


def test_a_gpu_where_all_ratios_are_small_does_not_fill_the_places(storage: BaseStorage) -> None:
    """A study goes on with another GPU, whose floor takes 10 % longer: what was best on the first
    one is timed beside what the second one thinks best."""

    class Elsewhere(Shortlister):
        gpu, factor = "first", 1.0

        def _result(self, variant: Variant) -> Result:
            result = super()._result(variant)
            assert result.us is not None
            floor_us = FLOOR_US / self.factor
            ratio = result.us / floor_us
            return replace(result, floor_us=floor_us, ratio=ratio, extra={"gpu": self.gpu})

    evaluator = Elsewhere()
    search(storage, evaluator, trials=60)
    [first] = evaluator.finalists
    evaluator.gpu, evaluator.factor = "second", 0.9
    search(storage, evaluator, trials=240)
    here, there = (
        [r for r in records(storage) if r.feasible and r.result.extra.get("gpu") == gpu]
        for gpu in ("first", "second")
    )
    best = min(r.ratio for r in here if r.config in first)
    assert sum(r.ratio < best for r in there) > SHORTLIST, "these could fill all places"
    assert sum(r.config in evaluator.shortlisted[-1] for r in here) == SHORTLIST // 2


def test_few_that_take_long_are_not_shortlisted(storage: BaseStorage) -> None:
    evaluator = Shortlister()
    slow = Result("ok", SHORTLIST_US / 6, SHORTLIST_US / 8, 1.3, "verified")
    evaluator._result = lambda variant: slow  # type: ignore[method-assign]
    search(storage, evaluator, trials=40)
    assert evaluator.shortlisted == []


@pytest.mark.parametrize("lucky", [False, True], ids=["caught", "bits that happen to repeat"])
def test_a_nondeterministic_variant_planted_fastest_never_wins(
    storage: BaseStorage, lucky: bool
) -> None:
    def planted(variant: Variant) -> float:
        return 1.0 if variant.determinism == "none" else cost(variant)

    winner = won(search(storage, FakeEvaluator(planted, lucky=lucky), trials=60))
    assert determinism_class(winner.config) != "none"
    assert all(determinism_class(entry.config) != "none" for entry in winner.tied)
    fastest = winner.fastest_nondeterministic
    assert fastest is not None
    assert determinism_class(fastest.config) == "none"
    assert fastest.ratio == 1.0
    assert winner.overhead_of_determinism == winner.result.ratio


def test_who_fails_in_the_finals_does_not_win(storage: BaseStorage) -> None:
    def ladder(variant: Variant) -> Result | None:
        bad = variant["strategy"] == "column_slices"
        return timed(0.5, "nondeterministic", "refuted") if bad else None

    evaluator = FakeEvaluator(final=ladder)
    winner = won(search(storage, evaluator, trials=120))
    assert winner.config["strategy"] != "column_slices"
    assert len(evaluator.finalists) > 1, "the next best were to be called up"
    again = FakeEvaluator(final=ladder)
    assert search(storage, again, trials=60) == winner
    assert again.finalists == []


def test_no_winner_when_nobody_passes(storage: BaseStorage) -> None:
    evaluator = FakeEvaluator(final=lambda variant: Result("crashed", note="planted"))
    assert search(storage, evaluator, trials=30) is None
    assert stored_winners(storage) == []


def test_ties_go_to_the_first_in_the_order_of_the_space() -> None:
    one, two, three = DETERMINISTIC[:3]
    finals = [(three, timed(1.100)), (two, timed(1.109)), (one, timed(1.112))]
    for order in (finals, finals[::-1], [finals[1], finals[2], finals[0]]):
        choice = choose(order, LEGAL.rank, None)
        assert choice is not None
        assert order[choice.winner][0] == two, "the first knob with a difference is the strategy"
        assert [order[place][0] for place in choice.tied] == [two, three]


def test_rank_compares_knob_by_knob_in_file_order() -> None:
    config = DETERMINISTIC[0]
    later = {**config, "store_hint": "streaming"}
    earlier_knob = {**config, "grid": "even"}
    assert LEGAL.rank(config) < LEGAL.rank(later) < LEGAL.rank(earlier_knob)


@pytest.mark.parametrize(
    ("ratio", "stays"),
    [(1.1, True), (1.1 * 1.0099, True), (1.1 * 1.0101, False), (1.05, True)],
)
def test_the_incumbent_stays_unless_beaten_by_more_than_one_percent(
    ratio: float, stays: bool
) -> None:
    challenger, incumbent = DETERMINISTIC[:2]
    finals = [(challenger, timed(1.1)), (incumbent, timed(ratio))]
    choice = choose(finals, LEGAL.rank, incumbent)
    assert choice is not None
    assert (finals[choice.winner][0] == incumbent) is stays
    assert "incumbent" in choice.reason


@pytest.mark.parametrize("ratio", [1.0, 1.095, 1.12])
def test_an_incumbent_of_two_launches_gives_way_to_as_fast_a_kernel_of_one(ratio: float) -> None:
    two = next(config for config in DETERMINISTIC if launches(config) == 2)
    one = next(config for config in DETERMINISTIC if launches(config) == 1)
    finals = [(two, timed(1.1)), (one, timed(ratio))]
    choice = choose(finals, LEGAL.rank, two)
    assert choice is not None
    assert (finals[choice.winner][0] == one) is (ratio < 1.11)
    # The other way round it stays: a second launch is never worth a tie.
    choice = choose(finals, LEGAL.rank, one)
    assert choice is not None
    assert (finals[choice.winner][0] == one) is (ratio < 1.11)


def test_ties_go_to_one_launch_before_the_order_of_the_space() -> None:
    finals = [(config, timed(1.1)) for config in DETERMINISTIC]
    rank = {repr(config): (launches(config) != 2,) for config, _ in finals}
    choice = choose(finals, lambda config: rank[repr(config)], None)
    assert choice is not None
    assert launches(finals[choice.winner][0]) == 1
    assert sorted(choice.tied) == list(range(len(finals)))


def test_an_incumbent_that_fails_is_replaced() -> None:
    challenger, incumbent = DETERMINISTIC[:2]
    failed = timed(1.0, "nondeterministic", "refuted")
    finals = [(incumbent, failed), (challenger, timed(1.5))]
    choice = choose(finals, LEGAL.rank, incumbent)
    assert choice is not None
    assert choice.winner == 1
    assert "incumbent failed in the finals (nondeterministic)" in choice.reason


def test_the_stored_incumbent_takes_part_and_stays_on_a_tie(storage: BaseStorage) -> None:
    def flat(variant: Variant) -> float:
        return 1.2 + 0.001 * (cost(variant) - 1)

    first = won(search(storage, FakeEvaluator(flat), trials=30))
    evaluator, newer = FakeEvaluator(flat), FakePool(version="other machine code")
    again = won(search(storage, evaluator, trials=30, pool=newer, seed=9))
    assert again.date >= first.date
    assert len(evaluator.evaluated) == 30
    assert dict(first.config) in evaluator.finalists[0]
    assert again.config == first.config
    assert again.reason == "the incumbent: not beaten by more than 1 %"


def test_an_incumbent_is_in_the_finals_however_slow(storage: BaseStorage) -> None:
    slow = max(DETERMINISTIC, key=ratio_of)
    evaluator = FakeEvaluator()
    winner = won(search(storage, evaluator, trials=60, incumbent=make_winner(slow)))
    assert slow in evaluator.finalists[0]
    assert winner.reason.startswith("beat the incumbent by ")


def test_a_predicted_incumbent_has_no_rights_among_measured_ones(storage: BaseStorage) -> None:
    slow = max(DETERMINISTIC, key=ratio_of)
    evaluator = FakeEvaluator(lambda variant: 1.2)
    predicted = make_winner(slow, evidence="predicted")
    winner = won(search(storage, evaluator, trials=30, incumbent=predicted))
    assert "incumbent" not in winner.reason


def test_an_illegal_incumbent_is_a_start_and_no_finalist(storage: BaseStorage) -> None:
    stale = {**DETERMINISTIC[0], "register_cap": 40}  # would run, but a rule rejects it
    assert not LEGAL.allows(stale)
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=30, incumbent=make_winner(stale))
    assert stale not in evaluator.finalists[0]
    assert evaluator.evaluated[0]["strategy"] == stale["strategy"]


def test_a_predicted_winner_never_replaces_a_measured_one() -> None:
    measured = make_winner(DETERMINISTIC[0])
    predicted = make_winner(DETERMINISTIC[1], ratio=1.0, evidence="predicted")
    newer = make_winner(DETERMINISTIC[2])
    assert keep_measured(measured, predicted) is measured
    assert keep_measured(predicted, measured) is measured
    assert keep_measured(measured, newer) is newer
    assert keep_measured(None, predicted) is predicted
    assert keep_measured(measured, None) is measured


def test_winners_of_near_problems_are_tried_first(storage: BaseStorage) -> None:
    neighbour = Problem.parse("8192x1024:bf16")
    other = won(search(storage, trials=40, problem=neighbour))
    evaluator = FakeEvaluator()
    search(storage, evaluator, trials=30)
    assert evaluator.evaluated[0] == other.config


def test_warm_starts_come_nearest_first() -> None:
    def at(problem: str, place: int, target: str = "h200") -> Winner:
        where = Problem.parse(problem)
        return make_winner(DETERMINISTIC[place], problem=where, target=target)

    far = at("65536x1024:bf16", 0)
    near = at("8192x1024:bf16", 1)
    as_wide = at("4096x1024:fp16", 4)
    other_weight = at("4096x1024:bf16:fp32", 5)
    wider = at("4096x1024:fp32", 2)
    other_gpu = at("4096x1024:bf16", 3, "h100")
    same_config = at("16384x1024:bf16", 1)
    winners = [other_gpu, wider, far, same_config, near, as_wide, other_weight]
    found = warm_starts(PROBLEM, TARGET, winners)
    nearest_first = (other_weight, as_wide, near, far, wider, other_gpu)
    assert found == [w.config for w in nearest_first]


def test_longer_rows_start_with_as_many_columns_in_each_cta() -> None:
    problem = Problem.parse("8192x16384:bf16")
    legal = LegalConfigs(SPACE, problem, TARGET)
    one = next(c for c in DETERMINISTIC if c["cluster"] == 1)
    for shape, cluster, expected in (
        ("8192x4096:bf16", 1, [4, 1]),
        ("8192x8192:bf16", 2, [4, 2]),
        ("8192x32768:bf16", 8, [4, 8]),
        ("4096x16384:bf16", 2, [2]),
        ("8192x3072:bf16", 1, [1]),  # 16384 is no multiple of 3072
        ("8192x512:bf16", 1, [1]),  # there are no clusters of 32
    ):
        config = {**one, "cluster": cluster}
        winner = make_winner(config, problem=Problem.parse(shape))
        found = warm_starts(problem, TARGET, [winner])
        assert [c["cluster"] for c in found] == expected, shape
        adapted = legal.adapt(found[0], random.Random(0))
        assert adapted is not None
        assert legal.allows(adapted)


def test_a_winner_survives_json(storage: BaseStorage) -> None:
    winner = won(search(storage, trials=30))
    assert Winner.from_json(winner.to_json()) == winner
    assert stored_winners(storage) == [winner]
    assert winner.evidence == "measured"
    assert winner.space_hash == SPACE.hash
    assert sum(winner.counts.values()) == winner.trials == 30
    assert winner.fastest_nondeterministic is not None


def test_equal_seeds_find_the_same_winner(tmp_path: Path) -> None:
    runs: list[Winner] = [
        won(search(open_storage(tmp_path / name), trials=50, seed=3)) for name in ("a", "b")
    ]
    assert replace(runs[0], date="") == replace(runs[1], date="")


def test_packed_journal_is_unpacked_when_the_journal_is_missing(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    optuna.create_study(storage=open_storage(path), study_name="kept")
    packed = path.with_name(path.name + ".xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()

    assert optuna.get_all_study_names(open_storage(path)) == ["kept"]

    optuna.create_study(storage=open_storage(path), study_name="newer")
    assert optuna.get_all_study_names(open_storage(path)) == ["kept", "newer"]


def test_damaged_packed_journal_is_one_sentence_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    packed = path.with_name(path.name + ".xz")
    packed.write_bytes(b"no archive")

    with pytest.raises(NormforgeError, match="corrupt"):
        open_storage(path)

    assert packed.read_bytes() == b"no archive"
    assert not path.exists()
