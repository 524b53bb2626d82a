"""Check on a GPU that the bits of the batch-invariant package depend on the rows alone.

    python -m benchmarks.batch_invariance --out batch_invariance.json

Takes rows out of a batch, at random, and asks the package for them as a batch of their own: in
place, with gaps between the rows, and at odd addresses, on a random number of SMs. Compared bit by
bit are y, rstd and dx with those of the whole batch, and dw in fp32 with that of copies of the
rows, or with that of two micro-batches, on another number of SMs. The file is written after each
width. Ends with exit code 1 when a bit differs.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.command import command_line, exit_code
from benchmarks.gpu import open_session
from benchmarks.results import machine, write_json
from generator.evaluate.verify.determinism import equal_bits
from generator.operations.operation import TORCH_DTYPE
from normforge.spec import CHUNK_ROWS

ELEMENTS = 1 << 27
"""The most elements of the whole batch."""
FORMS = ("plain", "gaps", "odd address")
PROCESSES = 4
"""Processes at a time: one is busy on the host, while the GPU waits."""


class Case:
    """One width and dtype: a whole batch, and its results."""

    def __init__(self, package: Any, N: int, dtype: str, device: str = "cuda") -> None:
        self.package, self.N, self.dtype = package, N, dtype
        self.sms = int(package.PROVENANCE["target"]["sms"])
        package.set_sm_margin(0)
        self.M = M = max(4096, min(65536, ELEMENTS // N))
        torch.manual_seed(N)
        kind: dict[str, Any] = {"device": device, "dtype": TORCH_DTYPE[dtype]}
        self.x, self.dy = torch.randn(M, N, **kind), torch.randn(M, N, **kind)
        self.weight = torch.randn(N, **kind)
        wide, odd = torch.empty(M, N + 64, **kind), torch.empty(M * N + 1, **kind)
        self.forms = dict(zip(FORMS, (self.x, wide[:, :N], odd[1:].view(M, N)), strict=True))
        for form in FORMS[1:]:
            self.forms[form].copy_(self.x)
        self.y, self.rstd = package.rmsnorm_forward(self.x, self.weight, 1e-6)
        self.dx, _ = self.backward(self.x, self.dy, 0, M)

    def backward(
        self, x: torch.Tensor, dy: torch.Tensor, start: int, stop: int, **options: Any
    ) -> Any:
        options = options or {"dw_dtype": torch.float32}
        return self.package.rmsnorm_backward(dy, x, self.rstd[start:stop], self.weight, **options)

    def differs(self, random: Random) -> str:
        """Return what differs in one random batch, "" when nothing does."""
        most = 14 if random.random() < 0.9 else 16
        count = min(self.M, 1 + int(2 ** random.uniform(0, most)))
        start = random.randint(0, self.M - count)
        stop = start + count
        form = random.choice(FORMS)
        rows, dy = self.forms[form][start:stop], self.dy[start:stop]
        margins = [random.randrange(self.sms), random.randrange(self.sms)]
        self.package.set_sm_margin(margins[0])
        y, rstd = self.package.rmsnorm_forward(rows, self.weight, 1e-6)
        dx, dw = self.backward(rows, dy, start, stop)
        pairs = {"y": (y, self.y), "rstd": (rstd, self.rstd), "dx": (dx, self.dx)}
        faults = [name for name, (a, b) in pairs.items() if not equal_bits(a, b[start:stop])]
        self.package.set_sm_margin(margins[1])
        if count > CHUNK_ROWS:
            cut = start + CHUNK_ROWS * random.randint(1, (count - 1) // CHUNK_ROWS)
            total = torch.zeros(self.N, device=rows.device)
            for a, b in ((start, cut), (cut, stop)):
                into = {"dw_out": total, "accumulate": True}
                self.backward(self.x[a:b], self.dy[a:b], a, b, **into)
            faults += [] if equal_bits(total, dw) else ["dw of micro-batches"]
        else:
            _, again = self.backward(rows.clone(), dy.clone(), start, stop)
            faults += [] if equal_bits(again, dw) else ["dw"]
        if not faults:
            return ""
        return f"{', '.join(faults)} of rows {start} to {stop}, {form}, margins {margins}"


def check(case: Case, cases: int, seconds: float) -> dict[str, Any]:
    """Check up to `cases` random batches, for at most so many seconds."""
    random, begin, faults, done = Random(case.N), time.time(), [], 0
    while done < cases and time.time() - begin < seconds:
        fault = case.differs(random)
        faults += [fault] if fault else []
        done += 1
    return {
        "N": case.N,
        "dtype": case.dtype,
        "rows": case.M,
        "cases": done,
        "differing": len(faults),
        "first": faults[:3],
        "seconds": round(time.time() - begin, 1),
    }


def check_width(name: str, N: int, dtype: str, cases: int, seconds: float) -> dict[str, Any]:
    """Do `check` for one width of the package `name`."""
    found = check(Case(import_module(name), N, dtype), cases, seconds)
    torch.cuda.empty_cache()
    return found


def run(name: str, cases: int, seconds: float, out: Path) -> int:
    """Check all widths of a package, PROCESSES at a time. Raises NormforgeError."""
    session = open_session()
    package = import_module(name)
    widths = sorted({(tuned.N, tuned.dtype) for tuned in package._package.table.tuned})
    tuned_for = package.PROVENANCE["target"]["title"]
    environment = {**machine(session.facts), "tuned_for": tuned_for}
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        check_one = partial(check_width, name, cases=cases, seconds=seconds)
        for row in pool.map(check_one, *zip(*widths, strict=True)):
            rows.append(row)
            print(row, flush=True)
            write_json(out, {"environment": environment, "rows": rows})
    return int(any(row["differing"] for row in rows))


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out")
    parser.add_argument("--package", default="normforge.generated.h200.rmsnorm_invariant_backward")
    parser.add_argument("--cases", type=int, default=10_000, help="of each width")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each width, at most")
    args = parser.parse_args(argv)
    return exit_code(__file__, lambda: run(args.package, args.cases, args.seconds, args.out))


if __name__ == "__main__":
    sys.exit(main())
