"""A space fixes knobs for a width, so that the bits of its kernels do not depend on the batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import yaml

from generator.errors import NormforgeError
from generator.problem import Problem
from generator.space.forward_space import forward_variants
from generator.space.legal_configs import LegalConfigs
from generator.space.load import load_space, space_file
from generator.space.space import Space
from generator.target import find_target

OPERATION = "rmsnorm_invariant_backward"
FORWARD = "rmsnorm_invariant_forward"
INVARIANT, FORWARDS = (load_space(space_file(name)) for name in (OPERATION, FORWARD))
CONTENT = yaml.safe_load(space_file(OPERATION).read_text())
H200 = find_target("h200")
PROBLEM = Problem.parse("16384x4096:bf16", OPERATION)
FIXED = {
    **{"cluster": 1, "threads_per_row": 256, "vector_bytes": 16},
    **{"rows_per_cta": 2, "run_rows": 32, "group_rows": 128},
}
"""The knobs that are fixed for 4096 columns of bf16."""
ENTRY = {"N": [4096], "dtype": ["bf16"], "knobs": {"cluster": 1}}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    """Writes a space with these entries of `fixed`."""

    def to_file(fixed: Any) -> Path:
        path = tmp_path / "space.yaml"
        path.write_text(yaml.safe_dump({**CONTENT, "fixed": fixed}, sort_keys=False))
        return path

    return to_file


# ---- The file ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fixed", "says"),
    [
        ({"N": [64]}, "'fixed' is a list"),
        (["N"], "an entry has exactly N, dtype and knobs, got 'N'"),
        ([{"N": [4096], "dtype": ["bf16"]}], "an entry has exactly N, dtype and knobs"),
        ([{**ENTRY, "forward": {"cluster": 1}}], "an entry has exactly N, dtype and knobs"),
        ([{**ENTRY, "knobs": {"colour": 1}}], "{'colour': 1} has other knobs or values"),
        ([{**ENTRY, "knobs": {"run_rows": 3}}], "{'run_rows': 3} has other knobs or values"),
        ([{**ENTRY, "knobs": {"cluster": "one"}}], "has other knobs or values than this space"),
        ([{**ENTRY, "knobs": ["cluster"]}], "['cluster'] has other knobs or values"),
        ([{**ENTRY, "N": 4096}], "N and dtype are lists"),
        ([{**ENTRY, "dtype": "bf16"}], "N and dtype are lists"),
        ([{**ENTRY, "N": ["4096"]}], "N has integers and dtype some of bf16, fp16, fp32"),
        ([{**ENTRY, "N": [[4096]]}], "N has integers and dtype some of bf16, fp16, fp32"),
        ([{**ENTRY, "dtype": ["fp8"]}], "N has integers and dtype some of bf16, fp16, fp32"),
        ([ENTRY, ENTRY], "'fixed' has 4096 columns of bf16 twice"),
        ([{**ENTRY, "N": [64, 4096, 64]}], "'fixed' has 64 columns of bf16 twice"),
        ([ENTRY, {**ENTRY, "dtype": ["fp16", "bf16"]}], "'fixed' has 4096 columns of bf16 twice"),
    ],
)
def test_what_is_fixed_wrongly_is_refused_in_a_sentence(
    write: Callable[[Any], Path], fixed: Any, says: str
) -> None:
    path = write(fixed)
    with pytest.raises(NormforgeError) as caught:
        load_space(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_new_knobs_of_a_space_that_extends_another_come_first(space: Space) -> None:
    """The other file's rules may need them: shared memory depends on run_rows."""
    names = [knob.name for knob in INVARIANT.knobs]
    assert names == ["run_rows", "group_rows", "leaves", *(knob.name for knob in space.knobs)]
    strategy = next(knob for knob in INVARIANT.knobs if knob.name == "strategy")
    assert strategy.values == ("column_slices", "separate")


def test_hash_tells_what_is_fixed_for_a_problem_and_nothing_else(
    write: Callable[[Any], Path],
) -> None:
    entries = CONTENT["fixed"]
    problem = Problem.parse("4096x64:bf16", OPERATION)
    own = INVARIANT.digest(problem)
    assert load_space(write([])).digest(problem) != own
    changes: list[tuple[int, str, Any, bool]] = [
        (0, "N", [64, 96], True),
        (1, "knobs", {**entries[1]["knobs"], "run_rows": 64}, True),
        (0, "knobs", {**entries[0]["knobs"], "run_rows": 8}, False),
    ]
    for place, key, value, same in changes:
        changed = copy.deepcopy(entries)
        changed[place][key] = value
        assert (load_space(write(changed)).digest(problem) == own) is same, (place, key)


# ---- Configs -------------------------------------------------------------------------------------


def test_only_the_width_and_the_dtype_of_x_say_what_is_fixed() -> None:
    for shape in ("64x4096:bf16", "65536x4096:bf16:fp32", "512x4096:fp16+offset+residual"):
        assert INVARIANT.fixed_for(Problem.parse(shape, OPERATION)) == FIXED
    wide = FORWARDS.fixed_for(Problem.parse("64x4096:fp32", FORWARD))
    assert wide == {"cluster": 1, "threads_per_row": 128, "vector_bytes": 16}


def test_space_without_fixed_knobs_fixes_nothing(space: Space) -> None:
    assert space.fixed_for(PROBLEM) == {}


