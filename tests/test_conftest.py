"""The default run and the slow one share the tests between them."""

from __future__ import annotations

from pathlib import Path

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


def run(pytester: pytest.Pytester, *options: str) -> set[str]:
    """Names of the tests that ran, in a folder with the project's rules."""
    settings = (REPOSITORY / "pyproject.toml").read_text().replace('pythonpath = ["."]', "")
    (pytester.path / "pyproject.toml").write_text(settings)
    rules = (REPOSITORY / "tests" / "conftest.py").read_text()
    pytester.makeconftest(rules)
    folder = pytester.path / "tests"
    folder.mkdir(exist_ok=True)
    (folder / "test_sample.py").write_text(SAMPLE)
    result = pytester.inline_run(*options, "-p", "no:cacheprovider", str(folder))
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


def test_the_slow_run_takes_the_rest(pytester: pytest.Pytester) -> None:
    assert run(pytester, "-m", "slow") == {
        "test_many[1]",
        "test_many[3]",
        "test_many[5]",
        "test_many[6]",
        "test_deep",
    }
