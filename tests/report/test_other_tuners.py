"""Studies in the formats of other tuners, by what those formats require."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import tune
from generator.kernels.strategies import is_deterministic
from generator.report.other_tuners import INVALIDITY, OBJECTIVE, kernel_tuner, t4
from generator.result import OUTCOMES
from generator.studies.reader import Study
from tests.support.committed import committed_studies

SHAPE = "4096x4096:bf16"
ERRORS = {"InvalidConfig", "CompilationFailedConfig", "RuntimeFailedConfig"}


@pytest.fixture(scope="module", params=["h100", "gb200"])
def study(request: pytest.FixtureRequest) -> Study:
    return next(s for s in committed_studies(request.param) if str(s.problem) == SHAPE)


def test_every_outcome_has_a_name_in_t4() -> None:
    assert INVALIDITY.keys() == set(OUTCOMES)
    known = {"timeout", "compile", "runtime", "correctness", "constraints", "correct"}
    assert set(INVALIDITY.values()) == known


def test_a_trial_that_was_too_slow_to_be_checked_may_still_not_win(study: Study) -> None:
    loose = next(r for r in study.records if not is_deterministic(r.config) and r.result.timed)
    slow = replace(loose, result=replace(loose.result, outcome="slow"))
    (found,) = t4(replace(study, records=(slow,)), "1")["results"]
    assert (found["invalidity"], found["correctness"]) == ("correctness", False)


def test_t4_has_every_trial_as_version_1_1_of_its_schema_wants_it(study: Study) -> None:
    document = json.loads(json.dumps(t4(study, "1.2.3"), allow_nan=False))
    assert document["schema_version"] == "1.1.0"
    metadata = document["metadata"]
    assert metadata["compute_api"] == "CUDA"
    assert metadata["timeunit"] == "microseconds"
    assert (metadata["autotuner"], metadata["autotuner_version"]) == ("Normforge", "1.2.3")
    assert metadata["evidence"] == study.evidence
    assert datetime.fromisoformat(metadata["timestamp"])
    assert len(document["results"]) == len(study.records)
    for result, record in zip(document["results"], study.records, strict=True):
        assert datetime.fromisoformat(result["timestamp"])
        assert result["configuration"] == record.config
        assert result["objectives"] == [OBJECTIVE]
        assert result["correctness"] == (result["invalidity"] == "correct")
        measured = {one["name"]: one for one in result["measurements"]}
        assert len(measured) == len(result["measurements"])
        assert all(one.keys() == {"name", "value", "unit"} for one in result["measurements"])
        if record.feasible:
            assert measured["time"] == {"name": "time", "value": record.result.us, "unit": "us"}
            assert measured[OBJECTIVE]["value"] == study.over_floor(record)
            assert result["times"]["runtimes"] == [record.result.us]
        elif record.result.outcome != "slow":
            assert measured[OBJECTIVE]["value"] in ERRORS, "it must not count as the best"
    spent = sum(result["times"]["framework"] for result in document["results"])
    assert spent == pytest.approx(1e6 * study.records[-1].elapsed, rel=0.01)


def test_no_trial_took_less_than_no_time(study: Study) -> None:
    """A run that was killed may leave a clock that the next one sets back a little."""
    trials = [replace(study.records[0], elapsed=seconds) for seconds in (2.0, 1.5, 2.5)]
    own = replace(study, records=tuple(trials))
    spent = [result["times"]["framework"] for result in t4(own, "1")["results"]]
    assert spent == [2e6, 0, 1e6]


def test_a_cache_file_has_every_config_as_kernel_tuner_reads_it(study: Study) -> None:
    document = json.loads(json.dumps(kernel_tuner(study), allow_nan=False))
    assert document["schema_version"] == "1.1.0"
    assert document["problem_size"] == [4096, 4096]
    assert document["kernel_name"] == "rmsnorm_backward bf16"
    assert ("absent" in document["device_name"]) == (study.evidence == "predicted")
    keys, values = document["tune_params_keys"], document["tune_params"]
    assert list(values) == keys
    numbers = [f"{what}_time" for what in ("compile", "verification", "benchmark", "strategy")]
    best: dict[str, Any] = {}
    for key, entry in document["cache"].items():
        assert key == ",".join(str(entry[knob]) for knob in keys)
        assert all(entry[knob] in values[knob] for knob in keys)
        assert all(isinstance(entry[name], int | float) for name in (*numbers, "framework_time"))
        assert datetime.fromisoformat(entry["timestamp"])
        if isinstance(entry["time"], str):
            assert entry["time"] == entry[document["objective"]]
            assert entry["time"] in ERRORS
            continue
        ratio = entry["time"] / entry["floor_time"]
        assert entry[document["objective"]] == pytest.approx(ratio, rel=0.1)
        if not best or entry[document["objective"]] < best[document["objective"]]:
            best = entry
    fastest = study.ranked[0]
    assert {knob: best[knob] for knob in keys} == fastest.config
    assert best["time"] == pytest.approx(fastest.result.us / 1000)  # type: ignore[operator]


@pytest.mark.parametrize("form", ["--t4", "--kernel-tuner"])
def test_a_file_is_written_once(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache file ends as the dashboard of Kernel Tuner looks for."""
    file = tmp_path / "trials.json"
    line = ["export", "--gpu", "gb200", "--shape", SHAPE, form, str(file)]
    assert tune.main(line) == 0
    assert "14 trials: " in capsys.readouterr().out
    written = file.read_text()
    assert json.loads(written)["schema_version"] == "1.1.0"
    assert form == "--t4" or written.strip().endswith("}\n}")
    assert tune.main(line) == 2
    assert capsys.readouterr().err == f"tune.py export: {file} exists already: name a new file\n"
    assert file.read_text() == written


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--t4 {file}", "name the shape whose trials to export: --shape 4096x4096:bf16"),
        (f"--t4 {{file}} --shape {SHAPE}", "name the studies: --gpu h200"),
        ("--t4 {file} --gpu gb200 --shape 4096x4096:fp32", "has no study of 4096x4096:fp32"),
        ("--t4 {file} --gpu gb200 --shape 4096x4096", "has no dtype"),
        (f"--t4 {{file}} --gpu b200 --shape {SHAPE}", "no studies in "),
        (f"--t4 /proc/no --gpu gb200 --shape {SHAPE}", "cannot write /proc/no ("),
        (f"--t4 {{file}} --kernel-tuner {{file}} --gpu gb200 --shape {SHAPE}", "not allowed with"),
        (
            f"--hf {{file}} --shape {SHAPE}",
            "--shape and --storage are for trials, not",
        ),
    ],
)
def test_what_cannot_be_exported_is_told_in_a_sentence(
    arguments: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trials.json"
    assert tune.main(["export", *shlex.split(arguments.format(file=file))]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not file.exists()
