"""A user's own operation: a Python file, and the template of its kernel in the same folder."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import torch
from jinja2 import meta

from generator.errors import NormforgeError
from generator.operations.operation import FrontEnd
from generator.operations.row_inputs import incoming_gradients, make_inputs
from generator.operations.rows import inputs_class, row_operation, tensor_specs
from generator.own_files import FILES, OWN_OPERATIONS
from generator.problem import Problem
from normforge import operations
from normforge.operations import RowOperation, Signature
from normforge.operations.formula import evaluate, terms_of
from normforge.own import OwnPackage, read_operation

_FEW = (5, 24)
_TAKEN = ("folder", "name", "operation", "serve")
"""Names that the object of a package has beside its class's."""


def add_operation(path: Path, known: dict[str, Any]) -> str:
    """Read, check and register the operation of a file; `known` gets what the tuner knows of it.
    Returns its name. Raises NormforgeError, with one sentence, for one that cannot be tuned."""
    path = path.resolve()
    if not path.is_file():
        raise NormforgeError(f"there is no file {path}: --op names an operation or its file")
    try:
        operation = read_operation(path)
    except (OSError, ValueError) as error:
        raise NormforgeError(str(error)) from error
    if FILES.get(operation.name) == path:
        return operation.name
    if operation.name in known or operation.name in operations.OPERATIONS:
        raise NormforgeError(
            f"{path}: there is an operation called {operation.name} already; choose another name"
        )
    operations.register(operation)
    fault = next(_faults(operation, path), None)
    if fault is not None:
        operations.OPERATIONS.pop(operation.name)
        raise NormforgeError(f"{path}: {fault}")
    FILES[operation.name] = path
    front_end = FrontEnd("", "own", "OwnPackage", ("backward", "explain", operation.function))
    known[operation.name] = row_operation(operation, front_end)
    files = [*filter(None, os.environ.get(OWN_OPERATIONS, "").split(os.pathsep)), str(path)]
    os.environ[OWN_OPERATIONS] = os.pathsep.join(dict.fromkeys(files))
    return operation.name


def add_operations_of_run(known: dict[str, Any]) -> None:
    """Register what a run told its processes of. Raises NormforgeError."""
    for path in filter(None, os.environ.get(OWN_OPERATIONS, "").split(os.pathsep)):
        add_operation(Path(path), known)


def _faults(operation: RowOperation, path: Path) -> Iterator[str]:
    """Yield what is wrong with an operation, one sentence each."""
    if operation.forward is None:
        yield "give the operation a forward, which says what its terms are the gradients of"
        return
    if operation.function in _TAKEN or hasattr(OwnPackage, operation.function):
        yield f"its package has another function called {operation.function}: choose another name"
    sums = operation.signature.sums
    if sums and sums.count > 1 and sums.name in operation.gradients.values():
        yield f"{sums.name} has several sums of a column, so it is the gradient of no argument"
    if operation.signature.pairs or any(t.role == "flag" for t in operation.signature.inputs):
        yield "pairs of columns, groups of rows and flags are for operations of the library alone"
        return
    more = any(tensor.extra or tensor.sum_of for tensor in operation.signature.outputs)
    if operation.signature.quantized or more:
        yield (
            "what is quantized, written if asked for or a sum of inputs is for operations of the "
            "library alone"
        )
        return
    if path.stem != operation.name:
        yield f"the file of operation {operation.name} is called {operation.name}.py"
    template = path.with_name(f"{operation.name}.cu.j2")
    yield from _faults_of_template(operation, template)
    try:
        problem = Problem(*_FEW, "fp32", "fp32", operation=operation.name)
        given = make_inputs(operation, inputs_class(operation.signature), problem, _CPU)
        tensors = {t.name: getattr(given, t.name) for t in operation.signature.inputs}
        wide = {name: v.double() if torch.is_tensor(v) else v for name, v in tensors.items()}
        missing = _written(operation.signature) - terms_of(operation, wide, torch.float64).keys()
        if missing:
            yield f"terms() has no '{min(missing)}'"
            return
        found = evaluate(operation, wide)
    except NormforgeError as error:
        yield str(error)
        return
    except Exception as error:
        yield f"forward() or terms() fails for {_FEW[0]} rows of {_FEW[1]}: {error}"
        return
    yield from _faults_of_formula(operation, problem, wide, found)


_CPU = torch.device("cpu")


def _written(signature: Signature) -> set[str]:
    """The names of what a kernel writes, but for copies."""
    return {tensor.name for tensor in signature.tensors if tensor.output and not tensor.copy_of}


def _faults_of_template(operation: RowOperation, template: Path) -> Iterator[str]:
    if not template.is_file():
        yield f"its kernel's template {template.name} is not beside it"
        return
    try:
        text = template.read_text(encoding="utf-8")
        tree = jinja2.Environment().parse(text)
    except (jinja2.TemplateSyntaxError, UnicodeDecodeError) as error:
        yield f"{template.name} is no template: {error}"
        return
    used = meta.find_undeclared_variables(tree)
    for name in sorted(_written(operation.signature)):
        if name not in used:
            yield f"{template.name} never writes {{{{ {name} }}}}, which is an output"
    if operation.signature.row_sums and "row_sums" not in used:
        yield f"{template.name} never adds to {{{{ row_sums[0] }}}}"
    if not operation.signature.row_sums:
        for word in ("row_sums", "row_terms", "inverse_columns"):
            if re.search(rf"\b{word}\b", text):
                yield f"{template.name} has {word}, and the signature says row_sums=0"


def _faults_of_formula(
    operation: RowOperation, problem: Problem, tensors: dict[str, Any], found: dict[str, Any]
) -> Iterator[str]:
    """Yield where terms() has other shapes than the signature says, or is no gradient of
    forward()."""
    signature = operation.signature
    for spec in tensor_specs(signature, problem, output=True):
        if found[spec.name].numel() != torch.Size(spec.shape).numel():
            has = tuple(found[spec.name].shape)
            yield f"terms() gives {spec.name} the shape {has}, and it is {spec.shape}"
            return
    assert operation.forward is not None
    generator = torch.Generator().manual_seed(0)
    arguments = {}
    for name, gradient in operation.gradients.items():
        shape = _FEW if signature[gradient].role == "rows" else _FEW[1:]
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        arguments[name] = drawn.requires_grad_()
    result, saved = operation.forward(**arguments)
    dy = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    exact = torch.autograd.grad(result, list(arguments.values()), dy)
    given = {name: v.detach() if torch.is_tensor(v) else v for name, v in saved.items()}
    first, *others = incoming_gradients(operation)
    given |= {first: dy, **{name: torch.zeros_like(dy) for name in others}}
    given |= {name: tensors[name] for name in tensors if name not in given}
    ours = evaluate(operation, given)
    for (name, gradient), expected in zip(operation.gradients.items(), exact, strict=True):
        error = (ours[gradient].reshape(expected.shape) - expected).norm() / expected.norm()
        if not error < 1e-6:
            yield (
                f"terms() gives {gradient}, which is not the gradient of forward() in {name}: they "
                f"differ by {error:.1e} of its size"
            )
