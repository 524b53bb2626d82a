"""Files that can be read, appear whole, and stay after a power cut."""

from __future__ import annotations

import fcntl
import json
import lzma
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from generator.errors import NormforgeError, one_line


class _Loader(yaml.SafeLoader):
    """Refuses a key that is in a mapping twice, of which PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known: list[tuple[str, Any]] = []
        for key, _ in node.value:
            if (key.tag, key.value) in known:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line} has the key '{key.value}' a second time")
            known.append((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_json(path: Path) -> Any:
    """Parse a JSON file; where it is missing, `<name>.xz` beside it. Raises OSError, and ValueError
    for content that is not JSON."""
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    with lzma.open(path.with_name(f"{path.name}.xz"), "rt", encoding="utf-8") as packed:
        return json.loads(packed.read())


def read_yaml(path: Path, what: str = "") -> Any:
    """The content of a file. Raises NormforgeError, which calls the file `what`."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise NormforgeError(f"cannot read {what}{path}: {one_line(error)}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, whose folder is made: it takes the place of `path` when the body
    ends, and is removed when that fails. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid4().hex}.part")
    part.touch(exist_ok=False)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """flock on a file or a folder: one process at a time. The kernel drops it with its holder, so
    kill -9 leaves nothing stale. Raises OSError."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
