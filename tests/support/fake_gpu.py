"""A GPU that does not exist: the worker's protocol over a made-up landscape with planted faults.

Everything above the device is the real thing: worker process, deadlines, replacement, noise,
finals, compile pool, study. Every measurement is logged before its answer leaves the worker.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from multiprocessing import parent_process
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from generator.evaluate.gpu.noise import SEARCH_PAUSES, Block, collect
from generator.evaluate.gpu.protocol import Answer, Candidate, Job, NoGpuError
from generator.kernels.forward import ForwardVariant
from generator.kernels.geometry import Config
from generator.kernels.nvrtc import Compiled
from generator.kernels.ptxas import Resources
from generator.kernels.variant import Variant, make_variant
from generator.operations import operation_of
from generator.problem import Problem
from generator.result import Result
from normforge.spec import FORWARD_KERNELS, MAIN_KERNEL, ForwardSpec
from tests.support.synthetic import FLOOR_US, PROBLEM, TARGET, cost, digest

COMPILE_FAULTS = ("compile_error", "compile_crash", "spill")
GPU_FAULTS = (
    "wrong",
    "unsteady",  # bits change from run to run
    "moody",  # bits change from process to process
    "segfault",
    "sticky",  # an illegal access: the context is lost
    "hang",
    "refused",
    "memory",  # there is none left the first time
)
OUTCOME = {
    "compile_error": "compile_error",
    "compile_crash": "compile_error",
    "spill": "resource",
    "wrong": "wrong",
    "unsteady": "nondeterministic",
    "segfault": "crashed",
    "sticky": "crashed",
    "hang": "timeout",
    "refused": "launch_error",
}
"""The outcome that has to be recorded for a planted fault; the others are found in the finals, or
pass."""


def key(config: Config) -> str:
    return digest(sorted(config.items()))[:12]


@dataclass(frozen=True)
class Log:
    """Lines of JSON that any process appends, each in one write; those that matter are synced.
    Without a path nothing is written."""

    path: Path | None = None

    def write(self, sync: bool = False, **entry: Any) -> None:
        if self.path is None:
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(handle, json.dumps({"at": time.time(), **entry}).encode() + b"\n")
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)

    def read(self) -> list[dict[str, Any]]:
        if self.path is None or not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def hello(self, role: str) -> None:
        """Tell who may be killed; the time of its start says that a pid still means it."""
        self.write(role=role, pid=os.getpid(), born=born(os.getpid()))


def born(pid: int) -> str | None:
    """Return the time when a process started, in ticks; None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


@dataclass(frozen=True)
class Landscape:
    """Times and faults by the key of a config. What must not win is faster than the champion, so
    that who does not notice a fault chooses a wrong winner."""

    champion: str = ""
    faults: dict[str, str] = field(default_factory=dict)

    def ratio(self, variant: Variant) -> float:
        name = key(variant.config)
        if name == self.champion:
            return 1.1
        if self.faults.get(name, "memory") != "memory" or variant.determinism == "none":
            return cost(variant) - 0.25
        return cost(variant)

    def fault(self, config: Config) -> str:
        return self.faults.get(key(config), "")


class BothWays(Landscape):
    """A landscape with forwards, which all take the same."""

    def ratio(self, variant: Any) -> float:
        return 1.5 if "id" in variant.config else super().ratio(variant)


@dataclass(frozen=True)
class ForwardLandscape:
    """The landscape of forwards, by the variant's id. residual: faults of calls with a residual."""

    ratios: dict[str, float] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    residual: dict[str, str] = field(default_factory=dict)

    def ratio(self, variant: Any) -> float:
        return self.ratios.get(variant.config["id"], 1.5)

    def fault(self, config: Config) -> str:
        name = str(config["id"])
        own = self.faults.get(name, "")
        return self.residual.get(name, own) if config["residual"] else own


@dataclass(frozen=True)
class FakeCompiler:
    """Compiles a config to a cubin that is the config."""

    log: Log
    landscape: Landscape = Landscape()

    def __call__(self, variant: Variant, arch: str, folder: Path) -> Compiled:
        self.log.hello("compiler")
        time.sleep(0.002)
        fault = self.landscape.fault(variant.config)
        if fault == "compile_crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        cubin = json.dumps(sorted(variant.config.items())).encode()
        if fault == "compile_error":
            return Compiled(arch, "", b"", {}, "0", False, "", "kernel.cu(1): error: planted")
        kernels = {MAIN_KERNEL: Resources(32, 8 if fault == "spill" else 0, 0, 0)}
        return Compiled(arch, "", cubin, kernels, "0", False, "")


def compile_both(variant: Variant | ForwardVariant, arch: str, folder: Path) -> Compiled:
    if isinstance(variant, Variant):
        return FakeCompiler(Log())(variant, arch, folder)
    resources = dict.fromkeys(FORWARD_KERNELS, Resources(32, 0, 0, 0))
    return Compiled(arch, "", f"cubin of {variant.id}".encode(), resources, "0", False, "")


@dataclass(frozen=True)
class Weather:
    """The disturbances of times. jitter: of every time; drift: of all times, slow; storms:
    probability of a block in which a neighbour makes them half as long again."""

    jitter: float = 0.003
    drift: float = 0.02
    storms: float = 0.0

    def block(self, ratios: list[float], rounds: int, rng: random.Random) -> Block:
        storm = rng.random() < self.storms
        phase = rng.uniform(0, 1)

        def now(round_: int) -> float:
            slow = 1 + self.drift * abs((phase + round_ / 200) % 1 - 0.5)
            hit = 1.5 if storm and rng.random() < 0.7 else 1.0
            return FLOOR_US * 4 * slow * hit * rng.gauss(1, self.jitter)

        return [[ratio * now(round_) for round_ in range(rounds)] for ratio in [1.0, *ratios]]


