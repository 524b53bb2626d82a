"""Command lines: what every option may be, and one sentence for what it may not."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from generator.errors import NormforgeError
from generator.problem import RMSNORM_BACKWARD
from generator.space.space import Space
from normforge.operations import OPERATIONS

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


SHAPE = (
    "MxN:dtype[:weight dtype], with any of +offset, +residual (or +residual_fp32), +rotary64, "
    "+joined128 and +interleaved behind it"
)
"""The form of a shape, for the help of options."""


class CommandLine(argparse.ArgumentParser):
    """A parser that raises NormforgeError, and suggests the option that was probably meant."""

    def error(self, message: str) -> NoReturn:
        raise NormforgeError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print as argparse does, but raise OSError when the disk is full."""
        (file or sys.stderr).write(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Raises NormforgeError."""
        known = self._option_string_actions
        for word in argv:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                near = get_close_matches(name, known, n=1)
                hint = f": did you mean '{near[0]}'?" if near else f"; see {self.prog} --help"
                raise NormforgeError(f"there is no option '{name}'{hint}")
        return self.parse_args(argv)


def add_operation(parser: argparse._ActionsContainer, also: Collection[str] = ()) -> None:
    """The option that names an operation. also: what it may name beside those that are tuned."""
    parser.add_argument(
        "--op",
        type=lambda text: text if text in also else operation_name(text),
        default=RMSNORM_BACKWARD,
        metavar="NAME|FILE.py",
        help=f"the operation: {', '.join(OPERATIONS)}, or the file of one of your own "
        "(docs/extending.md; default: %(default)s)",
    )


def operation_name(text: str) -> str:
    """Return the name of an operation, as generator.operations does, which takes a while to
    import."""
    if text in OPERATIONS:
        return text
    from generator.operations import operation_name as named

    return named(text)


def positive_number(text: str) -> int:
    if not re.fullmatch(r"-?\d+", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    if len(text.lstrip("-0")) > 9:
        raise argparse.ArgumentTypeError(f"'{text[:80]}' has more than 9 digits")
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' must be above 0")
    return int(text)


def trial_count(text: str) -> tuple[int, bool]:
    """A number of trials, and whether it comes on top of what is known, as in `+40`."""
    return positive_number(text.removeprefix("+")), text.startswith("+")


def positive_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number") from None
    if not (math.isfinite(seconds) and seconds > 0):
        raise argparse.ArgumentTypeError(f"'{text}' must be above 0 and finite")
    return seconds


def device_list(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of indices like 0,1,2,3")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def folder_name(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty name is not a folder")
    return Path(text)


def storage_url(text: str) -> str:
    if "://" not in text:
        raise argparse.ArgumentTypeError(
            f"'{text.rpartition('@')[2]}' is not the URL of a database: write for example "
            "postgresql+psycopg://user@host/normforge, or choose a folder with --out"
        )
    if text.startswith("postgres://"):
        raise argparse.ArgumentTypeError(
            "SQLAlchemy does not know postgres://: write postgresql+psycopg:// in its place"
        )
    return text


def parse_config(text: str, space: Space) -> dict[str, int | str]:
    """Read `knob=value,knob=value`. Raises NormforgeError naming the knob or its values."""
    choices = {knob.name: knob.choices for knob in space.knobs}
    given: dict[str, int | str] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = entry.partition("=")
        if name not in choices:
            raise NormforgeError(f"unknown knob '{name}': the space has {', '.join(choices)}")
        matching = [choice for choice in choices[name] if str(choice) == value]
        if not matching:
            shown = ", ".join(map(str, choices[name]))
            raise NormforgeError(f"'{entry}': {name} is one of {shown}")
        given[name] = matching[0]
    if not given:
        raise NormforgeError("--config names no knob: write strategy=last_cta,stages=2")
    return given
