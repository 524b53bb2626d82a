"""Plants the mutants one at a time in a copy of the repository and runs the tests that claim to
protect the place.

    python -m tests.mutate                 all of them, half an hour on two idle cores
    python -m tests.mutate -k finals       those whose file or sentence has the word
    python -m tests.mutate --again         those that survived or are new, for the same result

Any number of these may run side by side, each in a copy of its own.
Exit code 1 when more survive than the goal allows, 2 when the list is out of date or a test fails
without a mutant. RESULT.md beside this file has what became of each the last time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from generator.paths import REPOSITORY
from tests.mutate.mutants import FOLDER, Mutant, fault_in, load_mutants

RESULT = FOLDER / "RESULT.md"
GOAL = 0.95
"""Share of the mutants that have to be caught."""
SECONDS = 180.0
"""Deadline of the tests of one mutant. One that is reached counts as caught: they pass in less."""
_COPIED = (
    ".ci",
    "generator",
    "normforge",
    "templates",
    "search_spaces",
    "tests",
    "benchmarks",
    "examples",
    "docs",
)
_LINKED = ("generated", ".cache")  # tests only read it, or it is content-addressed


@dataclass(frozen=True)
class Verdict:
    """The fate of a mutant. outcome: caught, timeout, survived, unseen, broken (no test ran)."""

    mutant: Mutant
    outcome: str
    seconds: float
    said: str = ""

    @property
    def caught(self) -> bool:
        return self.outcome in ("caught", "timeout")


@contextmanager
def copied() -> Iterator[Path]:
    """A copy of the repository that can be broken."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        root = Path(folder)
        for name in _COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, root / name, ignore=ignored)
        for path in REPOSITORY.iterdir():
            if path.is_file():
                shutil.copy(path, root)
        for name in _LINKED:
            if (REPOSITORY / name).exists():
                (root / name).symlink_to(REPOSITORY / name)
        yield root


def preload() -> None:
    """Import what takes long, once: every run of tests is a fork of this process. Nothing of the
    repository, which each run imports from its own copy."""
    import hypothesis
    import jinja2
    import numpy
    import optuna
    import pytest
    import sqlalchemy
    import torch._dynamo
    import torch._inductor.decomposition

    del hypothesis, jinja2, numpy, optuna, pytest, sqlalchemy, torch


def _become_pytest(root: Path, tests: Sequence[str], output: Path) -> None:
    """Run the tests of the copy at `root` in the child, and end."""
    os.setsid()
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.chdir(root)
    # Compiled Python is taken for up to date by the second and the size: a mutant may have both.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] in _COPIED]:
        del sys.modules[name]
    sys.path[:] = [str(root), *(entry for entry in sys.path if entry not in ("", str(REPOSITORY)))]
    import pytest

    options = ["-q", "-x", "-n", "0", "-m", "", "-p", "no:cacheprovider", "--no-header"]
    code = int(pytest.main([*options, f"--rootdir={root}", *tests]))
    sys.stdout.flush()
    os._exit(code)


def run_tests(root: Path, tests: Sequence[str], seconds: float) -> tuple[str, str]:
    """The outcome of the tests in the copy, and the last line that pytest prints."""
    output = root / "said"
    child = os.fork()
    if child == 0:
        try:
            _become_pytest(root, tests, output)
        finally:
            os._exit(70)
    until = time.monotonic() + seconds
    ended = status = 0
    while not ended and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # processes that the tests have left behind end, too
    if not ended:
        os.waitpid(child, 0)
        return "timeout", f"no end within {seconds:.0f} s"
    lines = [line for line in output.read_text().splitlines() if line.strip()] or ["nothing"]
    failed = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    code = os.waitstatus_to_exitcode(status)
    outcome = {0: "survived", 1: "caught"}.get(code, "broken")
    if code == 0 and "passed" not in lines[-1]:
        outcome = "broken"  # all are skipped here
    if outcome == "broken" and any(line.startswith(("E  ", "ERROR")) for line in lines):
        outcome = "caught"  # the mutant cannot even be imported
    return outcome, failed


def judge(mutant: Mutant, root: Path, seconds: float) -> Verdict:
    if mutant.unseen:
        return Verdict(mutant, "unseen", 0.0, mutant.unseen)
    start = time.monotonic()
    before = mutant.plant(root)
    try:
        outcome, said = run_tests(root, mutant.tests, seconds)
    finally:
        (root / mutant.file).write_text(before)
    return Verdict(mutant, outcome, time.monotonic() - start, said)


def judge_all(mutants: Sequence[Mutant], seconds: float) -> Iterator[Verdict]:
    with copied() as root:
        for mutant in mutants:
            yield judge(mutant, root, seconds)


