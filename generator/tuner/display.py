"""What a run shows: a status line that rewrites itself, a table at the end, or JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from generator.problem import Problem
from generator.search.budget import Progress
from generator.studies.records import FLOOR, PLAIN_FLOOR, Winner
from generator.tuner.plan import Plan
from generator.tuner.run import Outcome


class Status:
    """Live progress on stderr: rewritten in place on a terminal, a line per problem elsewhere."""

    def __init__(self, problems: int, stream: TextIO | None = None) -> None:
        self.problems = problems
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.started = time.monotonic()
        self._last = 0.0
        self._width = 0
        self._done = 0
        self._shares: dict[int, float] = {}  # of the problems under way
        self._waited: set[Problem] = set()

    def progress(self, index: int, event: Progress) -> None:
        now = time.monotonic()
        self._shares[index] = event.done / event.total if event.total else 0.0
        if not self.live or now - self._last < 0.1:
            return
        self._last = now
        failed = ", ".join(
            f"{count} {outcome}"
            for outcome, count in sorted(event.counts.items())
            if outcome != "ok"
        )
        best = f"best {event.best_us:.2f} us" if event.best_us else "no time yet"
        text = (
            f"{self._place()} {event.problem} {event.phase} "
            f"{event.done}/{event.total or '?'} {best} | {self._left()}"
            + (f" | {failed}" if failed else "")
        )
        self._write(text[:160])

    def winner(self, index: int, problem: Problem, winner: Winner | None) -> None:
        place = self._place()
        self._done += 1
        self._shares.pop(index, None)
        self._say(f"{place} {describe(problem, winner)} | {self._left()}")

    def waiting(self, holders: Mapping[Problem, str]) -> None:
        """Said once for every problem that others have."""
        new = holders.keys() - self._waited
        self._waited = set(holders)
        if new:
            who = "; ".join(f"{problem} ({holders[problem]})" for problem in sorted(new))
            self._say(f"{len(holders)} shapes left, which others search: waiting for {who}")

    def _place(self) -> str:
        """The number of the next problem to be concluded."""
        at_once = f", {len(self._shares)} at once" if len(self._shares) > 1 else ""
        return f"[{min(self._done + 1, self.problems)}/{self.problems}{at_once}]"

    def _left(self) -> str:
        done = self._done + sum(self._shares.values())
        elapsed = time.monotonic() - self.started
        if done <= 0:
            return "time left unknown"
        left = elapsed * (self.problems - done) / done
        minutes, seconds = divmod(round(left), 60)
        return f"{minutes} min {seconds:02} s left" if minutes else f"{seconds} s left"

    def _say(self, line: str) -> None:
        self._clear()
        print(line, file=self.stream, flush=True)

    def _write(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self._width))
        self.stream.flush()
        self._width = len(text)

    def _clear(self) -> None:
        if self.live and self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self._width = 0


def describe(problem: Problem, winner: Winner | None) -> str:
    """One line about a finished problem."""
    if winner is None:
        return f"{problem}: no variant may win"
    return (
        f"{problem}: {winner.variant} {winner.result.us:.2f} us, "
        f"{winner.result.ratio:.3f} x {winner.floor}, {winner.evidence}"
    )


def table(winners: Sequence[tuple[Problem, Winner | None]]) -> str:
    """The final table. `overhead`: that of determinism, see Winner.overhead_of_determinism."""
    rows = [
        ("shape", "winner", "us", "x floor", "fastest non-deterministic", "overhead", "evidence")
    ]
    for problem, winner in winners:
        if winner is None:
            rows.append((str(problem), "none", "-", "-", "-", "-", "-"))
            continue
        fastest, overhead = winner.fastest_nondeterministic, winner.overhead_of_determinism
        rows.append(
            (
                str(problem),
                winner.variant,
                f"{winner.result.us:.2f}",
                f"{winner.result.ratio:.3f}{'' if winner.floor == FLOOR else '*'}",
                f"{fastest.variant} {fastest.us:.2f}" if fastest else "-",
                f"{overhead:.3f}" if overhead else "-",
                f"{winner.evidence}, {winner.result.determinism}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    if any(winner and winner.floor != FLOOR for _, winner in winners):
        lines.append(f"* to {PLAIN_FLOOR}")
    return "\n".join(lines)


def document(plan: Plan, outcome: Outcome, evidence: str, seconds: float) -> dict[str, Any]:
    """The run as one JSON-able document."""
    return {
        "gpu": plan.target.name,
        "evidence": evidence,
        "seconds": round(seconds, 1),
        "interrupted": outcome.interrupted,
        "package": str(outcome.emission.package) if outcome.emission else None,
        "kept_measured": [str(p) for p in outcome.emission.refused] if outcome.emission else [],
        "shapes": [_row(problem, winner) for problem, winner in outcome.winners],
    }


def _row(problem: Problem, winner: Winner | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "shape": str(problem),
        "M": problem.M,
        "N": problem.N,
        "dtype": problem.dtype,
        "weight_dtype": problem.weight_dtype,
    }
    if winner is None:
        return row | {"strategy": None, "config": None, "us": None, "evidence": None}
    fastest = winner.fastest_nondeterministic
    return row | {
        "strategy": winner.config["strategy"],
        "variant": winner.variant,
        "config": dict(winner.config),
        "us": winner.result.us,
        "floor_us": winner.result.floor_us,
        "floor": winner.floor,
        "ratio": winner.result.ratio,
        "evidence": winner.evidence,
        "determinism": winner.result.determinism,
        "checks": list(winner.result.checks),
        "fastest_nondeterministic": fastest.variant if fastest else None,
        "overhead_of_determinism": winner.overhead_of_determinism,
        "trials": winner.trials,
        "outcomes": dict(winner.counts),
        "reason": winner.reason,
    }
