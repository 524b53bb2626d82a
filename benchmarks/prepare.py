"""Compiles the peers' kernels in several processes, into the caches that they keep on disk.

Nothing is measured here. Whatever fails fails again, and is reported, where it is measured.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, TimeoutError, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from benchmarks.harness import Contender, Entrant, sentence
from benchmarks.peers import choose_peers
from benchmarks.peers.peer import Bind, Peer
from generator.evaluate.gpu.timer import Timer
from generator.operations import operation_of
from generator.operations.operation import TORCH_DTYPE
from generator.operations.rows import inputs_class
from generator.problem import Problem
from generator.processes import end_with_parent
from normforge.operations import signature_of

FEW_ROWS = 64


def prepare(
    tasks: Sequence[tuple[Peer, Problem]],
    processes: int,
    seconds: float,
    device: int,
    say: Callable[[str], None],
) -> None:
    """Compile for each task what goes to disk, in `processes` processes, for at most `seconds`;
    meanwhile, in this one, what stays in a process for the N and dtypes of the tasks."""
    began = time.monotonic()
    until = began + seconds
    # The slowest first, so that none of them starts last.
    slowest_first = sorted(tasks, key=lambda task: not task[0].tuned)
    on_disk = [
        (peer.name, str(problem)) for peer, problem in slowest_first if peer.compiles == "disk"
    ]
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start, (device,))
    futures = {pool.submit(compile_one, *task): task for task in on_disk}
    _compile_here(tasks, until, device)
    try:
        for done, future in enumerate(as_completed(futures, until - time.monotonic()), start=1):
            if reason := future.result():
                say(f"{' '.join(futures[future])} cannot be compiled in advance: {reason}")
            if done == len(futures):
                say(f"Compiled {done} peer kernels in advance in {time.monotonic() - began:.0f} s")
    except (TimeoutError, BrokenProcessPool) as error:
        say(f"Not all peer kernels were compiled in advance ({type(error).__name__})")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # A compiler may hang, and must not run beside a measurement.
        for process in multiprocessing.active_children():
            process.kill()
            process.join()


def _compile_here(tasks: Sequence[tuple[Peer, Problem]], until: float, device: int) -> None:
    widths = dict.fromkeys(
        (peer, replace(problem, M=FEW_ROWS))
        for peer, problem in tasks
        if peer.compiles == "process"
    )
    for peer, problem in widths:
        if time.monotonic() < until:
            run_once(peer, problem, torch.device("cuda", device))


def _start(device: int) -> None:
    end_with_parent()
    torch.cuda.set_device(device)


def compile_one(name: str, shape: str) -> str:
    """Run a peer once on a shape; "" or why it could not."""
    problem = Problem.parse(shape)
    (peer,) = choose_peers(name, problem.operation)
    return run_once(peer, problem, torch.device("cuda", torch.cuda.current_device()))


def run_once(peer: Peer, problem: Problem, device: torch.device) -> str:
    try:
        with torch.no_grad():
            contender = Contender(_loaded(peer, device), peer.overwrites_dy)
            Entrant(contender, any_inputs(problem, device)).run()
            torch.cuda.synchronize()
        return ""
    except Exception as error:
        return sentence(error)
    finally:
        torch.cuda.empty_cache()


@cache
def _loaded(peer: Peer, device: torch.device) -> Bind:
    return peer.load(Timer(device, flush_bytes=4))


def any_inputs(problem: Problem, device: torch.device) -> Any:
    """Inputs of the right shapes and dtypes, quickly."""
    tensors: dict[str, Any] = {
        spec.name: torch.ones(spec.shape, dtype=TORCH_DTYPE[spec.dtype], device=device)
        for spec in operation_of(problem).arguments(problem)
    }
    return inputs_class(signature_of(problem.operation))(**tensors)
