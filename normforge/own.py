"""Packages of operations that users bring: their own file, which says what they compute, lies in
the package beside its kernels."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .frontends.library import Served, define
from .frontends.row_functions import provenance_of
from .operations import RowOperation, register
from .operations.formula import wide_dtype
from .serve.kernels import source_of
from .serve.rows import RowServer

NAME = "operation.py"
"""The file of a package that says what it computes."""


def read_operation(path: Path) -> RowOperation:
    """The operation that a Python file calls OPERATION. Raises ValueError, in one sentence, for a
    file without one or one that fails, OSError for none."""
    content = path.read_text(encoding="utf-8")
    # A copy of this library in a package has another name.
    content = content.replace("normforge.operations", f"{__package__}.operations")
    name = f"normforge_own_{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # torch.compile asks there
    try:
        exec(compile(content, str(path), "exec"), vars(module))
    except Exception as error:
        raise ValueError(f"{path} cannot be read as an operation: {error}") from error
    operation = getattr(module, "OPERATION", None)
    if not isinstance(operation, RowOperation):
        raise ValueError(
            f"{path} has no operation: call it OPERATION = RowOperation(...), of "
            "normforge.operations"
        )
    return operation


class OwnPackage:
    """The functions of a package of a user's operation: what it differentiates, under its own name,
    `backward` and `explain`. Making one compiles nothing and does not touch CUDA."""

    def __init__(self, folder: Path, name: str = "") -> None:
        """Raises ValueError for a damaged package or a name that this library has, OSError for
        none."""
        self.folder, self.name = folder, name or str(folder)
        self.operation = read_operation(folder / NAME)
        register(self.operation)
        self._source = source_of(folder, self.operation.name)
        self.serve = RowServer(self.operation, self._source)
        self._operator = _operator_of(self.operation)
        _SERVED.add(self.name, self)
        setattr(self, self.operation.function, self.call)

    def retire(self) -> None:
        """Do nothing: another package has taken the name, and nothing has to be given back."""

    def of_form(self, form: str) -> Any:
        """Raise LookupError: there are no forms of such packages."""
        raise LookupError(form)

    @property
    def provenance(self) -> dict[str, Any]:
        """The target, and how the kernel of every tuned shape was found and checked."""
        return provenance_of(self._source)

    def explain(
        self, M: int, N: int, dtype: str | torch.dtype, weight_dtype: str | torch.dtype = ""
    ) -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and
        why."""
        return self.serve.explain(M, N, dtype, weight_dtype)

    def backward(self, **tensors: torch.Tensor | float | None) -> dict[str, torch.Tensor]:
        """The outputs of the operation by name, from its inputs by name. Works under torch.compile,
        in CUDA graphs and on the CPU. Raises TypeError or ValueError for what does not fit."""
        signature = self.operation.signature
        if unknown := sorted(tensors.keys() - {tensor.name for tensor in signature.inputs}):
            raise TypeError(f"{self.operation.name} takes no '{unknown[0]}'")
        given = [tensors.get(tensor.name) for tensor in signature.inputs]
        results = self._operator(*given, self.name)
        results = (results,) if isinstance(results, torch.Tensor) else results
        named = zip(_results(self.operation), results, strict=True)
        return {name: result for name, result in named if result.shape != _NOT_WANTED}

    def call(self, *arguments: torch.Tensor) -> torch.Tensor:
        """The forward of the operation, in PyTorch, with its gradients by the kernels of this
        package. arguments: those of the operation's forward(); rows of shape (..., N). The result
        has the dtype of the first one, computed in fp32."""
        result: torch.Tensor = _Node.apply(self, *arguments)
        return result


