"""The files of an emitted package: its kernels, its tables, and the runtime that serves them."""

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
from generator.kernels.render import headers
from generator.operations import OPERATIONS
from generator.operations.operation import FrontEnd
from generator.package.cubin_archive import pack_cubins
from generator.package.project import write_project
from generator.package.sources import (
    INCLUDE,
    config_of,
    header_revision,
    included_revisions,
    same_but_for_comments,
    source_of,
    variant_of,
)
from generator.paths import RUNTIME
from generator.problem import RMSNORM_BACKWARD
from generator.runtime.cubins import CUBINS, CUBINS_INDEX
from generator.runtime.table import (
    FORWARD_TABLE,
    TABLE,
    ForwardTable,
    KernelOf,
    S,
    Table,
    seal,
)

_INIT = '''\
"""{norm} for {title}. Written by Normforge; tune again instead of editing."""

from pathlib import Path

from .runtime.{module} import {package}

_package = {package}(Path(__file__).resolve().parent)

PROVENANCE = _package.provenance
{functions}

{norm} = _package.{norm}
{norm}.__module__ = __name__  # where pickle finds it

__all__ = [
{names}
]
'''

_NAME = re.compile(r"\w{1,200}")
_TITLE = re.compile(r"[\w .,+()/-]{1,200}")


class KernelFiles:
    """The kernels of a new package: cubins of all, sources of the tuned ones and the headers that
    these include. Of the forward kernels, which differ in a few constants, one source of each form.
    package: the one that it takes the place of; sms: multiprocessors of the GPU."""

    def __init__(self, package: Path, sms: int) -> None:
        self.package, self.sms = package, sms
        self.cubins: dict[str, bytes] = {}
        self.headers: dict[str, Mapping[str, str]] = {}
        self._sources: dict[str, str] = {}
        self._forwards: dict[str, dict[str, str]] = {}  # by form

    @property
    def sources(self) -> dict[str, str]:
        """Every source that is written, by the name of its kernel. Of a form it is one whose
        headers are there for others as well, if possible that which the old package has."""
        found = dict(self._sources)
        there = {name for source in found.values() for name in included_revisions(source)}

        def order(entry: tuple[str, str]) -> tuple[bool, bool, str]:
            file, source = entry
            headers_there = there.issuperset(included_revisions(source))
            return not headers_there, not self._source_file(file).exists(), file

        found.update(min(same.items(), key=order) for same in self._forwards.values())
        return found

    def _source_file(self, file: str) -> Path:
        return self.package / "kernels" / f"{file}.cu"

    def add(self, variant: AnyVariant, compiled: Compiled, *, tuned: bool) -> KernelOf[Any]:
        """A new kernel, of today's templates. tuned: its source is to be read."""
        file = self._store_cubin(variant.id, compiled.digest, compiled.cubin)
        config = config_of(variant)
        if tuned:
            self._store_source(file, config, source_of(variant))
            self.headers[header_revision(headers())] = headers()
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
                source = path.read_text()
                for name in included_revisions(source):
                    self._keep_headers(name)
                self._store_source(file, old.config, self._todays(source, old))
        except (OSError, ValueError, RuntimeError) as error:
            raise NormforgeError(
                f"{self.package}: the {what} cannot be kept ({error}): tune that shape again, or "
                "move the folder away to start a new one"
            ) from error
        return replace(old, file=file)

    def _todays(self, source: str, old: KernelOf[Any]) -> str:
        """The source as today's templates write it, unless they make other code of the kernel."""
        self.headers[header_revision(headers())] = headers()
        try:
            fresh = source_of(variant_of(old))
            return fresh if same_but_for_comments(source, fresh, self.headers) else source
        except (LookupError, TypeError, ValueError, NormforgeError, TemplateError):
            return source  # of a config or of headers that today's templates do not know

    def _store_source(self, file: str, config: Mapping[str, Any], source: str) -> None:
        same = self._forwards.setdefault(config["form"], {}) if "form" in config else self._sources
        same[file] = source

    def _keep_headers(self, name: str) -> None:
        """Raises OSError, ValueError."""
        if name not in self.headers:
            folder = self.package / INCLUDE / name
            texts = {path.name: path.read_text() for path in folder.iterdir()}
            if header_revision(texts) != name:
                raise ValueError(f"{folder} is not what it was compiled from")
            self.headers[name] = texts

    def _store_cubin(self, name: str, digest: str, cubin: bytes) -> str:
        # One variant has two cubins when the templates changed between two winners that share it.
        file = name if self.cubins.get(name) in (None, cubin) else f"{name}_{digest}"
        self.cubins[file] = cubin
        return file