@dataclass(frozen=True)
class FakeGpu:
    """Opens a session, as `worker.open_session` does. seconds: what a trial takes."""

    log: Log
    landscape: Landscape | ForwardLandscape = Landscape()
    weather: Weather = Weather()
    seconds: float = 0.002

    def __call__(self, device: int) -> FakeSession:
        self.log.hello("worker")
        if self.trouble == "absent":
            raise NoGpuError("no GPU")
        if self.trouble == "die":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.trouble not in ("", "no answer"):
            raise RuntimeError(self.trouble)
        return FakeSession(self)

    @property
    def trouble(self) -> str:
        """Return what is wrong with the whole GPU right now: it kills every process ("die"), is not
        there ("absent"), starts and then does not work ("no answer"), or refuses with a reason."""
        broken = self.log.path and self.log.path.with_name("broken")
        return broken.read_text() if broken and broken.exists() else ""


class FakeSession:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.rng = random.Random(os.urandom(8))
        self.facts = {"name": "fake", "sms": TARGET.sms, "uuid": "GPU-fake"}

    def handle(self, job: Job) -> Answer:
        if job.kind == "probe" and self.gpu.trouble == "no answer":
            return Answer(error="unspecified launch failure", last=True)
        variants = [self._variant(one, job.problem) for one in job.candidates]
        ratios = [self.gpu.landscape.ratio(variant) for variant in variants]
        if job.kind in ("probe", "interleave"):
            for variant in variants:
                if self.gpu.landscape.fault(variant.config) == "late_hang":
                    time.sleep(3600)
                if self.gpu.landscape.fault(variant.config) == "late_sticky":
                    return Answer(Result("crashed", note="planted"), last=True)
            block = self.gpu.weather.block(ratios, job.rounds or 21, self.rng)
            return Answer(block=block, condition=job.condition)
        name = key(variants[0].config)
        driver = parent_process()
        entry = {"kind": job.kind, "key": name, "driver": driver and driver.pid}
        entry |= {"problem": str(job.problem), "operation": job.problem.operation}
        self.gpu.log.write(**entry, event="begin")
        answer = self._answer(job, variants[0], ratios[0])
        known = answer.result
        assert known is not None
        told = {"outcome": known.outcome, "ratio": known.ratio, "noisy": known.noisy}
        told["floor_us"] = known.floor_us
        self.gpu.log.write(sync=True, **entry, event="answer", **told, last=answer.last)
        return answer

    def _answer(self, job: Job, variant: Variant, ratio: float) -> Answer:
        time.sleep(self.gpu.seconds)
        fault = self.gpu.landscape.fault(variant.config)
        if fault == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "taken":  # the system ends the worker, whenever this one runs
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            time.sleep(3600)
        if fault == "sticky":
            return Answer(Result("crashed", note="CUDA_ERROR_ILLEGAL_ADDRESS"), last=True)
        if fault == "refused":
            return Answer(Result("launch_error", note="CUDA_ERROR_INVALID_VALUE"))
        if fault in ("memory", "hog") and self._short(fault, key(variant.config)):
            result = Result("launch_error", note="CUDA out of memory")
            return Answer(result, last=True, short_of_memory=True)
        if fault == "wrong":
            return Answer(Result("wrong", note="planted"))
        if job.kind == "accuracy":
            return Answer(Result("ok", checks=("accuracy",)))
        bits = digest(key(variant.config), os.getpid() if fault == "moody" else 0)
        if job.kind == "recheck":
            return Answer(Result("ok", errors={"dx": 1e-3}, extra={"bits": bits}))
        if job.kind == "digest":
            return Answer(Result("ok", extra={"digest": bits}))
        fields: dict[str, Any] = {
            "extra": {"digest": bits, "bits": bits},
            "determinism": "verified",
        }
        if job.kind == "evaluate":
            timing = collect(
                lambda: self.gpu.weather.block([ratio], 15, self.rng),
                1,
                job.floor_us,
                SEARCH_PAUSES,
                lambda seconds: None,
            )
            fields |= timing.fields(operation_of(job.problem).traffic_bytes(job.problem))
        if fault == "unsteady" or variant.determinism == "none":
            note = "planted" if fault else "none by construction"
            return Answer(
                Result("nondeterministic", **fields | {"determinism": "refuted", "note": note})
            )
        return Answer(Result("ok", **fields))

    def _short(self, fault: str, name: str) -> bool:
        assert self.gpu.log.path is not None
        marker = self.gpu.log.path.with_name(f"memory-{name}")
        if fault == "memory" and marker.exists():
            return False
        marker.touch()
        return True

    @staticmethod
    def _variant(candidate: Candidate, problem: Problem) -> Any:
        if isinstance(candidate.spec, ForwardSpec):
            config = {"id": candidate.spec.name, "residual": problem.residual}
            return SimpleNamespace(config=config, determinism="gpu_to_gpu")
        return make_variant(dict(json.loads(candidate.cubin)), problem)


def plant(configs: list[Config], seed: int, count: int = 2) -> Landscape:
    """`count` faults of every kind, one hang, and a champion that has to win."""
    rng = random.Random(seed)
    sound = [c for c in configs if make_variant(c, PROBLEM).determinism != "none"]
    champion, *drawn = rng.sample(sound, len(sound))
    kinds = [kind for kind in (*COMPILE_FAULTS, *GPU_FAULTS) if kind != "hang"] * count
    planted = zip([*kinds, "hang"], drawn, strict=False)
    return Landscape(key(champion), {key(config): kind for kind, config in planted})
