"""The file of a search space: YAML to a checked Space, or the sentence that names the fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

from generator.disk import read_yaml
from generator.errors import NormforgeError
from generator.kernels.knobs import KNOBS, KnobFacts, knobs_like
from generator.own_files import space_of
from generator.paths import SEARCH_SPACES
from generator.problem import ITEMSIZE, RMSNORM_BACKWARD
from generator.space.expressions import GIVEN_NAMES, IMPLIED, Expression
from generator.space.space import Fixed, Space
from generator.space.walk import Knob, Rule

UNPREDICTED = ("pipeline", "producer")
"""A knob and its value that no predicted kernel has: the model of times was fitted to none, so that
a prediction would be a guess."""


def space_file(operation: str = RMSNORM_BACKWARD) -> Path:
    """Return the file with the search space of an operation: its own, or that of operations like
    it."""
    return space_of(operation)


SPACE_FILE = space_file()


def load_space(path: Path = SPACE_FILE) -> Space:
    """Read and check a space. Raises NormforgeError with the file, the place and the fault."""
    content = _read(path)
    known = {*GIVEN_NAMES, *IMPLIED}
    knobs: list[Knob] = []
    of_kernel = knobs_like(content["knobs"])
    for name, entry in content["knobs"].items():
        above = {knob.name for knob in knobs}
        knobs.append(_read_knob(path, name, entry, known, above, of_kernel))
    needed = {name for name, facts in of_kernel.items() if not facts.optional}
    missing = sorted(needed - {knob.name for knob in knobs})
    if missing:
        raise NormforgeError(f"{path}: knob '{missing[0]}' is missing; one value is enough")
    fixed = _read_fixed(path, content.get("fixed", []), {knob.name: knob for knob in knobs})
    rules = read_rules(path, content["rules"], {knob.name for knob in knobs})
    return Space(path, tuple(knobs), rules, fixed)


load_space_once = cache(load_space)
"""`load_space` for repeated use: the file is read once in a process."""


def _read(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The knobs and rules of a file. One that `extends` another of the project has those of that
    one, but for what it says itself. extending: the files that extend this one."""
    content = read_yaml(path, "the search space ")
    beside = {"extends", "fixed"}
    if not isinstance(content, dict) or set(content) - beside != {"knobs", "rules"}:
        raise NormforgeError(
            f"{path}: expected the keys 'knobs' and 'rules', and beside them at most 'extends' and "
            "'fixed'"
        )
    if not isinstance(content["knobs"], dict) or not isinstance(content["rules"], list):
        raise NormforgeError(f"{path}: 'knobs' is a mapping and 'rules' a list")
    if "extends" not in content:
        return content
    whole = SEARCH_SPACES / f"{content['extends']}.yaml"
    chain = (*extending, path.resolve())
    if whole.resolve() in chain or whole not in SEARCH_SPACES.glob("*.yaml"):
        raise NormforgeError(f"{path}: 'extends' names no other file of {SEARCH_SPACES}")
    base = _read(whole, chain)
    own = {_rule_id(rule) for rule in content["rules"]} - {None}
    rules = [rule for rule in base["rules"] if _rule_id(rule) not in own]
    # Its new knobs come first: what the rules of the other file compute may need them. Those that
    # look at knobs above them come last.
    new = {name: knob for name, knob in content["knobs"].items() if name not in base["knobs"]}
    first = {name: knob for name, knob in new.items() if "when" not in (knob or ())}
    return {
        **content,
        "knobs": first | base["knobs"] | content["knobs"],
        "rules": rules + content["rules"],
    }


def _rule_id(rule: Any) -> str | None:
    """Return the id of a rule; None for what is no rule, which is found when the rules are read."""
    return str(rule["id"]) if isinstance(rule, dict) and "id" in rule else None


def _read_fixed(path: Path, entries: Any, knobs: Mapping[str, Knob]) -> tuple[Fixed, ...]:
    """The entries of `fixed`: the only values of some knobs at some widths and dtypes."""
    if not isinstance(entries, list):
        raise NormforgeError(f"{path}: 'fixed' is a list")
    found: list[Fixed] = []
    for entry in entries:
        where = f"{path}: 'fixed'"
        if not isinstance(entry, dict) or set(entry) != {"N", "dtype", "knobs"}:
            raise NormforgeError(f"{where}: an entry has exactly N, dtype and knobs, got {entry!r}")
        chosen = entry["knobs"]
        if not isinstance(chosen, dict) or not all(
            name in knobs and value in knobs[name].choices for name, value in chosen.items()
        ):
            raise NormforgeError(f"{where}: {chosen!r} has other knobs or values than this space")
        widths, dtypes = entry["N"], entry["dtype"]
        if not isinstance(widths, list) or not isinstance(dtypes, list):
            raise NormforgeError(f"{where}: N and dtype are lists, got {entry!r}")
        if {type(N) for N in widths} != {int} or any(d not in [*ITEMSIZE] for d in dtypes):
            known = ", ".join(ITEMSIZE)
            raise NormforgeError(
                f"{where}: N has integers and dtype some of {known}, got {widths} and {dtypes}"
            )
        found.append(Fixed(tuple(widths), tuple(dtypes), tuple(chosen.items())))
    pairs = [(N, dtype) for entry in found for N in entry.widths for dtype in entry.dtypes]
    twice = sorted({pair for pair in pairs if pairs.count(pair) > 1})
    if twice:
        raise NormforgeError(f"{path}: 'fixed' has {twice[0][0]} columns of {twice[0][1]} twice")
    return tuple(found)


