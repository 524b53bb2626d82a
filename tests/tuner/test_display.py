"""The output of a run: lines in a file, bars on a terminal, and a table of 80 columns."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from generator.problem import Problem
from generator.result import Result
from generator.search.budget import Progress
from generator.shape_lists import load_problems
from generator.studies.records import Winner
from generator.tuner import display
from generator.tuner.display import Status, table
from generator.tuner.run import check_problems
from tests.support.fake_devices import PROBLEMS, make_plan
from tests.support.packages import variant_for

PROBLEM = Problem.parse("65536x16384:bf16")
LONGEST = "65536x16384:bf16"


class Terminal(io.TextIOWrapper):
    """A terminal of an encoding, and what was written to it."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding=encoding, errors="strict", write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self.bytes.getvalue().decode(self.encoding)


@pytest.fixture(autouse=True)
def usual_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def winner(problem: Problem, evidence: str = "measured") -> Winner:
    config = dict(variant_for(Problem.parse("64x1024:bf16")).config)
    config |= {"strategy": "column_slices", "pipeline": "async", "stages": 6}
    checked = "verified" if evidence == "measured" else "unverified"
    result = Result("ok", us=1234.5678, floor_us=1150.0, ratio=1.0735, determinism=checked)
    return Winner(
        problem,
        "h200",
        config,
        "column_slices_async6_n16384_bf16_512x16_0123abcd",
        "digest",
        result,
        evidence,
        (),
        None,
        400,
        {"ok": 400},
        "study",
        "space",
        "reason",
        "date",
    )


def go(stream: TextIO) -> None:
    """All that is told of a run of two shapes."""
    problems = [PROBLEM, Problem.parse("4096x1024:bf16")]
    with Status(2, stream) as status:
        for done in (1, 2):
            status.phase("planning", done, 2)
        for index, problem in enumerate(problems):
            for done in (1, 30, 60):
                counts = {"ok": done, "resource": 1}
                status.progress(index, Progress(problem, "search", done, 60, 12.5, counts))
            status.winner(index, problem, winner(problem))
        for done in range(4):
            status.phase("fallback kernels", done, 3)
        status.waiting({PROBLEM: "host a"})
        status.waiting({PROBLEM: "host a"})
        status.say("forward: 99 % done [bold]")


def test_a_file_gets_plain_lines() -> None:
    stream = io.StringIO()
    go(stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "planning: 2/2 in 0 s"
    assert lines[1].startswith(f"[1/2] {PROBLEM}: column_slices async6, 1234.57 us")
    assert re.search(r"\| \d+ s left$", lines[1])
    assert lines[2].startswith("[2/2] 4096x1024:bf16: ")
    assert lines[3] == "fallback kernels: 3/3 in 0 s"
    assert lines[4] == f"1 shapes left, which others search: waiting for {PROBLEM} (host a)"
    assert lines[5:] == ["forward: 99 % done [bold]"]
    assert "\x1b" not in stream.getvalue()


def test_a_long_phase_says_every_ten_seconds_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(display.time, "monotonic", lambda: float(next(clock)))
    stream = io.StringIO()
    status = Status(1, stream)
    for done in range(11):
        status.phase("fallback kernels", done, 10)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "fallback kernels: 3/10 | 28 s left",
        "fallback kernels: 6/10 | 16 s left",
        "fallback kernels: 9/10 | 4 s left",
        "fallback kernels: 10/10 in 40 s",
    ]


def test_planning_tells_of_each_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int, int]] = []
    status = Status(2, io.StringIO())
    monkeypatch.setattr(status, "phase", lambda *phase: told.append(phase))
    check_problems(make_plan(tmp_path, 1, problems=PROBLEMS[:2]), status)
    assert told == [("planning", 1, 2), ("planning", 2, 2)]


def test_a_terminal_gets_bars_of_every_phase_in_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bars at one time, without the thread that draws them."""
    stream = Terminal()
    status = Status(2, stream)
    status.phase("fallback kernels", 1, 3)
    status.progress(0, Progress(PROBLEM, "search", 30, 400, 1234.56, {"wrong": 12}))
    shown = [line for line in drawn(status, stream).splitlines() if line.strip()]
    assert [line.split()[0] for line in shown] == ["fallback", "searching", str(PROBLEM)]
    assert "1/3 | " in shown[0]
    assert re.search(r"0/2 shapes \| .* left", shown[1])
    assert "30/400 search, best 1234.56 us, 12 out" in " ".join(shown[2].split())
    assert all(len(line.rstrip()) <= 80 for line in shown), shown
    status.winner(0, PROBLEM, winner(PROBLEM))
    status.phase("fallback kernels", 3, 3)
    assert drawn(status, stream).split()[0] == "searching"


def drawn(status: Status, stream: Terminal) -> str:
    """The bars, without colours."""
    stream.bytes.truncate(0)
    stream.bytes.seek(0)
    status.console.print(status._bars.get_renderable())
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.text())


def test_the_display_leaves_nothing_but_its_lines_on_a_terminal() -> None:
    stream = Terminal()
    go(stream)
    text = stream.text()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor stays hidden"
    assert "99 % done [bold]" in text


def test_a_terminal_without_unicode_is_no_error() -> None:
    stream = Terminal("ascii")
    go(stream)
    assert "searching" in stream.text() or "planning" in stream.text()


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    go(stream)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", stream.text())


def test_a_failure_is_not_shown_as_a_verdict_on_the_variants() -> None:
    stream = io.StringIO()
    status = Status(2, stream)
    status.progress(0, Progress(PROBLEM, "search", 1, 60, None, {"wrong": 1}))
    status.winner(0, PROBLEM, None, "no clean numbers")
    status.winner(1, PROBLEM, None)
    first, second = stream.getvalue().splitlines()
    assert first.startswith(f"[1/2] {PROBLEM}: no answer: no clean numbers")
    assert second.startswith(f"[2/2] {PROBLEM}: no variant may win")


@pytest.mark.parametrize("evidence", ["measured", "predicted"])
def test_the_table_fits_80_columns_of_ascii(evidence: str) -> None:
    rows = [(problem, winner(problem, evidence)) for problem in load_problems("default,tilegym")]
    shown = table([*rows, (PROBLEM, None)])
    lines = shown.splitlines()
    assert len(lines) == 2 + len(rows) + 1
    assert lines[1] == "-" * max(map(len, lines))
    assert max(map(len, lines)) <= 80
    assert shown.isascii()
    assert lines[0].split() == ["shape", "winner", "us", "x", "floor", "overhead", "evidence"]
    assert "column_slices async6  1234.57    1.073         -  " + evidence in shown
    assert lines[-1].split()[:2] == [LONGEST, "none"]


def test_what_was_not_verified_is_marked() -> None:
    one = winner(PROBLEM)
    other = replace(one, result=replace(one.result, determinism="refuted"))
    assert "measured, refuted" in table([(PROBLEM, other)])