def write_package(
    folder: Path, kernels: KernelFiles, table: Table, forward: ForwardTable | None
) -> None:
    """Write a package to an empty folder. Raises OSError."""
    (folder / "kernels").mkdir()
    sources = kernels.sources
    for file, source in sources.items():
        (folder / "kernels" / f"{file}.cu").write_text(source)
    for name in {name for source in sources.values() for name in included_revisions(source)}:
        (folder / INCLUDE / name).mkdir(parents=True)
        for header, text in kernels.headers[name].items():
            (folder / INCLUDE / name / header).write_text(text)
    write_cubins(folder, kernels.cubins)
    write_code(folder, table)
    _make_installable(folder, table)
    (folder / TABLE).write_text(seal(_format_json(table.to_json()) + "\n"))
    if forward is not None:
        (folder / FORWARD_TABLE).write_text(seal(_format_json(forward.to_json()) + "\n"))


def write_cubins(folder: Path, cubins: Mapping[str, bytes]) -> None:
    """Write a package's cubins, which are given by name. Raises OSError."""
    archive, index = pack_cubins(cubins)
    (folder / CUBINS).write_bytes(archive)
    (folder / CUBINS_INDEX).write_text(_format_json(index) + "\n")


def write_code(folder: Path, table: Table) -> None:
    """Write the Python and C++ of a package, over those that are there. Raises OSError, and
    ValueError for a title or an operation that cannot be written into it."""
    for path in runtime_files():
        (folder / "runtime" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(RUNTIME / path, folder / "runtime" / path)
    _, title = _gpu(table)
    (folder / "__init__.py").write_text(_init(_operation(table)[1], title))


def _make_installable(folder: Path, table: Table) -> None:
    gpu, title = _gpu(table)
    operation, front_end = _operation(table)
    write_project(folder, operation, gpu, front_end.norm, title)


def _gpu(table: Table) -> tuple[str, str]:
    """Name and title of a package's GPU, which become parts of its files. Raises ValueError."""
    gpu, title = (str(table.target[key]) for key in ("name", "title"))
    for text, form in ((gpu, _NAME), (title, _TITLE)):
        if not form.fullmatch(text):
            raise ValueError(f"{text!r} is no name of a GPU")
    return gpu, title


def _operation(table: Table) -> tuple[str, FrontEnd]:
    """The operation of a package, and its functions. Raises ValueError."""
    name = next((kernel.spec.operation for kernel in table.kernels()), RMSNORM_BACKWARD)
    front_end = OPERATIONS[name].front_end if name in OPERATIONS else None
    if front_end is None:
        raise ValueError(f"{name!r} is no operation that has a package")
    return name, front_end


def _init(front_end: FrontEnd, title: str) -> str:
    names = sorted(("PROVENANCE", front_end.norm, *front_end.functions))
    return _INIT.format(
        title=title,
        norm=front_end.norm,
        module=front_end.module,
        package=front_end.package,
        functions="\n".join(f"{name} = _package.{name}" for name in front_end.functions),
        names="\n".join(f'    "{name}",' for name in names),
    )


def runtime_files() -> list[Path]:
    """What every package carries a copy of, relative to the runtime's folder."""
    found = (path for suffix in ("py", "cpp", "h") for path in RUNTIME.rglob(f"*.{suffix}"))
    return sorted(path.relative_to(RUNTIME) for path in found)


def refresh(folder: Path) -> None:
    """Bring the code of a package up to date; kernels and tables stay as they are, but a table that
    has no digest gets one. Raises OSError, ValueError for a damaged package."""
    table = Table.load(folder)
    for path in (folder / TABLE, folder / FORWARD_TABLE):
        if path.exists() and "digest" not in json.loads(text := path.read_text()):
            path.write_text(seal(text))
    shutil.rmtree(folder / "runtime", ignore_errors=True)
    write_code(folder, table)
    _make_installable(folder, table)


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
