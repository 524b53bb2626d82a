"""The results file: written whole after every shape, so that an interrupted run keeps what it has.

    {"environment": {"operation", "gpu", "uuid", "driver", "torch", "commit", "libraries", "peers",
                     "missing", "module": {"digest", "cubins", …}, "harness": {"condition",
                     "order", "flush_bytes", …}, "date", …},
     "rows": [{"M", "N", "dtype", "weight_dtype", "add_us", "ours_us", "ours_host_us", "strategy",
               "plain_weight_us", "sets",
               "peers": {name: {"us", "host_us", "error_dx", "error_dw", "deterministic", "path"}},
               …}]}

`operation`: that of all rows, RMSNorm's backward where none is named. `error_dw`: of all sums over
rows together. `plain_weight_us`: of ours with a weight of x's dtype, in the blocks of a row whose
weight has another. `sets`: through how many sets of inputs and outputs all rotated, 1 where the L2
is flushed. Times are in microseconds; None stands for what could not be measured, with a
`reason` beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.provenance import cubins_of, origin
from generator.disk import read_json, replacing
from generator.errors import NormforgeError
from generator.problem import RMSNORM_BACKWARD, Problem
from normforge.table import TABLE

Row = dict[str, Any]
Environment = dict[str, Any]

OURS = "ours"
LONGEST = (100, 100, 2500)
"""Characters of an entry on one line: of the document, of its entries, and of all below."""
SAME = ("gpu", "uuid", "commit", "driver", "torch", "triton", "peers", "module", "harness")
"""Keys of the facts that must not differ between the rows of one file. Of the module, it is its
digest."""


def problem_of(row: Row, operation: str = RMSNORM_BACKWARD) -> Problem:
    shape = (row["M"], row["N"], row["dtype"], str(row.get("weight_dtype", row["dtype"])))
    return Problem(*shape, operation=operation)


def cell_of(row: Row, name: str) -> dict[str, Any] | None:
    """Return what a row says of ours or of a peer, under the same keys; None where it took no
    part."""
    if name != OURS:
        return row["peers"].get(name)
    own = f"{OURS}_"
    return {key.removeprefix(own): value for key, value in row.items() if key.startswith(own)}


def operation_in(environment: Environment) -> str:
    return str(environment.get("operation", RMSNORM_BACKWARD))


class Results:
    """The rows of one results file, in memory and on disk."""

    def __init__(self, path: Path, environment: Environment, rows: Sequence[Row] = ()) -> None:
        self.path, self.environment = path, environment
        self.operation = operation_in(environment)
        self._rows = {problem_of(row, self.operation): row for row in rows}

    @classmethod
    def read(cls, path: Path) -> Results:
        """Raises NormforgeError when the file cannot be read or is no results file."""
        with _reading(path):
            data = read_json(path)
            return cls(path, dict(data["environment"]), list(data["rows"]))

    @classmethod
    def resume(cls, path: Path, environment: Environment) -> Results:
        """Read what the file already has, or nothing when there is none. Raises NormforgeError when
        it was measured under other conditions."""
        if not path.exists():
            return cls(path, environment)
        found = cls.read(path)
        check_same(path, found.environment, environment, SAME)
        merged = {**environment, "date": found.environment["date"]}
        merged["peers"] = {**found.environment["peers"], **environment["peers"]}
        return cls(path, merged, found.rows)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def row(self, problem: Problem) -> Row | None:
        return self._rows.get(problem)

    def has(self, problem: Problem, peers: Sequence[str]) -> bool:
        """True when the problem was measured together with all of these peers."""
        row = self.row(problem)
        return row is not None and set(peers) <= set(row["peers"])

    def put(self, row: Row) -> None:
        self._rows[problem_of(row, self.operation)] = row

    def sort(self, problems: Sequence[Problem]) -> None:
        """Put the rows into the order of the problems; others follow."""
        order = {problem: index for index, problem in enumerate(problems)}
        known = sorted(self._rows, key=lambda problem: order.get(problem, len(order)))
        self._rows = {problem: self._rows[problem] for problem in known}

    def write(self) -> None:
        """Replace the file in one step. Raises NormforgeError when it cannot be written."""
        document = {"environment": self.environment, "rows": self.rows}
        write_json(self.path, document)


def kept(path: Path, environment: Environment, same: Iterable[str]) -> dict[str, Any]:
    """The document that a run goes on with; {} where there is no file. Raises NormforgeError where
    its environment has another value of one of `same`."""
    if not path.exists():
        return {}
    with _reading(path):
        document = dict(json.loads(path.read_text(encoding="utf-8")))
        check_same(path, document["environment"], environment, same)
        return document


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Makes one sentence of what a file raises that cannot be read or has another form."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NormforgeError(
            f"{path} is no results file ({type(error).__name__}: {error}): "
            "name another with --out, or measure again without --resume"
        ) from error


def check_same(path: Path, old: Environment, new: Environment, same: Iterable[str]) -> None:
    """Raise NormforgeError where one of these facts differs. path: of the file with the old."""
    for key in same:
        before, now = old.get(key), new.get(key)
        if key == "module":
            before, now = (value and value["digest"] for value in (before, now))
        if key == "peers" and isinstance(before, dict) and isinstance(now, dict):
            # Others may take part this time.
            before = {name: before[name] for name in before.keys() & now.keys()}
            now = {name: now[name] for name in before}
        if before != now:
            was = "does not say its" if before is None else "was measured with another"
            raise NormforgeError(
                f"{path} {was} {key} ({before}, now {now}): "
                "leave out --resume to measure everything again"
            )


def module_facts(folder: Path, table: str = TABLE) -> dict[str, Any]:
    """Return a package's path, and the digests of the table that names its kernels and of each of
    these. Raises NormforgeError where there is no such table."""
    try:
        content = (folder / table).read_bytes()
    except OSError as error:
        raise NormforgeError(f"{folder} has no readable {table}: {error.strerror}") from error
    digest = hashlib.sha256(content).hexdigest()[:16]
    return {"path": str(folder), "digest": digest, "cubins": cubins_of(content)}


def machine(facts: Mapping[str, Any], *, timed: bool = False) -> Environment:
    """Today's date and what says from where numbers come. facts: of a
    generator.evaluate.gpu.session.Session; timed: whether its timer took the times."""
    return {**origin(facts, timed=timed), "date": today()}


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def write_json(path: Path, document: object) -> None:
    """Write a document as `write_text` does. Raises NormforgeError for NaN and infinity as well."""
    try:
        text = json_text(document)
    except ValueError as error:
        raise NormforgeError(f"cannot write {path}: {error}") from error
    write_text(path, text + "\n")


def show_json(document: object, out: Path | None) -> None:
    """Print a document, and write it where it shall be kept. Raises as `write_json` does."""
    print(json_text(document))
    if out:
        write_json(out, document)


def json_text(document: object) -> str:
    """JSON with a line for each row. An entry that is longer than LONGEST has a line for each of
    its own entries. Raises ValueError for NaN and infinity."""
    return _lines(json.loads(json.dumps(document, allow_nan=False)), 0)


def _lines(value: Any, depth: int) -> str:
    """Format what JSON has: dicts with keys of text, lists, and plain values."""
    text = json.dumps(value)
    if len(text) <= LONGEST[min(depth, 2)] or not isinstance(value, dict | list):
        return text
    inner, outer = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_lines(value[key], depth + 1)}" for key in value]
    else:
        parts = [_lines(entry, depth + 1) for entry in value]
    return text[0] + inner + f",{inner}".join(parts) + outer + text[-1]


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader, and a crash, see the old one or the new one. Makes its folder.
    Raises NormforgeError when it cannot be written."""
    path = path.resolve()  # a link keeps pointing to what is written
    try:
        if path.exists() and not path.is_file():  # /dev/null, a pipe
            path.write_text(text, encoding="utf-8")
            return
        with replacing(path) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NormforgeError(f"cannot write {path}: {error.strerror or error}") from error
