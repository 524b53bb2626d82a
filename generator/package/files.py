"""The files of an emitted package: its kernels, its tables, and the runtime that serves them.

`python -m generator.package.files [folder ...]` copies today's runtime into packages, by default
into those of generated/."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.forward import ForwardVariant
from generator.kernels.nvrtc import Compiled
from generator.kernels.variant import Variant
from generator.paths import GENERATED, RUNTIME
from generator.runtime.forward_table import FORWARD_TABLE, ForwardKernel, ForwardTable
from generator.runtime.table import TABLE, Kernel, Table, Tuned
from generator.target import Target

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
rms_norm = _package.rms_norm
rmsnorm_backward = _package.rmsnorm_backward
uninstall = _package.uninstall
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
    "rms_norm",
    "rmsnorm_backward",
    "uninstall",
    "use_native",
    "warmup",
]
'''


class KernelFiles:
    """The kernels/ folder of a new package: content by file name."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    def add(self, variant: Variant, compiled: Compiled, target: Target) -> Kernel:
        file = self._store(variant.id, compiled.digest, compiled.source.encode(), compiled.cubin)
        return Kernel(file, compiled.digest, variant.spec(target.sms))

    def add_forward(
        self, variant: ForwardVariant, compiled: Compiled, target: Target
    ) -> ForwardKernel:
        file = self._store(variant.id, compiled.digest, compiled.source.encode(), compiled.cubin)
        return ForwardKernel(file, compiled.digest, variant.spec(target.sms))

    def keep_forward(self, old: ForwardKernel, package: Path) -> ForwardKernel:
        """A forward taken over from the old package."""
        file = self._keep(old, package, f"forward {old.file}", "move the folder away")
        return ForwardKernel(file, old.digest, old.spec)

    def keep(self, tuned: Tuned, package: Path) -> Tuned:
        """The same entry with its kernel taken over from the old package."""
        old, what = tuned.kernel, f"kernel of {tuned.shape}"
        file = self._keep(old, package, what, "tune that shape again, or move the folder away")
        return Tuned(**{**vars(tuned), "kernel": Kernel(file, old.digest, old.spec)})

    def _keep(self, old: Kernel | ForwardKernel, package: Path, what: str, advice: str) -> str:
        """The file's name in the new package."""
        try:
            cubin = old.read_cubin(package)
            source = (package / "kernels" / f"{old.file}.cu").read_bytes()
        except (OSError, RuntimeError) as error:
            raise NormforgeError(
                f"{package}: the {what} cannot be kept ({error}): {advice} to start a new one"
            ) from error
        return self._store(old.spec.name, old.digest, source, cubin)

    def _store(self, name: str, digest: str, source: bytes, cubin: bytes) -> str:
        # One variant has two cubins when the templates changed between two winners that share it.
        taken = self.contents.get(f"{name}.cubin")
        file = name if taken in (None, cubin) else f"{name}_{digest}"
        self.contents[f"{file}.cubin"] = cubin
        self.contents[f"{file}.cu"] = source
        return file


def write_package(
    folder: Path, kernels: KernelFiles, table: Table, forward: ForwardTable | None
) -> None:
    """Write a package to an empty folder. Raises OSError."""
    (folder / "kernels").mkdir()
    for name, content in kernels.contents.items():
        (folder / "kernels" / name).write_bytes(content)
    write_code(folder, table)
    (folder / TABLE).write_text(_json(table.to_json()))
    if forward is not None:
        (folder / FORWARD_TABLE).write_text(_json(forward.to_json()))


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


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for package in sys.argv[1:] or GENERATED.glob("*/rmsnorm_backward"):
        refresh(Path(package))
