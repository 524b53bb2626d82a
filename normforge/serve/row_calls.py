"""Calls of operations over rows that differ in addresses alone: their kernel is chosen once, and
the arguments of their launch are written once for every stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..launch.binding import Binding, bind
from ..launch.kernel_arguments import Extent
from ..launch.loaded_kernel import LoadedKernel
from ..launch.workspace import MOST_STREAMS, PER_THREAD, StreamWorkspace
from ..operations import Signature
from ..spec import Launch
from ..table import MAX_ALIGNMENT
from .row_checks import Tensors

_MOST = 1 << 10
"""Kinds of calls that a server remembers."""


class KnownCall:
    """A kernel with its launch and its arguments, for all calls of one kind."""

    def __init__(
        self, kernel: LoadedKernel, launch: Launch, extent: Extent, wants_sums: bool
    ) -> None:
        self.kernel, self.launch, self.extent = kernel, launch, extent
        self._wants_sums = wants_sums
        self._bindings: dict[tuple[int, int], Binding] = {}

    def bind(
        self,
        device: int,
        stream: int,
        zeros: int,
        scratch: int,
        workspace: StreamWorkspace | None = None,
    ) -> Binding:
        """A binding to a raw stream of the current device, `device`; see `binding.bind`."""
        at = (device, stream, zeros, scratch)
        return bind(self.kernel, self.launch, self.extent, *at, self._wants_sums, workspace)

    def binding(self, device: int, stream: int, workspace: StreamWorkspace) -> Binding:
        """The binding to the stream of a workspace that is large enough. Hold its lock."""
        found = self._bindings.get((device, stream))
        if found is not None and found.scratch == workspace.scratch:
            return found
        found = self.bind(device, stream, workspace.zeros, workspace.scratch, workspace)
        if stream != PER_THREAD:  # that handle means another stream in every thread
            if len(self._bindings) >= MOST_STREAMS:
                self._bindings.clear()
            self._bindings[device, stream] = found
        return found


class KnownCalls:
    """The calls of one operation that came before. Safe to use from several threads."""

    def __init__(self, signature: Signature) -> None:
        self._names = tuple(tensor.name for tensor in signature.inputs)
        self._calls: dict[Any, KnownCall] = {}

    def kind_of(self, tensors: Tensors, offset: float, into: Mapping[str, torch.Tensor]) -> Any:
        """Return all of a call but the addresses, which are all aligned: calls that are equal in it
        have one kernel and one launch. into: outputs that are to be written there. None for a call
        that is not remembered."""
        kind: list[Any] = [offset, *into]
        for given in (*(tensors.get(name) for name in self._names), *into.values()):
            if isinstance(given, torch.Tensor):
                if given.data_ptr() % MAX_ALIGNMENT or given.is_neg():
                    return None
                kind.append((given.shape, given.stride(), given.dtype, given.device.index))
            else:
                kind.append(given)
        return tuple(kind)

    def find(self, kind: Any) -> KnownCall | None:
        return None if kind is None else self._calls.get(kind)

    def add(self, kind: Any, call: KnownCall, tensors: Tensors, used: Tensors) -> None:
        """Remember a call, unless its kernel read copies. used: what it read, by name."""
        if kind is None or any(
            isinstance(given, torch.Tensor) and given.data_ptr() != used[name].data_ptr()
            for name, given in tensors.items()
        ):
            return
        if len(self._calls) >= _MOST:
            self._calls.clear()
        self._calls[kind] = call
