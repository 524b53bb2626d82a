"""The common part of the functions of operations over rows, each of which has a server: those of a
package, or of all packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from importlib import import_module
from pathlib import Path
from pickle import PicklingError
from typing import Any, ClassVar

import torch

from ..native.native import Native
from ..operations import OPERATIONS, RowOperation
from ..serve.checks import foreign_device
from ..serve.kernels import Source, source_of
from ..serve.options import DTYPES
from ..serve.rows import RowServer
from ..table import Table
from .library import Served, namespace

_MANY = 4096
"""Rows for which a kernel is asked where their number is not known."""


def _named(functions: type[RowFunctions], name: str) -> Any:
    """Return functions by their name, also in a process that has used none yet."""
    import_module(f"..{functions.packages}", __package__)
    return functions.served(name)


class RowFunctions:
    """Functions of operations over rows. Safe to use from several threads.

    served: those of the operators. packages: the module that finds them by their names.
    """

    served: ClassVar[Served[Any]]
    packages: ClassVar[str]

    def __init__(self, sources: Callable[[str], Source | str], name: str) -> None:
        """sources: by operation, where its kernels are, or why there are none; asked at the first
        call that needs them. name: by which operators know these functions."""
        self.name, self._sources = name, sources
        self._servers: dict[str, RowServer] = {}
        self.served.add(name, self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference by the name that operators know, so that models that keep a function
        can be pickled. Raises PicklingError where another package has taken the name."""
        if self.served.known.get(self.name) is not self:
            raise PicklingError(f"another package has taken the name {self.name}")
        return _named, (type(self), self.name)

    def __deepcopy__(self, _: Any) -> Any:
        return self

    def retire(self) -> None:
        """Do nothing: another package has taken the name, and nothing has to be given back."""

    def of_form(self, form: str) -> Any:
        """Raise LookupError: there are no forms of such packages."""
        raise LookupError(form)

    @property
    def operators(self) -> Any:
        """The operators, as torch.compile and policies of selective checkpointing see them."""
        return getattr(torch.ops, namespace)

    def server(self, operation: RowOperation) -> RowServer:
        """Return the server of the calls of an operation."""
        found = self._servers.get(operation.name)
        if found is None:
            made = RowServer(operation, self._sources(operation.name))
            found = self._servers.setdefault(operation.name, made)
        return found

    def have_kernels(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        operations: Iterable[RowOperation],
        *,
        offset: bool = False,
        **options: Any,
    ) -> bool:
        """Return True if all of some operations have kernels for rows like x, which may be a fake
        of sizes that tracing does not know. options: as of `has_kernel`."""
        asked = asked_of(x, weight)
        if asked is None:
            return False
        servers = map(self.server, operations)
        return all(has_kernel(server, *asked, offset=offset, **options) for server in servers)


def provenance_of(source: Source) -> dict[str, Any]:
    """Return the target of a package, and how the kernel of every tuned shape was found and
    checked."""
    table = source(None).backward
    shapes = {entry.shape: dict(entry.provenance) for entry in table.tuned}
    return {"target": table.target, "shapes": shapes}


class OneOperation:
    """The kernels of a package, which are of one operation. Making one compiles nothing and does
    not touch CUDA."""

    def __init__(self, folder: Path, known: Collection[str], what: str) -> None:
        """known: the operations that it may have kernels of; what: a word for them. Raises
        ValueError for a damaged package and one of another operation, OSError for none."""
        self.folder = folder
        self.operation = next((k.spec.operation for k in Table.load(folder).kernels()), "")
        if self.operation not in known:
            raise ValueError(f"{folder} has no kernels of {what}")
        self.source = source_of(folder, self.operation)

    def source_for(self, name: str) -> Callable[[str], Source | str]:
        """Return the function that gives the kernels of an operation, or says why a package of
        this name has none."""

        def source(operation: str) -> Source | str:
            if operation == self.operation:
                return self.source
            return f"{name} has kernels of {self.operation} alone"

        return source

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        return provenance_of(self.source)


def sizes_of(x: torch.Tensor) -> tuple[int, int] | None:
    """Return M and N of rows, which may be a fake of sizes that tracing does not know: then as of
    many rows. None where N is not known."""
    *rows, width = x.shape
    if not isinstance(width, int):
        return None
    known = all(isinstance(size, int) for size in rows)
    return max(1, x.shape[:-1].numel()) if known else _MANY, width


def asked_of(x: torch.Tensor, weight: torch.Tensor | None) -> tuple[int, int, str, str] | None:
    """Return M, N and the dtypes of rows and weight, as kernels are asked for; None where none may
    serve. x: as of `sizes_of`."""
    scale, sizes = x if weight is None else weight, sizes_of(x)
    if not x.is_cuda or x.dtype not in DTYPES or scale.dtype not in DTYPES or sizes is None:
        return None
    return *sizes, DTYPES[x.dtype], DTYPES[scale.dtype]


def has_kernel(
    server: RowServer, M: int, N: int, dtype: str, weight: str, *, offset: bool, **options: Any
) -> bool:
    """Return True if there is a kernel for such rows, or one without the offset for the sum of
    weight and offset. weight: its dtype; the other arguments are those of `RowServer.explain`."""
    asked = [(weight, offset), *[("fp32", False)] * offset]
    found = (server.explain(M, N, dtype, of, offset=added, **options) for of, added in asked)
    return any(one["kernel"] is not None for one in found)


class ForwardKernels:
    """The kernels of one forward, which are looked for at the first call on a GPU. Safe to use from
    several threads.

    source: finds them, or says why there are none. native: is told what served a call.
    """

    def __init__(
        self,
        operation: RowOperation,
        source: Callable[[], Source | str],
        native: Native | None = None,
    ) -> None:
        self._operation, self._native = operation, native
        self.by(source)

    def by(self, source: Callable[[], Source | str]) -> None:
        """Let other kernels serve."""
        self._source = source
        self._server: RowServer | None = None

    @property
    def server(self) -> RowServer:
        if self._server is None:
            self._server = RowServer(self._operation, self._source(), self._native)
        return self._server

    @property
    def missing(self) -> str:
        """The reason why there are no kernels at all, "" where there are."""
        return self.server.missing

    def may_serve(self, x: torch.Tensor) -> bool:
        """Return False if there are no kernels for rows like x."""
        return self.server.may_serve(x)

    def warmup(self, shapes: Iterable[tuple[int, int, str, str]]) -> None:
        """Load the kernels of some shapes on the current CUDA device, as `Forward.warmup` does.
        Raises LaunchError."""
        device = torch.cuda.current_device()
        source = self.server.source
        kernels = None if isinstance(source, str) else source(device)
        if kernels is None or foreign_device(kernels.backward.target, device):
            return
        for shape in shapes:
            kernel = kernels.backward.choose(*shape, offset=False, residual="").kernel
            if kernel is not None:
                kernels.loaded.get(kernel).load(device)


class ForwardPackage:
    """The functions of a package of one forward. Making one compiles nothing and does not touch
    CUDA."""

    operation: ClassVar[str]

    def __init__(self, of: Path, name: str = "") -> None:
        """Raises ValueError for a damaged package and one of another operation, OSError for
        none."""
        self.folder, self.name = of, name or str(of)
        self._source = source_of(of, self.operation)
        self._server = RowServer(OPERATIONS[self.operation], self._source)

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        return provenance_of(self._source)
