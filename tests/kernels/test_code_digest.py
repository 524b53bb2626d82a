"""Records follow the machine code: what a template's text says beside the code changes nothing."""

from __future__ import annotations

import hashlib
import json
import lzma
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import InMemoryStorage

from generator import paths
from generator.kernels import code_digest as module
from generator.kernels import render
from generator.kernels.code_digest import code_digest
from generator.kernels.knobs import KNOBS
from generator.kernels.nvrtc import Compiled
from generator.kernels.render import without_comments
from generator.kernels.strategies import STRATEGIES
from generator.kernels.variant import Variant, kernel_of, make_variant
from generator.paths import GENERATED, TEMPLATES
from generator.problem import FORWARDS as FORWARDS_OF
from generator.problem import Problem
from generator.search.search import Budget, search_problem
from generator.space.forward_space import forward_variants
from generator.space.load import load_space
from generator.studies.records import Record, study_name, without_space
from generator.studies.study_log import StudyLog
from generator.target import find_target
from normforge.table import ForwardTable
from tests.support.committed import config_of
from tests.support.synthetic import LEGAL, PROBLEM, TARGET, FakeEvaluator, FakePool

SPACE = load_space()
FORWARDS = forward_variants(PROBLEM, TARGET)


def variants() -> list[Variant]:
    """Return a variant of every strategy and pipeline."""
    found = {}
    for strategy in dict.fromkeys(s.name for s in STRATEGIES):
        for pipeline in ("bulk", "direct", "async"):
            fixed = {"strategy": strategy, "pipeline": pipeline}
            for config in SPACE.legal(PROBLEM, TARGET, fixed=fixed):
                found[strategy, pipeline] = make_variant(config, PROBLEM)
                break
    return list(found.values())


