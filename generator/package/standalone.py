"""Packages that stand alone: with a copy of the library, they need only PyTorch and cuda-python."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError
from generator.kernels.render import headers
from generator.package.atomic_folder import check_writable, replacing_folder, writer_lock
from generator.package.files import (
    gpu_of_table,
    operation_of_table,
    unverified,
    write_stub,
)
from generator.package.sources import old_headers, with_old_headers
from generator.paths import LIBRARY, REPOSITORY, program_version
from normforge.cubins import CUBINS, CUBINS_INDEX, read_cubins
from normforge.table import FORWARD_TABLE, TABLE, ForwardTable, Table

RUNTIME = "runtime"
"""The folder of a package with its copy of the library."""
INCLUDE = "include"
"""The folder of a package with its headers."""
_OF_ALL_PACKAGES = (
    "__init__",
    "packages",
    "this_gpu",
    "generated",
    "rmsnorm",
    "batch_invariant",
    "layernorm",
    "gated",
    "gated_packages",
    "rope",
    "rope_packages",
    "quantized",
    "quantized_packages",
    "torchtitan",
)
"""Modules of the library that choose between packages; a package has no use for them."""
_OPENING = """\
from pathlib import Path

from .runtime.{module} import {package}

_package = {package}(Path(__file__).resolve().parent, "{operation}")"""
_IDENTITY = '''\
"""The name under which this copy of the library is known to PyTorch."""

NAMESPACE = "{namespace}"
"""The namespace of its operators."""
'''
_INIT = '''\
"""A copy of the library Normforge {version}, for the package that this folder is in."""
'''
_WRITTEN, _EXPORTED = "Written by Normforge", "Exported by Normforge, which may replace it"
"""First words of pyproject.toml: nobody may replace what the tuner wrote."""
_PROJECT = """\
# {marker}. `pip install .` in this folder installs it as `{module}`.

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "{version}"
description = "{norm} for {title}.{unverified}"
license = "Apache-2.0"
license-files = ["LICENSE"]
requires-python = ">=3.10"
dependencies = ["torch>=2.9", "cuda-python>=13.0"]

[tool.setuptools]
packages = [
{packages}
]
package-dir = {{ "{module}" = "." }}

