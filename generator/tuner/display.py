"""The output of a run: its progress while it goes on, and a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from generator.problem import Problem
from generator.search.budget import Progress as SearchProgress
from generator.studies.records import FLOOR, PLAIN_FLOOR, Winner
from generator.text_table import columns

_PLAIN_SECONDS = 10.0
"""Seconds between two lines of progress of a phase where nothing can be rewritten."""
_TRIALS_SHARE = 0.8
"""The share of the time of a problem that its trials take; the rest is for its finals."""
_REFRESHES = 4
"""A second. More would take time from the search, which is in the same process."""


class Status:
    """Live progress on stderr: bars on a terminal; elsewhere a line for every problem, for every
    phase that ends, and for every ten seconds of one."""

    def __init__(self, problems: int, stream: TextIO | None = None) -> None:
        self.problems = problems
        self.console = Console(file=stream or sys.stderr, highlight=False, markup=False)
        self.live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            refresh_per_second=_REFRESHES,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._since: dict[str, float] = {}  # when each phase began
        self._said: dict[str, float] = {}  # when it was last said how far it is
        self._done = 0
        self._shares: dict[int, float] = {}  # shares done of the problems under way
        self._waited: set[Problem] = set()

    def __enter__(self) -> Status:
        if self.live:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:
            self._bars.stop()

    def phase(self, name: str, done: int, total: int) -> None:
        """A phase beside the searches, and how many of its parts are done."""
        now = time.monotonic()
        since = self._since.setdefault(name, now)
        said = self._said.setdefault(name, now)
        ended = done >= total
        if self.live:
            if ended:
                self._end(name)
            else:
                self._show(name, done, total, f"{done}/{total} | {_left(now - since, done, total)}")
        elif not ended and now - said >= _PLAIN_SECONDS:
            self._said[name] = now
            self.say(f"{name}: {done}/{total} | {_left(now - since, done, total)}")
        if ended:
            if total:
                self.say(f"{name}: {done}/{total} in {_duration(now - since)}")
            self._since.pop(name)
            self._said.pop(name)

    def progress(self, index: int, event: SearchProgress) -> None:
        """index: place of the problem in the plan."""
        self._shares[index] = _TRIALS_SHARE * event.done / event.total
        self._searching()
        if self.live:
            best = f"best {event.best_us:.2f} us" if event.best_us else "no time yet"
            failed = sum(count for outcome, count in event.counts.items() if outcome != "ok")
            note = f"{event.done}/{event.total} {event.phase}, {best}"
            note += f", {failed} out" if failed else ""
            self._show(f"  {event.problem}", event.done, event.total, note)

    def winner(
        self, index: int, problem: Problem, winner: Winner | None, failure: str = ""
    ) -> None:
        """A problem is concluded. failure: why there is no answer from this run."""
        self._done += 1
        self._shares.pop(index, None)
        self._end(f"  {problem}")
        self._searching()
        place = f"[{self._done}/{self.problems}]"
        left = "" if self.live else f" | {self._search_left()}"
        self.say(f"{place} {describe(problem, winner, failure)}{left}")

    def waiting(self, holders: Mapping[Problem, str]) -> None:
        """Say, once for every problem that others have, that there is nothing to do until they are
        done. holders: who has which."""
        new = holders.keys() - self._waited
        self._waited = set(holders)
        if new:
            who = "; ".join(f"{problem} ({holders[problem]})" for problem in sorted(new))
            self.say(f"{len(holders)} shapes left, which others search: waiting for {who}")

    def say(self, line: str) -> None:
        """Print one line that stays."""
        self.console.print(line, soft_wrap=not self.live)

    def _searching(self) -> None:
        """The bar of the search as a whole."""
        self._since.setdefault("searching", time.monotonic())
        if self._done >= self.problems:
            self._end("searching")
        else:
            share = self._done + sum(self._shares.values())
            note = f"{self._done}/{self.problems} shapes | {self._search_left()}"
            self._show("searching", share, self.problems, note)

    def _search_left(self) -> str:
        elapsed = time.monotonic() - self._since["searching"]
        return _left(elapsed, self._done + sum(self._shares.values()), self.problems)

    def _show(self, name: str, done: float, total: int, note: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note=note)
        self._bars.update(self._tasks[name], completed=done, total=total, note=note)

    def _end(self, name: str) -> None:
        if name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))


def _left(elapsed: float, done: float, total: int) -> str:
    return f"{_duration(elapsed * (total - done) / done)} left" if done > 0 else "time left unknown"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def describe(problem: Problem, winner: Winner | None, failure: str = "") -> str:
    """Describe a finished problem in one line."""
    if winner is None:
        return f"{problem}: {f'no answer: {failure}' if failure else 'no variant may win'}"
    if "form" in winner.config and winner.evidence == "predicted":  # no model knows its time
        return f"{problem}: {_in_short(winner)}, by rule"
    return (
        f"{problem}: {_in_short(winner)}, {winner.result.us:.2f} us, "
        f"{winner.result.ratio:.3f} x {winner.floor}, {winner.evidence}"
    )


def table(winners: Sequence[tuple[Problem, Winner | None]]) -> str:
    """The final table, of at most 80 columns for shapes without options. The winner is said in
    short: its strategy, and its pipeline with the stages. `overhead`: that of determinism, see
    Winner.overhead_of_determinism."""
    rows = [("shape", "winner", "us", "x floor", "overhead", "evidence")]
    for problem, winner in winners:
        if winner is None:
            rows.append((str(problem), "none", "-", "-", "-", "-"))
            continue
        overhead = winner.overhead_of_determinism
        usual = winner.evidence == "predicted" or winner.result.determinism == "verified"
        rows.append(
            (
                str(problem),
                _in_short(winner),
                f"{winner.result.us:.2f}",
                f"{winner.result.ratio:.3f}{'' if winner.floor == FLOOR else '*'}",
                f"{overhead:.3f}" if overhead else "-",
                winner.evidence if usual else f"{winner.evidence}, {winner.result.determinism}",
            )
        )
    lines = [line[2:] for line in columns(rows, right=(2, 3, 4)).splitlines()]
    lines.insert(1, "-" * max(map(len, lines)))
    if any(winner and winner.floor != FLOOR for _, winner in winners):
        lines.append(f"* to {PLAIN_FLOOR}")
    return "\n".join(lines)


def _in_short(winner: Winner) -> str:
    knobs = winner.config
    if "form" in knobs:
        rows = f"{knobs['rows_per_cta']}x{knobs['rows_in_flight']}"
        return f"{knobs['form']} {knobs['threads_per_row']}x{rows}"
    stages = "" if knobs["pipeline"] == "direct" else knobs["stages"]
    return f"{knobs['strategy']} {knobs['pipeline']}{stages}"
