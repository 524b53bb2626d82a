"""What every process that the tuner starts does first."""

from __future__ import annotations

import os
from multiprocessing import parent_process
from threading import Thread


def end_with_parent() -> None:
    """End this process when the one that started it is gone: nobody else would after a kill -9."""
    parent = parent_process()
    if parent is None:
        raise RuntimeError("end_with_parent is for processes started by multiprocessing")

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, name="end with parent", daemon=True).start()
