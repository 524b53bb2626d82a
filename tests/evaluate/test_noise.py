"""Noise: what counts as such, what is measured again, and that the answer stays the same."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from generator.evaluate.gpu.evaluator import FINAL_PAUSES, MeasuredEvaluator
from generator.evaluate.gpu.noise import (
    BLOCKS,
    SEARCH_PAUSES,
    SHORT_BLOCKS,
    Block,
    NoisyError,
    collect,
    noise_in,
)
from generator.evaluate.gpu.nvml import DeviceMonitor
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant, make_variant
from generator.problem import Problem
from generator.result import Result
from generator.search.budget import Budget
from generator.search.choose_winner import TIE, choose
from generator.search.finals import noisy
from generator.search.search import search_problem
from generator.space.legal_configs import LegalConfigs
from generator.studies.records import Record, study_name
from generator.studies.storage import open_storage
from generator.studies.study_log import StudyLog
from tests.support.fake_gpu import FakeCompiler, FakeGpu, FakeSession, Landscape, Log, key
from tests.support.fake_run import little_space
from tests.support.fake_supervisor import FakeSupervisor
from tests.support.synthetic import PROBLEM, TARGET, FakePool

LEGAL = LegalConfigs(little_space(), PROBLEM, TARGET)
SOUND: list[Config] = [
    config for config in LEGAL.first(1000) if make_variant(config, PROBLEM).determinism != "none"
]
NAME = study_name(PROBLEM, TARGET, "measured")


def steady(floor_us: float = 40.0, ratio: float = 1.2, rounds: int = 15) -> Block:
    wobble = [1 + 0.004 * (round_ % 3 - 1) for round_ in range(rounds)]
    return [[floor_us * w for w in wobble], [floor_us * ratio * w for w in reversed(wobble)]]


def scattered(floor_us: float = 40.0) -> Block:
    """A neighbour takes turns on the GPU."""
    floors = [floor_us * (1.0 if round_ % 2 else 1.4) for round_ in range(15)]
    return [floors, [floor_us * 1.2] * 15]


# ---- One block -----------------------------------------------------------------------------------


def test_steady_block_is_clean() -> None:
    assert noise_in(steady()) == ""
    assert noise_in(steady(), best_us=40.0) == ""


def test_reference_slower_than_its_best_is_noise_and_the_sentence_has_both_times() -> None:
    fault = noise_in(steady(44.0), best_us=40.0)
    assert "44.0 us" in fault
    assert "40.0 at its best" in fault
    assert noise_in(steady(40.0), best_us=44.0) == "", "faster than ever is no noise"


def test_what_an_undisturbed_h200_shows_is_no_noise() -> None:
    """Best and 99th percentile of the reference, in us, from the trials in generated/h200."""
    for best, late in ((5.54, 6.36), (10.5, 11.3), (28.4, 30.0), (97.1, 98.4), (735.0, 737.5)):
        assert noise_in(steady(late), best) == ""


def test_times_that_scatter_are_noise_even_without_a_known_best() -> None:
    assert "scatter" in noise_in(scattered())


def test_candidate_that_is_restless_by_itself_is_no_noise_beside_a_steady_one() -> None:
    floors, own = steady()
    restless = [t * (1.0 if i % 2 else 1.5) for i, t in enumerate(own)]
    assert noise_in([floors, own, restless]) == ""
    assert noise_in([floors, restless]) != ""


# ---- Discarded and measured again ----------------------------------------------------------------


class Blocks:
    """Answers with the blocks given, the last one for ever; keeps the pauses."""

    def __init__(self, *blocks: Block) -> None:
        self.blocks = list(blocks)
        self.measured = 0
        self.pauses: list[float] = []

    def __call__(self) -> Block:
        self.measured += 1
        return self.blocks.pop(0) if len(self.blocks) > 1 else self.blocks[0]

    def collect(self, blocks: int, best_us: float | None = None) -> Any:
        return collect(self, blocks, best_us, (0.1, 0.2, 0.3), self.pauses.append)


def test_clean_blocks_cost_no_pause_and_are_put_together() -> None:
    source = Blocks(steady(40.0), steady(40.4), steady(40.8))
    timing = source.collect(3)
    assert (source.measured, source.pauses) == (3, [])
    assert (timing.discarded, timing.fault) == (0, "")
    assert timing.floor_us == pytest.approx(40.4, rel=0.01)
    assert timing.ratios[0] == pytest.approx(1.2, rel=0.01)
    assert timing.fields(0)["extra"]["block_ratios"] == pytest.approx([1.2] * 3, rel=0.01)
    assert "block_ratios" not in source.collect(1).fields(0)["extra"], "it is the ratio"


def test_noisy_blocks_are_discarded_and_measured_again() -> None:
    source = Blocks(steady(60.0), scattered(), steady(40.0))
    timing = source.collect(1, best_us=40.0)
    assert source.pauses == [0.1, 0.2]
    assert timing.discarded == 2
    assert timing.fault == ""
    assert timing.floor_us == pytest.approx(40.0)


def test_measuring_again_ends_and_says_so() -> None:
    source = Blocks(steady(61.0), steady(55.0), steady(60.0), steady(62.0))
    timing = source.collect(1, best_us=40.0)
    assert source.measured == 4
    assert source.pauses == [0.1, 0.2, 0.3]
    assert "40.0 at its best" in timing.fault
    assert timing.floor_us == pytest.approx(55.0), "the least disturbed one"
    assert timing.fields(0)["noisy"] is True


def test_blocks_before_a_faster_reference_are_found_to_be_slow() -> None:
    """The first blocks were measured in noise that nobody could know of."""
    source = Blocks(steady(46.0, 1.3), steady(40.0), steady(40.0), steady(40.0))
    timing = source.collect(3)
    assert timing.discarded == 1
    assert timing.ratios[0] == pytest.approx(1.2, rel=0.01)


# ---- The evaluator -------------------------------------------------------------------------------


class Clock:
    """A made-up time that passes while something is measured or slept away."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class World:
    """A GPU in time: all times drift slowly, every one jitters, some are far off, and a neighbour
    disturbs during `storm(seconds)`. The order within a round rotates, as in the timer."""

    def __init__(
        self,
        seed: int = 0,
        storm: Callable[[float], bool] = lambda seconds: False,
        jitter: float = 0.005,
        drift: float = 0.03,
        floor_us: float = 40.0,
    ) -> None:
        self.clock, self.floor_us = Clock(), floor_us
        self.rng = random.Random(seed)
        self.storm, self.jitter, self.drift = storm, jitter, drift
        self.level = 0.0

    def time(self, ratio: float) -> float:
        """Microseconds of one run of an operation that takes `ratio` times the floor."""
        rng = self.rng
        self.clock.seconds += 0.001
        # A random walk that is drawn back: clocks and temperatures.
        self.level += 0.02 * rng.gauss(0, self.drift) - 0.0005 * self.level
        us = self.floor_us * ratio * (1 + self.level) * rng.gauss(1, self.jitter)
        if self.storm(self.clock.seconds) and rng.random() < 0.6:
            us *= rng.uniform(1.2, 2.0)
        return us * 3 if rng.random() < 0.005 else us

    def block(self, ratios: list[float], rounds: int, rng: random.Random) -> Block:
        every = [1.0, *ratios]
        times: Block = [[] for _ in every]
        for round_ in range(rounds):
            for turn in range(len(every)):
                which = (turn + round_) % len(every)
                times[which].append(self.time(every[which]))  # type: ignore[attr-defined]
        return times


def evaluator(world: World, landscape: Landscape | None = None) -> MeasuredEvaluator:
    gpu = FakeGpu(Log(), landscape or Landscape(), world, seconds=0)  # type: ignore[arg-type]
    session = FakeSession(gpu)
    supervisor: Any = FakeSupervisor(session.handle, session.facts, world.clock.sleep)
    return MeasuredEvaluator(TARGET, supervisor)


def evaluated(measuring: MeasuredEvaluator) -> list[str]:
    """Keys of the configs of all trials so far."""
    supervisor: Any = measuring._supervisor
    trials = [job for job in supervisor.jobs if job.kind == "evaluate"]
    return [key(FakeSession._variant(job.candidates[0], job.problem).config) for job in trials]


def entry(config: Config, problem: Problem = PROBLEM) -> tuple[Variant, Compiled]:
    variant = make_variant(config, problem)
    return variant, FakeCompiler(Log())(variant, "sm_90a", Path())


class Pool(FakePool):
    def _compile(self, variant: Variant) -> Compiled:
        return FakeCompiler(Log())(variant, "sm_90a", Path())


def test_noisy_trial_says_so_and_why() -> None:
    world = World(storm=lambda seconds: seconds > 1)
    measuring = evaluator(world)
    measuring.monitor = SimpleNamespace(causes=lambda own: ("other processes",), reason="")  # type: ignore[assignment]
    clean = measuring.evaluate(PROBLEM, *entry(SOUND[0]), None)
    assert not clean.noisy
    world.clock.sleep(1)
    result = measuring.evaluate(PROBLEM, *entry(SOUND[1]), None)
    assert result.noisy
    assert result.gpu == clean.gpu == "GPU-fake", "it would count as a trial of another GPU"
    assert result.outcome == "ok"
    assert result.note.startswith("noisy: ")
    assert result.note.endswith("(other processes)")
    assert result.extra["discarded_blocks"] == len(SEARCH_PAUSES)
    assert Result.from_json(result.to_json()) == result
    said = measuring.disturbances()
    assert "3 noisy blocks were measured again; 1 trials stayed noisy" in said
    assert "other processes" in said


