"""The studies that the repository keeps, read once by each process of the tests."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from generator.paths import GENERATED
from generator.studies.reader import Study, read_studies


@cache
def committed_studies(gpu: str) -> tuple[Study, ...]:
    """All studies of a GPU: to read those of the H200 takes 10 s."""
    return tuple(read_studies(GENERATED / gpu))


def config_of(trial: dict[str, Any]) -> dict[str, Any]:
    """Return the config of a trial, as a line of a journal has it."""
    found = trial["distributions"]
    choices = {name: json.loads(text)["attributes"]["choices"] for name, text in found.items()}
    return {name: choices[name][int(index)] for name, index in trial["params"].items()}
