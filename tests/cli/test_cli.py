"""The command line on a machine without the GPU it tunes for: results, resuming, bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
import yaml

import tune
from generator.cli import tune as cli_tune
from generator.kernels.cubin_cache import DEFAULT_CACHE, compile_variant, entry_path
from generator.kernels.nvrtc import Compiled
from generator.kernels.render import render
from generator.kernels.variant import Variant, make_variant
from generator.package.fallback_kernels import compile_fallbacks, fallbacks_to_compile
from generator.paths import REPOSITORY
from generator.problem import RMSNORM_BACKWARD as PACKAGE_NAME
from generator.problem import Problem
from generator.shape_lists import load_problems
from generator.space.legal_configs import LegalConfigs
from generator.space.load import SPACE_FILE, load_space
from generator.studies.records import Finalist
from generator.studies.storage import JOURNAL_NAME, open_storage
from generator.target import find_target
from generator.tuner import run
from generator.tuner.display import Status
from generator.tuner.plan import Plan
from generator.tuner.run import Outcome
from normforge.table import ForwardTable, Table
from tests.support.packages import archived_cubins, unsealed
from tests.support.patience import patience
from tests.support.runs import command, kill_and_resume, trials
from tests.support.samples import sm_of
from tests.support.searches import DETERMINISTIC
from tests.support.synthetic import make_winner, shrink

GB200 = find_target("gb200")
WINNER = make_winner(DETERMINISTIC[0])
SHAPES = "512x256:bf16,300x1536:bf16,64x1001:bf16:fp32"
"""Shapes of two pairs of dtypes: the fallback kernels of each take 10 s to compile."""
SMOKE = ["--gpu", "gb200", "--shapes", SHAPES, "--trials", "6", "--json"]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with the content of the files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def variant_of(row: dict[str, Any]) -> Variant:
    """The winner in a row of the JSON document."""
    problem = Problem(row["M"], row["N"], row["dtype"], row["weight_dtype"])
    return make_variant(row["config"], problem)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The output folder of a finished run, its JSON document, and what it said on stderr."""
    out = tmp_path_factory.mktemp("first") / "gb200"
    done = subprocess.run(
        command(*SMOKE, "--out", str(out)), capture_output=True, text=True, timeout=patience(300)
    )
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


@pytest.fixture
def out(first_run: tuple[Path, dict[str, Any], str], tmp_path: Path) -> Path:
    """A copy of that folder, to be changed."""
    return Path(shutil.copytree(first_run[0], tmp_path / "gb200"))


