"""The studies that the repository keeps, read once by each process of the tests."""

from __future__ import annotations

from functools import cache

from generator.paths import GENERATED
from generator.studies.reader import Study, read_studies


@cache
def committed_studies(gpu: str) -> tuple[Study, ...]:
    """All studies of a GPU: to read those of the H200 takes 10 s."""
    return tuple(read_studies(GENERATED / gpu))
