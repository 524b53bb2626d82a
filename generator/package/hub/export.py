"""An emitted package as a repository of Hugging Face's `kernels`."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from generator.errors import NormforgeError
from generator.package.atomic_folder import check_writable, replacing_folder, writer_lock
from generator.package.files import write_code
from generator.package.hub.texts import CARD, INIT, LAYERS
from generator.package.sources import INCLUDE
from generator.paths import REPOSITORY
from generator.problem import RMSNORM_BACKWARD
from generator.runtime.cubins import CUBINS, CUBINS_INDEX
from generator.runtime.table import FORWARD_TABLE, TABLE, ForwardTable, Table

WITH_LAYERS = (RMSNORM_BACKWARD,)
"""Those that have layers to export."""
VARIANT = "torch-cuda"
"""The build for any PyTorch with CUDA: nothing in it is compiled against PyTorch."""
METADATA = "metadata.json"
_BINDINGS = Path("runtime", "launch", "cuda_api.py")
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
    table, forward = _read(package)
    if gpu not in (None, table.target["name"]):
        raise NormforgeError(f"{package} is for {table.target['name']}, not for {gpu}")
    folder = folder.resolve()
    check_writable(folder, "--hf")
    with writer_lock(folder):
        _check_replaceable(folder)
        with replacing_folder(folder) as fresh:
            build = fresh / "build" / VARIANT
            build.mkdir(parents=True)
            try:
                _write_build(build, package, table)
            except ValueError as error:
                raise NormforgeError(f"{package} cannot be exported ({error})") from error
            metadata = _metadata(build, table)
            (build / METADATA).write_text(json.dumps(metadata, indent=2) + "\n")
            (fresh / "README.md").write_text(_card(table, forward, str(metadata["name"])))
            shutil.copyfile(REPOSITORY / "LICENSE", fresh / "LICENSE")
    return table


def _read(package: Path) -> tuple[Table, ForwardTable | None]:
    """The tables of a package whose kernels are all there. Raises NormforgeError."""
    try:
        table, forward = Table.load(package), ForwardTable.load(package)
        for kernel in (*table.kernels(), *(forward.kernels() if forward else ())):
            kernel.read_cubin(package)
    except (FileNotFoundError, NotADirectoryError):
        raise NormforgeError(
            f"there is no package at {package}: choose one with --gpu or --out, or tune it first"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise NormforgeError(f"{package} cannot be exported ({error})") from error
    return table, forward


def _check_replaceable(folder: Path) -> None:
    """Raise NormforgeError unless a folder is missing, empty or all of it an earlier export."""
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
        if not names:
            return
        build = folder / "build"
        if names <= _TOP and [path.name for path in build.iterdir()] == [VARIANT]:
            identity = json.loads((build / VARIANT / METADATA).read_text())["id"]
            if str(identity).startswith(_ID):
                return
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise NormforgeError(
        f"{folder} is not empty and no earlier export: choose another folder with --hf"
    )


def _write_build(build: Path, package: Path, table: Table) -> None:
    """The importable part, without its metadata. Raises OSError."""
    write_code(build, table)
    shutil.copyfile(Path(__file__).with_name("bindings.py"), build / _BINDINGS)
    with (build / "__init__.py").open("a") as init:
        init.write(INIT)
    (build / "layers.py").write_text(LAYERS)
    for name in (TABLE, FORWARD_TABLE, CUBINS, CUBINS_INDEX):
        if (package / name).exists():
            shutil.copyfile(package / name, build / name)
    for name in ("kernels", INCLUDE):
        if (package / name).exists():
            shutil.copytree(package / name, build / name)


def _metadata(build: Path, table: Table) -> dict[str, object]:
    """What `kernels` reads. The id becomes the module's name, so it changes with the content."""
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
    """sm_90a as `kernels` writes it: 9.0a."""
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
    return CARD.format(
        name=name,
        title=table.target["title"],
        arch=table.target["arch"],
        shapes=shapes or "none",
        kernels=len({kernel.file for kernel in kernels}),
    )
