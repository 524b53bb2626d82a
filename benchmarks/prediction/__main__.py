"""Score the predictions, or fit the correction that they learn.

python -m benchmarks.prediction score --out benchmarks/results/prediction_widths.json
python -m benchmarks.prediction score --leave gpu --out benchmarks/results/prediction_gpus.json
python -m benchmarks.prediction score --op layernorm_backward
python -m benchmarks.prediction fit

The first scores every shape by a model that has not seen its N, the second by one that has not seen
its GPU. The third scores the fitted model as it stands on an operation that it was not fitted to.
None needs a GPU. docs/prediction.md explains the columns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.command import command_line, exit_code
from benchmarks.prediction.fit import examples, fit_all, held_out
from benchmarks.prediction.score import least, preferred, score, summary, table
from benchmarks.prediction.shapes import MEASURED, Shape, Trial, physical, read_shapes
from benchmarks.results import write_json, write_text
from generator.errors import NormforgeError
from generator.evaluate.predict.evaluator import features_of
from generator.evaluate.predict.fitted import FITTED_FILE, Fitted, load_fitted
from generator.evaluate.predict.model import floor_us
from generator.evaluate.predict.prior import Measured, Prior
from generator.paths import GENERATED
from generator.problem import RMSNORM_BACKWARD

SHORT_US = 12.0
UNSEEN = ("layernorm_backward",)
"""Operations that the correction is not fitted to, and is scored on."""


def prior_of(shapes: Sequence[Shape]) -> Prior:
    """The winners of the shapes."""
    return Prior(tuple(Measured(s.problem, s.target.arch, s.target.sms, s.won) for s in shapes))


Group = Callable[[Shape], object]
FEWEST = 3
"""Trials that may win, of a shape that is scored: fewer leave nothing to rank."""
GROUPS: dict[str, Group] = {
    "width": lambda shape: shape.problem.N,
    "gpu": lambda shape: shape.target.name,
}
"""Groups of shapes: a model that scores a shape has seen none of the same group."""


def unseen(shapes: Sequence[Shape], group: Group, shape: Shape) -> Prior:
    """The prior without the group of a shape."""
    return prior_of([other for other in shapes if group(other) != group(shape)])


def predictions(shapes: Sequence[Shape], group: Group) -> list[list[float]]:
    """Predict every trial of every shape, by a correction that has not seen the shape's group."""
    factors = held_out(shapes, [group(shape) for shape in shapes], *examples(shapes))
    return [
        [us * exp(factor) for us, factor in zip(physical(shape), found, strict=True)]
        for shape, found in zip(shapes, factors, strict=True)
    ]


