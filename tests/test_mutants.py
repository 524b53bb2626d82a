"""The list of mutants is up to date; `python -m tests.mutate` plants them."""

from __future__ import annotations

from tests.mutate.mutants import fault_in, load_mutants


def test_every_mutant_can_be_planted_and_names_tests_that_there_are() -> None:
    mutants = load_mutants()
    assert fault_in(mutants) == []
    assert len(mutants) >= 120
