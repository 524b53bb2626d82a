"""Tells when a captured graph is gone.

The driver reports this through a user object (CUDA programming guide, "CUDA User Objects"). The
graph, and everything instantiated from it, hold references to the object until they are destroyed
and their last launch has finished. Then a driver thread calls its destructor, which may not call
CUDA and should not need Python. So the destructor is `sem_post` of the C library, and whoever wants
memory looks at the semaphore.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .driver import LaunchError, checked, cuda_driver, during_capture

_SEMAPHORE_BYTES = 64  # sem_t has 32
_NAME = "the workspace of a graph"
_unused: list[int] = []
"""Semaphores of graphs that are gone. No Python object owns them, because a graph may outlive the
interpreter."""


class GraphEnd:
    """The end of one graph that is being captured. Raises LaunchError if the driver refuses, and
    AttributeError if the C library has no semaphores."""

    def __init__(self, graph: Any) -> None:
        library, driver = ctypes.CDLL(None), cuda_driver()
        self._try_wait = library.sem_trywait
        post = ctypes.cast(library.sem_post, ctypes.c_void_p).value
        try:
            self._semaphore = _unused.pop()
        except IndexError:
            allocate = library.calloc
            allocate.restype = ctypes.c_void_p
            self._semaphore = allocate(1, _SEMAPHORE_BYTES)
            library.sem_init(ctypes.c_void_p(self._semaphore), 0, 0)
        flag = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        with during_capture(_NAME):
            created = driver.cuUserObjectCreate(self._semaphore, post, 1, int(flag))
            owned = checked(created, "creating a user object for", _NAME)
            retained = driver.cuGraphRetainUserObject(graph, owned, 1, int(move))
            checked(retained, "giving a user object to", _NAME)

    def reached(self) -> bool:
        """Return True if the graph is gone and none of its launches is running. It does so once;
        discard this object then."""
        if self._try_wait(ctypes.c_void_p(self._semaphore)) != 0:
            return False
        _unused.append(self._semaphore)
        return True


def end_of(graph: Any) -> GraphEnd | None:
    """The end of a graph that is being captured; None if the driver cannot report it."""
    try:
        return GraphEnd(graph)
    except (LaunchError, AttributeError):
        return None
