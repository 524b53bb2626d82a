"""The files of an emitted package: its kernels, its tables, and a stub with its functions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from generator.errors import NormforgeError
from generator.kernels.code_digest import AnyVariant
from generator.kernels.nvrtc import Compiled
from generator.operations import OPERATIONS
from generator.operations.operation import FrontEnd
from generator.own_files import FILES
from generator.package.cubin_archive import pack_cubins
from generator.package.sources import (
    config_of,
    is_same_code,
    old_headers,
    source_of,
    variant_of,
    with_old_headers,
)
from generator.problem import RMSNORM_BACKWARD
from normforge.cubins import CUBINS, CUBINS_INDEX
from normforge.own import NAME as OPERATION_FILE
from normforge.table import (
    FORWARD_TABLE,
    TABLE,
    ForwardTable,
    KernelOf,
    S,
    Table,
    seal,
)

_INIT = '''\
"""{what} for {title}.{unverified} Written by Normforge; tune again instead of editing."""

{opening}

PROVENANCE = _package.provenance
{functions}
{layer}
__all__ = [
{names}
]
'''
_LAYER = """
{norm} = _package.{norm}
{norm}.__module__ = __name__  # where pickle finds it
"""
_BY_LIBRARY = """\
try:
    from normforge.packages import open_package
except ImportError as error:
    raise ImportError(
        f"{{__name__}} needs the library normforge ({{error}}): install it, or make a package that "
        "stands alone with `python tune.py export --standalone`"
    ) from error

_package = open_package(__file__, __name__, "{operation}")"""

_NAME = re.compile(r"\w{1,200}")
_GPU = re.compile(r"[\w-]{1,200}")
_TITLE = re.compile(r"[\w .,+()/-]{1,200}")


UNVERIFIED = "// Unverified: a model chose this kernel, and it has not run on this GPU.\n"
"""The first line of the source of a kernel that no measured shape has."""


class KernelFiles:
    """The kernels of a new package: cubins of all, and sources of the tuned ones. Of the forward
    kernels, which differ in a few constants, one source of each form. package: the one that it
    takes the place of; sms: multiprocessors of the GPU."""

    def __init__(self, package: Path, sms: int) -> None:
        self.package, self.sms = package, sms
        self.cubins: dict[str, bytes] = {}
        self._sources: dict[str, str] = {}
        self._forwards: dict[str, dict[str, str]] = {}  # by form
        self._old_headers: dict[str, dict[str, str]] | None = None

    @property
    def sources(self) -> dict[str, str]:
        """Every source that is written, by the name of its kernel. Of a form it is one that the old
        package has, if there is one."""
        found = dict(self._sources)
        found.update(
            min(same.items(), key=lambda entry: (not self._source_file(entry[0]).exists(), entry))
            for same in self._forwards.values()
        )
        return found

    def _source_file(self, file: str) -> Path:
        return self.package / "kernels" / f"{file}.cu"

    def add(self, variant: AnyVariant, compiled: Compiled, *, tuned: bool) -> KernelOf[Any]:
        """A new kernel, of today's templates. tuned: its source is to be read."""
        file = self._store_cubin(variant.id, compiled.digest, compiled.cubin)
        config = config_of(variant)
        if tuned:
            self._store_source(file, config, source_of(variant))
        return KernelOf(file, compiled.digest, variant.spec(self.sms), compiled.nvrtc, config)

    def keep(self, old: KernelOf[S], what: str, *, tuned: bool) -> KernelOf[S]:
        """A kernel of the old package. Raises NormforgeError, which calls it `what`."""
        try:
            file = self._store_cubin(
                _checked_name(old.spec.name),
                _checked_name(old.digest),
                old.read_cubin(self.package),
            )
            path = self._source_file(_checked_name(old.file))
            if tuned and ("form" not in old.config or path.exists()):
                self._store_source(
                    file, old.config, self._todays(path.read_text(encoding="utf-8"), old)
                )
        except (OSError, LookupError, ValueError, RuntimeError) as error:
            raise NormforgeError(
                f"{self.package}: the {what} cannot be kept ({error}): tune that shape again, or "
                "move the folder away to start a new one"
            ) from error
        return replace(old, file=file)

    def _todays(self, source: str, old: KernelOf[Any]) -> str:
        """The source as today's templates write it, unless they make other code of the kernel:
        then as it was, and its last line says which headers it needs. Raises LookupError where
        headers are missing that a source had in a folder of its own."""
        if self._old_headers is None:
            self._old_headers = old_headers(self.package)
        folders = self._old_headers
        try:
            todays = source_of(variant_of(old))
        except (LookupError, TypeError, ValueError, NormforgeError, TemplateError):
            todays = ""  # today's templates do not know the config
        same = todays and is_same_code(source, todays, folders)
        return todays if same else with_old_headers(source, folders)

    def _store_source(self, file: str, config: Mapping[str, Any], source: str) -> None:
        same = self._forwards.setdefault(config["form"], {}) if "form" in config else self._sources
        same[file] = source

    def _store_cubin(self, name: str, digest: str, cubin: bytes) -> str:
        # One variant has two cubins when the templates changed between two winners that share it.
        file = name if self.cubins.get(name) in (None, cubin) else f"{name}_{digest}"
        self.cubins[file] = cubin
        return file


