"""An emitted package as a repository of Hugging Face's `kernels`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from generator.errors import NormforgeError
from generator.package.files import unverified
from generator.package.hub.texts import CARD, INIT, LAYERS, PREDICTED, VERIFIED
from generator.package.standalone import (
    RUNTIME,
    add_library,
    copy_kernels,
    read_package,
    write_export,
)
from generator.paths import REPOSITORY
from generator.problem import RMSNORM_BACKWARD
from normforge.table import ForwardTable, Table

WITH_LAYERS = (RMSNORM_BACKWARD,)
"""Operations that have layers to export."""
VARIANT = "torch-cuda"
"""The build for any PyTorch with CUDA: nothing in it is compiled against PyTorch."""
METADATA = "metadata.json"
_BINDINGS = Path(RUNTIME, "launch", "cuda_api.py")
_ID = "_normforge_"
_TOP = {"build", "README.md", "LICENSE"}


def export_package(package: Path, folder: Path, gpu: str | None = None) -> Table:
    """Write a package to `folder` as a repository, equal files for equal packages; its table. gpu:
    whose package it has to be. Raises NormforgeError, leaving the folder as it was, for an
    operation without layers, a package that is missing, damaged or of another GPU, and a folder
    that cannot be written or holds anything but an earlier export."""
    operation = package.name
    if operation not in WITH_LAYERS:
        raise NormforgeError(f"{operation} has no layers to export, only {', '.join(WITH_LAYERS)}")
    table, forward = read_package(package, gpu)

    def write(fresh: Path) -> None:
        build = fresh / "build" / VARIANT
        build.mkdir(parents=True)
        _write_build(build, package)
        metadata = _metadata(build, table)
        (build / METADATA).write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
        (fresh / "README.md").write_text(
            _card(table, forward, str(metadata["name"])), encoding="utf-8"
        )
        shutil.copyfile(REPOSITORY / "LICENSE", fresh / "LICENSE")

    write_export(folder.resolve(), "--hf", _is_export, write)
    return table


def _is_export(folder: Path) -> bool:
    """Return True if all of a folder is a repository that was exported."""
    build = folder / "build"
    if {path.name for path in folder.iterdir()} - _TOP:
        return False
    if [path.name for path in build.iterdir()] != [VARIANT]:
        return False
    identity = json.loads((build / VARIANT / METADATA).read_text(encoding="utf-8"))["id"]
    return str(identity).startswith(_ID)


def _write_build(build: Path, package: Path) -> None:
    """The importable part, without its metadata. Raises OSError, ValueError."""
    copy_kernels(package, build)
    add_library(build)
    for name in ("pyproject.toml", "LICENSE", "py.typed"):  # pip does not see this folder
        (build / name).unlink()
    shutil.copyfile(Path(__file__).with_name("bindings.py"), build / _BINDINGS)
    with (build / "__init__.py").open("a", encoding="utf-8") as init:
        init.write(INIT)
    (build / "layers.py").write_text(LAYERS, encoding="utf-8")


def _metadata(build: Path, table: Table) -> dict[str, object]:
    """Return the metadata that `kernels` reads. The id becomes the module's name, so it changes
    with the content."""
    content = hashlib.sha256()
    for path in sorted(path for path in build.rglob("*") if path.is_file()):
        content.update(f"{path.relative_to(build).as_posix()}\0".encode() + path.read_bytes())
    gpu = str(table.target["name"])
    return {
        "name": f"normforge-rmsnorm-{gpu.replace('_', '-')}",
        "id": f"{_ID}rmsnorm_{gpu.replace('-', '_')}_{content.hexdigest()[:12]}",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [_capability(str(table.target["arch"]))]},
    }


def _capability(arch: str) -> str:
    """Return the compute capability of an arch as `kernels` writes it, 9.0a for sm_90a."""
    digits = arch.removeprefix("sm_").removesuffix("a")
    return f"{digits[:-1]}.{digits[-1]}" + ("a" if arch.endswith("a") else "")


def _card(table: Table, forward: ForwardTable | None, name: str) -> str:
    said = {
        "measured": "timed and checked on that GPU",
        "predicted": "chosen by a model: nobody has timed them",
    }
    counts = {kind: sum(tuned.evidence == kind for tuned in table.tuned) for kind in said}
    shapes = "; ".join(f"{count}, {said[kind]}" for kind, count in counts.items() if count)
    kernels = [*table.kernels(), *(forward.kernels() if forward else ())]
    doubt = unverified(table).strip()
    return CARD.format(
        name=name,
        bits=PREDICTED.format(unverified=doubt) if doubt else VERIFIED,
        title=table.target["title"],
        arch=table.target["arch"],
        shapes=shapes or "none",
        kernels=len({kernel.file for kernel in kernels}),
    )
