"""The search space: YAML to legal configs, and the rule that rejects an illegal one."""

from __future__ import annotations

import ast
import hashlib
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

import yaml

from generator.errors import NormforgeError
from generator.problem import Problem
from generator.target import Target
from generator.variant import DERIVED, Config, Geometry

SPACE_FILE = Path(__file__).resolve().parent.parent / "search_spaces" / "rmsnorm_backward.yaml"
PROBLEM_NAMES = (
    *("M", "N", "dtype", "weight_dtype", "itemsize", "weight_itemsize"),
    *("residual_itemsize", "exact"),
)
TARGET_NAMES = {
    "gpu": "name",
    **{
        name: name
        for name in (
            *("sms", "registers_per_sm", "max_threads_per_sm", "max_ctas_per_sm"),
            *("smem_per_sm", "smem_per_cta", "barriers_per_sm", "max_vector_bytes"),
            "has_bulk_copy",
        )
    },
}
PATIENCE = 1_000_000
"""Values of knobs tried in vain before a search for legal configs is given up: a few seconds. Where
the rules of this project allow nothing it takes less than half of that to know."""
_ALLOWED = (
    *(ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod, ast.Compare, ast.Eq, ast.NotEq),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Tuple, ast.Name, ast.Load),
    ast.Constant,
)


@dataclass(frozen=True)
class Expression:
    """A checked expression over the names a space offers."""

    text: str
    names: frozenset[str]
    code: CodeType
    where: str

    @classmethod
    def parse(cls, text: Any, known: set[str], where: str) -> Expression:
        if not isinstance(text, str):
            raise NormforgeError(f"{where}: expected an expression in text, got {text!r}")
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise NormforgeError(f"{where}: '{text}' is no expression ({error})") from error
        for node in ast.walk(tree):
            if not isinstance(node, _ALLOWED):
                kind = type(node).__name__
                raise NormforgeError(f"{where}: '{text}' uses {kind}, which rules may not")
        names = frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))
        unknown = sorted(names - known)
        if unknown:
            raise NormforgeError(
                f"{where}: '{text}' uses unknown name '{unknown[0]}'; the header of the "
                "file lists the names"
            )
        return cls(text.strip(), names, compile(tree, where, "eval"), where)

    def __str__(self) -> str:
        return self.text

    def __call__(self, names: Mapping[str, Any]) -> Any:
        """The value. Raises NormforgeError where the names do not allow one, such as `M / 0`."""
        try:
            return eval(self.code, {"__builtins__": {}}, names)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise NormforgeError(
                f"{self.where}: '{self.text}' cannot be computed ({error})"
            ) from error


@dataclass(frozen=True)
class Knob:
    """One choice. `otherwise` is its value where `when` does not hold."""

    name: str
    values: tuple[int | str, ...]
    why: str
    when: Expression | None
    otherwise: int | str

    @property
    def choices(self) -> tuple[int | str, ...]:
        """Every value the knob can have in a config, searched or not."""
        if self.otherwise in self.values:
            return self.values
        return (*self.values, self.otherwise)


@dataclass(frozen=True)
class Rule:
    """`require` must hold; `say` is formatted with the names when it does not."""

    id: str
    require: Expression
    say: str
    say_parts: tuple[tuple[str, Expression | None, str], ...]

    def sentence(self, names: Mapping[str, Any]) -> str:
        text = ""
        for literal, expression, spec in self.say_parts:
            text += literal
            if expression is not None:
                text += _formatted(expression, expression(names), spec)
        return text


def _formatted(expression: Expression, value: Any, spec: str) -> str:
    try:
        return format(value, spec)
    except (TypeError, ValueError) as error:
        raise NormforgeError(
            f"{expression.where}: '{expression.text}' cannot be shown as '{spec}' ({error})"
        ) from error


@dataclass(frozen=True)
class Rejection:
    """Why a config is illegal for a problem on a target."""

    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.sentence}"


class Names(dict[str, Any]):
    """Names of one (possibly partial) config, with derived ones computed when asked for."""

    def __init__(self, problem: Problem, target: Target, exact: bool) -> None:
        super().__init__({name: getattr(problem, name) for name in PROBLEM_NAMES[:-1]})
        self.update({name: getattr(target, field) for name, field in TARGET_NAMES.items()})
        self["exact"] = exact
        self.problem, self.target = problem, target
        self.geometry = Geometry(
            self,
            *(problem.N, problem.dtype, problem.weight_dtype),
            *(exact, problem.offset, problem.residual),
        )

    def __missing__(self, name: str) -> Any:
        return DERIVED[name][1](self.geometry, self.problem, self.target)


@dataclass(frozen=True)
class Space:
    """The knobs and rules of one YAML file."""

    path: Path
    knobs: tuple[Knob, ...]
    rules: tuple[Rule, ...]

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits over knobs, values and rules (not over the prose)."""
        content = [
            [(k.name, k.values, k.when and k.when.text, k.otherwise) for k in self.knobs],
            [(r.id, r.require.text) for r in self.rules],
        ]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:12]

    @cached_property
    def _position(self) -> dict[str, int]:
        return {knob.name: index for index, knob in enumerate(self.knobs)}

    @cached_property
    def _rules_after(self) -> tuple[tuple[Rule, ...], ...]:
        """Rules by the index of the last knob they need, so that enumeration prunes early."""
        after: list[list[Rule]] = [[] for _ in range(len(self.knobs) + 1)]
        for rule in self.rules:
            needed = set(rule.require.names)
            for name in rule.require.names & DERIVED.keys():
                needed |= set(DERIVED[name][0])
            last = max((self._position[n] for n in needed if n in self._position), default=-1)
            after[last + 1].append(rule)
        return tuple(map(tuple, after))

    def normalize(self, config: Config, problem: Problem, target: Target) -> dict[str, int | str]:
        """The config with every knob present and those without meaning at `otherwise`.

        Raises NormforgeError for an unknown knob or a value that the space does not have.
        """
        for name, value in config.items():
            if name not in self._position:
                raise NormforgeError(f"unknown knob '{name}': {self.path.name} has none such")
            choices = self.knobs[self._position[name]].choices
            if value not in choices:
                raise NormforgeError(f"knob '{name}' has no value {value!r}: it has {choices}")
        names = Names(problem, target, True)
        for knob in self.knobs:
            active = knob.when is None or bool(knob.when(names))
            value = config.get(knob.name, knob.values[0])
            if not active:
                value = knob.otherwise
            elif value not in knob.values:
                value = knob.values[0]
            names[knob.name] = value
        return {knob.name: names[knob.name] for knob in self.knobs}

    def reject(
        self, config: Config, problem: Problem, target: Target, *, exact: bool = True
    ) -> Rejection | None:
        """The first rule that the complete config breaks, or None when it is legal."""
        names = Names(problem, target, exact)
        names.update(config)
        for rule in self.rules:
            if not rule.require(names):
                return Rejection(rule.id, rule.sentence(names))
        for knob in self.knobs:
            active = knob.when is None or bool(knob.when(names))
            if config[knob.name] not in (knob.values if active else (knob.otherwise,)):
                sentence = f"{knob.name} cannot be {config[knob.name]} here: when {knob.when}"
                return Rejection("when", sentence)
        return None

    def legal(
        self,
        problem: Problem,
        target: Target,
        *,
        rng: random.Random | None = None,
        fixed: Config | None = None,
    ) -> Iterator[dict[str, int | str]]:
        """Legal configs, each once: in the order of the file, or in an order drawn by `rng`
        (a random walk of the same tree). `fixed` narrows knobs to one value each. Ends early when
        PATIENCE values were tried since the last legal config."""
        fixed = fixed or {}
        tried = 0
        names = Names(problem, target, True)
        if not all(rule.require(names) for rule in self._rules_after[0]):
            return

        def descend(index: int) -> Iterator[dict[str, int | str]]:
            nonlocal tried
            if index == len(self.knobs):
                tried = 0
                yield {knob.name: names[knob.name] for knob in self.knobs}
                return
            knob = self.knobs[index]
            active = knob.when is None or bool(knob.when(names))
            values: Sequence[int | str] = knob.values if active else (knob.otherwise,)
            if knob.name in fixed and active:
                values = [value for value in values if value == fixed[knob.name]]
            if rng is not None and len(values) > 1:
                values = rng.sample(values, len(values))
            for value in values:
                tried += 1
                if tried > PATIENCE:
                    return
                names[knob.name] = value
                if all(rule.require(names) for rule in self._rules_after[index + 1]):
                    yield from descend(index + 1)
                del names[knob.name]

        yield from descend(0)

    def sample(
        self, problem: Problem, target: Target, rng: random.Random, fixed: Config | None = None
    ) -> dict[str, int | str]:
        """One legal config drawn by `rng`.

        Raises NormforgeError naming the rule that rejects most often when there is none."""
        for config in self.legal(problem, target, rng=rng, fixed=fixed):
            return config
        raise NormforgeError(
            f"{self.path.name} has no legal config for {problem} on {target}"
            + (f" with {dict(fixed)}" if fixed else "")
            + self._why_none(problem, target, rng, fixed or {})
        )

    def _why_none(self, problem: Problem, target: Target, rng: random.Random, fixed: Config) -> str:
        """The rule that most random configs break: where nothing is legal, the one that is in the
        way whatever the others leave. Its sentence is about the config that breaks fewest rules."""
        counts: Counter[str] = Counter()
        nearest: dict[str, tuple[int, Rejection]] = {}
        for _ in range(300):
            drawn = {k.name: fixed.get(k.name, rng.choice(k.values)) for k in self.knobs}
            names = Names(problem, target, True)
            names.update(self.normalize(drawn, problem, target))
            broken = [rule for rule in self.rules if not rule.require(names)]
            for rule in broken:
                counts[rule.id] += 1
                if rule.id not in nearest or len(broken) < nearest[rule.id][0]:
                    rejection = Rejection(rule.id, rule.sentence(names))
                    nearest[rule.id] = (len(broken), rejection)
        if not counts:
            return ""
        return f"; the rule met most: {nearest[counts.most_common(1)[0][0]][1]}"


def load_space(path: Path = SPACE_FILE) -> Space:
    """Read and check a space. Raises NormforgeError with the file, the place and the fault."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise NormforgeError(f"cannot read the search space {path}: {reason}") from error
    if not isinstance(content, dict) or set(content) != {"knobs", "rules"}:
        raise NormforgeError(f"{path}: expected the keys 'knobs' and 'rules' and no others")
    if not isinstance(content["knobs"], dict) or not isinstance(content["rules"], list):
        raise NormforgeError(f"{path}: 'knobs' is a mapping and 'rules' a list")
    known = {*PROBLEM_NAMES, *TARGET_NAMES, *DERIVED}
    knobs: list[Knob] = []
    for name, entry in content["knobs"].items():
        knobs.append(_read_knob(path, name, entry, known, {knob.name for knob in knobs}))
    missing = sorted(KNOWN_KNOBS.keys() - {knob.name for knob in knobs})
    if missing:
        raise NormforgeError(f"{path}: knob '{missing[0]}' is missing; one value is enough")
    known |= {knob.name for knob in knobs}
    rules: list[Rule] = []
    for entry in content["rules"]:
        rule = _read_rule(path, entry, known)
        if any(rule.id == other.id for other in rules):
            raise NormforgeError(f"{path}: two rules are called '{rule.id}'")
        rules.append(rule)
    space = Space(path, tuple(knobs), tuple(rules))
    return space


KNOWN_KNOBS: dict[str, tuple[int | str, ...] | range] = {
    "strategy": (
        "column_slices",
        "mailbox",
        "separate",
        "last_cta",
        "semaphore",
        "bulk_reduce",
        "atomic",
    ),
    "order": ("turns", "free"),
    "levels": range(1, 3),
    "overlap": ("dependent", "none"),
    "sum_threads": range(0, 1025, 32),
    "slice_columns": range(0, 1025, 4),
    "cluster": (1, 2, 4, 8, 16),
    "pipeline": ("bulk", "direct", "async"),
    "stages": range(1, 17),
    "threads_per_row": (8, 16, *range(32, 1025, 32)),
    "rows_per_cta": range(1, 33),
    "rows_in_flight": range(1, 17),
    "vector_bytes": (2, 4, 8, 16, 32),
    "reload": ("none", "smem"),
    "weight_in": ("registers", "smem"),
    "ctas_per_sm": range(1, 33),
    "grid": ("full", "even"),
    "min_blocks": range(33),
    "register_cap": range(256),
    "load_hint": ("default", "no_allocate", "streaming", "evict_last"),
    "store_hint": ("default", "streaming"),
}
"""The knobs that the templates know, with the values for which they make a kernel."""


def _read_knob(path: Path, name: Any, entry: Any, known: set[str], above: set[str]) -> Knob:
    where = f"{path}: knob '{name}'"
    if name not in KNOWN_KNOBS:
        raise NormforgeError(
            f"{where} is unknown: the templates have {', '.join(sorted(KNOWN_KNOBS))}"
        )
    if not isinstance(entry, dict) or not {"values", "why"} <= set(entry):
        raise NormforgeError(f"{where} needs 'values' and 'why'")
    extra = sorted(set(entry) - {"values", "why", "when", "otherwise"})
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
        if value not in KNOWN_KNOBS[name]:
            raise NormforgeError(f"{where} cannot be {value!r}: the templates know {_shown(name)}")
    if len(set(values)) != len(values):
        raise NormforgeError(f"{where} lists a value twice")
    when = entry.get("when")
    expression = None
    if when is not None:
        expression = Expression.parse(when, known | KNOWN_KNOBS.keys(), where)
        later = sorted(expression.names & (KNOWN_KNOBS.keys() - above))
        if later:
            raise NormforgeError(f"{where}: 'when' looks at '{later[0]}', which comes later")
        # Derived names are resolved at the knob's place; those that need a later knob are refused.
        for used in expression.names & DERIVED.keys():
            late = sorted(set(DERIVED[used][0]) - above)
            if late:
                raise NormforgeError(
                    f"{where}: 'when' uses {used}, which needs the later knob '{late[0]}'"
                )
    otherwise = entry["otherwise"] if "otherwise" in entry else values[0]
    return Knob(name, tuple(values), str(entry["why"]), expression, otherwise)


def _shown(knob: str) -> str:
    known = KNOWN_KNOBS[knob]
    if isinstance(known, range):
        steps = f" in steps of {known.step}" if known.step > 1 else ""
        return f"{known[0]} to {known[-1]}{steps}"
    return ", ".join(map(str, known))


def _read_rule(path: Path, entry: Any, known: set[str]) -> Rule:
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
    return Rule(entry["id"], require, entry["say"], tuple(parts))