def test_a_quiet_run_says_nothing() -> None:
    measuring = evaluator(World())
    measuring.finals(PROBLEM, [entry(config) for config in SOUND[:3]])
    assert measuring.disturbances() == ""


def test_shortlisting_orders_by_what_is_seen_side_by_side() -> None:
    measuring = evaluator(World())
    configs = SOUND[:6]
    ratios = measuring.shortlist(PROBLEM, [entry(config) for config in configs])
    landscape = Landscape()
    truth = [landscape.ratio(make_variant(config, PROBLEM)) for config in configs]
    assert ratios == pytest.approx(truth, rel=0.01)


@pytest.mark.parametrize(("floor_us", "blocks"), [(40.0, BLOCKS), (8.0, SHORT_BLOCKS)])
def test_short_kernels_are_ranked_by_more_blocks(floor_us: float, blocks: int) -> None:
    entries = [entry(config) for config in SOUND[:3]]
    for result in evaluator(World(floor_us=floor_us)).finals(PROBLEM, entries):
        assert len(result.extra["block_ratios"]) == blocks
    # The shortlist of a resumed study comes before anything else of its problem.
    measuring = evaluator(World(floor_us=floor_us))
    assert len(measuring.shortlist(PROBLEM, entries)) == 3
    supervisor: Any = measuring._supervisor
    assert [job.kind for job in supervisor.jobs] == ["probe"] + ["interleave"] * blocks


def test_the_winner_is_chosen_while_inputs_rotate() -> None:
    """Trials are timed after a flush: the floor of one condition says nothing of the other."""
    measuring = evaluator(World())
    made = [entry(config) for config in SOUND[:3]]
    for one in made:
        measuring.evaluate(PROBLEM, *one, None)
    measuring._floors[PROBLEM] = 20.0  # half of what it takes when inputs rotate
    assert len(measuring.shortlist(PROBLEM, made)) == 3
    assert measuring.finals(PROBLEM, made)[0].extra["condition"] == "rotation"
    supervisor: Any = measuring._supervisor
    conditions = {(job.kind, job.condition) for job in supervisor.jobs}
    assert {kind for kind, condition in conditions if condition} == {"interleave"}
    assert ("interleave", "rotation") in conditions and ("interleave", "") not in conditions
    measuring._floors_of_finals[PROBLEM] = 20.0
    assert measuring.shortlist(PROBLEM, made) == [], "it drifted"