def digests() -> list[str]:
    """Return the digests of all variants, from the templates that are there now."""
    render._file.cache_clear()
    render._fragment.cache_clear()
    render.environment.cache_clear()
    module._digests.clear()
    return [code_digest(variant, TARGET.arch) for variant in [*variants(), *FORWARDS[:5]]]


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the templates, from which everything is rendered."""
    folder = tmp_path / "templates"
    shutil.copytree(TEMPLATES, folder)
    for reader in (render, paths):
        monkeypatch.setattr(reader, "TEMPLATES", folder)
    yield folder
    monkeypatch.undo()
    digests()  # the real ones again, for the next test


def test_comments_and_empty_lines_are_no_code(templates: Path) -> None:
    before = digests()
    for path in templates.rglob("*.*"):
        text = path.read_text().replace("{\n", "{  /* more\n lines */\n\n  // and a remark\n")
        path.write_text("// Another first line.\n\n" + text)
    assert digests() == before


def test_a_fragment_may_move_and_be_split(templates: Path) -> None:
    before = digests()
    (templates / "elements.cuh").rename(templates / "dw" / "numbers.cuh")
    rows = templates / "rows"
    macro, found, rest = (rows / "rows_bulk.cuh.j2").read_text().partition("struct ")
    assert found
    (rows / "rows_bulk.cuh.j2").write_text(macro)
    found = macro[: macro.index("// ----")] + found
    (templates / "more_rows.cuh.j2").write_text(found + rest)
    for path in templates.rglob("*.j2"):
        text = path.read_text().replace('source("elements.cuh")', 'source("numbers.cuh")')
        pasted = '{{ source("rows_" ~ knobs.pipeline ~ ".cuh") }}'
        more = '{% if knobs.pipeline == "bulk" %}\n{{ source("more_rows.cuh") }}\n{% endif %}\n'
        path.write_text(text.replace(pasted, f"{pasted}\n{more}"))
    assert digests() == before


def test_every_token_counts(templates: Path) -> None:
    before = digests()
    path = templates / "elements.cuh"
    path.write_text(
        path.read_text().replace("asm volatile", "asm", 1).replace("  return", "return")
    )
    path.write_text(path.read_text() + "\nconstexpr int kMore = 1;\n")
    assert all(now != then for now, then in zip(digests(), before, strict=True))


def test_literals_are_no_comments() -> None:
    source = 'asm("// kept");  // gone\nchar a = \'"\';  /* gone */ int b;\n\n  int c;\n'
    assert without_comments(source) == 'asm("// kept");\nchar a = \'"\';    int b;\nint c;'


def search(pool: FakePool, storage: InMemoryStorage) -> tuple[FakeEvaluator, str]:
    """The evaluator that was asked, and the winner."""
    evaluator = FakeEvaluator()
    winner = search_problem(LEGAL, pool, evaluator, storage, Budget(trials=40), seed=3)
    assert winner is not None
    return evaluator, winner.variant


class Rewritten(FakePool):
    """Other code, and for the strategies in `changed` other machine code."""

    def __init__(self, changed: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.changed = changed

    def code(self, variant: Variant) -> str:
        return "rewritten " + super().code(variant)[:6]

    def _compile(self, variant: Variant) -> Compiled:
        self.version = "new" if variant["strategy"] in self.changed else ""
        return super()._compile(variant)


@pytest.mark.usefixtures("quick_proposals")
def test_other_code_with_the_same_machine_code_is_not_measured_again() -> None:
    storage = InMemoryStorage()
    _, winner = search(FakePool(), storage)
    evaluator, again = search(Rewritten(), storage)
    assert again == winner
    assert evaluator.evaluated == []
    assert evaluator.finalists == []


@pytest.mark.usefixtures("quick_proposals")
def test_only_what_became_other_machine_code_is_measured_again() -> None:
    storage = InMemoryStorage()
    search(FakePool(), storage)
    log = StudyLog(storage, study_name(PROBLEM, TARGET, "measured"))
    before = [Record.from_trial(trial) for trial in log.trials()]
    changed = [n for n, r in enumerate(before) if r.config["strategy"] == "separate"]
    assert changed
    evaluator, _ = search(Rewritten(("separate",)), storage)
    assert log.outdated == frozenset(changed)
    assert 0 < len(evaluator.evaluated) <= len(changed)
    assert len(evaluator.finalists) == 1
    assert len(log.trials()) == len(before) + len(changed)
    evaluator, _ = search(Rewritten(("separate",)), storage)
    assert evaluator.evaluated == []
    assert evaluator.finalists == []


def committed(kind: int, step: int = 1) -> list[dict[str, Any]]:
    """Every `step`th record of one kind of the journal that the repository keeps."""
    with lzma.open(GENERATED / "h200" / "studies.journal.xz", "rt") as file:
        lines = [line for line in file if f'"op_code":{kind},' in line]
    return [json.loads(line) for line in lines[::step]]


RETUNED = {
    "gate": "2026-11-28T20:40",
    "rmsnorm_rope": "2026-11-29T04:20",
    **dict.fromkeys(("rmsnorm_fp8", "rmsnorm_mxfp8"), "2026-11-29T09:00"),
}
"""When the templates of such operations were changed last, and tuned for again."""
HALVES = "2026-11-30T17:00"
"""When threads of rows of heads got both columns of every pair."""


def test_committed_studies_are_of_todays_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hundredth trial is checked: a change that this test does not pass measures 300 shapes
    again."""
    monkeypatch.setattr(module, "nvrtc_version", lambda: "13.0")  # this version measured them
    monkeypatch.setattr(module, "_digests", {})
    neutral = {name: facts.neutral for name, facts in KNOBS.items() if facts.neutral is not None}
    names = [entry["study_name"] for entry in committed(0)]
    assert len(names) == 506 and sum(name.startswith("layernorm_b") for name in names) == 47
    for entry in committed(4, step=100):
        problem = Problem.parse(names[entry["study_id"]].partition("@")[0])
        changed = (at for kind, at in RETUNED.items() if problem.operation.startswith(kind))
        if entry["datetime_complete"] < next(changed, ""):
            continue
        known = config_of(entry)
        config = known if "form" in known else {**neutral, **known}  # with knobs that came later
        assert without_space(names[entry["study_id"]]) == study_name(problem, TARGET, "measured")
        variant = kernel_of(config, problem)
        # Kernels with a producer were tried before their templates were changed.
        later = isinstance(variant, Variant) and (variant.run_rows or variant.producer)
        halved = isinstance(variant, Variant) and variant.halves
        if not later and not (halved and entry["datetime_complete"] < HALVES):
            assert code_digest(variant, TARGET.arch) == entry["user_attrs"]["code"]


@pytest.mark.parametrize("forward", FORWARDS_OF)
@pytest.mark.parametrize("gpu", ["h200", "h100"])
def test_committed_forwards_are_of_todays_code(
    gpu: str, forward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that no study chose states the code of all that it was chosen from, in the order of the
    rule."""
    monkeypatch.setattr(module, "nvrtc_version", lambda: "13.0")  # this version measured them
    monkeypatch.setattr(module, "_digests", {})
    table = ForwardTable.load(GENERATED / gpu / FORWARDS_OF[forward])
    assert table is not None
    for entry in table.tuned:
        if "study" in entry.provenance:
            continue
        shape = (entry.M, entry.N, entry.dtype, entry.weight_dtype)
        problem = Problem(*shape, operation=forward)
        target = find_target(gpu)
        codes = (code_digest(v, target.arch) for v in forward_variants(problem, target))
        assert (
            entry.provenance["code"] == hashlib.sha256("\n".join(codes).encode()).hexdigest()[:16]
        )