def fitted_predictions(shapes: Sequence[Shape], fitted: Fitted) -> list[list[float]]:
    """Predict every trial of every shape, by a correction as it is stored."""

    def factor(shape: Shape, trial: Trial) -> float:
        known = features_of(trial.variant, trial.resources, shape.problem, shape.target)
        return exp(fitted.correction.log_factor(known))

    return [
        [us * factor(shape, t) for us, t in zip(physical(shape), shape.trials, strict=True)]
        for shape in shapes
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


def error_at_picks(
    shapes: Sequence[Shape], predicted: Sequence[list[float]], priors: Sequence[Prior]
) -> float:
    """Root mean square over the shapes of measured over predicted time, less 1, of the pick."""
    found = []
    for shape, times, prior in zip(shapes, predicted, priors, strict=True):
        pick = preferred(prior, shape, shape.feasible, times)
        ratio = log(times[pick] / floor_us(shape.problem, shape.target))
        found.append(shape.trials[pick].log_ratio - ratio)
    return sqrt(fmean((exp(value) - 1) ** 2 for value in found))


def digests_of(folders: Sequence[Path]) -> dict[str, str]:
    """Return digests of the files of studies, by which a test knows what was made of older ones."""
    files = [file for folder in folders for file in sorted(folder.glob("studies.journal*"))]
    return {
        f"{file.parent.name}/{file.name}": sha256(file.read_bytes()).hexdigest()[:16]
        for file in files
    }


def fit_command(shapes: Sequence[Shape], folders: Sequence[Path]) -> int:
    """Write the fitted file."""
    width = GROUPS["width"]
    priors = [unseen(shapes, width, shape) for shape in shapes]
    error = error_at_picks(shapes, predictions(shapes, width), priors)
    errors = {RMSNORM_BACKWARD: round(error, 3)}
    fitted = Fitted(fit_all(shapes), prior_of(shapes), errors, digests_of(folders))
    for name in UNSEEN:
        if others := read_shapes(folders, name):
            times = fitted_predictions(others, fitted)
            errors[name] = round(error_at_picks(others, times, [fitted.prior] * len(others)), 3)
    write_text(FITTED_FILE, json.dumps(fitted.to_json(), separators=(",", ":")) + "\n")
    for name, error in errors.items():
        print(f"{FITTED_FILE}: expected error {error:.1%} ({name})")
    return 0


def score_command(
    shapes: Sequence[Shape], group: Group, out: Path | None, folders: Sequence[Path]
) -> int:
    """Print a table for each GPU, and write it with the score of every shape."""
    seen = all(shape.problem.operation == RMSNORM_BACKWARD for shape in shapes)
    learned = predictions(shapes, group) if seen else fitted_predictions(shapes, load_fitted())
    documents = {}
    for gpu in dict.fromkeys(shape.target.name for shape in shapes):
        own = [place for place, shape in enumerate(shapes) if shape.target.name == gpu]
        priors = [
            unseen(shapes, group, shapes[place]) if seen else load_fitted().prior for place in own
        ]
        print(f"{gpu}:", end=" ")
        documents[gpu] = _scored([shapes[p] for p in own], [learned[p] for p in own], priors)
        documents[gpu]["studies"] = digests_of(folders)
    if out is not None:
        write_json(out, documents)
    return 0


def _scored(
    shapes: Sequence[Shape], learned: Sequence[list[float]], priors: Sequence[Prior]
) -> dict[str, Any]:
    """Prints the table of some shapes; returns what is written of them."""
    plain = list(map(physical, shapes))
    by_model = {
        "physical terms": (plain, False),
        "with correction": (learned, False),
        "with correction and prior": (learned, True),
    }
    scores = {}
    for name, (predicted, with_prior) in by_model.items():
        scores[name] = [
            score(shape, times, partial(preferred, prior) if with_prior else least)
            for shape, times, prior in zip(shapes, predicted, priors, strict=True)
        ]
    summaries = {name: summary(found) for name, found in scores.items()}
    print(f"{len(shapes)} shapes, {sum(len(s.trials) for s in shapes)} timed trials")
    print(table(summaries))
    factors = [
        a / b for x, y in zip(learned, plain, strict=True) for a, b in zip(x, y, strict=True)
    ]
    facts = {
        "error_at_choices": round(error_at_picks(shapes, learned, priors), 3),
        "factors": [round(min(factors), 3), round(max(factors), 3)],
        "floors_over_predicted": floors(shapes),
    }
    print(json.dumps(facts))
    detail = {name: [asdict(s) for s in found] for name, found in scores.items()}
    return {"summaries": summaries, "facts": facts, "shapes": detail}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = command_line(__doc__, out=None)
    parser.add_argument("command", choices=("score", "fit"))
    parser.add_argument(
        "--studies",
        type=Path,
        action="append",
        help="a folder with measured studies, any number of times (default: those in generated/)",
    )
    parser.add_argument(
        "--op",
        choices=(RMSNORM_BACKWARD, *UNSEEN),
        default=RMSNORM_BACKWARD,
        help="of score: the operation whose studies are scored",
    )
    parser.add_argument(
        "--leave",
        choices=tuple(GROUPS),
        default="width",
        help="of score: what the model that scores a shape has not seen (default: its width)",
    )
    args = parser.parse_args(argv)
    folders = args.studies or [GENERATED / gpu for gpu in MEASURED]

    def run() -> int:
        if args.command == "fit":
            return fit_command(read_shapes(folders), folders)
        found = read_shapes(folders, args.op)
        shapes = [shape for shape in found if len(shape.feasible) >= FEWEST]
        if args.leave == "gpu" and len({shape.target.name for shape in shapes}) < 2:
            raise NormforgeError("--leave gpu needs studies of two GPUs: name both with --studies")
        return score_command(shapes, GROUPS[args.leave], args.out, folders)

    return exit_code("prediction", run)


if __name__ == "__main__":
    sys.exit(main())