@pytest.fixture
def rerun(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = tune.main(list(arguments))
        except SystemExit as exit:
            code = int(exit.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


# ---- A run ---------------------------------------------------------------------------------------


def test_run_without_the_gpu_predicts_and_says_so(
    first_run: tuple[Path, dict[str, Any], str],
) -> None:
    out, document, said = first_run
    assert said.startswith("No gb200 here")
    assert "nothing is measured" in said.splitlines()[0]
    assert document["gpu"] == "gb200"
    assert document["evidence"] == "predicted"
    assert document["package"] == str(out / PACKAGE_NAME)
    rows = document["shapes"]
    assert [Problem(r["M"], r["N"], r["dtype"], r["weight_dtype"]) for r in rows] == (
        load_problems(SHAPES)
    )
    assert [Problem.parse(row["shape"]) for row in rows] == load_problems(SHAPES)
    for row in rows:
        assert row["us"] > 0
        assert row["evidence"] == "predicted"
        assert row["determinism"] == "unverified"
        assert row["strategy"] == row["config"]["strategy"]
        assert row["trials"] == 6 == sum(row["outcomes"].values())
        assert variant_of(row).id == row["variant"]
    assert len(trials(out)) == 18


def test_every_kernel_of_the_module_is_for_the_target_and_has_no_spills(
    first_run: tuple[Path, dict[str, Any], str],
) -> None:
    out, document, _ = first_run
    package = out / PACKAGE_NAME
    cubins = archived_cubins(package)
    assert all(sm_of(cubin) == 100 for cubin in cubins.values())
    winners = [variant_of(row) for row in document["shapes"]]
    table = Table.load(package)
    digests = {kernel.spec.name: kernel.digest for kernel in table.kernels()}

    def compile(variants: list[Variant]) -> list[Compiled]:
        return [compile_variant(variant, "sm_100a") for variant in variants]

    wanted = fallbacks_to_compile("common", GB200, load_problems(SHAPES))
    assert {v.dtype for v in wanted} == {w.dtype for w in winners}
    fallbacks = compile_fallbacks(GB200, compile, wanted)
    made = [*zip(winners, compile(winners), strict=True), *fallbacks]
    for variant, compiled in made:
        assert compiled.spills == 0
        assert digests.pop(variant.id) == compiled.digest
    assert not digests, "kernels of unknown origin"
    forward = ForwardTable.load(package)
    assert forward is not None
    files = [kernel.file for kernel in (*table.kernels(), *forward.kernels())]
    assert len(cubins) == len(set(files))


def test_finished_run_answers_again_without_a_trial(
    out: Path,
    first_run: tuple[Path, dict[str, Any], str],
    rerun: Callable[..., tuple[int, str, str]],
) -> None:
    before = snapshot(out)
    code, stdout, stderr = rerun(*SMOKE, "--out", str(out))
    assert code == 0
    said = "3 of 3 shapes were not searched again: what earlier runs tried counts"
    assert said in stderr and "not searched again" not in first_run[2]
    document = json.loads(stdout)
    assert document["shapes"] == first_run[1]["shapes"]
    assert document["seconds"] < first_run[1]["seconds"]
    assert snapshot(out) == before


def test_a_run_that_finds_the_same_without_its_studies_changes_no_file(
    tmp_path: Path, rerun: Callable[..., tuple[int, str, str]]
) -> None:
    """A fresh clone has the package and no studies: not even a date changes. The space is tried
    whole, so the answer is the same."""
    problem, out = Problem.parse("512x256:bf16"), tmp_path / "gb200"
    keep = LegalConfigs(load_space(), problem, GB200).first(1)[0]
    shrink(tmp_path, keep, store_hint=["default", "streaming"])
    arguments = ["--gpu", "gb200", "--shapes", str(problem), "--trials", "4", "--out", str(out)]
    arguments += ["--space", str(tmp_path / "tiny.yaml"), "--json"]
    assert rerun(*arguments, "--fallbacks", "common")[0] == 0
    before = snapshot(out / PACKAGE_NAME)
    assert Table.load(out / PACKAGE_NAME).fallback
    for fallbacks in ("common", "none"):
        (out / JOURNAL_NAME).unlink()
        time.sleep(1)  # dates have seconds
        assert rerun(*arguments, "--fallbacks", fallbacks)[0] == 0
        assert snapshot(out / PACKAGE_NAME) == before


def test_bits_that_may_change_are_said_and_winners_are_kept_if_wanted(
    tmp_path: Path, rerun: Callable[..., tuple[int, str, str]]
) -> None:
    """The second space does not allow the first one's winner."""
    problem, out = Problem.parse("512x256:bf16"), tmp_path / "gb200"
    keep = LegalConfigs(load_space(), problem, GB200).first(1)[0]

    def tune(hint: str, *more: str, shapes: str = str(problem)) -> tuple[dict[str, Any], str]:
        shrink(tmp_path, keep, store_hint=[hint])
        space = str((tmp_path / "tiny.yaml").rename(tmp_path / f"{hint}.yaml"))
        run = ["--gpu", "gb200", "--shapes", shapes, "--trials", "2", "--fallbacks", "none"]
        code, stdout, stderr = rerun(*run, "--space", space, "--out", str(out), "--json", *more)
        assert code == 0, stderr
        return json.loads(stdout), stderr

    document, said = tune("default")
    assert document["replaced"] == [] and "Bits of" not in said
    before = snapshot(out)
    document, said = tune("streaming", "--keep-winners")
    assert document["shapes"] == [] and "1 of 1 shapes keep the winners of the package" in said
    assert snapshot(out) == before
    document, said = tune("streaming", "--keep-winners", shapes=f"{problem},512x512:bf16")
    assert [row["shape"] for row in document["shapes"]] == ["512x512:bf16"]
    assert document["replaced"] == [] and "1 of 2 shapes keep the winners" in said
    tuned = {one.shape: one for one in Table.load(out / PACKAGE_NAME).tuned}
    assert tuned["512x256:bf16"].kernel.config["store_hint"] == "default"
    assert tuned["512x512:bf16"].kernel.config["store_hint"] == "streaming"
    document, said = tune("streaming")
    assert document["replaced"] == ["512x256:bf16"]
    assert "Bits of 1 shapes may change" in said and said.count("512x256:bf16\n") == 1


def test_shape_without_an_answer_is_said_in_every_output(
    tmp_path: Path, rerun: Callable[..., tuple[int, str, str]]
) -> None:
    arguments = ["--gpu", "gb200", "--shapes", "64x768:bf16", "--seconds", "0.0001", "--json"]
    code, stdout, stderr = rerun(*arguments, "--out", str(tmp_path / "out"))
    why = "its time was over before the first trial: give more --seconds"
    assert code == 1
    assert f"[1/2] 64x768:bf16: no answer: {why}" in stderr
    assert f"64x768:bf16 has no answer from this run: {why}" in stderr
    assert json.loads(stdout)["failures"] == {"64x768:bf16": why}


def test_table_names_every_shape_its_winner_and_the_evidence(
    out: Path, rerun: Callable[..., tuple[int, str, str]]
) -> None:
    arguments = [argument for argument in SMOKE if argument != "--json"]
    code, stdout, stderr = rerun(*arguments, "--out", str(out))
    assert code == 0
    heading, _, *lines = stdout.splitlines()
    assert [*heading.split()][:3] == ["shape", "winner", "us"]
    for problem, line in zip(load_problems(SHAPES), lines, strict=False):
        assert line.startswith(f"{problem} ")
        assert line.endswith("predicted")
        assert f"{problem}: " in stderr
    assert f"Package: {out / PACKAGE_NAME}" in stdout


def test_predicted_winner_never_overwrites_a_measured_one(
    out: Path, rerun: Callable[..., tuple[int, str, str]]
) -> None:
    path = out / PACKAGE_NAME / "table.json"
    table = json.loads(unsealed(path.read_text()))
    entry = table["tuned"][0]
    entry["evidence"] = "measured"
    entry["provenance"]["us"] = 1.25
    path.write_text(json.dumps(table))
    code, stdout, _ = rerun(*SMOKE, "--out", str(out))
    assert code == 0
    kept = Problem(entry["M"], entry["N"], entry["dtype"], entry["weight_dtype"])
    assert json.loads(stdout)["kept_measured"] == [str(kept)]
    after = json.loads(path.read_text())["tuned"]
    assert after[0] == entry
    assert [other["evidence"] for other in after[1:]] == ["predicted", "predicted"]


def test_corrupt_entry_of_the_cubin_cache_is_mended_silently(
    out: Path,
    first_run: tuple[Path, dict[str, Any], str],
    rerun: Callable[..., tuple[int, str, str]],
) -> None:
    before = snapshot(out)
    variant = variant_of(first_run[1]["shapes"][0])
    path = entry_path(DEFAULT_CACHE, render(variant), "sm_100a", int(variant["register_cap"]))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3] + b"garbage")
    code, stdout, stderr = rerun(*SMOKE, "--out", str(out))
    assert code == 0
    assert json.loads(stdout)["shapes"] == first_run[1]["shapes"]
    assert "cache" not in stderr
    assert snapshot(out) == before
    assert len(path.read_bytes()) > len(content) // 2, "the entry was not replaced"