@pytest.mark.parametrize("shape", ["4096x96:bf16", "4096x64:fp32", "4096x4097:fp16"])
def test_width_that_is_not_listed_is_refused_with_the_way_out(shape: str) -> None:
    problem = Problem.parse(shape, OPERATION)
    rng = random.Random(0)
    legal = LegalConfigs(INVARIANT, problem, H200)
    uses: list[Callable[[], Any]] = [
        lambda: INVARIANT.fixed_for(problem),
        lambda: INVARIANT.normalize({}, problem, H200),
        lambda: next(INVARIANT.legal(problem, H200)),
        lambda: INVARIANT.sample(problem, H200, rng),
        lambda: legal.nearest({}, rng),
    ]
    for use in uses:
        with pytest.raises(NormforgeError) as caught:
            use()
        assert str(caught.value) == (
            f"rmsnorm_invariant_backward.yaml fixes nothing for rows of {problem.N} "
            f"{problem.dtype}, and the bits would depend on M: add an entry to 'fixed'"
        )


def test_every_way_to_a_config_keeps_what_is_fixed() -> None:
    rng = random.Random(3)
    legal = LegalConfigs(INVARIANT, PROBLEM, H200)
    other: dict[str, int | str] = {
        **{"cluster": 2, "threads_per_row": 128, "vector_bytes": 8, "run_rows": 16},
        **{"group_rows": 256, "leaves": "groups", "rows_per_cta": 4, "reload": "smem"},
    }
    found = list(islice(INVARIANT.legal(PROBLEM, H200, rng=rng), 40))
    found += islice(INVARIANT.legal(PROBLEM, H200, fixed={"run_rows": 16}), 3)
    found += [INVARIANT.sample(PROBLEM, H200, rng, {"run_rows": 16, "strategy": "separate"})]
    found += [INVARIANT.normalize(other, PROBLEM, H200)]
    for near in (legal.nearest(other, rng), legal.adapt(other, rng)):
        assert near is not None
        assert (near["leaves"], near["reload"]) == ("groups", "smem")
        found.append(near)
    drawn = legal.draw(rng, ())
    assert drawn is not None
    found += [drawn, *islice(legal.around(drawn, rng), 40)]
    assert len(found) > 70
    for config in found:
        assert config.items() >= FIXED.items()
    assert len({str(config) for config in found}) > 30


@pytest.mark.parametrize(("knob", "value"), [("run_rows", 16), ("group_rows", 256)])
def test_config_with_another_value_is_rejected_by_name(knob: str, value: int) -> None:
    config = INVARIANT.sample(PROBLEM, H200, random.Random(0), {"rows_in_flight": 1})
    assert INVARIANT.reject(config, PROBLEM, H200) is None
    other = {**config, knob: value}
    rejection = INVARIANT.reject(other, PROBLEM, H200)
    assert str(rejection) == (
        f"fixed: {knob} is {FIXED[knob]} for all 4096 columns of bf16, not {value}: their bits "
        "depend on it"
    )
    assert not LegalConfigs(INVARIANT, PROBLEM, H200).is_legal(other)


# ---- The forward ---------------------------------------------------------------------------------


def test_forwards_are_those_that_have_what_is_fixed() -> None:
    problem = Problem.parse("16384x8192:bf16", FORWARD)
    every = forward_variants(replace(problem, operation="rmsnorm_forward"), H200)
    assert FORWARDS.fixed_for(problem) == {"cluster": 1, "threads_per_row": 256, "vector_bytes": 16}
    found = forward_variants(problem, H200)
    assert found == [
        v
        for v in every
        if (v.form, v.cluster, v.threads_per_row, v.vector_bytes) == ("registers", 1, 256, 16)
    ]
    assert 1 < len(found) < len(every)
    # One that reads rows twice adds in another order.
    assert any(v.form == "twice" and v.threads_per_row == 256 for v in every)


def test_every_width_that_is_fixed_has_kernels_of_both_directions() -> None:
    kinds = [[(e.widths, e.dtypes) for e in space.fixed] for space in (INVARIANT, FORWARDS)]
    assert kinds[0] == kinds[1]
    for space, operation in ((INVARIANT, OPERATION), (FORWARDS, FORWARD)):
        for widths, dtypes in kinds[0]:
            for N, dtype in product(widths, dtypes):
                problem = Problem(16384, N, dtype, dtype, operation=operation)
                assert next(space.legal(problem, H200), None), problem


def test_gpu_that_cannot_have_what_is_fixed_is_refused_by_name(
    write: Callable[[Any], Path],
) -> None:
    """A cluster is one CTA on an A100, which has none: another order of dx's sums."""
    knobs = {"cluster": 2, "threads_per_row": 256}
    space, a100 = load_space(write([{**ENTRY, "knobs": knobs}])), find_target("a100")
    assert space.sample(PROBLEM, H200, random.Random(0))["cluster"] == 2
    told = "fixed: cluster is 2 for all 4096 columns of bf16, not 1: their bits depend on it"
    with pytest.raises(NormforgeError, match=told):
        space.sample(PROBLEM, a100, random.Random(0))
    assert list(space.legal(PROBLEM, a100)) == []
    legal = LegalConfigs(space, PROBLEM, a100)
    assert legal.nearest(space.sample(PROBLEM, H200, random.Random(0)), random.Random(0)) is None
