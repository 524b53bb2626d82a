"""What searches on a made-up cost have in common."""

from __future__ import annotations

import pytest


@pytest.fixture
def quick_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler looks at few candidates, with small forests. For tests that do not depend on how
    good its proposals are: three quarters of a search on a made-up cost are its looking."""
    monkeypatch.setattr("generator.search.sampler.DRAWN", 8)
    monkeypatch.setattr("generator.search.sampler.STEP", (4, 1))
    monkeypatch.setattr("generator.search.surrogate.TREES", 3)