# ---- Kill -9 -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_run_resumes_without_losing_or_repeating_a_trial(tmp_path: Path) -> None:
    out = tmp_path / "gb200"
    line = command("--gpu", "gb200", "--shapes", "512x256:bf16", "--trials", "16", "--json")
    line += ["--fallbacks", "none", "--out", str(out)]
    document = kill_and_resume(line, out, 16)
    assert document["shapes"][0]["trials"] == 16
    (tuned,) = Table.load(out / PACKAGE_NAME).tuned
    assert (tuned.M, tuned.N) == (512, 256)
    assert tuned.provenance["trials"] == 16


# ---- Bad input -----------------------------------------------------------------------------------


def space_with(folder: Path, change: Callable[[Any], Any]) -> str:
    """Path of a space file: the real one, changed."""
    content = yaml.safe_load(SPACE_FILE.read_text())
    content = change(content) or content
    path = folder / "space.yaml"
    path.write_text(
        content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
    )
    return str(path)


def check_refused(said: tuple[int, str, str], says: str) -> None:
    code, stdout, stderr = said
    assert code == 2
    assert stdout == ""
    assert "Traceback" not in stderr
    assert "pw@" not in stderr, "a password was shown"
    (sentence,) = [line for line in stderr.splitlines() if line.startswith("tune.py: ")]
    assert says in sentence


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA GPU is here")
def test_automatic_choice_without_a_gpu_asks_for_a_name(
    out: Path, rerun: Callable[..., tuple[int, str, str]]
) -> None:
    check_refused(rerun("--gpu", "auto", "--out", str(out)), "name one, for example --gpu gb200")