def check_without(mutants: Sequence[Mutant], seconds: float) -> str:
    """Return which test fails without any mutant, "" when all pass."""
    tests = list(dict.fromkeys(test for m in mutants if not m.unseen for test in m.tests))
    # A file and a test of it are one.
    tests = [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]
    with copied() as root:
        outcome, said = run_tests(root, tests, seconds * len(tests)) if tests else ("survived", "")
    return "" if outcome == "survived" else f"{said} ({outcome})"


def last_verdicts(every: Sequence[Mutant]) -> dict[str, Verdict]:
    """Return what RESULT.md says of mutants that were caught or cannot be seen, by their
    sentences."""
    mutants = {mutant.what: mutant for mutant in every}
    rows = re.findall(r"^\| \S+ \| (.+) \| (\w+) \| (\d+) \|$", RESULT.read_text(), re.MULTILINE)
    return {
        what: Verdict(mutants[what], outcome, float(seconds), mutants[what].unseen)
        for what, outcome, seconds in rows
        if what in mutants
        and (outcome in ("caught", "timeout") or (outcome == "unseen" and mutants[what].unseen))
    }


def report(verdicts: Sequence[Verdict]) -> str:
    """The result as Markdown: numbers by package, what survived, what cannot be seen."""
    seen = [verdict for verdict in verdicts if verdict.outcome != "unseen"]
    caught = sum(verdict.caught for verdict in seen)
    minutes = sum(verdict.seconds for verdict in verdicts) / 60
    date = datetime.now(timezone.utc).date().isoformat()
    lines = [
        "# What the tests find",
        "",
        f"`python -m tests.mutate`, {date}: {caught} of {len(seen)} mutants caught "
        f"({caught / max(1, len(seen)):.1%}), {len(verdicts) - len(seen)} more can only be seen on "
        f"a GPU; {minutes:.0f} minutes.",
        "",
        "| part | mutants | caught |",
        "|---|---|---|",
    ]
    parts: dict[str, list[Verdict]] = {}
    for verdict in seen:
        parts.setdefault(str(Path(verdict.mutant.file).parent), []).append(verdict)
    lines += [f"| {part} | {len(v)} | {sum(x.caught for x in v)} |" for part, v in parts.items()]
    for title, outcomes in (("Survived", ("survived", "broken")), ("Unseen", ("unseen",))):
        rows = [v for v in verdicts if v.outcome in outcomes]
        lines += ["", f"## {title}", ""] + (
            ["| file | mutant | |", "|---|---|---|"] if rows else ["None."]
        )
        lines += [f"| {v.mutant.file} | {v.mutant.what} | {v.said} |" for v in rows]
    lines += ["", "## All", "", "| file | mutant | | seconds |", "|---|---|---|---|"]
    lines += [
        f"| {v.mutant.file} | {v.mutant.what} | {v.outcome} | {v.seconds:.0f} |" for v in verdicts
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__)
    parser.add_argument("-k", dest="word", default="", help="only those whose file or sentence has")
    parser.add_argument("--again", action="store_true", help="those that survived or are new")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="deadline of one mutant")
    parser.add_argument(
        "--no-check", action="store_true", help="leave out the run without a mutant"
    )
    args = parser.parse_args(argv)
    preload()
    every = load_mutants()
    faults = fault_in(every)
    known = last_verdicts(every) if args.again else {}
    mutants = [m for m in every if args.word.lower() in f"{m.file} {m.what}".lower()]
    mutants = [m for m in mutants if m.what not in known]
    if not faults and not mutants:
        faults = [f"no mutant has '{args.word}'"]
    if not faults and not args.no_check and (failing := check_without(mutants, args.seconds)):
        faults = [f"without a mutant: {failing}"]
    if faults:
        print("\n".join(faults), file=sys.stderr)
        return 2
    verdicts = []
    for verdict in judge_all(mutants, args.seconds):
        verdicts.append(verdict)
        print(
            f"{verdict.outcome:8} {verdict.seconds:4.0f} s  {verdict.mutant.file}: "
            f"{verdict.mutant.what}" + (f"  [{verdict.said}]" if not verdict.caught else ""),
            flush=True,
        )
    found = known | {verdict.mutant.what: verdict for verdict in verdicts}
    verdicts = [found[m.what] for m in every if m.what in found]
    text = report(verdicts)
    if len(verdicts) == len(every):
        RESULT.write_text(text)
    print(text.partition("## All")[0])
    seen = [verdict for verdict in verdicts if verdict.outcome != "unseen"]
    return 0 if sum(v.caught for v in seen) >= GOAL * len(seen) else 1


if __name__ == "__main__":
    sys.exit(main())
