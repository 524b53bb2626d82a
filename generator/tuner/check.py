"""The kernels of a package on this machine: whether each does what the package says of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from generator.errors import NormforgeError, ProblemError
from generator.evaluate.gpu.protocol import Candidate
from generator.evaluate.gpu.recheck import Rechecker
from generator.evaluate.gpu.rotation import FLUSH
from generator.package.emit import read_forward_table
from generator.package.entries import BITS, problem_of
from generator.problem import FORWARDS, RMSNORM_BACKWARD, RMSNORM_FORWARD, Problem
from generator.result import FLOOR_BYTES, Result
from generator.studies.records import plain_floor
from generator.target import Target
from normforge.table import Table, TunedOf

TOLERANCE = 10.0
"""Percent by which times may differ. Between GPUs of one model, the floor alone differs by 5 %
where it takes 10 us."""
OTHER_FLOOR = "its time was measured beside another reference"


@dataclass(frozen=True)
class Stored:
    """A tuned kernel of a package, and the problem that it was tuned for."""

    problem: Problem
    tuned: TunedOf[Any]

    @property
    def forward(self) -> bool:
        return self.problem.operation in FORWARDS

    def __str__(self) -> str:
        if self.forward:
            return f"{replace(self.problem, operation=RMSNORM_BACKWARD)} forward"
        return str(self.problem)


@dataclass(frozen=True)
class Checked:
    """The findings about one kernel. bits: `same`, `differ`, or why they were not compared;
    accuracy: `ok`, or what is wrong; time: `ok`, `slow`, or why it was not compared; slower: by how
    much its ratio to the floor is above that of the table. errors: of the outputs, relative to
    float64."""

    shape: str
    kernel: str
    bits: str
    accuracy: str
    time: str
    errors: dict[str, float]
    us: float | None = None
    floor_us: float | None = None
    ratio: float | None = None
    recorded_ratio: float | None = None
    slower: float | None = None

    @property
    def passed(self) -> bool:
        """True when nothing contradicts the package."""
        return (self.bits == "differ", self.accuracy, self.time == "slow") == (False, "ok", False)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def stored_kernels(package: Path, target: Target, operation: str) -> list[Stored]:
    """The tuned kernels of a package, every forward behind the backward of its shape. Raises
    NormforgeError for none, for a damaged one, and for one of another GPU."""
    try:
        table = Table.load(package)
    except (OSError, ValueError) as error:
        raise NormforgeError(f"{package} holds no package that can be read ({error})") from error
    if table.target["name"] != target.name:
        raise NormforgeError(
            f"{package} is for {table.target['name']} and this machine has a {target.name}: a "
            "package is checked on its own GPU"
        )
    if not table.tuned:
        raise NormforgeError(f"{package} has no tuned kernel: there is nothing to check")
    forward = read_forward_table(package)
    tuned_forwards = forward.tuned if forward else ()
    forwards = {(t.M, t.N, t.dtype, t.weight_dtype): t for t in tuned_forwards}
    found = []
    for tuned in table.tuned:
        problem = problem_of(tuned)
        if problem.operation != operation:
            raise NormforgeError(f"{package} has kernels of {problem.operation}: choose with --op")
        found.append(Stored(problem, tuned))
        shape = (problem.M, problem.N, problem.dtype, problem.weight_dtype)
        if (own := forwards.pop(shape, None)) is not None:
            found.append(Stored(Problem(*shape, operation=RMSNORM_FORWARD), own))
    return found


def choose(
    stored: Sequence[Stored], shapes: Sequence[Problem] | None, sample: int | None
) -> list[Stored]:
    """Choose the kernels of some shapes (None for all), and of these so many, spread evenly over
    the table, the same ones each time. Raises NormforgeError for a shape that the package was not
    tuned for."""
    of_shape: dict[Problem, list[Stored]] = {}
    own: list[Stored] = []
    for one in stored:
        if not one.forward:  # forwards stand behind their backwards
            own = of_shape.setdefault(one.problem, [])
        own.append(one)
    wanted = list(of_shape if shapes is None else shapes)
    if missing := [str(problem) for problem in wanted if problem not in of_shape]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise NormforgeError(f"the package has no kernel for {', '.join(missing[:3])}{more}")
    if sample is not None and sample < len(wanted):
        wanted = [wanted[i * len(wanted) // sample] for i in range(sample)]
    return [one for problem in wanted for one in of_shape[problem]]


def check_kernel(
    stored: Stored, package: Path, rechecker: Rechecker, tolerance: float = TOLERANCE
) -> Checked:
    """Check one kernel on this machine. tolerance: percent that its ratio to the floor may be above
    that of the table. Raises NormforgeError when no GPU works any more."""
    tuned, kernel = stored.tuned, stored.tuned.kernel
    try:
        candidate = Candidate(kernel.read_cubin(package), kernel.spec)
        condition = tuned.provenance.get("condition") or FLUSH  # older tables say none
        result = rechecker.check(stored.problem, candidate, condition)
    except (RuntimeError, ProblemError) as error:  # damaged, or what the GPU has no room for
        result = Result("unchecked", note=str(error))
    accuracy = "ok" if result.outcome == "ok" else f"{result.outcome}: {result.note}"
    recorded = _recorded_ratio(stored)
    slower = None
    if result.ratio is not None and not isinstance(recorded, str):
        slower = result.ratio / recorded - 1
    return Checked(
        shape=str(stored),
        kernel=kernel.file,
        bits=_bits(tuned, result),
        accuracy=accuracy,
        time=_time(result, recorded, slower, tolerance, rechecker),
        errors=dict(result.errors),
        us=result.us,
        floor_us=result.floor_us,
        ratio=result.ratio,
        recorded_ratio=None if isinstance(recorded, str) else recorded,
        slower=slower,
    )


def _bits(tuned: TunedOf[Any], result: Result) -> str:
    recorded, found = tuned.provenance.get(BITS), result.extra.get(BITS)
    if found is None:
        return "not checked"
    if recorded is None:
        return "not recorded"
    return "same" if found == recorded else "differ"


def _recorded_ratio(stored: Stored) -> float | str:
    """Return the table's ratio of the kernel's time to the floor, or why that does not compare."""
    facts = stored.tuned.provenance
    if stored.tuned.evidence != "measured" or facts.get("ratio") is None:
        return "predicted" if stored.tuned.evidence == "predicted" else "not recorded"
    extra = {} if facts.get(FLOOR_BYTES) is None else {FLOOR_BYTES: facts[FLOOR_BYTES]}
    recorded = Result("ok", ratio=facts["ratio"], extra=extra)
    if not stored.forward and plain_floor(stored.problem, "measured", recorded):
        return OTHER_FLOOR
    return float(facts["ratio"])


def _time(
    result: Result,
    recorded: float | str,
    slower: float | None,
    tolerance: float,
    rechecker: Rechecker,
) -> str:
    if result.ratio is None:
        untimed = result.extra.get("untimed")
        return f"not timed: {untimed}" if untimed else "not checked"
    if result.noisy:
        cause = rechecker.causes()
        return f"noisy: {result.extra['noise']}{f' ({cause})' if cause else ''}"
    if slower is None:
        return str(recorded)
    return "slow" if slower > tolerance / 100 else "ok"


def summary(checked: Iterable[Checked]) -> str:
    """Say how many kernels were checked, and what could not be compared, in sentences."""
    found = list(checked)
    failed = sum(not one.passed for one in found)
    said = [
        f"{len(found)} kernels checked: {len(found) - failed} as the package says, {failed} not."
    ]
    for count, what in (
        (
            sum(one.bits == "not recorded" for one in found),
            "have no record of their bits, which packages have that were tuned since",
        ),
        (sum(one.time.startswith("noisy") for one in found), "have no clean times"),
        (
            sum(one.time in ("predicted", "not recorded", OTHER_FLOOR) for one in found),
            "have no measured time to compare with",
        ),
    ):
        if count:
            said.append(f"{count} {what}.")
    return " ".join(said)
