"""Fixtures of the searches on a made-up cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import searches


@pytest.fixture
def quick_proposals() -> Iterator[None]:
    with searches.quick_proposals():
        yield
