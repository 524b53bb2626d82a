"""Programs in processes of their own that have PyTorch already.

A server that has imported PyTorch, and nothing of this repository, forks one for each of them:
importing PyTorch takes seconds. A program that is about imports before PyTorch, or without it,
needs a Python of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from generator.paths import REPOSITORY
from tests.support.patience import patience

SERVER = """
import gc, json, os, sys, warnings
import {imported}

def become(asked):
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in enumerate(asked["said"], 1):
        os.dup2(os.open(path, os.O_WRONLY), number)
    sys.path[1:1] = asked["paths"]
    warnings.simplefilter("ignore")
    names, program = globals(), compile(asked["program"], "program", "exec")
    names.clear()
    names["__name__"] = "__main__"
    exec(program, names)

gc.freeze()  # no program looks through what is imported here when it ends
for line in sys.stdin:
    child = os.fork()
    if not child:
        become(json.loads(line))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
INDUCTOR = "torch._inductor.compile_fx"
"""A module with which a compiler of PyTorch is imported, whatever the backend."""


@cache
def server(imported: str) -> subprocess.Popen[str]:
    """Start a server of this process, which ends with it."""
    started = subprocess.Popen(
        [sys.executable, "-c", SERVER.replace("{imported}", imported)],
        cwd=tempfile.gettempdir(),
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    atexit.register(started.communicate)  # which closes its input
    return started


def run_fresh(
    program: str,
    cwd: Path,
    paths: Sequence[Path] = (),
    imported: str = "torch",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Do what `python -W ignore -c program` does that finds modules in `cwd` and in `paths`, and
    has `imported` one of PyTorch's already: INDUCTOR, which takes longer to import than PyTorch,
    for a program that compiles or exports a model."""
    found = list(map(str, paths))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(found), **environment}
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        for file in said:
            file.touch()
        asked = {"program": program, "cwd": str(cwd), "paths": found, "env": env}
        pipes = server(imported)
        assert pipes.stdin is not None and pipes.stdout is not None
        print(json.dumps({**asked, "said": list(map(str, said))}), file=pipes.stdin, flush=True)
        if not select.select([pipes.stdout], [], [], patience(200))[0]:
            os.killpg(pipes.pid, signal.SIGKILL)
            server.cache_clear()
            raise AssertionError(f"no end of this program:\n{program}")
        code = int(pipes.stdout.readline())
        return subprocess.CompletedProcess(program, code, *(file.read_text() for file in said))


def printed_by(program: str, folder: Path | str = "", **how: Any) -> list[str]:
    """The lines that a program of this repository prints, which has to come to its end. folder:
    what stands for {folder} in it; how: as of `run_fresh`."""
    done = run_fresh(program.replace("{folder}", str(folder)), REPOSITORY, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
