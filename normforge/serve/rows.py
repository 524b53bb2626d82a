"""Serves an operation that has no functions of its own in this library, by a kernel of its package,
or its formula."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

import torch

from ..launch.kernel_arguments import argument_layout, extent_of
from ..launch.row_layout import RowLayout, alignment_of, dense, row_layout
from ..launch.workspace import Workspaces
from ..operations import RowOperation
from ..operations.formula import added_to, evaluate, quantized_like, wide_dtype
from ..spec import plan_launch
from ..table import MAX_ALIGNMENT, Choice, Table
from ..torch_internals import current_device, empty_strided, is_capturing, raw_stream, resolved
from .checks import Dtype, explained, foreign_device
from .collect import collecting
from .groups import matrices_of_groups, rotation_of
from .kernels import Source
from .options import DTYPES
from .row_calls import KnownCall, KnownCalls
from .row_checks import Tensors, check_tensors
from .warn_once import WarnOnce

_NOTHING: Mapping[str, torch.Tensor] = {}


class RowServer:
    """Serves the calls of one operation by the kernels of a package. Thread-safe.

    A call enqueues on the current stream and may be captured into a CUDA graph. Where there is no
    kernel, the formula serves, on a GPU with a warning.
    """

    def __init__(self, operation: RowOperation, source: Source | str, native: Any = None) -> None:
        """source: where the kernels are, or a sentence that says why there are none. native: a
        Native, which learns what served a call."""
        self.operation, self.source, self._native = operation, source, native
        self._workspaces, self._warn = Workspaces(), WarnOnce()
        self._known = KnownCalls(operation.signature)

    def __call__(
        self, tensors: Tensors, offset: float = 0.0, into: Mapping[str, torch.Tensor] = _NOTHING
    ) -> dict[str, torch.Tensor]:
        """All outputs by name, but for copies that are not asked for: those with rows in the dtype
        and shape of the first input, numbers of a row as (..., 1) in fp32, sums in the dtype of the
        columns. tensors: the inputs by name, rows of shape (..., N), numbers as a float, what
        groups share as groups.py says. offset: is added to the columns in fp32. into: outputs that
        are to be written there, by name, of x's shape and dtype: packed ones of the signature, and,
        aligned and dense, those that a call has to ask for.
        Raises TypeError or ValueError, in one sentence, for what does not fit together."""
        x = check_tensors(self.operation, tensors)
        self.count_call(x, tensors, offset)
        if not self.is_without_kernels(x):
            served = self.by_kernel(tensors, offset, into)
            if not isinstance(served, str):
                return served
            self._warn_of(served)
        return self._by_formula(x, tensors, offset, into)

    def by_kernel(
        self, tensors: Tensors, offset: float = 0.0, into: Mapping[str, torch.Tensor] = _NOTHING
    ) -> dict[str, torch.Tensor] | str:
        """Return what a call does, of tensors on a GPU that fit together, or the reason why no
        kernel serves it."""
        if isinstance(self.source, str):
            return self.source
        x = tensors[self.operation.signature.early[0].name]
        with torch.cuda.device(x.device), torch.no_grad():
            return self._by_kernel(x, tensors, offset, into)

    def _warn_of(self, why: str) -> None:
        self._warn(f"{why}; using the formula of {self.operation.name} in PyTorch")

    @property
    def missing(self) -> str:
        """The reason why there are no kernels at all, "" where there are."""
        return self.source if isinstance(self.source, str) else ""

    def count_call(self, x: torch.Tensor, tensors: Tensors, offset: float = 0.0) -> None:
        """Tell who collects of a call. x: its first rows; tensors, offset: as in a call."""
        recorder, signature = collecting.recorder, self.operation.signature
        if recorder is not None:
            of_call = (added_to(signature, tensors), rotation_of(signature, tensors, x))
            columns = self._columns_of(tensors)
            recorder.count(self.operation.name, x, columns, offset != 0, *of_call)

    def count(self, x: torch.Tensor, columns: torch.Tensor | None, offset: float = 0.0) -> None:
        """Tell who collects of a call, or of one for each group of rows (..., H, N) with columns
        (H, N)."""
        recorder = collecting.recorder
        if recorder is None:
            return
        if columns is None or columns.dim() == 1:
            recorder.count(self.operation.name, x, columns, offset != 0)
            return
        for rows, one in zip(x.unbind(-2), columns, strict=True):
            recorder.count(self.operation.name, rows, one, offset != 0)

    def may_serve(self, x: torch.Tensor) -> bool:
        """Return False if there are no kernels for rows like x."""
        return x.is_cuda and x.numel() > 0 and x.dtype in DTYPES and not self.missing

    def is_without_kernels(self, x: torch.Tensor) -> bool:
        """Return True if the formula serves all rows like x. Warns where a GPU has no kernels."""
        if x.is_cuda and x.numel() > 0 and x.dtype in DTYPES and self.missing:
            self._warn_of(self.missing)
        return not self.may_serve(x)

    def explain(
        self, M: int, N: int, dtype: Dtype, weight_dtype: Dtype = "", **options: Any
    ) -> dict[str, Any]:
        """Say which kernel serves M aligned rows of N columns ("bf16", "fp16" or "fp32"), and why.
        options: as of Table.choose. Raises ValueError for an impossible shape or dtype."""
        names = explained(M, N, dtype, weight_dtype)
        choice = Choice("none", str(self.source))
        if not isinstance(self.source, str):
            choice = self.source(None).backward.choose(M, N, *names, **options)
        kernel = None if choice.kernel is None else choice.kernel.file
        return {"how": choice.how, "reason": choice.reason, "kernel": kernel}

    def outputs(
        self, x: torch.Tensor, tensors: Tensors, into: Mapping[str, torch.Tensor] = _NOTHING
    ) -> dict[str, torch.Tensor]:
        """Empty outputs for rows like x, but for those that are given."""
        signature = self.operation.signature
        made = dict(into)
        for tensor in signature.outputs:
            if tensor.name not in into and not tensor.extra:
                made[tensor.name] = x.new_empty(x.shape)
        for tensor in signature.row_outputs:
            made[tensor.name] = x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x))
        made |= quantized_like(signature, x)
        if signature.sums:
            like = self._columns_of(tensors, x)
            shape = [signature.column_sums] * (signature.column_sums > 1) + [x.shape[-1]]
            made[signature.sums.name] = like.new_empty(shape)
        added = added_to(signature, tensors)
        for copy in signature.copies:
            if added is not None and added.dtype != x.dtype:
                made[copy.name] = added.new_empty(x.shape)
        return made

    def _columns_of(self, tensors: Tensors, default: Any = None) -> Any:
        """Return a tensor that all rows share, or `default`: all such have its dtype."""
        found = (tensors.get(tensor.name) for tensor in self.operation.signature.all_columns)
        return next((columns for columns in found if columns is not None), default)

    def _by_formula(
        self,
        x: torch.Tensor,
        tensors: Tensors,
        offset: float,
        into: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            found = evaluate(self.operation, tensors, offset=offset)
            made = self.outputs(x, tensors, into)
            copies = {copy.name: copy.copy_of for copy in self.operation.signature.copies}
            for name, out in made.items():
                out.copy_(found[copies.get(name, name)])
        return made

    def _by_kernel(
        self,
        x: torch.Tensor,
        tensors: Tensors,
        offset: float = 0.0,
        into: Mapping[str, torch.Tensor] = _NOTHING,
    ) -> dict[str, torch.Tensor] | str:
        """The outputs, or why no kernel serves the call. x's device is the current one."""
        assert not isinstance(self.source, str)
        kind = self._known.kind_of(tensors, offset, into)
        known = self._known.find(kind)
        if known is not None:
            made = self.outputs(x, tensors, into)
            self._launch(known, {**tensors, **made})
            if self._native is not None and self._native.learn_rows is not None and not into:
                self._native.learn_rows(known, tensors)
            return made
        signature, N = self.operation.signature, x.shape[-1]
        given = {name: resolved(given) for name, given in tensors.items() if given is not None}
        layouts, in_place = self._lay_out(given, into)
        kernels = self.source(x.device.index)
        choice = self._choose(kernels.backward, x, {**given, **in_place}, layouts, offset != 0)
        if choice.kernel is None and offset and signature.columns:
            wide = {t.name: given[t.name].float() for t in signature.all_columns if t.name in given}
            weight = wide.get(signature.columns.name, x.new_ones(N, dtype=torch.float32))
            wide[signature.columns.name] = weight + offset
            served = self._by_kernel(x, given | wide, 0.0, into)
            if signature.sums and not isinstance(served, str):  # they have the columns' dtype
                name, like = signature.sums.name, self._columns_of(tensors, x)
                served[name] = served[name].to(like.dtype)
            return served
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
        extent = extent._replace(weight_offset=offset)
        call = KnownCall(loaded, launch, extent, signature.sums is not None)
        self._launch(call, {**given, **made})
        self._known.add(kind, call, {**tensors, **into}, {**given, **made})
        for name in into.keys() - in_place.keys():
            made[name] = into[name].copy_(made[name])
        return made

    def _lay_out(
        self, given: dict[str, Any], into: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, RowLayout], dict[str, torch.Tensor]]:
        """Put copies in the place of arguments that kernels cannot read. Return the layouts of rows
        by name, and the outputs that can be written where they are to lie."""
        signature = self.operation.signature
        present = [t for t in (*signature.early, *signature.late) if t.name in given]
        found = {tensor.name: row_layout(given[tensor.name].detach()) for tensor in present}
        # All in heads step through their rows alike; a dense one goes along with any.
        written = {name: at for name, out in into.items() if (at := row_layout(out))}
        at_first = (*written.values(), *(found[tensor.name] for tensor in signature.early))
        inner = next((at.inner for at in at_first if at and at.inner), 0)
        written = {name: at for name, to in written.items() if (at := to.in_steps_of(inner))}
        in_place, layouts = {name: into[name] for name in written}, dict(written)
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
            given[tensor.name], layouts[tensor.name] = rows, at or RowLayout(rows.shape[-1])
        for tensor in signature.inputs:
            if tensor.role in ("row", "columns") and tensor.name in given:
                given[tensor.name] = given[tensor.name].detach().contiguous()
        return layouts, in_place

    @staticmethod
    def _unaligned(rows: torch.Tensor, at: RowLayout) -> bool:
        return bool((rows.data_ptr() | at.stride * rows.element_size()) % MAX_ALIGNMENT)

    def _choose(
        self,
        table: Table,
        x: torch.Tensor,
        given: Mapping[str, torch.Tensor],
        layouts: Mapping[str, RowLayout],
        offset: bool,
    ) -> Choice:
        signature, N = self.operation.signature, x.shape[-1]
        if foreign := foreign_device(table.target, x.device.index):
            return Choice("none", foreign)
        places = N * x.element_size()
        for name in (tensor.name for tensor in signature.in_heads if tensor.name in layouts):
            at = layouts[name]
            places |= given[name].data_ptr() | (at.stride | at.outer) * given[name].element_size()
        shared = [given[t.name].data_ptr() for t in signature.all_columns if t.name in given]
        added = added_to(signature, given)
        names = [DTYPES.get(t.dtype, "") for t in (x, self._columns_of(given, x))]
        return table.choose(
            x.numel() // N,
            N,
            names[0],
            names[1],
            offset=offset,
            residual="" if added is None else DTYPES.get(added.dtype, "none"),
            rotation=rotation_of(signature, given, x),
            alignment=alignment_of(places),
            weight_alignment=alignment_of(reduce(or_, shared, 0)),
        )

    def _launch(self, call: KnownCall, tensors: Tensors) -> None:
        """Enqueue one call on the current stream. Raises LaunchError."""
        device = current_device()
        stream = raw_stream(device)
        addresses = argument_layout(self.operation.signature).addresses(tensors)
        launch = call.launch
        if is_capturing():
            zeros = self._workspaces.of_capture(device, stream, launch.scratch_offset)
            scratch = empty_strided((launch.scratch,), (1,), torch.float32)
            call.bind(device, stream, zeros, scratch.data_ptr()).run(*addresses)
            return
        workspace = self._workspaces.of_stream(device, stream)
        with workspace.lock:
            workspace.fit(launch)
            call.binding(device, stream, workspace).run(*addresses)