[tool.setuptools.package-data]
"*" = ["py.typed", "*.json", "*.xz", "include/*", "kernels/*", "*.cpp", "*.h"]
"""


def library_files() -> list[Path]:
    """Return the files that a package that stands alone has a copy of, relative to the library's
    folder."""
    found = (path for suffix in ("py", "cpp", "h") for path in LIBRARY.rglob(f"*.{suffix}"))
    files = sorted(path.relative_to(LIBRARY) for path in found)
    return [
        path
        for path in files
        if path.parts[0] != "generated" and str(path) not in map("{}.py".format, _OF_ALL_PACKAGES)
    ]


def stands_alone(package: Path) -> bool:
    """Return True if a package has a copy of the library, as all had that older versions wrote."""
    return (package / RUNTIME).is_dir()


def add_library(folder: Path, *, exported: bool = False) -> None:
    """Let the package in a folder stand alone: add the library, the headers, and what makes it
    installable. exported: whether another export may replace it. Raises OSError, ValueError."""
    table = Table.load(folder)
    operation, front_end = operation_of_table(table)
    gpu, title = gpu_of_table(table)
    module = f"normforge_{gpu}_{operation}".replace("-", "_")
    write_runtime(folder, f"{module}_{_digest(folder)}")
    write_stub(folder, table, _OPENING)
    parts = [path.parent.parts for path in library_files() if path.name == "__init__.py"]
    packages = [module, f"{module}.{RUNTIME}", *(".".join((module, RUNTIME, *p)) for p in parts)]
    project = _PROJECT.format(
        marker=_EXPORTED if exported else _WRITTEN,
        module=module,
        name=module.replace("_", "-"),
        version=program_version(),
        norm=front_end.norm or operation,
        title=title,
        unverified=unverified(table),
        packages="\n".join(f'    "{name}",' for name in sorted(packages)),
    )
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    (folder / "py.typed").touch()
    shutil.copyfile(REPOSITORY / "LICENSE", folder / "LICENSE")


def write_runtime(folder: Path, namespace: str) -> None:
    """Write the library and the headers to the folder of a package. namespace: of its operators.
    Raises OSError."""
    runtime, include = folder / RUNTIME, folder / INCLUDE
    for path in library_files():
        (runtime / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(LIBRARY / path, runtime / path)
    (runtime / "identity.py").write_text(_IDENTITY.format(namespace=namespace), encoding="utf-8")
    (runtime / "__init__.py").write_text(_INIT.format(version=program_version()), encoding="utf-8")
    include.mkdir()
    for name, text in headers().items():
        (include / name).write_text(text, encoding="utf-8")


def _digest(folder: Path) -> str:
    """Eight hex digits over the tables of a package and the library: two packages in one process
    have operators of their own, and so has one that was exported again."""
    content = hashlib.sha256()
    tables = (folder / name for name in (TABLE, FORWARD_TABLE))
    for path in chain(tables, (LIBRARY / name for name in library_files())):
        if path.exists():
            content.update(path.read_bytes())
    return content.hexdigest()[:8]


# ---- Export --------------------------------------------------------------------------------------


def read_package(package: Path, gpu: str | None = None) -> tuple[Table, ForwardTable | None]:
    """The tables of a package whose kernels are all there. gpu: whose package it has to be. Raises
    NormforgeError."""
    try:
        table, forward = Table.load(package), ForwardTable.load(package)
        kernels = (*table.kernels(), *(forward.kernels() if forward else ()))
        read_cubins(package, {kernel.file: kernel.digest for kernel in kernels})
    except (FileNotFoundError, NotADirectoryError):
        raise NormforgeError(
            f"there is no package at {package}: choose one with --gpu or --out, or tune it first"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise NormforgeError(f"{package} cannot be exported ({error})") from error
    if gpu not in (None, table.target["name"]):
        raise NormforgeError(f"{package} is for {table.target['name']}, not for {gpu}")
    return table, forward


def copy_kernels(package: Path, folder: Path) -> None:
    """Copy the tables and the kernels of a package. Raises OSError."""
    for name in (TABLE, FORWARD_TABLE, CUBINS, CUBINS_INDEX):
        if (package / name).exists():
            shutil.copyfile(package / name, folder / name)
    (folder / "kernels").mkdir()
    headers_of = old_headers(package)
    for path in (package / "kernels").glob("*.cu"):
        source = with_old_headers(path.read_text(encoding="utf-8"), headers_of)
        (folder / "kernels" / path.name).write_text(source, encoding="utf-8")


def write_export(
    folder: Path, option: str, is_export: Callable[[Path], bool], write: Callable[[Path], Any]
) -> None:
    """Write an export with `write` to a folder that is missing, empty or an earlier one. option:
    that of the command line which names it. Raises NormforgeError, leaving the folder as it was."""
    check_writable(folder, option)
    with writer_lock(folder):
        try:
            free = not folder.exists() or not any(folder.iterdir()) or is_export(folder)
        except (OSError, ValueError, LookupError, TypeError):
            free = False
        if not free:
            raise NormforgeError(
                f"{folder} is not empty and no earlier export: choose another folder with {option}"
            )
        with replacing_folder(folder) as fresh:
            try:
                write(fresh)
            except ValueError as error:
                raise NormforgeError(f"it cannot be exported ({error})") from error


def export_standalone(package: Path, folder: Path, gpu: str | None = None) -> Table:
    """Write a package to `folder` so that it stands alone; its table. gpu: whose package it has to
    be. Raises NormforgeError, leaving the folder as it was, for a package that is missing, damaged
    or of another GPU, and a folder that cannot be written or holds anything but an earlier
    export."""
    table, _ = read_package(package, gpu)

    def write(fresh: Path) -> None:
        copy_kernels(package, fresh)
        add_library(fresh, exported=True)

    write_export(folder.resolve(), "--standalone", _is_standalone, write)
    return table


def _is_standalone(folder: Path) -> bool:
    """Return True if all of a folder is an export, with what `pip install` leaves."""
    if not (folder / "pyproject.toml").read_text(encoding="utf-8").startswith(f"# {_EXPORTED}"):
        return False
    known = {TABLE, FORWARD_TABLE, CUBINS, CUBINS_INDEX, "kernels", INCLUDE, RUNTIME, "LICENSE"}
    known |= {"__init__.py", "pyproject.toml", "py.typed", "__pycache__", "build"}
    names = {path.name for path in folder.iterdir() if path.suffix not in (".egg-info", ".whl")}
    return names <= known