def test_finals_say_where_inputs_could_not_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows are flushed, and so are inputs for which memory is short."""
    measuring, few = evaluator(World()), Problem.parse("8x1024:bf16")
    supervisor: Any = measuring._supervisor
    call = supervisor.call
    monkeypatch.setattr(supervisor, "call", lambda job: replace(call(job), condition="flush"))
    (result,) = measuring.finals(few, [entry(SOUND[0], few)])
    assert result.extra["condition"] == "flush"


def test_a_neighbour_costs_short_kernels_blocks_but_no_winner() -> None:
    """Once no pause is left, as many clean blocks are enough as for long kernels."""
    blocks = set()
    for seed in range(20):
        noisy_blocks = random.Random(seed)
        timing = collect(
            lambda noise=noisy_blocks: scattered(8.0) if noise.random() < 0.3 else steady(8.0),  # type: ignore[misc]
            SHORT_BLOCKS,
            None,
            FINAL_PAUSES,
            lambda seconds: None,
        )
        assert not timing.fault
        blocks.add(len(timing.block_ratios[0]))
    assert min(blocks) >= BLOCKS and max(blocks) == SHORT_BLOCKS and len(blocks) > 2


def test_shortlisting_in_a_storm_says_nothing_and_does_not_wait_for_its_end() -> None:
    world = World(storm=lambda seconds: True)
    measuring = evaluator(world)
    measuring._update_floor(PROBLEM, 40.0)
    assert measuring.shortlist(PROBLEM, [entry(config) for config in SOUND[:4]]) == []
    assert measuring.discarded > 0
    assert world.clock.seconds < 5


def test_finals_wait_for_a_storm_to_pass() -> None:
    world = World(storm=lambda seconds: seconds < 20, drift=0)
    measuring = evaluator(world)
    measuring._update_floor(PROBLEM, 40.0)
    results = measuring.finals(PROBLEM, [entry(config) for config in SOUND[:4]])
    landscape = Landscape()
    for config, result in zip(SOUND, results, strict=False):
        truth = landscape.ratio(make_variant(config, PROBLEM))
        assert result.ratio == pytest.approx(truth, rel=0.005)
        assert not result.noisy
    assert measuring.discarded > 3
    assert 20 < world.clock.seconds < 60


def search(measuring: MeasuredEvaluator, folder: Path) -> Any:
    storage = open_storage(folder / "studies.journal")
    legal = LegalConfigs(little_space(), PROBLEM, TARGET)
    return search_problem(legal, Pool(), measuring, storage, Budget(trials=200))


def records(folder: Path) -> list[Record]:
    log = StudyLog(open_storage(folder / "studies.journal"), NAME)
    return [Record.from_trial(trial) for trial in log.trials()]


def test_endless_noise_ends_without_a_winner_and_calm_continues_from_there(tmp_path: Path) -> None:
    """A storm comes up during the trials and stays: nobody wins. When it is calm again, the noisy
    trials that may count and the finals are measured, and nothing else."""
    landscape = Landscape(champion=key(SOUND[-1]))
    world = World(storm=lambda seconds: seconds > 1)
    with pytest.raises(NoisyError, match="no winner is chosen; finished trials are kept"):
        search(evaluator(world, landscape), tmp_path)
    assert world.clock.seconds > sum(FINAL_PAUSES)
    known = records(tmp_path)
    assert len(known) == 96
    flagged = {key(record.config) for record in known if record.result.noisy}
    assert 20 < len(flagged) < 96
    assert key(SOUND[-1]) in flagged

    calm = evaluator(World(), landscape)
    winner = search(calm, tmp_path)
    assert key(winner.config) == key(SOUND[-1])
    assert records(tmp_path) == known, "finished trials stay as they are"
    tried = evaluated(calm)
    assert set(tried) <= flagged
    assert len(tried) == len(set(tried)) > 0


def test_records_with_a_slow_reference_count_as_noisy_fastest_first() -> None:
    """Their times rank them: a slow floor makes a trial's own ratio too good."""

    def record(place: int, ratio: float, floor_us: float, **more: Any) -> Record:
        result = Result("ok", ratio * floor_us, floor_us, ratio, **more)
        return Record(SOUND[place], "", result, "tpe", 0.0)

    slow = record(0, 1.05, 46.0)
    flagged = record(1, 1.1, 40.0, noisy=True)
    fine = record(2, 1.3, 40.0)
    refuted = replace(flagged, result=replace(flagged.result, outcome="nondeterministic"))
    assert noisy([slow, flagged, fine, refuted]) == [flagged, slow]
    assert noisy([record(3, 1.2, 46.0), record(4, 1.3, 46.5)]) == []
    elsewhere = record(3, 1.0, 46.0, extra={"gpu": "another of the same model"})
    assert noisy([elsewhere, fine, slow]) == [slow]


# ---- The same answer twice -----------------------------------------------------------------------

REPETITIONS = 200
OFFSETS = (0.015, 0.003, 0.0, 0.008, 0.04, 0.002, 0.025, 0.06)
"""Distances of the finalists from the best, in the order of the space: the first would win every
tie."""


class Planted(Landscape):
    def ratio(self, variant: Variant) -> float:
        return 1.1 * (1 + OFFSETS[SOUND.index(dict(variant.config))])


def stormy(seed: int) -> World:
    """Drift of a few per cent within a second, and a storm one second in eight."""
    return World(seed, storm=lambda seconds: (seconds + seed * 0.37) % 8 < 1)


