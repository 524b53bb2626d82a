"""A study in the formats of other tuners: T4 results, and a cache file of Kernel Tuner.

T4 is the results format of the autotuning community, version 1.1.0, as AutoTuningAssociation's
autotuning_methodology reads it; the cache file is version 1.1.0 of KernelTuner/kernel_tuner. Both
have one study per file.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from generator.kernels.strategies import is_deterministic
from generator.report.summary import kind_of
from generator.studies.reader import Study
from generator.studies.records import Record

OBJECTIVE = "time_over_floor"
INVALIDITY = {
    "ok": "correct",
    "slow": "correct",
    "compile_error": "compile",
    "resource": "constraints",
    "launch_error": "runtime",
    "crashed": "runtime",
    "timeout": "timeout",
    "wrong": "correctness",
    "nondeterministic": "correctness",
}
"""T4's names of the outcomes. Bits that change from run to run are a fault here, also in a variant
whose numbers are right."""
_ERRORS = {"compile": "CompilationFailedConfig", "constraints": "InvalidConfig"}
"""T4's errors, which stand in place of the objective of a trial that may not win; for any other
fault it is RuntimeFailedConfig."""


def t4(study: Study, version: str) -> dict[str, Any]:
    """The document of T4; all times are in microseconds. What a trial took beside its runtime is
    `framework`, since its parts are not kept. version: of this program."""
    first = study.records[0]
    started = first.finished and first.finished - timedelta(seconds=first.elapsed)
    metadata = {
        "compute_api": "CUDA",
        "platform": "NVIDIA",
        "device": _device(study),
        "autotuner": "Normforge",
        "autotuner_version": version,
        "timestamp": _utc(started),
        "timeunit": "microseconds",
        "operation": study.problem.operation,
        "problem": str(study.problem),
        "evidence": study.evidence,
        "study": study.name,
        "environment": dict(study.machine),
    }
    results = [
        {
            "timestamp": _utc(record.finished),
            "configuration": dict(record.config),
            "objectives": [OBJECTIVE],
            "times": {
                "runtimes": [] if record.result.us is None else [record.result.us],
                "framework": 1e6 * seconds,
            },
            "invalidity": _invalidity(record),
            "correctness": int(_invalidity(record) == "correct"),
            "measurements": [
                {"name": name, "value": value, "unit": unit}
                for name, value, unit in (
                    ("time", record.result.us, "us"),
                    ("floor", record.result.floor_us, "us"),
                    (OBJECTIVE, _objective(study, record), ""),
                    ("registers", record.registers, ""),
                    ("shared_memory", record.smem, "bytes"),
                )
                if value is not None
            ],
        }
        for record, seconds in zip(study.records, _seconds(study), strict=True)
    ]
    return {"schema_version": "1.1.0", "metadata": metadata, "results": results}


def kernel_tuner(study: Study) -> dict[str, Any]:
    """The document of a cache file; all times are in milliseconds. What a trial took is its
    `benchmark_time`, since its parts are not kept. The lists of `tune_params` have what was
    tried."""
    knobs = list(study.records[0].config)
    values = {knob: sorted({record.config[knob] for record in study.records}) for knob in knobs}
    cache = {}
    for record, seconds in zip(study.records, _seconds(study), strict=True):
        us, floor_us = record.result.us, record.result.floor_us
        objective = _objective(study, record)
        entry: dict[str, Any] = {**record.config, "time": objective, OBJECTIVE: objective}
        if us and floor_us and not isinstance(objective, str):
            entry |= {"time": us / 1000, "times": [us / 1000], "floor_time": floor_us / 1000}
        entry |= dict.fromkeys(
            ("compile_time", "verification_time", "strategy_time", "framework_time"), 0
        )
        entry["benchmark_time"] = 1000 * seconds
        entry["timestamp"] = _utc(record.finished)
        cache[",".join(str(record.config[knob]) for knob in knobs)] = entry
    return {
        "schema_version": "1.1.0",
        "device_name": _device(study),
        "kernel_name": f"{study.problem.operation} {kind_of(study.problem)}",
        "problem_size": [study.problem.M, study.problem.N],
        "tune_params_keys": knobs,
        "tune_params": values,
        "objective": OBJECTIVE,
        "cache": cache,
    }


def _device(study: Study) -> str:
    return str(study.machine.get("gpu") or study.gpu)


def _invalidity(record: Record) -> str:
    """Return T4's name of a record's outcome. It is `correctness` for a correct variant, too, that
    is not deterministic by construction and so cannot win."""
    found = INVALIDITY[record.result.outcome]
    return "correctness" if found == "correct" and not is_deterministic(record.config) else found


def _objective(study: Study, record: Record) -> float | str:
    invalidity = _invalidity(record)
    if invalidity == "correct" and record.result.us is not None:
        return study.over_floor(record)
    return _ERRORS.get(invalidity, "RuntimeFailedConfig")


def _seconds(study: Study) -> list[float]:
    """Return the seconds of the search that each trial took, from the end of the one before to its
    own."""
    ends = [record.elapsed for record in study.records]
    return [max(0.0, round(end - start, 3)) for start, end in zip([0.0, *ends], ends, strict=False)]


def _utc(moment: datetime | None) -> str:
    """Format a moment as ISO 8601, in UTC."""
    return moment.astimezone(timezone.utc).isoformat() if moment else ""
