"""The files of an emitted package: its kernels, its tables, and the runtime that serves them.

`python -m generator.package.files [folder ...]` copies today's runtime into packages, by default
into those of generated/."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, overload
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from generator.errors import NormforgeError
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.render import headers
from generator.kernels.variant import Variant
from generator.package.sources import INCLUDE, config_of, included, revision, source_of
from generator.paths import GENERATED, RUNTIME
from generator.runtime.cubins import CUBINS
from generator.runtime.table import (
    FORWARD_TABLE,
    TABLE,
    ForwardKernel,
    ForwardTable,
    Kernel,
    KernelOf,
    S,
    Table,
)

_INIT = '''\
"""RMSNorm for {title}. Written by Normforge; tune again instead of editing."""

from pathlib import Path

from .runtime.api import Package

_package = Package(Path(__file__).resolve().parent)

PROVENANCE = _package.provenance
explain = _package.explain
graph_pass = _package.graph_pass
inductor_backend = _package.inductor_backend
install = _package.install
installed = _package.installed
patch = _package.patch
rms_norm = _package.rms_norm
rmsnorm_backward = _package.rmsnorm_backward
rmsnorm_forward = _package.rmsnorm_forward
uninstall = _package.uninstall
unpatch = _package.unpatch
use_native = _package.use_native
warmup = _package.warmup

RMSNorm = _package.RMSNorm
RMSNorm.__module__ = __name__  # where pickle finds it

__all__ = [
    "PROVENANCE",
    "RMSNorm",
    "explain",
    "graph_pass",
    "inductor_backend",
    "install",
    "installed",
    "patch",
    "rms_norm",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "uninstall",
    "unpatch",
    "use_native",
    "warmup",
]
'''


class KernelFiles:
    """The kernels of a new package: cubins of all, sources of the tuned ones and the headers that
    these include. package: the one that it takes the place of; sms: multiprocessors of the GPU."""

    def __init__(self, package: Path, sms: int) -> None:
        self.package, self.sms = package, sms
        self.cubins: dict[str, bytes] = {}
        self.sources: dict[str, str] = {}
        self.headers: dict[str, Mapping[str, str]] = {}

    @overload
    def add(self, variant: Variant, compiled: Compiled, *, tuned: bool) -> Kernel: ...
    @overload
    def add(self, variant: ForwardVariant, compiled: Compiled, *, tuned: bool) -> ForwardKernel: ...
    def add(self, variant: Variant | ForwardVariant, compiled: Compiled, *, tuned: bool) -> Any:
        """A new kernel, of today's templates. tuned: its source is to be read."""
        file = self._store(variant.id, compiled.digest, compiled.cubin)
        if tuned:
            self.sources[file] = source_of(variant)
            self.headers[revision(headers())] = headers()
        return KernelOf(
            file=file,
            digest=compiled.digest,
            spec=variant.spec(self.sms),
            nvrtc=compiled.nvrtc,
            config=config_of(variant),
        )

    def keep(self, old: KernelOf[S], what: str, *, tuned: bool) -> KernelOf[S]:
        """A kernel of the old package. Raises NormforgeError, which calls it `what`."""
        try:
            file = self._store(old.spec.name, old.digest, old.read_cubin(self.package))
            if tuned:
                source = (self.package / "kernels" / f"{old.file}.cu").read_text()
                for name in included(source):
                    self._keep_headers(name)
                self.sources[file] = source
        except (OSError, ValueError, RuntimeError) as error:
            raise NormforgeError(
                f"{self.package}: the {what} cannot be kept ({error}): tune that shape again, or "
                "move the folder away to start a new one"
            ) from error
        return replace(old, file=file)

    def _keep_headers(self, name: str) -> None:
        """Raises OSError, ValueError."""
        if name not in self.headers:
            folder = self.package / INCLUDE / name
            texts = {path.name: path.read_text() for path in folder.iterdir()}
            if revision(texts) != name:
                raise ValueError(f"{folder} is not what it was compiled from")
            self.headers[name] = texts

    def _store(self, name: str, digest: str, cubin: bytes) -> str:
        # One variant has two cubins when the templates changed between two winners that share it.
        file = name if self.cubins.get(name) in (None, cubin) else f"{name}_{digest}"
        self.cubins[file] = cubin
        return file


def write_package(
    folder: Path, kernels: KernelFiles, table: Table, forward: ForwardTable | None
) -> None:
    """Write a package to an empty folder. Raises OSError."""
    (folder / "kernels").mkdir()
    for file, source in kernels.sources.items():
        (folder / "kernels" / f"{file}.cu").write_text(source)
    for name, texts in kernels.headers.items():
        (folder / INCLUDE / name).mkdir(parents=True)
        for header, text in texts.items():
            (folder / INCLUDE / name / header).write_text(text)
    write_cubins(folder, kernels.cubins)
    write_code(folder, table)
    (folder / TABLE).write_text(_json(table.to_json()) + "\n")
    if forward is not None:
        (folder / FORWARD_TABLE).write_text(_json(forward.to_json()) + "\n")


def write_cubins(folder: Path, cubins: Mapping[str, bytes]) -> None:
    """Write the container of a package's cubins, equal bytes for equal cubins. Raises OSError."""
    content = BytesIO()
    with ZipFile(content, "w", ZIP_DEFLATED) as container:
        for file, cubin in sorted(cubins.items()):
            about = ZipInfo(f"{file}.cubin")  # of 1980, whenever it is written
            about.compress_type = ZIP_DEFLATED
            about.external_attr = 0o644 << 16
            container.writestr(about, cubin)
    (folder / CUBINS).write_bytes(content.getvalue())


def write_code(folder: Path, table: Table) -> None:
    """Write the Python and C++ of a package, over those that are there. Raises OSError."""
    for name in runtime_files():
        (folder / "runtime" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(RUNTIME / name, folder / "runtime" / name)
    (folder / "__init__.py").write_text(_INIT.format(title=table.target["title"]))


def runtime_files() -> list[Path]:
    """What every package carries a copy of, relative to the runtime's folder."""
    found = (path for suffix in ("py", "cpp", "h") for path in RUNTIME.rglob(f"*.{suffix}"))
    return sorted(path.relative_to(RUNTIME) for path in found)


def refresh(folder: Path) -> None:
    """Bring the code of a package up to date; kernels and tables stay. Raises OSError, ValueError
    for a damaged package."""
    table = Table.load(folder)
    shutil.rmtree(folder / "runtime", ignore_errors=True)
    write_code(folder, table)


def _json(value: Any, margin: str = "") -> str:
    """A JSON value on lines to be read and compared: one for whatever holds no other container."""
    inside = list(value.values() if isinstance(value, dict) else value)
    if not any(isinstance(item, dict | list | tuple) for item in inside):
        return json.dumps(value, sort_keys=True)
    inner = f"{margin} "
    parts = [
        _json(item, inner) if isinstance(item, dict | list | tuple) else json.dumps(item)
        for item in inside
    ]
    opening, closing = "[]"
    if isinstance(value, dict):
        opening, closing = "{}"
        named = zip(value, parts, strict=True)
        parts = [f"{json.dumps(name)}: {part}" for name, part in sorted(named)]
    lines = ",\n".join(inner + part for part in parts)
    return f"{opening}\n{lines}\n{margin}{closing}"


if __name__ == "__main__":
    for package in sys.argv[1:] or GENERATED.glob("*/rmsnorm_backward"):
        refresh(Path(package))
