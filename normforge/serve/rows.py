"""Serves an operation that has no functions of its own in this library, by a kernel of its package,
or its formula."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any

import torch

from ..launch.kernel_arguments import argument_layout, extent_of
from ..launch.row_layout import RowLayout, alignment_of
from ..launch.workspace import Workspaces
from ..operations import RowOperation
from ..operations.formula import added_to, evaluate, quantized_like, wide_dtype
from ..spec import plan_launch
from ..table import Choice, Table
from ..torch_internals import (
    contiguous,
    current_device,
    empty_strided,
    is_capturing,
    raw_stream,
    resolved,
)
from .checks import Dtype, explained, foreign_device
from .collect import collecting
from .groups import matrices_of_groups, rotation_of
from .kernels import Source
from .options import DTYPES
from .row_calls import RowCall, RowCalls
from .row_checks import Tensors, check_tensors
from .row_layouts import lay_out
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
        self._known = RowCalls()
        self._arguments = argument_layout(operation.signature)

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
        known = self.again(tensors, offset, into)
        if known is not None:
            return known
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
        known = self._serve_known(tensors, offset, into)
        if known is not None:
            return known
        x = tensors[self.operation.signature.early[0].name]
        with torch.cuda.device(x.device), torch.no_grad():
            return self._by_kernel(x, tensors, offset, into)

    def again(
        self, tensors: Tensors, offset: float = 0.0, into: Mapping[str, torch.Tensor] = _NOTHING
    ) -> dict[str, torch.Tensor] | None:
        """Serve a call like one that a kernel has served on the current device: those fit together.
        None for another, and while somebody collects, who is to hear of it first."""
        return None if collecting.recorder is not None else self._serve_known(tensors, offset, into)

    def _serve_known(
        self, tensors: Tensors, offset: float, into: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        if not self._known.any:
            return None
        known = self._known.find(tensors, offset, into)
        if known is None or known.device != current_device():
            return None
        made = {name: empty_strided(*size) for name, size in known.sizes}
        made.update(into)
        self._launch(known, {**tensors, **made})
        if self._native is not None and self._native.learn_rows is not None and not into:
            self._native.learn_rows(known, tensors)
        return made

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
        known = self._serve_known(tensors, offset, into)  # on this device
        if known is not None:
            return known
        signature, N = self.operation.signature, x.shape[-1]
        given = {name: resolved(given) for name, given in tensors.items() if given is not None}
        layouts, in_place = lay_out(signature, given, into)
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
        sizes = {n: contiguous(out.shape, out.dtype) for n, out in made.items() if n not in into}
        call = RowCall(loaded, launch, extent, signature.sums is not None, current_device(), sizes)
        self._launch(call, {**given, **made})
        self._known.add(call, tensors, offset, into, {**given, **made})
        for name in into.keys() - in_place.keys():
            made[name] = into[name].copy_(made[name])
        return made

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

    def _launch(self, call: RowCall, tensors: Tensors) -> None:
        """Enqueue one call on the current stream. Raises LaunchError."""
        device = current_device()
        stream = raw_stream(device)
        addresses = self._arguments.addresses(tensors)
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
