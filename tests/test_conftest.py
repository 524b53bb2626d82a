"""The default run and the slow one share the tests between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from generator.paths import REPOSITORY

pytest_plugins = ["pytester"]

SAMPLE = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", range(7))
def test_many(n): pass

@pytest.mark.sampled(5)
@pytest.mark.parametrize("n", range(2))
def test_few(n): pass

@pytest.mark.slow
def test_deep(): pass

def test_plain(): pass
"""


def result_of(pytester: pytest.Pytester, *options: str) -> pytest.HookRecorder:
    """Run the tests of a folder with the project's rules."""
    settings = (REPOSITORY / "pyproject.toml").read_text().replace('pythonpath = ["."]', "")
    (pytester.path / "pyproject.toml").write_text(settings)
    rules = (REPOSITORY / "tests" / "conftest.py").read_text()
    pytester.makeconftest(rules)
    folder = pytester.path / "tests"
    folder.mkdir(exist_ok=True)
    (folder / "test_sample.py").write_text(SAMPLE)
    return pytester.inline_run(*options, "-p", "no:cacheprovider", str(folder))


def run(pytester: pytest.Pytester, *options: str) -> set[str]:
    """Names of the tests that ran."""
    result = result_of(pytester, *options)
    return {Path(report.nodeid.split("::")[-1]).name for report in result.listoutcomes()[0]}


def test_the_default_run_takes_an_even_sample(pytester: pytest.Pytester) -> None:
    assert run(pytester) == {
        "test_many[0]",
        "test_many[2]",
        "test_many[4]",
        "test_few[0]",
        "test_few[1]",
        "test_plain",
    }


def test_the_parts_of_a_run_are_each_of_its_tests_once(pytester: pytest.Pytester) -> None:
    parts = [run(pytester, "-m", "slow", "--part", f"{part}/2") for part in (1, 2)]
    assert parts == [
        {"test_many[1]", "test_many[5]", "test_deep"},
        {"test_many[3]", "test_many[6]"},
    ]
    every = [run(pytester, "--part", f"{part}/9") for part in range(1, 10)]
    assert sorted(map(len, every)) == [0] * 3 + [1] * 6
    assert set().union(*every) == run(pytester)


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "1/0", "one/2", "-1/2"])
def test_a_part_that_there_is_not_is_refused(
    pytester: pytest.Pytester, part: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result: Any = result_of(pytester, f"--part={part}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"argument --part: expected K/N with K from 1 to N, not {part}" in capfd.readouterr().err


def test_the_slow_run_takes_the_rest(pytester: pytest.Pytester) -> None:
    assert run(pytester, "-m", "slow") == {
        "test_many[1]",
        "test_many[3]",
        "test_many[5]",
        "test_many[6]",
        "test_deep",
    }
