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
from ..spec import Launch
from ..torch_internals import PLAIN_TYPES, Size
from .call_cache import CallCache
from .row_checks import Tensors


class RowCall:
    """A kernel with its launch and its arguments, for all calls of one kind."""

    def __init__(
        self,
        kernel: LoadedKernel,
        launch: Launch,
        extent: Extent,
        wants_sums: bool,
        device: int,
        sizes: Mapping[str, Size],
    ) -> None:
        """device: its index. sizes: those of what such a call allocates, by name."""
        self.kernel, self.launch, self.extent = kernel, launch, extent
        self.device, self.sizes = device, tuple(sizes.items())
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


class RowCalls:
    """The calls of one operation that came before. Safe to use from several threads.

    any: whether there are some.
    """

    def __init__(self) -> None:
        self.any = False
        self._cache = CallCache()

    def find(
        self, tensors: Tensors, offset: float, into: Mapping[str, torch.Tensor]
    ) -> RowCall | None:
        """Return what serves a call that differs from one before in addresses alone, which are
        aligned alike. into: outputs that are to be written there."""
        kind, present = _kind_of(tensors, offset, into)
        try:
            found = self._cache.find(kind, present) if kind else None
        except TypeError:  # an argument is neither a tensor nor a number, such as a list
            return None
        return None if found is None else found.call

    def add(
        self,
        call: RowCall,
        tensors: Tensors,
        offset: float,
        into: Mapping[str, torch.Tensor],
        used: Tensors,
    ) -> None:
        """Remember a call, unless its kernel read copies. used: what it read, by name."""
        kind, present = _kind_of(tensors, offset, into)
        names = [name for name, given in (*tensors.items(), *into.items()) if _is_tensor(given)]
        read = [used[name].data_ptr() for name in names]
        if kind and read == [given.data_ptr() for given in present]:
            self._cache.add(kind, present, call)
            self.any = True


def _is_tensor(given: Any) -> bool:
    return isinstance(given, torch.Tensor)


def _kind_of(
    tensors: Tensors, offset: float, into: Mapping[str, torch.Tensor]
) -> tuple[tuple[Any, ...], list[torch.Tensor]]:
    """Return the key of a call and its tensors, or an empty key for one that is not remembered."""
    kind: list[Any] = [offset, *tensors, None, *into]
    present: list[torch.Tensor] = []
    for given in (*tensors.values(), *into.values()):
        if type(given) in PLAIN_TYPES:
            present.append(given)
            kind.append(torch.Tensor)  # in its place
        elif _is_tensor(given):
            return (), present
        else:
            kind.append(given)
    kind += [given.shape for given in present[:1] if not given.is_nested]  # it may have none
    return tuple(kind), present
