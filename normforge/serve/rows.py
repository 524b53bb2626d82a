"""Serves an operation that has no functions of its own in this library, by a kernel of its package,
or its formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..launch.binding import Binding, bind
from ..launch.kernel_arguments import Extent, argument_layout, extent_of
from ..launch.loaded_kernel import LoadedKernel
from ..launch.row_layout import RowLayout, alignment_of, dense, row_layout
from ..launch.workspace import Workspaces
from ..operations import RowOperation
from ..operations.formula import added_to, evaluate
from ..spec import Launch, plan_launch
from ..table import MAX_ALIGNMENT, Choice, Table
from ..torch_internals import (
    current_device,
    empty_strided,
    is_capturing,
    raw_stream,
    resolved,
)
from .checks import foreign_device
from .collect import collecting
from .groups import matrices_of_groups
from .kernels import Source
from .options import DTYPES
from .row_checks import check_tensor
from .warn_once import WarnOnce

Tensors = Mapping[str, Any]
"""The arguments of a call by name: tensors, None for one that it does without, and numbers."""
_KINDS = ("tensor", "number")
_NOTHING: Mapping[str, torch.Tensor] = {}


class RowServer:
    """Serves the calls of one operation by the kernels of a package. Thread-safe.

    A call enqueues on the current stream and may be captured into a CUDA graph. Where there is no
    kernel, the formula serves, on a GPU with a warning.
    """

    def __init__(self, operation: RowOperation, source: Source | str) -> None:
        """source: where the kernels are, or a sentence that says why there are none."""
        self.operation, self._source = operation, source
        self._workspaces, self._warn = Workspaces(), WarnOnce()

    def __call__(
        self, tensors: Tensors, into: Mapping[str, torch.Tensor] = _NOTHING
    ) -> dict[str, torch.Tensor]:
        """All outputs by name, but for copies that are not asked for: those with rows in the dtype
        and shape of the first input, sums in that of the columns. tensors: the inputs by name, rows
        of shape (..., N), numbers as a float, what groups share as groups.py says. Raises TypeError
        or ValueError, in one sentence, for what does not fit together. into: outputs that are to be
        written there, by name: packed ones of the signature, of x's shape and dtype."""
        x = self._check(tensors)
        self.count(x, self._columns_of(tensors), added_to(self.operation.signature, tensors))
        if not self.is_without_kernels(x):
            with torch.cuda.device(x.device), torch.no_grad():
                served = self._by_kernel(x, tensors, into)
            if not isinstance(served, str):
                return served
            self._warn_of(served)
        made = self._by_formula(x, tensors)
        for name, out in into.items():
            made[name] = out.copy_(made[name])
        return made

    def _warn_of(self, why: str) -> None:
        self._warn(f"{why}; using the formula of {self.operation.name} in PyTorch")

    @property
    def missing(self) -> str:
        """The reason why there are no kernels at all, "" where there are."""
        return self._source if isinstance(self._source, str) else ""

    def count(
        self,
        x: torch.Tensor,
        columns: torch.Tensor | None,
        added: torch.Tensor | None = None,
    ) -> None:
        """Tell who collects of a call, or of one for each group of rows (..., H, N) with columns
        (H, N)."""
        recorder = collecting.recorder
        if recorder is None:
            return
        if columns is None or columns.dim() == 1:
            recorder.count(self.operation.name, x, columns, dresidual=added)
            return
        for rows, one in zip(x.unbind(-2), columns, strict=True):
            recorder.count(self.operation.name, rows, one)

    def is_without_kernels(self, x: torch.Tensor) -> bool:
        """Return True if the formula serves all rows like x. Warns where a GPU has no kernels."""
        served = x.device.type == "cuda" and x.numel() > 0 and x.dtype in DTYPES
        if served and self.missing:
            self._warn_of(self.missing)
        return not served or bool(self.missing)

    def explain(self, M: int, N: int, dtype: str, weight_dtype: str = "") -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and
        why."""
        choice = Choice("none", str(self._source))
        if not isinstance(self._source, str):
            table = self._source(None).backward
            choice = table.choose(M, N, dtype, weight_dtype or dtype, offset=False, residual="")
        kernel = None if choice.kernel is None else choice.kernel.file
        return {"how": choice.how, "reason": choice.reason, "kernel": kernel}

    def outputs(
        self, x: torch.Tensor, tensors: Tensors, into: Mapping[str, torch.Tensor] = _NOTHING
    ) -> dict[str, torch.Tensor]:
        """Empty outputs for rows like x, but for those that are given."""
        signature = self.operation.signature
        made = {
            name: x.new_empty(x.shape) for t in signature.outputs if (name := t.name) not in into
        }
        made |= into
        if signature.sums:
            columns = self._columns_of(tensors)
            like = x if columns is None else columns
            shape = [signature.column_sums] * (signature.column_sums > 1) + [x.shape[-1]]
            made[signature.sums.name] = like.new_empty(shape)
        added = added_to(signature, tensors)
        for copy in signature.copies:
            if added is not None and added.dtype != x.dtype:
                made[copy.name] = added.new_empty(x.shape)
        return made

    def _columns_of(self, tensors: Tensors) -> torch.Tensor | None:
        """Return the tensor that all rows share, if there is one."""
        columns = self.operation.signature.columns
        return tensors.get(columns.name) if columns else None

    def _check(self, tensors: Tensors) -> torch.Tensor:
        signature = self.operation.signature
        if unknown := sorted(tensors.keys() - {tensor.name for tensor in signature.inputs}):
            raise TypeError(f"{self.operation.name} takes no '{unknown[0]}'")
        for tensor in signature.inputs:
            given = tensors.get(tensor.name)
            if given is None and not (tensor.late or tensor.role == "columns"):
                raise TypeError(f"{self.operation.name} needs {tensor.name}")
            numeric = tensor.role == "number"
            kind: Any = (int, float) if numeric else torch.Tensor
            if given is not None and not isinstance(given, kind):
                raise TypeError(
                    f"{tensor.name} must be a {_KINDS[numeric]}, got {type(given).__name__}"
                )
        x: torch.Tensor = tensors[signature.early[0].name]
        for tensor in signature.inputs:
            given = tensors.get(tensor.name)
            if given is not None and tensor.role != "number":
                check_tensor(self.operation.signature, tensor, given, x)
        return x

    def _by_formula(self, x: torch.Tensor, tensors: Tensors) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found = evaluate(self.operation, tensors)
            made = self.outputs(x, tensors)
            copies = {copy.name: copy.copy_of for copy in self.operation.signature.copies}
            for name, out in made.items():
                out.copy_(found[copies.get(name, name)])
        return made

    def _by_kernel(
        self, x: torch.Tensor, tensors: Tensors, into: Mapping[str, torch.Tensor] = _NOTHING
    ) -> dict[str, torch.Tensor] | str:
        """The outputs, or why no kernel serves the call. x's device is the current one."""
        assert not isinstance(self._source, str)
        signature, N = self.operation.signature, x.shape[-1]
        given = {name: resolved(given) for name, given in tensors.items() if given is not None}
        present = [t for t in (*signature.early, *signature.late) if t.name in given]
        found = {tensor.name: row_layout(given[tensor.name].detach()) for tensor in present}
        # All in heads step through their rows alike; a dense one goes along with any.
        written = {name: at for name, out in into.items() if (at := row_layout(out))}
        at_first = (*written.values(), *(found[tensor.name] for tensor in signature.early))
        inner = next((at.inner for at in at_first if at and at.inner), 0)
        written = {name: at for name, to in written.items() if (at := to.in_steps_of(inner))}
        layouts = dict(written)
        for tensor in present:
            rows, at = given[tensor.name].detach(), found[tensor.name]
            if tensor.late:
                fits = at is not None and not at.inner and not self._unaligned(rows, at)
            else:
                at = at and at.in_steps_of(inner)
                fits = at is not None
            if not fits:
                rows = dense(rows)
                at = row_layout(rows)
                at = at if tensor.late or at is None else at.in_steps_of(inner)
            given[tensor.name], layouts[tensor.name] = rows, at or RowLayout(N)
        for tensor in signature.inputs:
            if tensor.role in ("row", "columns") and tensor.name in given:
                given[tensor.name] = given[tensor.name].detach().contiguous()
        kernels = self._source(x.device.index)
        in_place = {name: into[name] for name in written}
        choice = self._choose(kernels.backward, x, {**given, **in_place}, layouts)
        if choice.kernel is None:
            return choice.reason
        loaded = kernels.loaded.get(choice.kernel)
        launch = plan_launch(choice.kernel.spec, x.numel() // N)
        if signature.groups:
            matrices = matrices_of_groups(signature, given, x)
            layouts |= {name: RowLayout(matrix.stride(0)) for name, matrix in matrices.items()}
            given |= matrices | {"heads": x.shape[-2]}
        try:
            extent = extent_of(signature, x.numel() // N, N, layouts, launch.group, given)
        except ValueError as error:  # too many rows
            return str(error)
        made = self.outputs(x, given, in_place)
        self._launch(loaded, launch, extent, {**given, **made})
        for name in into.keys() - written.keys():
            made[name] = into[name].copy_(made[name])
        return made

    @staticmethod
    def _unaligned(rows: torch.Tensor, at: RowLayout) -> bool:
        return bool((rows.data_ptr() | at.stride * rows.element_size()) % MAX_ALIGNMENT)

    def _choose(
        self,
        table: Table,
        x: torch.Tensor,
        given: Mapping[str, torch.Tensor],
        layouts: Mapping[str, RowLayout],
    ) -> Choice:
        signature, N = self.operation.signature, x.shape[-1]
        if foreign := foreign_device(table.target, x.device.index):
            return Choice("none", foreign)
        places = N * x.element_size()
        for name in (tensor.name for tensor in signature.in_heads if tensor.name in layouts):
            at = layouts[name]
            places |= given[name].data_ptr() | (at.stride | at.outer) * given[name].element_size()
        columns = self._columns_of(given)
        added = added_to(signature, given)
        names = [DTYPES.get(t.dtype, "") for t in (x, x if columns is None else columns)]
        return table.choose(
            x.numel() // N,
            N,
            names[0],
            names[1],
            offset=False,
            residual="" if added is None else DTYPES.get(added.dtype, "none"),
            alignment=alignment_of(places),
            weight_alignment=MAX_ALIGNMENT if columns is None else alignment_of(columns.data_ptr()),
        )

    def _launch(
        self,
        kernel: LoadedKernel,
        launch: Launch,
        extent: Extent,
        tensors: Mapping[str, Any],
    ) -> None:
        """Enqueue one call on the current stream. Raises LaunchError."""
        signature = self.operation.signature
        device = current_device()
        stream = raw_stream(device)
        addresses = argument_layout(signature).addresses(tensors)
        wants_sums = signature.sums is not None

        def binding(zeros: int, scratch: int, workspace: Any = None) -> Binding:
            at = (device, stream, zeros, scratch)
            return bind(kernel, launch, extent, *at, wants_sums, workspace)

        if is_capturing():
            zeros = self._workspaces.of_capture(device, stream, launch.scratch_offset)
            scratch = empty_strided((launch.scratch,), (1,), torch.float32)
            binding(zeros, scratch.data_ptr()).run(*addresses)
            return
        workspace = self._workspaces.of_stream(device, stream)
        with workspace.lock:
            workspace.fit(launch)
            binding(workspace.zeros, workspace.scratch, workspace).run(*addresses)