def write_package(
    folder: Path, kernels: KernelFiles, table: Table, forward: ForwardTable | None
) -> None:
    """Write a package to an empty folder. Raises OSError, and ValueError for a title or an
    operation that cannot be written into it."""
    (folder / "kernels").mkdir()
    measured = {entry.kernel.file for entry in table.tuned if entry.evidence == "measured"}
    if forward is not None:
        measured |= {entry.kernel.file for entry in forward.tuned if entry.evidence == "measured"}
    for file, source in kernels.sources.items():
        text = source.removeprefix(UNVERIFIED)
        text = text if file in measured else UNVERIFIED + text
        (folder / "kernels" / f"{file}.cu").write_text(text, encoding="utf-8")
    write_cubins(folder, kernels.cubins)
    write_stub(folder, table)
    if table_operation := FILES.get(operation_of_table(table)[0]):
        shutil.copyfile(table_operation, folder / OPERATION_FILE)
    (folder / TABLE).write_text(seal(_format_json(table.to_json()) + "\n"), encoding="utf-8")
    if forward is not None:
        (folder / FORWARD_TABLE).write_text(
            seal(_format_json(forward.to_json()) + "\n"), encoding="utf-8"
        )


def write_cubins(folder: Path, cubins: Mapping[str, bytes]) -> None:
    """Write a package's cubins, which are given by name. Raises OSError."""
    archive, index = pack_cubins(cubins)
    (folder / CUBINS).write_bytes(archive)
    (folder / CUBINS_INDEX).write_text(_format_json(index) + "\n", encoding="utf-8")


def write_stub(folder: Path, table: Table, opening: str = _BY_LIBRARY) -> None:
    """Write the `__init__.py` of a package. opening: the code that makes `_package`, with fields
    for the operation and its front end. Raises OSError, ValueError."""
    operation, front_end = operation_of_table(table)
    _, title = gpu_of_table(table)
    layers = [front_end.norm] if front_end.norm else []
    names = sorted(["PROVENANCE", *layers, *front_end.functions])
    text = _INIT.format(
        what=front_end.norm or operation,
        title=title,
        unverified=unverified(table),
        layer="".join(_LAYER.format(norm=layer) for layer in layers),
        opening=opening.format(operation=operation, **vars(front_end)),
        functions="\n".join(f"{name} = _package.{name}" for name in front_end.functions),
        names="\n".join(f'    "{name}",' for name in names),
    )
    (folder / "__init__.py").write_text(text, encoding="utf-8")


def unverified(table: Table) -> str:
    """A sentence behind a blank where kernels of a package have not run on its GPU, else ""."""
    count = sum(tuned.evidence == "predicted" for tuned in table.tuned)
    if not count:
        return ""
    which = "its kernels" if count == len(table.tuned) else f"{count} kernels"
    return f" Unverified: {which} were chosen by a model and have not run on this GPU."


def gpu_of_table(table: Table) -> tuple[str, str]:
    """Name and title of a package's GPU, which become parts of its files. Raises ValueError."""
    gpu, title = (str(table.target[key]) for key in ("name", "title"))
    for text, form in ((gpu, _GPU), (title, _TITLE)):
        if not form.fullmatch(text):
            raise ValueError(f"{text!r} is no name of a GPU")
    return gpu, title


def operation_of_table(table: Table) -> tuple[str, FrontEnd]:
    """The operation of a package, and its functions. Raises ValueError."""
    name = next((kernel.spec.operation for kernel in table.kernels()), RMSNORM_BACKWARD)
    front_end = OPERATIONS[name].front_end if name in OPERATIONS else None
    if front_end is None:
        raise ValueError(f"{name!r} is no operation that has a package")
    return name, front_end


def _checked_name(name: str) -> str:
    """A name that a table gives to a file: somebody else's may say anything. Raises ValueError."""
    if not _NAME.fullmatch(str(name)):
        raise ValueError(f"{name!r} is no name of a kernel")
    return name


def _format_json(value: Any, margin: str = "") -> str:
    """A JSON value on lines to be read and compared: one for whatever holds no other container."""
    inside = list(value.values() if isinstance(value, dict) else value)
    if not any(isinstance(item, dict | list | tuple) for item in inside):
        return json.dumps(value, sort_keys=True)
    inner = f"{margin} "
    parts = [
        _format_json(item, inner) if isinstance(item, dict | list | tuple) else json.dumps(item)
        for item in inside
    ]
    opening, closing = "[]"
    if isinstance(value, dict):
        opening, closing = "{}"
        named = zip(value, parts, strict=True)
        parts = [f"{json.dumps(name)}: {part}" for name, part in sorted(named)]
    lines = ",\n".join(inner + part for part in parts)
    return f"{opening}\n{lines}\n{margin}{closing}"
