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
from generator.kernels.nvrtc import Compiled, compile_options, compile_source, nvrtc_version
from generator.kernels.ptxas import Resources
from generator.kernels.revision import AnyVariant, compiler_input
from generator.paths import CACHE

DEFAULT_CACHE = CACHE / "cubins"
ENTRY_FORMAT = 2
"""Version of what a cache entry holds: entries of other versions are never looked at."""
STALE_SECONDS = 3600.0
"""Age of a half-written entry that nobody writes any more: a write takes milliseconds."""


class CubinCache:
    """Compiled results by content, shared by any number of processes."""

    def __init__(self, folder: Path = DEFAULT_CACHE) -> None:
        self.folder = folder

    def path(self, source: str, arch: str, register_cap: int) -> Path:
        options = " ".join(compile_options(arch, register_cap))
        text = f"{ENTRY_FORMAT} {nvrtc_version()}\n{options}\n{source}"
        key = hashlib.sha256(text.encode()).hexdigest()
        return self.folder / arch / key[:2] / f"{key}.json"

    def compile(self, source: str, arch: str, register_cap: int = 0) -> Compiled:
        """The cached result, or a fresh one that is stored. An entry that is damaged is compiled
        again and replaced."""
        found = self.find(source, arch, register_cap)
        if found is not None:
            return found
        compiled = compile_source(source, arch, register_cap)
        self._write(self.path(source, arch, register_cap), compiled)
        return compiled

    def find(self, source: str, arch: str, register_cap: int = 0) -> Compiled | None:
        """The cached result; None where there is none that is sound."""
        found = self._read(self.path(source, arch, register_cap))
        return found if found is not None and found.source == source else None

    @staticmethod
    def _read(path: Path) -> Compiled | None:
        try:
            checksum, _, body = path.read_text().partition("\n")
            if hashlib.sha256(body.encode()).hexdigest() != checksum:
                return None
            data = json.loads(body)
            data["cubin"] = bytes.fromhex(data["cubin"])
            data["kernels"] = {n: Resources(**r) for n, r in data["kernels"].items()}
            return Compiled(**data)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @staticmethod
    def _write(path: Path, compiled: Compiled) -> None:
        data = asdict(compiled) | {"cubin": compiled.cubin.hex()}
        body = json.dumps(data)
        try:
            with replacing(path) as part:
                part.write_text(hashlib.sha256(body.encode()).hexdigest() + "\n" + body)
            _sweep(path.parent)
        except OSError:
            # The cache saves time only: a full disk costs a compile, not the run.
            return


def _sweep(folder: Path) -> None:
    """Remove what processes left behind that were killed while they wrote there. Raises OSError.
    Who writes does it, where it writes: a folder has one entry in 256."""
    oldest = time.time() - STALE_SECONDS
    for part in folder.glob("*.part"):
        if part.stat().st_mtime < oldest:
            part.unlink()


def compile_variant(variant: AnyVariant, arch: str, cache_folder: Path = DEFAULT_CACHE) -> Compiled:
    """Render and compile one variant through the cache."""
    source, register_cap = compiler_input(variant)
    return CubinCache(cache_folder).compile(source, arch, register_cap)


def find_cached(
    variant: AnyVariant, arch: str, cache_folder: Path = DEFAULT_CACHE
) -> Compiled | None:
    """What the cache has of a variant, without compiling; None when it has nothing that is sound. A
    look takes less than a millisecond, a new process that compiles several seconds to start."""
    source, register_cap = compiler_input(variant)
    return CubinCache(cache_folder).find(source, arch, register_cap)
