"""A disposable process that owns one GPU, and jobs for it under deadlines.

The parent never touches CUDA. Whatever a candidate does to the worker (an illegal access, a hang, a
lost context) ends that process and becomes the candidate's outcome; the next job gets a new one.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from generator.errors import NormforgeError, one_line
from generator.evaluate.gpu.protocol import Answer, Handler, Job, WorkerLostError
from generator.processes import context_of, end_with_parent, shielded

START_SECONDS = 120.0
_FROM_OUTSIDE = {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT}
"""Exit codes that no kernel causes: the system, a person or a batch system ended the worker."""


def open_session(device: int) -> Handler:
    """The real session, imported in the worker alone."""
    from generator.evaluate.gpu.session import Session

    return Session(device)


class GpuWorker:
    """A worker process on one device. method: how multiprocessing starts it."""

    def __init__(
        self,
        device: int,
        open_handler: Callable[[int], Handler] = open_session,
        method: str = "spawn",
    ) -> None:
        context: Any = context_of(method)
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(child, device, open_handler), daemon=True
        )
        with shielded():
            self._process.start()
        child.close()
        self._facts: dict[str, Any] | None = None

    def ready(self) -> dict[str, Any]:
        """Wait until the worker has its GPU. Returns facts about the device and the driver. Raises
        NormforgeError when it says that it cannot have one (NoGpuError when there is none) and
        WorkerLostError when it died or hung."""
        if self._facts is None:
            try:
                answer = self._receive(START_SECONDS, "starting")
            except WorkerLostError as lost:
                # It had no job yet, so that no candidate is to blame.
                raise WorkerLostError(lost.outcome, lost.note, outside=True) from None
            if isinstance(answer, NormforgeError):
                self.kill()
                raise type(answer)(f"the GPU worker cannot start: {answer}")
            self._facts = answer
        return self._facts

    def call(self, job: Job, seconds: float) -> Answer:
        """The worker's answer. Raises WorkerLostError when there is none by the deadline, and what
        `ready` raises."""
        self.ready()
        try:
            self._connection.send(job)
        except OSError:
            self.kill()  # it died while it had nothing to do
            raise WorkerLostError("crashed", "the GPU worker had died", outside=True) from None
        answer: Answer = self._receive(seconds, job.kind)
        return answer

    def _receive(self, seconds: float, doing: str) -> Any:
        try:
            if not self._connection.poll(seconds):
                self.kill()
                raise WorkerLostError("timeout", f"no answer after {seconds:.0f} s ({doing})")
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            code = self._process.exitcode
            self.kill()
            note = f"the GPU worker died ({doing}, exit {code})"
            raise WorkerLostError("crashed", note, code in _FROM_OUTSIDE) from None

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL; the driver then ends whatever still runs on the GPU."""
        self._process.kill()
        self._process.join(30)
        self._connection.close()


def _serve(connection: Connection, device: int, open_handler: Callable[[int], Handler]) -> None:
    end_with_parent(sigterm=signal.SIG_IGN)
    try:
        handler = open_handler(device)
        connection.send(handler.facts)
    except NormforgeError as error:
        connection.send(error)
        return
    except Exception as error:
        connection.send(NormforgeError(one_line(error) or type(error).__name__))
        return
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, OSError):
            return  # the parent is gone, and this process goes as well
        try:
            answer = handler.handle(job)
        except Exception:
            # Nothing a candidate does arrives here; this is the setting-up of a problem.
            answer = Answer(error=traceback.format_exc(limit=3), last=True)
        connection.send(answer)
        if answer.last:
            return
