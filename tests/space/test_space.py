"""The search space: the real file's promises, and one sentence for everything wrong with a file."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from generator.errors import NormforgeError
from generator.kernels.knobs import KNOBS
from generator.kernels.variant import make_variant
from generator.problem import Problem
from generator.shape_lists import load_problems
from generator.space import load
from generator.space.expressions import Names
from generator.space.legal_configs import LegalConfigs
from generator.space.load import SPACE_FILE, load_space, space_file
from generator.space.space import Space
from generator.space.walk import Rule
from generator.target import Target, find_target, load_targets
from generator.tuner.plan import Plan
from tests.support.samples import REDUCTION, SPACE, problems, targets

CONTENT = yaml.safe_load(SPACE_FILE.read_text())
PROBLEM = Problem.parse("4096x1024:bf16")
NEEDED = sorted(name for name, facts in KNOBS.items() if not facts.optional)
"""Knobs that every space has."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a space file from text or from parsed YAML."""

    def to_file(content: Any) -> Path:
        path = tmp_path / "space.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        path.write_text(text)
        return path

    return to_file


def changed(**knobs: Any) -> dict[str, Any]:
    """The real content with fields of knobs replaced."""
    content = copy.deepcopy(CONTENT)
    for name, fields in knobs.items():
        content["knobs"].setdefault(name, {"why": "a test"}).update(fields)
    return content


def with_rule(require: Any, say: Any = "no", id: Any = "extra") -> dict[str, Any]:
    """The real content with one more rule."""
    return {**changed(), "rules": [*CONTENT["rules"], {"id": id, "require": require, "say": say}]}


def refusal(path: Path) -> str:
    """The sentence with which a file is refused."""
    with pytest.raises(NormforgeError) as caught:
        load_space(path)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(path) in sentence
    return sentence


# ---- The real file -------------------------------------------------------------------------------


def test_space_without_a_value_is_the_same_but_for_it(space: Space) -> None:
    without = space.without("pipeline", "producer")
    for before, after in zip(space.knobs, without.knobs, strict=True):
        left = tuple(value for value in before.values if value != "producer")
        assert after == replace(before, values=left)
    only = without.without("pipeline", "bulk").without("pipeline", "async")
    assert only.without("pipeline", "direct") == only, "the last one stays"


def test_predicted_searches_have_no_producer() -> None:
    """The model of predicted times was fitted to none."""
    problems, target = (Problem.parse("4096x1024:bf16"),), find_target("h200")
    for devices, wanted in (((), False), ((0,), True)):
        plan = Plan(target, problems, space_file("rmsnorm_backward"), Path(), 1, devices=devices)
        (pipeline,) = (knob for knob in plan.space.knobs if knob.name == "pipeline")
        assert ("producer" in pipeline.values) == wanted


def test_file_has_the_knobs_that_the_templates_know(space: Space) -> None:
    assert {knob.name for knob in space.knobs} == {*NEEDED, "column_sums", "row_numbers"}
    assert all(len(knob.why.split()) >= 5 for knob in space.knobs)


@settings(max_examples=30)
@given(problems(), targets(), st.integers(0, 999), st.booleans())
def test_enumeration_yields_legal_configs_and_none_twice(
    problem: Problem, target: Target, seed: int, in_order: bool
) -> None:
    rng = None if in_order else random.Random(seed)
    found = list(islice(SPACE.legal(problem, target, rng=rng), 40))
    for config in found:
        assert SPACE.reject(config, problem, target) is None
        assert SPACE.normalize(config, problem, target) == config
    assert len({tuple(config.values()) for config in found}) == len(found)


@settings(max_examples=40)
@given(problems(), targets(), st.sampled_from(sorted(REDUCTION)), st.integers(0, 999))
def test_sample_is_legal_has_what_is_fixed_and_follows_from_the_seed(
    problem: Problem, target: Target, reduction: str, seed: int
) -> None:
    fixed = REDUCTION[reduction]
    try:
        config = SPACE.sample(problem, target, random.Random(seed), fixed)
    except NormforgeError as error:
        assert not any(True for _ in SPACE.legal(problem, target, fixed=fixed))
        assert str(problem) in str(error) and f"on {target}" in str(error)
        return
    assert SPACE.reject(config, problem, target) is None
    assert config.items() >= fixed.items()
    assert SPACE.sample(problem, target, random.Random(seed), fixed) == config


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["ctas_per_sm > 0", "order == 'free'"])
def test_enumeration_finds_what_brute_force_finds(write: Callable[[Any], Path], rule: str) -> None:
    """The second rule leaves nothing to the strategy for which `order` means nothing."""
    values = {
        **{"strategy": ["separate", "bulk_reduce"], "order": ["turns", "free"], "levels": [2, 1]},
        **{"pipeline": ["bulk", "direct"], "stages": [3, 2], "threads_per_row": [128, 64]},
        **{"rows_per_cta": [2, 8], "ctas_per_sm": [1, 4], "min_blocks": [0, 1]},
        **{"register_cap": [0, 32, 64]},
    }
    content = with_rule(rule)
    for name, knob in content["knobs"].items():
        knob.setdefault("otherwise", knob["values"][0])
        knob["values"] = values.get(name, knob["values"][:1])
    tiny, target = load_space(write(content)), find_target("h200")
    combinations: list[dict[str, Any]] = [{}]
    for knob in tiny.knobs:
        combinations = [{**c, knob.name: value} for c in combinations for value in knob.choices]
    legal = [c for c in combinations if tiny.reject(c, PROBLEM, target) is None]
    assert len(legal) > 20
    for rng in (None, random.Random(1)):
        found = tiny.legal(PROBLEM, target, rng=rng)
        assert sorted(map(repr, found)) == sorted(map(repr, legal))


@pytest.mark.parametrize("gpu", load_targets())
def test_every_default_shape_can_be_tuned_on_every_gpu(gpu: str, space: Space) -> None:
    for problem in load_problems("default,smoke"):
        assert space.sample(problem, find_target(gpu), random.Random(0))


@pytest.mark.parametrize("reduction", REDUCTION)
def test_every_strategy_can_serve_every_shape_of_the_project(reduction: str, space: Space) -> None:
    for problem, gpu in product(load_problems("default,tilegym,smoke"), ("h200", "gb200")):
        assert space.sample(problem, find_target(gpu), random.Random(0), REDUCTION[reduction])


def violation(rule: Rule) -> tuple[str, Names]:
    """The sentence of a rule for some config that breaks it, and the names of that config. A few
    values are not in the file: the rules also guard what somebody may add to it."""
    rng = random.Random(rule.id)
    shapes = ["4096x1024:bf16", "64x1001:bf16:fp32", "4096x65536:fp32", "5x3072:fp16"]
    for _ in range(20000):
        problem = Problem.parse(rng.choice(shapes))
        target = load_targets()[rng.choice(sorted(load_targets()))]
        drawn = {knob.name: rng.choice(knob.values) for knob in SPACE.knobs}
        names = Names(problem, target, rng.random() < 0.9)
        names.update(SPACE.normalize(drawn, problem, target))
        if rng.random() < 0.1:
            name = rng.choice(sorted(KNOBS))
            names[name] = rng.choice(KNOBS[name].domain)
        if not rule.require(names):
            return rule.sentence(names), names
    raise AssertionError(f"no config breaks the rule {rule.id}: it can go")


@pytest.mark.parametrize("rule", SPACE.rules, ids=lambda rule: rule.id)
def test_every_rule_rejects_something_and_says_it_with_numbers(rule: Rule) -> None:
    sentence, names = violation(rule)
    assert not set("{}") & set(sentence)
    for _, expression, spec in rule.say_parts:
        if expression is not None:
            assert format(expression(names), spec) in sentence
    assert re.search(r"\d", sentence), "the sentence has no number"


def test_sentence_of_a_rejection_has_the_numbers_of_the_gpu(space: Space) -> None:
    config = {"pipeline": "bulk", "stages": 6, "threads_per_row": 512, "rows_per_cta": 1}
    problem = Problem.parse("65536x16384:bf16")
    config |= {"strategy": "separate", "rows_in_flight": 1, "cluster": 1}
    full = space.normalize(config, problem, find_target("h200"))
    rejection = space.reject(full, problem, find_target("h200"))
    assert rejection is not None
    assert str(rejection) == "smem: needs 448 KiB, h200 allows 227 KiB"


@pytest.mark.parametrize(
    ("shape", "knobs", "sentence"),
    [
        (
            "4096x64:bf16",
            {"threads_per_row": 8, "pipeline": "bulk"},
            "part_of_warp: 8 threads per row are part of a warp, which must load its rows itself: "
            "bulk copies of 128 bytes each",
        ),
        (
            "4096x256:fp32",
            {"threads_per_row": 8, "pipeline": "direct"},
            "short_rows: 8 threads per row, part of a warp, need whole rows of known length and at "
            "most 4 vectors per thread; here there are 8, and 1 CTAs share a row",
        ),
        (
            "4096x64:bf16",
            {"threads_per_row": 16, "pipeline": "direct"},
            "idle: 16 threads with 1 vectors leave 64 of 64 columns",
        ),
    ],
)
def test_part_of_a_warp_for_a_row_is_refused_where_it_cannot_serve(
    shape: str, knobs: dict[str, int | str], sentence: str, space: Space
) -> None:
    problem, target = Problem.parse(shape), find_target("h200")
    wanted = {"strategy": "separate", "rows_per_cta": 8, "vector_bytes": 16, **knobs}
    rejection = space.reject(space.normalize(wanted, problem, target), problem, target)
    assert str(rejection).startswith(sentence)


def test_rejection_of_a_knob_that_means_nothing_there_names_the_reason(space: Space) -> None:
    target = find_target("h200")
    config = space.sample(PROBLEM, target, random.Random(0), {"strategy": "atomic"})
    rejection = space.reject({**config, "slice_columns": 64}, PROBLEM, target)
    assert rejection is not None
    assert rejection.rule == "when"
    assert "slice_columns cannot be 64" in rejection.sentence
    assert "when way in ('slices', 'flagged_slices', 'second_kernel')" in rejection.sentence


# ---- Normalising ---------------------------------------------------------------------------------


def test_normalize_completes_a_config_and_clears_what_means_nothing(space: Space) -> None:
    target = find_target("h200")
    config = space.normalize({"strategy": "atomic", "slice_columns": 64}, PROBLEM, target)
    assert list(config) == [knob.name for knob in space.knobs]
    assert config["slice_columns"] == 0
    assert config["order"] == "turns"
    # A knob without a meaning elsewhere gets its first value where it means something.
    other = space.normalize({**config, "strategy": "separate"}, PROBLEM, target)
    assert other["slice_columns"] == 32


@settings(max_examples=50)
@given(st.data(), problems(), targets())
def test_normalize_is_idempotent(data: st.DataObject, problem: Problem, target: Target) -> None:
    drawn = {k.name: data.draw(st.sampled_from(k.choices), k.name) for k in SPACE.knobs}
    once = SPACE.normalize(drawn, problem, target)
    assert SPACE.normalize(once, problem, target) == once
    rejection = SPACE.reject(once, problem, target)
    assert rejection is None or rejection.rule != "when"


def test_normalize_refuses_what_the_space_does_not_have(space: Space) -> None:
    target = find_target("h200")
    with pytest.raises(NormforgeError, match="unknown knob 'colour'"):
        space.normalize({"colour": "blue"}, PROBLEM, target)
    with pytest.raises(NormforgeError, match="knob 'stages' has no value 99"):
        space.normalize({"stages": 99}, PROBLEM, target)


# ---- Files that are refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "expected the keys 'knobs' and 'rules'"),
        ("just text", "expected the keys 'knobs' and 'rules'"),
        ("- a\n- list", "expected the keys 'knobs' and 'rules'"),
        ("knobs: {}", "expected the keys 'knobs' and 'rules'"),
        ("knobs: {}\nrules: []\nmore: 1", "expected the keys 'knobs' and 'rules'"),
        ("knobs: []\nrules: []", "'knobs' is a mapping"),
        ("knobs: {}\nrules: {}", "'rules' a list"),
        ("knobs: {}\nrules: []", "is missing"),
        ("knobs: {", "cannot read the search space"),
        ("\tknobs: 1", "cannot read the search space"),
        ("? [1, 2]\n: 3", "cannot read the search space"),
        ("knobs: {}\nrules: []\nknobs: {}", "line 3 has the key 'knobs' a second"),
        ("knobs: 2024-13-01", "cannot read the search space"),
    ],
)
def test_file_that_is_no_space_is_refused(
    write: Callable[[Any], Path], content: str, says: str
) -> None:
    assert says in refusal(write(content))


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    for name in ("missing.yaml", "folder.yaml", "binary.yaml"):
        assert "cannot read the search space" in refusal(tmp_path / name)


@pytest.mark.parametrize(
    ("knob", "fields", "says"),
    [
        ("stages", {"values": 3}, "'values' is a list"),
        ("stages", {"values": []}, "'values' is a list"),
        ("stages", {"values": {"a": 1}}, "'values' is a list"),
        ("stages", {"values": [1, "two"]}, "all integers or all text, got int, str"),
        ("stages", {"values": [2, 3.0]}, "all integers or all text, got float, int"),
        ("stages", {"values": [1, True]}, "all integers or all text, got bool, int"),
        ("stages", {"values": [True, False]}, "all integers or all text, got bool"),
        ("stages", {"values": [None]}, "all integers or all text, got NoneType"),
        ("stages", {"values": [[2]]}, "all integers or all text, got int, list"),
        ("stages", {"otherwise": "none"}, "all integers or all text, got int, str"),
        ("stages", {"values": ["two", "three"], "otherwise": "two"}, "cannot be 'two'"),
        ("stages", {"values": [0]}, "cannot be 0: the templates know 1 to"),
        ("stages", {"values": [2], "otherwise": 99}, "cannot be 99: the templates know 1 to"),
        ("threads_per_row", {"values": [128, 100]}, "cannot be 100"),
        ("slice_columns", {"values": [32, 48]}, "cannot be 48: the templates know 0, 4, 8, 16, 32"),
        ("strategy", {"values": [1, 2]}, "cannot be 1: the templates know column_slices"),
        ("strategy", {"values": ["fastest"]}, "cannot be 'fastest'"),
        ("stages", {"values": [3, 2, 3]}, "lists a value twice"),
        ("stages", {"wen": "M > 1"}, "unknown field 'wen'"),
        ("stages", {"foo": 1, 1: 1}, "unknown field '1'"),
        ("colour", {"values": ["red"]}, "knob 'colour' is unknown"),
        ("stages", {"when": "pipelin == 'bulk'"}, "unknown name 'pipelin'"),
        ("stages", {"when": "reload == 'smem'"}, "looks at 'reload', which comes later"),
        ("stages", {"when": "stages > 2"}, "looks at 'stages', which comes later"),
        ("stages", {"when": "threads >= 64"}, "uses threads, which needs the later knob"),
        ("stages", {"when": "pipeline.upper() == 'BULK'"}, "uses Call"),
        ("stages", {"when": "M.real > 1"}, "uses Attribute"),
        ("stages", {"when": "__import__('os')"}, "uses Call"),
        ("stages", {"when": "[M for M in (1, 2)]"}, "uses ListComp"),
        ("stages", {"when": "dtype[0] == 'b'"}, "uses Subscript"),
        ("stages", {"when": "lambda: M"}, "uses Lambda"),
        ("stages", {"when": "M ** 99999999"}, "uses Pow"),
        ("stages", {"when": "(M := 1)"}, "uses NamedExpr"),
        ("stages", {"when": "M >"}, "is no expression"),
        ("stages", {"when": "not " * 20000 + "M"}, "at most 1000 characters, got 80001"),
        ("stages", {"when": "(" * 400 + "M" + ")" * 400}, "is no expression"),
        ("stages", {"when": ""}, "is no expression"),
        ("stages", {"when": "M = 1"}, "is no expression"),
        ("stages", {"when": True}, "expected an expression in text, got True"),
        ("stages", {"when": 1}, "expected an expression in text, got 1"),
    ],
)
def test_knob_that_is_wrong_is_refused_by_name(
    write: Callable[[Any], Path], knob: str, fields: dict[str, Any], says: str
) -> None:
    sentence = refusal(write(changed(**{knob: fields})))
    assert f"knob '{knob}'" in sentence
    assert says in sentence


@pytest.mark.parametrize("fields", [{}, {"values": [1]}, {"why": "x"}, [1, 2], 3, None])
def test_knob_without_values_or_reason_is_refused(
    write: Callable[[Any], Path], fields: Any
) -> None:
    content = changed()
    content["knobs"]["stages"] = fields
    assert "knob 'stages' needs 'values' and 'why'" in refusal(write(content))


@pytest.mark.parametrize("knob", NEEDED)
def test_knob_that_is_missing_is_named(write: Callable[[Any], Path], knob: str) -> None:
    content = changed()
    del content["knobs"][knob]
    # A knob whose 'when' looks at the missing one comes first: its name is what both share.
    assert f"'{knob}'" in refusal(write(content))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (with_rule("colour > 1"), "unknown name 'colour'"),
        (with_rule("M.real > 1"), "uses Attribute"),
        (with_rule("max(M, N) > 1"), "uses Call"),
        (with_rule("M >"), "is no expression"),
        (with_rule(True), "expected an expression in text"),
        (with_rule("M > 1", say="only {colour}"), "unknown name 'colour'"),
        (with_rule("M > 1", say="only {M"), "open brace"),
        (with_rule("M > 1", say="only {}"), "is no expression"),
        (with_rule("M > 1", say=5), "id and say are text"),
        (with_rule("M > 1", id=5), "id and say are text"),
        (with_rule("M > 1", id="smem"), "two rules are called 'smem'"),
        (with_rule("run_rows > 1"), "unknown name 'run_rows'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rule_that_is_wrong_is_refused(
    write: Callable[[Any], Path], rule: dict[str, Any], says: str
) -> None:
    assert says in refusal(write(rule))


@pytest.mark.parametrize(
    "rule", ["text", {"id": "x", "require": "M > 1"}, {"id": "x", "require": "M > 1", "sya": "?"}]
)
def test_rule_without_its_three_fields_is_refused(write: Callable[[Any], Path], rule: Any) -> None:
    content = changed()
    content["rules"].append(rule)
    assert "a rule has exactly id, require and say" in refusal(write(content))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (with_rule("M / (N - N) > 1"), "rule 'extra': 'M / (N - N) > 1' cannot be computed"),
        (with_rule("strategy > 3"), "'strategy > 3' cannot be computed"),
        (with_rule("M < 1", say="{dtype:.0f}"), "'dtype' cannot be shown as '.0f'"),
        (with_rule("M < 1", say="{M:rows}"), "'M' cannot be shown as 'rows'"),
        (changed(stages={"when": "pipeline > 3"}), "'pipeline > 3' cannot be computed"),
        (with_rule("gpu * 99999999999999 == 1"), "cannot be computed (out of memory)"),
        (with_rule("M < 1", say="{M:9999999999999}"), "cannot be shown as '9999999999999' (out of"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_expression_that_cannot_be_computed_is_one_sentence(
    write: Callable[[Any], Path], content: dict[str, Any], says: str
) -> None:
    broken = load_space(write(content))
    with pytest.raises(NormforgeError) as caught:
        broken.sample(PROBLEM, find_target("h200"), random.Random(0))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_window_may_stand_in_rules_and_below_its_knobs_in_conditions(
    write: Callable[[Any], Path],
) -> None:
    target, limit = find_target("h200"), 2**20
    rule = with_rule(f"window_bytes <= {limit}", "{window_bytes} bytes under way", "window")
    narrow = LegalConfigs(load_space(write(rule)), PROBLEM, target)
    for seed in range(20):
        drawn = narrow.draw(random.Random(seed), ())
        assert drawn is not None and narrow.window(drawn) <= limit
    wide = SPACE.normalize({"ctas_per_sm": 8, "rows_per_cta": 2}, PROBLEM, target)
    (rejection,) = narrow.space.broken_rules(wide, PROBLEM, target)[-1:]
    assert str(rejection) == f"window: {132 * 8 * 2 * 2048} bytes under way"

    load_space(write(changed(store_hint={"when": f"window_bytes <= {limit}"})))
    above = refusal(write(changed(grid={"when": f"window_bytes <= {limit}"})))
    assert "'when' uses window_bytes, which needs the later knob 'spare_sms'" in above


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (with_rule("strategy == 'none'", "{strategy} is not none"), "extra: "),
        (with_rule("store_hint == 'none'", "{store_hint} is not none"), "extra: "),
        (with_rule("M > 5000", "{M} rows are too few"), "extra: 4096 rows are too few"),
        (
            changed(
                pipeline={"values": ["bulk"]},
                threads_per_row={"values": [32]},
                rows_per_cta={"values": [1]},
            ),
            "threads: 32",
        ),
    ],
    ids=["first knob", "last knob", "problem alone", "values"],
)
def test_contradiction_names_the_shape_the_gpu_and_the_rule_met_most(
    write: Callable[[Any], Path],
    monkeypatch: pytest.MonkeyPatch,
    content: dict[str, Any],
    says: str,
) -> None:
    monkeypatch.setattr("generator.space.walk.PATIENCE", 20_000)
    with pytest.raises(NormforgeError) as caught:
        load_space(write(content)).sample(PROBLEM, find_target("h200"), random.Random(0))
    sentence = str(caught.value)
    assert "no legal config for 4096x1024:bf16 on h200" in sentence
    assert f"the rule met most: {says}" in sentence


def test_search_for_a_legal_config_gives_up_after_its_patience(
    monkeypatch: pytest.MonkeyPatch, space: Space
) -> None:
    target = find_target("h200")
    assert len(list(islice(space.legal(PROBLEM, target), 3))) == 3
    monkeypatch.setattr("generator.space.walk.PATIENCE", len(space.knobs) - 1)
    assert list(space.legal(PROBLEM, target)) == []


# ---- The hash ------------------------------------------------------------------------------------


def test_hash_changes_with_values_conditions_and_rules_and_not_with_prose(
    write: Callable[[Any], Path], space: Space
) -> None:
    def hash_of(content: Any) -> str:
        return load_space(write(content)).digest(PROBLEM)

    prose = changed(stages={"why": "because"})
    prose["rules"][0]["say"] = "no"
    known = space.digest(PROBLEM)
    assert hash_of(prose) == hash_of("# a comment\n" + SPACE_FILE.read_text()) == known
    hashes = [
        known,
        hash_of(changed(stages={"values": [3, 2]})),
        hash_of(changed(stages={"values": [2, 3]})),
        hash_of(changed(stages={"when": "pipeline == 'bulk'"})),
        hash_of(changed(stages={"otherwise": 2})),
        hash_of(with_rule("M > 1")),
        hash_of(with_rule("M > 2")),
        hash_of({**CONTENT, "rules": CONTENT["rules"][1:]}),
        hash_of(with_rule("M > 1", id="renamed")),
    ]
    assert len(set(hashes)) == len(hashes)


# ---- A space that extends another ----------------------------------------------------------------


def extending(**content: Any) -> dict[str, Any]:
    return {"extends": "rmsnorm_backward", "knobs": {}, "rules": [], **content}


def test_space_that_extends_another_has_its_knobs_and_rules_but_for_its_own(
    write: Callable[[Any], Path], space: Space
) -> None:
    same = load_space(write(extending()))
    assert same.digest(PROBLEM) == space.digest(PROBLEM)
    knob = {"levels": {"values": [1], "why": "a test"}}
    rule = {"id": "threads", "require": "threads <= 512", "say": "{threads} threads"}
    own = load_space(write(extending(knobs=knob, rules=[rule])))
    assert [k.name for k in own.knobs] == [k.name for k in space.knobs]
    assert next(k for k in own.knobs if k.name == "levels").values == (1,)
    assert sorted(r.id for r in own.rules) == sorted(r.id for r in space.rules)
    assert [r.require.text for r in own.rules if r.id == "threads"] == ["threads <= 512"]


@pytest.mark.parametrize("name", ["nothing", "../search_spaces/rmsnorm_backward", "", 3])
def test_space_that_extends_what_there_is_not_is_refused(
    write: Callable[[Any], Path], name: Any
) -> None:
    assert "'extends' names no other file" in refusal(write(extending(extends=name)))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"rules": ["x"]}, {}, "a rule has exactly"),
        ({"extends": "second"}, {"extends": "first"}, "'extends' names no other file"),
    ],
    ids=["no rule", "circle"],
)
def test_space_that_extends_a_damaged_one_is_refused(
    write: Callable[[Any], Path],
    monkeypatch: pytest.MonkeyPatch,
    first: dict[str, Any],
    second: dict[str, Any],
    says: str,
) -> None:
    folder = write(extending(extends="first")).parent
    monkeypatch.setattr(load, "SEARCH_SPACES", folder)
    for name, content in (("first", first), ("second", second)):
        whole = {"knobs": CONTENT["knobs"], "rules": [], **content}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    with pytest.raises(NormforgeError, match=says):
        load_space(write(extending(extends="first")))


def test_rule_whose_id_is_no_text_is_refused(write: Callable[[Any], Path]) -> None:
    rule = {"id": [1], "require": "M > 1", "say": "no"}
    assert "id and say are text" in refusal(write(extending(rules=[rule])))


def test_rule_stated_twice_is_refused(write: Callable[[Any], Path]) -> None:
    rule = {"id": "threads", "require": "threads <= 512", "say": "no"}
    assert "two rules are called 'threads'" in refusal(write(extending(rules=[rule, rule])))


def test_layernorm_counts_both_sums_of_a_thread() -> None:
    space = load_space(space_file("layernorm_backward"))
    problem = Problem.parse("layernorm_backward:4096x4096:bf16")
    target = find_target("h200")
    for config in islice(space.legal(problem, target), 50):
        variant = make_variant(config, problem)
        alike = make_variant(config, replace(problem, operation="rmsnorm_backward"))
        assert variant.accumulators == 2 * alike.accumulators <= 48
        assert variant.partial_stride == 2 * alike.partial_stride
        assert variant.sums_per_team == 2 * alike.sums_per_team
        assert variant.weight_bytes == alike.weight_bytes
        assert variant.spec(132).partial_columns == 2 * variant.columns
        assert variant.id != alike.id
