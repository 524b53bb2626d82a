"""Compiled kernels on disk, by content.

The key covers source, options and NVRTC version. A file appears by an atomic rename and carries its
own checksum, so that a crash or a second run leaves nothing half-written that is later believed.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path

from generator.disk import replacing
from generator.kernels.code_digest import AnyVariant, compiler_input
from generator.kernels.nvrtc import (
    Compiled,
    blames_source,
    compile_options,
    compile_source,
    nvrtc_version,
)
from generator.kernels.ptxas import Resources
from generator.paths import CACHE

DEFAULT_CACHE = CACHE / "cubins"
ENTRY_FORMAT = 2
"""Version of what a cache entry holds: entries of other versions are never looked at."""
STALE_SECONDS = 3600.0
"""Age of a half-written entry that nobody writes any more: a write takes milliseconds."""


def compile_variant(variant: AnyVariant, arch: str, cache_folder: Path = DEFAULT_CACHE) -> Compiled:
    """Render and compile one variant through the cache."""
    source, register_cap = compiler_input(variant)
    return compile_cached(cache_folder, source, arch, register_cap)


def compile_cached(folder: Path, source: str, arch: str, register_cap: int = 0) -> Compiled:
    """The cached result, or a fresh one that is stored: a cubin, or what is wrong with the source.
    An entry that is damaged is compiled again and replaced. folder: of the cache, which any number
    of processes share. Raises CompilerError, and stores nothing, where NVRTC itself failed."""
    path = entry_path(folder, source, arch, register_cap)
    found = _read(path, source)
    if found is None:
        found = compile_source(source, arch, register_cap)
        _write(path, found)
    return found


def find_cached(
    variant: AnyVariant, arch: str, cache_folder: Path = DEFAULT_CACHE
) -> Compiled | None:
    """Return the cached result of a variant, without compiling; None when there is none that is
    sound. A look takes less than a millisecond, a new process that compiles several seconds to
    start."""
    source, register_cap = compiler_input(variant)
    return _read(entry_path(cache_folder, source, arch, register_cap), source)


def entry_path(folder: Path, source: str, arch: str, register_cap: int = 0) -> Path:
    """Return the path at which the cache has the result of a source."""
    options = " ".join(compile_options(arch, register_cap))
    text = f"{ENTRY_FORMAT} {nvrtc_version()}\n{options}\n{source}"
    key = hashlib.sha256(text.encode()).hexdigest()
    return folder / arch / key[:2] / f"{key}.json"


def _read(path: Path, source: str) -> Compiled | None:
    """The entry of a source; None where there is none that is sound."""
    try:
        checksum, _, body = path.read_text(encoding="utf-8").partition("\n")
        if hashlib.sha256(body.encode()).hexdigest() != checksum:
            return None
        data = json.loads(body)
        data["cubin"] = bytes.fromhex(data["cubin"])
        data["kernels"] = {n: Resources(**r) for n, r in data["kernels"].items()}
        found = Compiled(**data)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if found.error and not blames_source(found.error):
        return None  # stored by an earlier version, when memory was short
    return found if found.source == source else None


def _write(path: Path, compiled: Compiled) -> None:
    body = json.dumps(asdict(compiled) | {"cubin": compiled.cubin.hex()})
    try:
        with replacing(path) as part:
            part.write_text(
                hashlib.sha256(body.encode()).hexdigest() + "\n" + body, encoding="utf-8"
            )
        _sweep(path.parent)
    except OSError:
        pass  # the cache saves time only: a full disk costs a compile, not the run


def _sweep(folder: Path) -> None:
    """Remove what processes left behind that were killed while they wrote there. Raises OSError.
    Who writes does it, where it writes: a folder has one entry in 256."""
    oldest = time.time() - STALE_SECONDS
    for part in folder.glob("*.part"):
        if part.stat().st_mtime < oldest:
            part.unlink()