def test_missing_driver_says_what_to_install(
    out: Path,
    rerun: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    url = "postgresql+psycopg://u:pw@127.0.0.1:1/db"
    check_refused(
        rerun("--gpu", "gb200", "--storage", url, "--out", str(out)),
        "pip install 'psycopg[binary]'",
    )


def wrong_type(content: Any) -> None:
    content["knobs"]["stages"]["values"] = "three"


def unknown_knob(content: Any) -> None:
    content["knobs"]["colour"] = {"values": ["red"], "why": "it is nice"}


def contradiction(content: Any) -> None:
    rule = {"id": "never", "require": "M < 0", "say": "{M} rows are too many"}
    content["rules"].append(rule)


def no_yaml(content: Any) -> str:
    return "knobs: ["


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (wrong_type, "knob 'stages': 'values' is a list"),
        (unknown_knob, "knob 'colour' is unknown"),
        (contradiction, "no legal config for 512x256:bf16 on gb200; the rule met most: never: 512"),
        (no_yaml, "cannot read the search space"),
    ],
)
def test_bad_space_is_one_sentence_and_touches_nothing(
    out: Path,
    tmp_path: Path,
    rerun: Callable[..., tuple[int, str, str]],
    change: Callable[[Any], Any],
    says: str,
) -> None:
    before = snapshot(out)
    check_refused(rerun(*SMOKE, "--space", space_with(tmp_path, change), "--out", str(out)), says)
    assert snapshot(out) == before


@pytest.mark.parametrize("place", ["", "deeper/still", PACKAGE_NAME])
def test_output_folder_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, rerun: Callable[..., tuple[int, str, str]], place: str
) -> None:
    """A file in the way stops even root."""
    blocker = tmp_path / "out"
    if place == PACKAGE_NAME:
        blocker.mkdir()
        (blocker / place).write_text("years of work")
        target = blocker
    else:
        blocker.write_text("years of work")
        target = blocker / place
    before = snapshot(tmp_path)
    check_refused(rerun(*SMOKE, "--out", str(target)), "cannot write")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("damage", ["garbage in the middle", "not a journal", "binary"])
def test_corrupt_study_file_is_one_sentence_and_stays_as_it_is(
    out: Path, rerun: Callable[..., tuple[int, str, str]], damage: str
) -> None:
    journal = out / JOURNAL_NAME
    content = journal.read_bytes()
    journal.write_bytes(
        {
            "garbage in the middle": content[:500] + b"\n}garbage{\n" + content[500:],
            "not a journal": b'{"hello": "world"}\n',
            "binary": bytes(range(256)) * 4,
        }[damage]
    )
    before = snapshot(out)
    check_refused(rerun(*SMOKE, "--out", str(out)), f"the study file {journal} is corrupt")
    assert snapshot(out) == before


@pytest.mark.slow
def test_emulator_without_room_ends_the_run_and_records_no_finals(tmp_path: Path) -> None:
    """The compiler answers as on a disk that is full."""
    compiler = tmp_path / "full-g++"
    said = "kernel.cpp:9:1: fatal error: error writing to /tmp/x.s: No space left on device"
    compiler.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\necho '{said}' >&2\nexit 1\n")
    compiler.chmod(0o755)
    out = tmp_path / "out"
    line = command("--gpu", "gb200", "--shapes", "64x256:bf16", "--trials", "2", "--out", str(out))
    env = os.environ | {"CXX": str(compiler)}
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    (study,) = optuna.get_all_study_summaries(open_storage(out / JOURNAL_NAME))
    assert study.n_trials == 2
    assert "trials_at_finals" not in study.user_attrs
    assert not (out / PACKAGE_NAME).exists()


@pytest.mark.parametrize("name", ["table.json", "forward.json"])
@pytest.mark.parametrize("damage", ["{}", "{", ""])
def test_damaged_package_is_one_sentence_before_anything_is_searched(
    out: Path, rerun: Callable[..., tuple[int, str, str]], name: str, damage: str
) -> None:
    path = out / PACKAGE_NAME / name
    path.write_text(damage)
    before = snapshot(out)
    more = ["--gpu", "gb200", "--shapes", SHAPES, "--trials", "9", "--json", "--out", str(out)]
    check_refused(rerun(*more), f"({path} is damaged (")
    path.unlink()
    path.mkdir()
    check_refused(rerun(*more), "move it away to start a new one")
    path.rmdir()
    path.write_text(damage)
    assert snapshot(out) == before