def read_rules(path: Path | str, entries: Sequence[Any], knobs: Set[str]) -> tuple[Rule, ...]:
    """Rules as a space's file has them. path: of the file, for the sentence of a NormforgeError;
    knobs: those of the space."""
    known = {*GIVEN_NAMES, *IMPLIED, *knobs}
    rules: list[Rule] = []
    for entry in entries:
        rule = _read_rule(path, entry, known)
        if any(rule.id == other.id for other in rules):
            raise NormforgeError(f"{path}: two rules are called '{rule.id}'")
        rules.append(rule)
    return tuple(rules)


def _read_knob(
    path: Path,
    name: Any,
    entry: Any,
    known: set[str],
    above: set[str],
    of_kernel: Mapping[str, KnobFacts],
) -> Knob:
    """of_kernel: the knobs that the space's templates have."""
    where = f"{path}: knob '{name}'"
    if name not in of_kernel:
        names = ", ".join(sorted(of_kernel))
        raise NormforgeError(f"{where} is unknown: the templates have {names}")
    if not isinstance(entry, dict) or not {"values", "why"} <= set(entry):
        raise NormforgeError(f"{where} needs 'values' and 'why'")
    extra = sorted(set(entry) - {"values", "why", "when", "otherwise"}, key=str)
    if extra:
        raise NormforgeError(f"{where} has an unknown field '{extra[0]}'")
    values = entry["values"]
    if not isinstance(values, list) or not values:
        raise NormforgeError(f"{where}: 'values' is a list with at least one value")
    kinds = {type(value) for value in [*values, entry.get("otherwise", values[0])]}
    if kinds not in ({int}, {str}):
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise NormforgeError(f"{where}: values are all integers or all text, got {shown}")
    for value in [*values, entry.get("otherwise", values[0])]:
        if value not in of_kernel[name].domain:
            known_values = _shown(of_kernel[name].domain)
            raise NormforgeError(f"{where} cannot be {value!r}: the templates know {known_values}")
    if len(set(values)) != len(values):
        raise NormforgeError(f"{where} lists a value twice")
    when = entry.get("when")
    expression = None
    if when is not None:
        expression = Expression.parse(when, known | KNOBS.keys(), where)
        later = sorted(expression.names & (KNOBS.keys() - above))
        if later:
            raise NormforgeError(f"{where}: 'when' looks at '{later[0]}', which comes later")
        # Derived names are resolved at the knob's place; those that need a later knob are refused.
        for used in expression.names & IMPLIED.keys():
            late = sorted(set(IMPLIED[used].knobs) - above)
            if late:
                raise NormforgeError(
                    f"{where}: 'when' uses {used}, which needs the later knob '{late[0]}'"
                )
    otherwise = entry["otherwise"] if "otherwise" in entry else values[0]
    return Knob(name, tuple(values), str(entry["why"]), expression, otherwise)


def _shown(known: Sequence[int | str]) -> str:
    if isinstance(known, range):
        steps = f" in steps of {known.step}" if known.step > 1 else ""
        return f"{known[0]} to {known[-1]}{steps}"
    return ", ".join(map(str, known if len(known) <= 10 else (*known[:8], "...", known[-1])))


def _read_rule(path: Path | str, entry: Any, known: set[str]) -> Rule:
    if not isinstance(entry, dict) or set(entry) != {"id", "require", "say"}:
        raise NormforgeError(f"{path}: a rule has exactly id, require and say, got {entry!r}")
    where = f"{path}: rule '{entry['id']}'"
    if not isinstance(entry["id"], str) or not isinstance(entry["say"], str):
        raise NormforgeError(f"{where}: id and say are text")
    require = Expression.parse(entry["require"], known, where)
    parts: list[tuple[str, Expression | None, str]] = []
    rest = entry["say"]
    while "{" in rest:
        literal, _, rest = rest.partition("{")
        inside, closed, rest = rest.partition("}")
        if not closed:
            raise NormforgeError(f"{where}: 'say' has an open brace")
        text, _, spec = inside.partition(":")
        parts.append((literal, Expression.parse(text, known, where), spec))
    parts.append((rest, None, ""))
    return Rule(entry["id"], require, tuple(parts))
