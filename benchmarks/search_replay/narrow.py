"""The part of a search space that is swept: a problem, and some values of each knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from generator.disk import read_yaml
from generator.errors import NormforgeError
from generator.problem import Problem
from generator.space.load import load_space, read_rules
from generator.space.space import Space

NARROW_FILE = Path(__file__).with_name("narrow.yaml")


@dataclass(frozen=True)
class Narrow:
    """A problem and the part of the space that is swept for it. rules: those that it has beyond the
    space's, as its file has them."""

    problem: Problem
    space: Space
    rules: tuple[Mapping[str, str], ...] = ()


def load_narrow(path: Path = NARROW_FILE) -> Narrow:
    """Read a file of `problem`, `values` and, if it has any, `rules` of its own. Raises
    NormforgeError with the file and the fault."""
    content = read_yaml(path)
    if not isinstance(content, dict) or set(content) - {"rules"} != {"problem", "values"}:
        raise NormforgeError(
            f"{path}: expected the keys 'problem', 'values' and perhaps 'rules', and no others"
        )
    if not isinstance(content["values"], dict):
        raise NormforgeError(f"{path}: 'values' maps knobs to lists of values")
    rules = content.get("rules", [])
    if not isinstance(rules, list):
        raise NormforgeError(f"{path}: 'rules' is a list")
    narrowed = narrow(load_space(), content["values"], str(path), rules)
    return Narrow(Problem.parse(str(content["problem"])), narrowed, tuple(rules))


def narrow(
    space: Space,
    values: Mapping[str, Sequence[int | str]],
    where: str,
    rules: Sequence[Mapping[str, str]] = (),
) -> Space:
    """The space with these values of its knobs, the first value of every other knob, and these
    rules beside its own. Raises NormforgeError, beginning with `where`, for a knob or a value that
    the space has not."""
    unknown = sorted(values.keys() - {knob.name for knob in space.knobs})
    if unknown:
        raise NormforgeError(f"{where}: {space.path.name} has no knob '{unknown[0]}'")
    knobs = []
    for knob in space.knobs:
        kept = values.get(knob.name, knob.values[:1])
        if not isinstance(kept, list | tuple) or not kept or not set(kept) <= set(knob.values):
            raise NormforgeError(
                f"{where}: knob '{knob.name}' takes a list of some of {list(knob.values)}"
            )
        knobs.append(replace(knob, values=tuple(kept)))
    more = read_rules(where, rules, {knob.name for knob in knobs})
    return replace(space, knobs=tuple(knobs), rules=space.rules + more)
