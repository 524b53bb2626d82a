"""The process of one GPU of a run on several."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any, Protocol

from generator.errors import NormforgeError, ProblemError
from generator.evaluate.evaluator import Evaluator, Pool
from generator.evaluate.gpu.evaluator import MeasuredEvaluator
from generator.evaluate.gpu.recheck import Rechecker
from generator.evaluate.gpu.supervisor import Supervisor
from generator.kernels.compile_pool import CompilePool
from generator.processes import end_with_parent
from generator.search.budget import Progress
from generator.studies.leases import LeaseLostError
from generator.studies.storage import open_storage
from generator.target import Target
from generator.tuner.plan import Plan
from generator.tuner.task_list import Task
from generator.tuner.task_runner import TaskRunner, compilers_of


class Device(Protocol):
    """One GPU in the process that drives it."""

    facts: Mapping[str, Any]

    def evaluator(self, target: Target) -> Evaluator: ...

    def pool(self, arch: str, processes: int) -> AbstractContextManager[Pool]: ...

    def close(self) -> None: ...


class Gpu:
    """The real one. The worker that tells its name goes on to measure."""

    def __init__(self, index: int) -> None:
        self._supervisor = Supervisor(index)
        self.facts: Mapping[str, Any] = self._supervisor.facts

    def evaluator(self, target: Target) -> MeasuredEvaluator:
        return MeasuredEvaluator(target, self._supervisor)

    def rechecker(self) -> Rechecker:
        return Rechecker(self._supervisor)

    def pool(self, arch: str, processes: int) -> AbstractContextManager[Pool]:
        return CompilePool(arch, processes)

    def close(self) -> None:
        self._supervisor.close()


def run_device(connection: Connection, index: int, open_device: Callable[[int], Device]) -> None:
    end_with_parent(sigterm=signal.SIG_IGN)
    try:
        device = open_device(index)
    except NormforgeError as error:
        connection.send(("error", error))
        return
    connection.send(("facts", dict(device.facts)))
    try:
        plan = connection.recv()
        if plan is not None:
            _run_tasks(connection, plan, device)
    except NormforgeError as error:
        connection.send(("error", error))
    except EOFError:
        pass
    except Exception:
        traceback.print_exc()
        raise
    finally:
        device.close()


def _run_tasks(connection: Connection, plan: Plan, device: Device) -> None:
    """Search every task that the parent sends; None or "stop" is the end."""

    def tell(event: Progress) -> None:
        connection.send(("progress", event))
        if connection.poll():
            raise KeyboardInterrupt  # all that is sent meanwhile is "stop", and None

    with device.pool(plan.target.arch, compilers_of(plan)) as pool:
        evaluator, storage = device.evaluator(plan.target), open_storage(plan.where)
        runner = TaskRunner(plan, pool, evaluator, device.facts, storage)
        while isinstance(task := connection.recv(), Task):
            try:
                answer: tuple[str, Any] = ("winner", runner.search(task, tell))
            except (LeaseLostError, KeyboardInterrupt):
                answer = ("open", None)
            except ProblemError as error:
                answer = ("failed", str(error))
            connection.send(answer)
        if isinstance(evaluator, MeasuredEvaluator) and (noise := evaluator.disturbances()):
            connection.send(("noise", noise))
