"""When the graph of a capture has come to its end.

The driver says so through a user object. A graph and all that is instantiated from it hold
references to it, until they are destroyed and their last launch has finished. Then a thread of the
driver's calls its destructor, which may enter neither CUDA nor, in that thread, Python. So that is
`sem_post` of the C library, and whoever wants memory looks at the semaphore.
"""

from __future__ import annotations

import ctypes
from typing import Any

from .driver import LaunchError, checked, cuda_driver, during_capture

_SEMAPHORE_BYTES = 64  # sem_t has 32
_NAME = "the workspace of a graph"
_unused: list[int] = []
"""Semaphores of graphs that are gone. They belong to no object of Python: a graph may end after the
interpreter."""


class GraphEnd:
    """The end of one graph that is being captured. Raises LaunchError where the driver cannot tell
    it, and AttributeError where the C library has no semaphores."""

    def __init__(self, graph: Any) -> None:
        library, driver = ctypes.CDLL(None), cuda_driver()
        self._reached = library.sem_trywait
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
        """Whether nothing of the graph is left, nor runs. True once; forget this object then."""
        if self._reached(ctypes.c_void_p(self._semaphore)) != 0:
            return False
        _unused.append(self._semaphore)
        return True


def end_of(graph: Any) -> GraphEnd | None:
    """The end of a graph that is being captured, None where nobody can tell it."""
    try:
        return GraphEnd(graph)
    except (LaunchError, AttributeError):
        return None