def winners(timed: Callable[[World], list[Result]]) -> Counter[float]:
    """Count how often a finalist of each offset won, over many repetitions."""
    found: Counter[float] = Counter()
    for seed in range(REPETITIONS):
        finals = list(zip(SOUND[: len(OFFSETS)], timed(stormy(seed)), strict=True))
        choice = choose(finals, LEGAL.rank, None)
        assert choice is not None
        found[OFFSETS[choice.winner]] += 1
    return found


def test_selection_repeated_on_fresh_measurements_stays_inside_the_tie() -> None:
    entries = [entry(config) for config in SOUND[: len(OFFSETS)]]

    def together(world: World) -> list[Result]:
        return evaluator(world, Planted()).finals(PROBLEM, entries)

    found = winners(together)
    assert all(offset <= TIE for offset in found), found
    assert found[0.003] > 0.9 * REPETITIONS, "the first in the order of the space, nearly always"


def test_finalists_timed_one_after_another_would_not() -> None:
    """The control: the same noise, every finalist alone and checked before the next one is timed,
    all against one reference."""

    def apart(world: World) -> list[Result]:
        floor_us = median(world.time(1.0) for _ in range(63))
        results = []
        for offset in OFFSETS:
            for _ in range(100):
                world.time(1.0)
            us = median(world.time(1.1 * (1 + offset)) for _ in range(63))
            results.append(Result("ok", us, floor_us, us / floor_us, "verified"))
        return results

    found = winners(apart)
    outside = sum(count for offset, count in found.items() if offset > TIE)
    assert outside > 0.1 * REPETITIONS, found


def test_a_second_run_keeps_the_winner_of_the_first() -> None:
    entries = [entry(config) for config in SOUND[: len(OFFSETS)]]
    first = SOUND[OFFSETS.index(0.0)]
    for seed in range(20):
        results = evaluator(stormy(seed), Planted()).finals(PROBLEM, entries)
        choice = choose(list(zip(SOUND, results, strict=False)), LEGAL.rank, first)
        assert choice is not None
        assert SOUND[choice.winner] == first
        assert choice.reason == "the incumbent: not beaten by more than 1 %"


# ---- NVML ----------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


def nvml(pids: list[int] | Exception, reasons: int = 0) -> Any:
    def answer(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bus_id: bus_id,
        nvmlDeviceGetComputeRunningProcesses=lambda device: answer(
            pids if isinstance(pids, Exception) else [SimpleNamespace(pid=pid) for pid in pids]
        ),
        nvmlDeviceGetCurrentClocksEventReasons=lambda device: reasons,
        nvmlClocksEventReasonHwThermalSlowdown=0x40,
        nvmlClocksEventReasonSwPowerCap=0x4,
    )


def monitor(monkeypatch: pytest.MonkeyPatch, module: Any) -> DeviceMonitor:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return DeviceMonitor("0000:1b:00.0")


def test_other_processes_are_named_and_our_own_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert monitor(monkeypatch, nvml([10, 11])).causes([10, 11]) == ()
    found = monitor(monkeypatch, nvml([10, 77, 76])).causes([10, 11])
    assert found == ("other processes on the GPU (pid 76, 77)",)


def test_in_a_container_other_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML gives the host's process ids there, which are not ours."""
    assert monitor(monkeypatch, nvml([5001, 5002])).causes([10, 11]) == ()
    found = monitor(monkeypatch, nvml([5001, 5002, 5003])).causes([10, 11])
    assert found == ("1 other processes on the GPU",)


def test_clocks_that_are_held_back_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = monitor(monkeypatch, nvml([10], reasons=0x44)).causes([10])
    assert found == ("clocks held back by heat (hardware), power cap",)
    assert monitor(monkeypatch, nvml([10], reasons=0x1)).causes([10]) == (), "idle is no cause"


def test_what_nvml_does_not_answer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert monitor(monkeypatch, nvml(NvmlError("not supported"))).causes([10]) == ()


def test_without_package_driver_or_bus_id_nothing_is_asked_and_the_reason_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise NvmlError("driver not loaded")

    absent = monitor(monkeypatch, None)
    assert absent.reason == "the package nvidia-ml-py is not installed"
    assert absent.causes([1]) == ()
    module = nvml([])
    module.nvmlInit = refuse
    assert monitor(monkeypatch, module).reason == "driver not loaded"
    assert DeviceMonitor(None).reason == "the GPU's bus id is not known"
