"""Messages name a storage and give no password away."""

from __future__ import annotations

import pytest

from generator.studies.outage import without_credentials


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql+psycopg://tuner:secret@host:5432/db", "postgresql+psycopg://host:5432/db"),
        ("postgresql://tuner@host/db?password=secret", "postgresql://host/db"),
        ("postgresql://tuner:secret@host/db?password=s@cret", "postgresql://host/db"),
        ("postgresql://tuner:s@cret@host/db", "postgresql://host/db"),
        ("postgresql://host/db", "postgresql://host/db"),
        ("sqlite:////tmp/studies.db", "sqlite:////tmp/studies.db"),
        # SQLAlchemy takes these as passwords with a question mark, too.
        ("postgresql://tuner:se?cret@host/db", "postgresql://..."),
        ("postgresql://host:5432/db?password=s@cret", "postgresql://..."),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown
