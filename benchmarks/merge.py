"""Join the results files of one benchmark that ran on several GPUs of one host at the same time.

    python -m benchmarks.merge part_0.json part_1.json --out benchmarks/results/h100.json

Every file has other shapes, and all facts of their environments agree but for the GPU's `uuid` and
the date. A row gets the `uuid` of the GPU that measured it, on which all of its operations took
turns; the joined file's environment lists them all. Rows are sorted by dtypes, N and M. Exit code:
2 for files that do not belong together, and for unreadable ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command_line, exit_code
from benchmarks.results import problem_of, write_json
from generator.disk import read_json
from generator.errors import NormforgeError
from generator.problem import Problem

OWN = ("uuid", "date")
"""Facts of an environment that may differ from file to file."""


def merged(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the joined document. Raises NormforgeError where two files have the same shape or
    were not measured alike, and where one is no results file."""
    documents = {path: _read(path) for path in paths}
    first, joined = next(iter(documents.items()))
    rows: dict[Problem, dict[str, Any]] = {}
    for path, document in documents.items():
        for key in sorted(joined.keys() | document.keys()):
            if key != "rows" and _shared(joined.get(key)) != _shared(document.get(key)):
                raise NormforgeError(
                    f"{path} and {first} differ in {_where(joined, document, key)}: they are not "
                    "parts of one measurement, so name files of one command only"
                )
        for row in document["rows"]:
            problem = problem_of(row) if "M" in row else Problem.parse(row["shape"])
            if problem in rows:
                raise NormforgeError(f"{path} repeats {problem}: leave it out of one of the files")
            rows[problem] = {**row, "uuid": document["environment"]["uuid"]}
    environments = [document["environment"] for document in documents.values()]
    environment = {
        **joined["environment"],
        "uuid": sorted({each["uuid"] for each in environments}),
        "date": min(each["date"] for each in environments),
    }
    order = sorted(rows, key=lambda p: (p.dtype, p.weight_dtype, p.N, p.M, str(p)))
    return {**joined, "environment": environment, "rows": [rows[problem] for problem in order]}


def _read(path: Path) -> dict[str, Any]:
    try:
        document = dict(read_json(path))
        if isinstance(document["environment"]["uuid"], str) and isinstance(document["rows"], list):
            return document
        found = "it is joined already, or has no rows"
    except (OSError, ValueError, KeyError, TypeError) as error:
        found = f"{type(error).__name__}: {error}"
    raise NormforgeError(f"{path} is no results file of one GPU ({found}): leave it out")


def _shared(value: Any) -> Any:
    """Return a value of a document without what is a GPU's own."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if key not in OWN}
    return value


def _where(one: dict[str, Any], other: dict[str, Any], key: str) -> str:
    """Name what differs: a key of the documents, or of a part of theirs."""
    left, right = _shared(one.get(key)), _shared(other.get(key))
    if not (isinstance(left, dict) and isinstance(right, dict)):
        return key
    names = [name for name in left.keys() | right.keys() if left.get(name) != right.get(name)]
    return f"the {key}'s {', '.join(sorted(names))}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, "out")
    parser.add_argument("files", nargs="+", type=Path, help="results files of one GPU each")
    return exit_code(__file__, lambda: run(parser.parse_args(argv)))


def run(args: argparse.Namespace) -> int:
    """Raises NormforgeError."""
    write_json(args.out, merged(args.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