def test_interrupt_before_the_search_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starts(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_tune, "choose_target", starts)
    assert tune.main([*SMOKE, "--out", str(tmp_path / "out")]) == 130
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"{cli_tune.INTERRUPTED}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("found", "interrupted", "code", "said"),
    [
        (True, False, 0, ""),
        (True, True, 1, "Interrupted: the same command resumes where this run stopped.\n"),
        (False, False, 1, "1 shapes have no winner.\n"),
        (False, True, 1, "Interrupted: the same command resumes where this run stopped.\n"),
    ],
    ids=["done", "ended early", "no winner", "ended early without a winner"],
)
def test_a_run_that_was_ended_early_tells_so_by_its_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: bool,
    interrupted: bool,
    code: int,
    said: str,
) -> None:
    """A run is ended early also where all winners are known and their package is being written."""

    def tuned(plan: Plan, workers: object, status: Status) -> Outcome:
        (problem,) = plan.problems
        return Outcome(((problem, WINNER if found else None),), None, interrupted, {}, 0)

    monkeypatch.setattr(cli_tune, "choose_target", lambda *arguments: (GB200, None, "Predicting."))
    monkeypatch.setattr(cli_tune, "tune", tuned)
    line = ["--gpu", "gb200", "--shapes", str(WINNER.problem), "--out", str(tmp_path / "out")]
    assert tune.main([*line, "--json"]) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out)["interrupted"] is interrupted
    assert printed.err.removeprefix("Predicting.\n") == said


@pytest.mark.slow
def test_interrupt_while_workers_end_costs_no_results(
    tmp_path: Path,
    first_run: tuple[Path, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Workers:
        def close(self) -> None:
            raise KeyboardInterrupt

    def predicting(plan: Plan, workers: object, status: Status) -> Outcome:
        return run.tune(replace(plan, devices=(), fallbacks="common"), None, status)

    chosen = (GB200, Workers(), "Measuring.")
    monkeypatch.setattr(cli_tune, "choose_target", lambda *arguments: chosen)
    monkeypatch.setattr(cli_tune, "tune", predicting)
    shutil.copytree(first_run[0], tmp_path / "gb200")
    assert tune.main([*SMOKE, "--out", str(tmp_path / "gb200")]) == 0
    assert json.loads(capsys.readouterr().out)["shapes"] == first_run[1]["shapes"]


def test_process_itself_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        command("--gpu", "gb200", "--shapes", "1x1:int4", "--out", str(tmp_path / "out")),
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    check_refused((done.returncode, done.stdout, done.stderr), "unknown dtype 'int4'")
    assert not (tmp_path / "out").exists()


@pytest.fixture(autouse=True)
def optuna_keeps_its_settings() -> Any:
    """A run turns Optuna's messages off; other tests get them back."""
    level = optuna.logging.get_verbosity()
    yield
    optuna.logging.set_verbosity(level)


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "reprot", "--gpu H200", "--gpu h200 --shapes 4096x4096"]
)
def test_what_is_said_at_once_needs_no_pytorch(arguments: str) -> None:
    """PyTorch and Optuna take seconds to import."""
    code = (
        "import sys, tune\n"
        "try:\n    tune.main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'optuna', 'cuda', 'rich'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_row_of_the_document_says_what_is_known_of_the_winner() -> None:
    loose = Finalist("loose", {}, us=22.0, ratio=1.1)
    more = {"trials": 7, "counts": {"ok": 5, "wrong": 2}, "reason": "the fastest"}
    winner = make_winner(DETERMINISTIC[0], 1.25, fastest_nondeterministic=loose, **more)
    row = cli_tune._row(winner.problem, winner)
    for name in ("variant", "config", "floor", "evidence", "trials", "reason"):
        assert row[name] == getattr(winner, name)
    for name in ("us", "floor_us", "ratio", "determinism"):
        assert row[name] == getattr(winner.result, name)
    assert row["checks"] == [*winner.result.checks]
    assert row["outcomes"] == winner.counts
    assert row["fastest_nondeterministic"] == "loose"
    assert row["overhead_of_determinism"] == winner.overhead_of_determinism == 1.25 / 1.1
