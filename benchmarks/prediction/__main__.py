"""Score the predictions, or fit the correction that they learn.

python -m benchmarks.prediction score --out benchmarks/results/prediction_h200.json
python -m benchmarks.prediction fit

Neither needs a GPU. docs/prediction.md explains the columns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean

from benchmarks.prediction.fit import examples, fit_all, held_out
from benchmarks.prediction.score import least, preferred, score, summary, table
from benchmarks.prediction.shapes import Shape, physical, read_shapes
from benchmarks.results import write_json, write_text
from generator.errors import NormforgeError
from generator.evaluate.predict.fitted import FITTED_FILE, Fitted
from generator.evaluate.predict.model import floor_us
from generator.evaluate.predict.prior import Measured, Prior
from generator.paths import GENERATED

SHORT_US = 12.0


def prior_of(shapes: Sequence[Shape]) -> Prior:
    """The winners of the shapes."""
    return Prior(tuple(Measured(s.problem, s.target.arch, s.target.sms, s.won) for s in shapes))


def without_width(shapes: Sequence[Shape], width: int) -> Prior:
    return prior_of([shape for shape in shapes if width != shape.problem.N])


def predictions(shapes: Sequence[Shape]) -> list[list[float]]:
    """Of every trial of every shape, by a correction that has not seen the shape's width."""
    factors = held_out(shapes, *examples(shapes))
    return [
        [us * exp(factor) for us, factor in zip(physical(shape), found, strict=True)]
        for shape, found in zip(shapes, factors, strict=True)
    ]


def floors(shapes: Sequence[Shape]) -> dict[str, float]:
    """Measured over predicted floors less 1, geometric means: of all shapes without a residual, and
    of those below SHORT_US. (With one, studies may have the floor without.)"""

    def behind(some: Sequence[Shape]) -> float:
        logs = [log(s.floor_us / floor_us(s.problem, s.target)) for s in some]
        return round(exp(fmean(logs)) - 1, 3) if logs else 0.0

    plain = [shape for shape in shapes if not shape.problem.residual]
    short = [shape for shape in plain if shape.floor_us < SHORT_US]
    return {"all": behind(plain), "short": behind(short)}


def error_at_picks(shapes: Sequence[Shape], predicted: Sequence[list[float]]) -> float:
    """Root mean square over the shapes of measured over predicted time, less 1, of the pick."""
    found = []
    for shape, times in zip(shapes, predicted, strict=True):
        prior = without_width(shapes, shape.problem.N)
        pick = preferred(prior, shape, shape.feasible, times)
        ratio = log(times[pick] / floor_us(shape.problem, shape.target))
        found.append(shape.trials[pick].log_ratio - ratio)
    return sqrt(fmean((exp(value) - 1) ** 2 for value in found))


def fit_command(shapes: Sequence[Shape], folders: Sequence[Path]) -> int:
    """Write the fitted file."""
    digests = {}
    for folder in folders:
        for file in sorted(folder.glob("studies.journal*")):
            digests[f"{folder.name}/{file.name}"] = sha256(file.read_bytes()).hexdigest()[:16]
    error = error_at_picks(shapes, predictions(shapes))
    fitted = Fitted(fit_all(shapes), prior_of(shapes), round(error, 3), digests)
    write_text(FITTED_FILE, json.dumps(fitted.to_json(), separators=(",", ":")) + "\n")
    print(f"{FITTED_FILE}: expected error {fitted.error:.1%}")
    return 0


def score_command(shapes: Sequence[Shape], out: Path | None) -> int:
    """Print the table, and write it with the score of every shape."""
    learned = predictions(shapes)
    by_model = {
        "physical terms": (list(map(physical, shapes)), False),
        "with correction": (learned, False),
        "with correction and prior": (learned, True),
    }
    scores = {}
    for name, (predicted, with_prior) in by_model.items():
        scores[name] = [
            score(
                shape,
                times,
                partial(preferred, without_width(shapes, shape.problem.N)) if with_prior else least,
            )
            for shape, times in zip(shapes, predicted, strict=True)
        ]
    summaries = {name: summary(found) for name, found in scores.items()}
    print(f"{len(shapes)} shapes, {sum(len(s.trials) for s in shapes)} timed trials")
    print(table(summaries))
    factors = [
        us / plain
        for shape, times in zip(shapes, learned, strict=True)
        for us, plain in zip(times, physical(shape), strict=True)
    ]
    facts = {
        "error_at_choices": round(error_at_picks(shapes, learned), 3),
        "factors": [round(min(factors), 3), round(max(factors), 3)],
        "floors_over_predicted": floors(shapes),
    }
    print(json.dumps(facts))
    if out is not None:
        detail = {name: [asdict(s) for s in found] for name, found in scores.items()}
        write_json(out, {"summaries": summaries, "facts": facts, "shapes": detail})
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("score", "fit"))
    parser.add_argument(
        "--studies",
        type=Path,
        action="append",
        help="a folder with measured studies, any number of times (default: generated/h200)",
    )
    parser.add_argument("--out", type=Path, help="of score: the results file, .json")
    args = parser.parse_args(argv)
    folders = args.studies or [GENERATED / "h200"]
    shapes = read_shapes(folders)
    if args.command == "fit":
        return fit_command(shapes, folders)
    return score_command(shapes, args.out)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NormforgeError as error:
        print(f"prediction: {error}", file=sys.stderr)
        sys.exit(2)