def _checked(
    operation: RowOperation, arguments: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """The first argument and the names of all. Raises TypeError or ValueError, in one sentence, for
    arguments that do not fit together."""
    names, called = tuple(operation.gradients), operation.function
    if len(arguments) != len(names):
        takes = ", ".join(names)
        raise TypeError(f"{called} takes {takes}; got {len(arguments)} tensors")
    x = arguments[0]
    for name, given in zip(names, arguments, strict=True):
        if not isinstance(given, torch.Tensor) or not given.is_floating_point():
            what = getattr(given, "dtype", type(given).__name__)
            raise TypeError(f"{called} takes a floating tensor as {name}, got {what}")
        rows = operation.signature[operation.gradients[name]].role == "rows"
        shape = x.shape if rows else x.shape[-1:]
        if given.shape != shape:
            raise ValueError(
                f"{name} must have shape {tuple(shape)}, as {names[0]} has {tuple(x.shape)}; got "
                f"{tuple(given.shape)}"
            )
    return x, names


def _columns_dtype(operation: RowOperation, arguments: tuple[torch.Tensor, ...]) -> torch.dtype:
    """Return the dtype of what all rows share: that of the argument whose gradient is summed over
    the rows."""
    sums = operation.signature.sums
    for given, gradient in zip(arguments, operation.gradients.values(), strict=True):
        if sums is not None and gradient == sums.name:
            return given.dtype
    return arguments[0].dtype


class _Node(torch.autograd.Function):
    """One call of `OwnPackage.call`."""

    @staticmethod
    def forward(ctx: Any, package: OwnPackage, *arguments: torch.Tensor) -> torch.Tensor:
        operation = package.operation
        assert operation.forward is not None
        x, names = _checked(operation, arguments)
        compute = wide_dtype(x)
        wide = dict(zip(names, (given.to(compute) for given in arguments), strict=True))
        result, saved = operation.forward(**wide)
        kept, ctx.numbers = {}, {}
        for name, value in saved.items():
            tensor = operation.signature[name]
            if tensor.role == "number":
                ctx.numbers[name] = float(value)
            elif value is wide.get(name):  # save the argument, and not a copy
                given = arguments[names.index(name)]
                kept[name] = given.to(x.dtype) if tensor.role == "rows" else given
            elif tensor.role == "columns":
                kept[name] = value.to(_columns_dtype(operation, arguments))
            else:
                kept[name] = value.to(compute if tensor.role == "row" else x.dtype)
        rounded = result.to(x.dtype)
        kept |= {name: rounded for name, value in saved.items() if value is result}
        ctx.names, ctx.package = tuple(kept), package
        ctx.incoming = next(t for t in operation.signature.early if t.name not in kept).name
        ctx.save_for_backward(*kept.values())
        ctx.dtypes = [given.dtype for given in arguments]
        return rounded

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        package = ctx.package
        saved = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        found = package.backward(**saved, **ctx.numbers, **{ctx.incoming: dy})
        outputs = package.operation.gradients.values()
        gradients = (found[name].to(d) for name, d in zip(outputs, ctx.dtypes, strict=True))
        return None, *gradients


_NOT_WANTED = (0,)
"""The shape of a result that a call does not have: the rows of others have at least one column."""
_SERVED: Served[OwnPackage] = Served()
_operators: dict[str, Any] = {}


def _results(operation: RowOperation) -> tuple[str, ...]:
    """The names of what the operator of an operation returns."""
    signature = operation.signature
    found = [*signature.outputs, *signature.row_outputs]
    found += [*([signature.sums] if signature.sums else []), *signature.copies]
    return tuple(tensor.name for tensor in found)


def _operator_of(operation: RowOperation) -> Any:
    """The operator of PyTorch of an operation, defined once in a process."""
    if operation.name in _operators:
        return _operators[operation.name]
    signature = operation.signature
    optional = {t.name for t in signature.inputs if t.late or t.role == "columns"}
    numbers = {t.name for t in signature.numbers}

    def declared(name: str) -> str:
        return f"float {name}" if name in numbers else f"Tensor{'?' * (name in optional)} {name}"

    takes = ", ".join(declared(tensor.name) for tensor in signature.inputs)
    results = _results(operation)
    gives = "Tensor" if len(results) == 1 else f"({', '.join(['Tensor'] * len(results))})"

    def ordered(found: Mapping[str, torch.Tensor], x: torch.Tensor) -> Any:
        made = tuple(found.get(name, x.new_empty(_NOT_WANTED)) for name in results)
        return made[0] if len(made) == 1 else made

    def named(*given: Any) -> tuple[OwnPackage, dict[str, Any]]:
        tensors = {t.name: g for t, g in zip(signature.inputs, given[:-1], strict=True)}
        return _SERVED(given[-1]), tensors

    def run(*given: Any) -> Any:
        package, tensors = named(*given)
        return ordered(package.serve(tensors), tensors[signature.early[0].name])

    def fake(*given: Any) -> Any:
        package, tensors = named(*given)
        x = tensors[signature.early[0].name]
        return ordered(package.serve.outputs(x, tensors), x)

    made = define(f"own_{operation.name}", f"({takes}, str package) -> {gives}", run, fake)
    _operators[operation.name] = made
    return made
