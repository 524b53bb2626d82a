"""Shape files that a program has recorded: `normforge.collect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from normforge.collected import KEY, longest_first


def collected_shapes(path: Path, content: Mapping[str, Any], operation: str) -> list[str]:
    """The shapes of an operation in the content of a file, those first whose calls took longest in
    all. Raises NormforgeError, with one sentence that names the file."""
    if other := sorted(map(str, content.keys() - {KEY})):
        raise NormforgeError(f"{path}: unknown key '{other[0]}' beside '{KEY}'")
    found = content[KEY]
    if not isinstance(found, dict) or not found:
        raise NormforgeError(f"{path}: expected operations with their calls under '{KEY}'")
    for name, calls in found.items():
        if not isinstance(calls, dict) or not calls:
            raise NormforgeError(f"{path}: expected shapes and how often each under '{name}'")
        for shape, count in calls.items():
            if not isinstance(shape, str) or type(count) is not int or count < 1:
                raise NormforgeError(
                    f"{path}: expected a shape and how often it was called under '{name}', for "
                    f"example '4096x1024:bf16: 640', got '{shape}: {count}'"
                )
    if operation not in found:
        raise NormforgeError(
            f"{path} has no calls of {operation}, only of {', '.join(map(str, found))}: choose "
            "with --op"
        )
    return longest_first(operation, found[operation])
