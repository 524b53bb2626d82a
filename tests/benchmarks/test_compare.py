"""The comparison with other implementations: everything in it that needs no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import compare, harness
from benchmarks.compare import TUNED, main
from benchmarks.comparison import Comparison, Plan, load_module, load_peers
from benchmarks.goals import best_peer, geometric_mean, goals
from benchmarks.harness import Contender, short_name
from benchmarks.peers import PEERS, choose_peers
from benchmarks.peers.pytorch import decomposed_backward
from benchmarks.report import markdown, missing_sentence
from benchmarks.results import Results, Row, json_text, problem_of, write_json
from generator.errors import NormforgeError
from generator.operations.rmsnorm_backward import make_inputs
from generator.problem import Problem
from generator.shape_lists import load_problems
from normforge.serve.reference import reference_backward
from tests.support.comparison import ENVIRONMENT, cell, row

EVERY = load_problems("compare")


def rows(**changed: float) -> list[Row]:
    """A row for every shape of the list; `changed` gives the ratio of some, by MxN_dtype."""
    return [
        row(problem, changed.get(f"r{problem.M}x{problem.N}_{problem.dtype}", 1.03))
        for problem in EVERY
    ]


def verdicts(some: list[Row]) -> dict[str, bool | None]:
    return {goal.text: goal.met for goal in goals(some)}


def test_the_list_has_the_47_shapes_and_the_tuned_ones_are_among_them() -> None:
    assert len(EVERY) == 47
    assert {problem.dtype for problem in EVERY} == {"bf16", "fp16", "fp32"}
    assert EVERY[0] == Problem.parse("4096x256:bf16")
    assert EVERY[-1] == Problem.parse("4096x16384:fp32")
    assert set(load_problems(TUNED)) <= set(EVERY)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    assert geometric_mean([]) == float("inf")
    assert geometric_mean([1.0, float("inf")]) == float("inf")


def test_the_best_peer_is_the_fastest_that_was_measured() -> None:
    some = row(EVERY[0], peers={"aten": 2.0, "quack": 1.5})
    some["peers"]["inductor"] = cell(None, reason="RuntimeError: no")
    assert best_peer(some) == ("quack", pytest.approx(1.5 * some["add_us"]))
    assert best_peer(row(EVERY[0], peers={})) is None


def test_goals_are_met_when_every_row_keeps_to_them() -> None:
    found = verdicts(rows())
    assert found.pop("bf16 x with fp32 weight, each") is None
    assert len(found) == 10
    assert set(found.values()) == {True}


@pytest.mark.parametrize(
    ("shape", "ratio", "missed"),
    [
        ("65536x4096_bf16", 1.055, "traffic ≥ 400 MB, each"),
        ("65536x8192_bf16", 1.065, "65536x3072, 65536x8192, 16384x16384, each"),
        ("4096x32768_bf16", 1.13, "4096x16384, 4096x32768, 4096x65536, each"),
        ("4096x8192_bf16", 1.13, "4096x4096, 4096x8192, each"),
        ("4096x1024_bf16", 1.19, "4096x1024, 4096x2048, each"),
        ("4096x512_bf16", 1.2, "4096x256, 4096x512, each"),
        ("4096x8192_fp32", 1.11, "fp32 and fp16 at M=4096, N ≥ 4096, each"),
        ("8192x256_bf16", 1.51, "faster than the best peer, each"),
    ],
)
def test_one_slow_shape_misses_the_goal_of_its_class(shape: str, ratio: float, missed: str) -> None:
    found = verdicts(rows(**{f"r{shape}": ratio}))
    assert found[missed] is False
    assert found["all 47 shapes, geometric mean"] is True


def test_goals_over_all_shapes_miss_when_all_are_slow() -> None:
    found = verdicts([row(problem, 1.35) for problem in EVERY])
    assert found["all 47 shapes, geometric mean"] is False
    assert found["faster than the best peer, geometric mean"] is False
    assert found["faster than the best peer, each"] is True


@pytest.mark.parametrize(
    ("operation", "limit"), [("rmsnorm_backward", 1.12), ("layernorm_backward", 1.08)]
)
def test_the_mean_of_all_shapes_has_a_limit(operation: str, limit: float) -> None:
    for ratio, met in ((limit - 1e-3, True), (limit + 1e-3, False)):
        first, *_ = goals([row(problem, ratio) for problem in EVERY], operation)
        assert (first.limit, first.met) == (f"≤ {limit} floor", met)


def test_goals_stay_open_until_all_of_their_shapes_are_measured() -> None:
    found = verdicts(rows()[:5])
    assert set(found.values()) == {None}
    slow = verdicts([row(EVERY[0], 2.0)])
    assert slow["4096x256, 4096x512, each"] is False
    assert set(verdicts([]).values()) == {None}


def test_goals_against_peers_stay_open_while_no_peer_was_timed_at_a_shape() -> None:
    """One shape that ours loses misses them all the same."""
    some = rows()
    some[3]["peers"] = {"quack": cell(None, reason="ValueError: too wide")}
    each, mean = (f"faster than the best peer, {what}" for what in ("each", "geometric mean"))
    found = verdicts(some)
    assert found["all 47 shapes, geometric mean"] is True
    assert (found[each], found[mean]) == (None, None)
    some[4] = row(EVERY[4], 1.6)
    found = verdicts(some)
    assert (found[each], found[mean]) == (False, None)


def test_a_shape_on_which_ours_failed_misses_its_goals() -> None:
    some = rows()
    some[0]["ours_us"] = None
    found = verdicts(some)
    assert found["all 47 shapes, geometric mean"] is False
    assert found["4096x256, 4096x512, each"] is False
    assert found["faster than the best peer, each"] is False
    assert "**no**" in markdown(ENVIRONMENT, some)


def test_the_fp32_weight_is_set_against_the_bf16_weight_of_the_same_shape() -> None:
    goal, wide = "bf16 x with fp32 weight, each", row(Problem.parse("4096x4096:bf16:fp32"))
    assert verdicts([*rows(), wide])[goal] is None
    for cost, met in ((1.02, True), (1.04, False)):
        timed = {**wide, "plain_weight_us": wide["ours_us"] / cost}
        assert verdicts([*rows(), timed])[goal] is met
    assert verdicts([*rows(), {**timed, "ours_us": None}])[goal] is False


def test_the_page_shows_ratios_marks_and_reasons() -> None:
    some = [row(EVERY[0], 1.25), row(EVERY[1], 1.25, {"aten": 3.0})]
    some[0]["peers"]["quack"] = cell(None, reason="ValueError: too wide")
    some[1]["peers"]["aten"]["timed"] = "events"
    page = markdown(ENVIRONMENT, some)
    lines = page.splitlines()
    head = next(line for line in lines if line.startswith("| shape"))
    assert [text.strip() for text in head.strip("|").split("|")] == [
        "shape",
        "add µs",
        "ours µs",
        "strategy",
        "ours",
        "ATen",
        "QuACK",
        "best peer",
        "ours faster",
    ]
    first, second, mean = (
        [text.strip() for text in line.strip("|").split("|")]
        for line in lines
        if line.startswith(("| 4096x256:", "| 8192x256:", "| **geometric"))
    )
    assert first[3:] == ["column_slices", "1.25", "2.50", "!", "ATen", "2.00x"]
    assert second[3:] == ["column_slices", "1.25", "3.00*", "", "ATen", "2.40x"]
    assert mean[4:] == ["1.25", "2.74", "-", "2.74", "2.19x"]
    assert "- QuACK, 4096x256:bf16: ValueError: too wide" in page
    assert "Not compared: Liger Triton (liger-kernel not installed)." in page
    assert "- ATen, N 256:bf16: `kernel`" in page
    assert "| ATen | 12.0 | 1.0e-03 | 2.0e-03 | 2 of 2 |" in page


def line_of(page: str, begin: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {begin}")]
    return [text.strip() for text in line.strip("|").split("|")][1:]


def test_means_have_every_shape_that_a_peer_serves() -> None:
    """Peers have 2 and 4.5 times the floor, the best of them 2 and 2; ours failed at the second."""
    some = [row(EVERY[0], 1.25, {"aten": 2.0}), row(EVERY[1], 1.25, {"aten": 4.5, "quack": 2.0})]
    assert line_of(markdown(ENVIRONMENT, some), "**geometric")[3:] == [
        *("1.25", "3.00", "2.00", "2.00", "1.60x"),
    ]
    some[1]["ours_us"] = None
    assert line_of(markdown(ENVIRONMENT, some), "**geometric")[3:] == [
        *("-", "3.00", "2.00", "2.00", "-"),
    ]


def test_qualities_have_the_worst_errors_of_each_dtype() -> None:
    """The middle of the host's times; of the bits, how often they are known to be the same."""
    some = [row(problem, peers={}) for problem in EVERY[:3]]
    some.append(row(next(problem for problem in EVERY if problem.dtype == "fp32"), peers={}))
    for each, host_us, dx, dw, same in zip(
        some,
        (10.0, 14.0, 99.0, 12.0),
        (1e-3, 3e-3, None, 9e-6),
        (2e-3, 1e-3, 5e-4, 1e-6),
        (True, False, None, True),
        strict=True,
    ):
        cells = cell(1.0, host_us=host_us, error_dx=dx, error_dw=dw, deterministic=same)
        each["peers"]["aten"] = cells
        each |= {f"ours_{key}": cells[key] for key in ("error_dx", "error_dw", "deterministic")}
    page = markdown(ENVIRONMENT, some)
    wanted = ["3.0e-03", "2.0e-03", "9.0e-06", "1.0e-06", "2 of 3"]
    assert line_of(page, "ATen |") == ["13.0", *wanted]
    assert line_of(page, "ours |") == ["12.0", *wanted]


def test_nothing_is_said_about_missing_peers_when_none_is_missing() -> None:
    assert missing_sentence({}) == ""


def test_a_peer_that_is_not_installed_is_reported_and_left_out() -> None:
    peer = PEERS["rmsnorm_backward"][0]
    absent = replace(peer, name="quack", needs=("no-such-distribution",))

    def broken(timer: object) -> Any:
        raise ImportError("libcuda.so.1: no such file")

    present = replace(peer, needs=("torch",), load=broken)
    good: Any = object()
    there = replace(present, name="cudnn", load=lambda timer: good, overwrites_dy=True)
    found, missing = load_peers([absent, present, there], None)  # type: ignore[arg-type]
    assert found == {"cudnn": Contender(good, overwrites_dy=True)}
    assert missing == {
        "quack": "no-such-distribution not installed",
        "aten": "ImportError: libcuda.so.1: no such file",
    }


def test_peers_are_chosen_by_name() -> None:
    assert choose_peers("all") == list(PEERS["rmsnorm_backward"])
    assert choose_peers("all", "layernorm_backward") == list(PEERS["layernorm_backward"])
    with pytest.raises(NormforgeError, match="unknown peer 'liger_cutedsl'"):
        choose_peers("liger_cutedsl", "layernorm_backward")
    assert [peer.name for peer in choose_peers("quack, aten")] == ["aten", "quack"]
    with pytest.raises(NormforgeError, match="unknown peer 'quak': use all or some of aten"):
        choose_peers("quak")


def test_results_survive_a_write_that_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sub" / "h200.json"
    results = Results(path, ENVIRONMENT, [row(EVERY[0])])
    results.write()
    before = path.read_text()
    results.put(row(EVERY[1]))

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(NormforgeError, match=r"cannot write .*h200\.json: No space left"):
            results.write()
    assert path.read_text() == before
    assert [file.name for file in path.parent.iterdir()] == ["h200.json"]
    results.write()
    assert [problem_of(found) for found in Results.read(path).rows] == EVERY[:2]


def test_a_resumed_run_keeps_rows_and_date_and_skips_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    Results(path, ENVIRONMENT, [row(EVERY[1])]).write()
    later = {**ENVIRONMENT, "date": "2026-01-03"}
    results = Results.resume(path, later)
    assert results.environment["date"] == "2026-01-02"
    peers = tuple(choose_peers("aten,quack,quack_tuned"))
    plan = Plan(tuple(EVERY[:3]), frozenset(EVERY[:1]), peers, until=0.0)
    assert plan.remaining(results) == [EVERY[2], EVERY[0]]
    assert [peer.name for peer in plan.peers_of(EVERY[0])] == ["aten", "quack", "quack_tuned"]
    more = replace(plan, peers=tuple(choose_peers("aten,inductor")))
    assert EVERY[1] in more.remaining(results)
    results.put(row(EVERY[0]))
    results.sort(EVERY)
    assert [problem_of(found) for found in results.rows] == EVERY[:2]
    assert Results.resume(tmp_path / "none.json", later).rows == []


def test_a_resumed_run_knows_the_peers_of_all_its_rows(tmp_path: Path) -> None:
    path, aten, quack = tmp_path / "h200.json", {"aten": "2.11.0"}, {"quack": "0.6.5"}
    for peers, known in ((aten, aten), (quack, aten | quack), (aten, aten | quack)):
        results = Results.resume(path, {**ENVIRONMENT, "peers": peers})
        results.write()
        assert Results.read(path).environment["peers"] == known


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("torch", "2.13.0"),
        ("peers", {"quack": "quack-kernels 0.7"}),
        ("module", {"path": "generated/h200/rmsnorm_backward", "digest": "fedcba9876543210"}),
    ],
)
def test_rows_of_other_conditions_are_not_resumed(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "h200.json"
    Results(path, ENVIRONMENT, [row(EVERY[1])]).write()
    with pytest.raises(NormforgeError, match=f"another {key} .*leave out --resume"):
        Results.resume(path, {**ENVIRONMENT, key: value})


def test_a_resumed_run_loses_no_peer(tmp_path: Path) -> None:
    """A row that lacks a new peer is measured again, with all that take part."""
    results = Results(tmp_path / "r.json", ENVIRONMENT, [row(EVERY[0])])
    had = ",".join(results.rows[0]["peers"])
    plan = Plan(tuple(EVERY[:2]), frozenset(), (), until=0.0)
    replace(plan, peers=tuple(choose_peers(had))).check_resumed(results, {})
    replace(plan, peers=tuple(choose_peers("aten"))).check_resumed(results, {})
    replace(plan, peers=tuple(choose_peers(f"{had},cudnn"))).check_resumed(results, {})
    some = replace(plan, peers=tuple(choose_peers("aten,cudnn")))
    with pytest.raises(NormforgeError, match=r"without .*quack \(no wheel\).*: let them take part"):
        some.check_resumed(results, {"quack": "no wheel"})


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"environment": {}, "rows": [1]}'])
def test_a_damaged_results_file_is_refused_with_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "h200.json"
    path.write_text(text)
    with pytest.raises(NormforgeError, match=r"h200.json is no results file"):
        Results.read(path)


def test_the_page_is_drawn_from_a_file_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "h200.json"
    Results(path, ENVIRONMENT, rows()).write()
    assert main(["--render", "--out", str(path)]) == 0
    page = (tmp_path / "h200.md").read_text()
    assert page == markdown(ENVIRONMENT, json.loads(path.read_text())["rows"])
    drawn = (tmp_path / "h200.svg").exists()
    assert drawn != ("No plot: matplotlib is not installed." in capsys.readouterr().err)
    assert main(["--render", "--out", str(tmp_path / "none.json")]) == 2


def test_a_folder_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NormforgeError, match="is no emitted package: --module names its folder"):
        load_module(tmp_path)
    (tmp_path / "table.json").write_text("{}")
    (tmp_path / "__init__.py").write_text("import no_such_module_at_all")
    with pytest.raises(NormforgeError, match="cannot be imported: ModuleNotFoundError"):
        load_module(tmp_path)
    (tmp_path / "part.py").write_text("VALUE = 3")
    (tmp_path / "__init__.py").write_text("from .part import VALUE")
    assert load_module(tmp_path).VALUE == 3


def test_kernel_names_lose_their_arguments() -> None:
    reduce = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(ReduceOp)"
    assert short_name(reduce) == "at::native::reduce_kernel"
    hidden = "void at::native::(anonymous namespace)::gamma<float, (bool)1>(long, float const*)"
    assert short_name(hidden) == "at::native::gamma"
    assert short_name("Memset (Device)") == "Memset (Device)"
    assert len(short_name("kernel_cutlass_" + "x" * 300)) == harness.PATH_CHARACTERS


def test_the_compiled_formula_is_the_backward() -> None:
    problem = Problem.parse("32x48:bf16:fp32")
    inputs = make_inputs(problem, torch.device("cpu"))
    arguments = (inputs.dy, inputs.x, inputs.rstd, inputs.weight)
    for out, expected in zip(
        decomposed_backward(*arguments), reference_backward(*arguments), strict=True
    ):
        assert out.dtype == expected.dtype
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(("left", "ours_us", "code"), [(0, 9.0, 0), (2, 9.0, 1), (0, None, 1)])
def test_the_exit_code_says_whether_every_shape_has_a_time_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left: int, ours_us: float | None, code: int
) -> None:
    class Measured:
        def measure(self, results: Results) -> int:
            results.put({**row(EVERY[0]), "ours_us": ours_us})
            return left

        def record_paths(self, results: Results) -> None:
            pass

    for name, fake in {
        "load_module": None,
        "operation_of_package": "rmsnorm_backward",
        "_set_environment": None,
        "open_session": SimpleNamespace(facts={}, timer=None),
        "load_peers": ({}, {}),
        "describe": ENVIRONMENT,
        "prepare": None,
        "Comparison": Measured(),
        "write_page": None,
    }.items():
        monkeypatch.setattr(compare, name, lambda *_, fake=fake: fake)
    assert main(["--module", "package", "--out", str(tmp_path / "h200.json")]) == code


def test_a_results_file_is_written_where_its_name_leads(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("old")
    link.symlink_to(kept)
    write_json(link, {"rows": []})
    assert link.is_symlink()
    assert json.loads(kept.read_text()) == {"rows": []}
    write_json(Path("/dev/null"), {"rows": []})
    assert Path("/dev/null").is_char_device()
    with pytest.raises(NormforgeError, match=r"cannot write .*kept\.json: Out of range float"):
        write_json(kept, {"rows": [float("nan")]})
    assert json.loads(kept.read_text()) == {"rows": []}


def test_a_results_file_has_a_line_for_each_row() -> None:
    rows = [{"shape": "1x64:bf16", "us": [0.5] * 400}, {"shape": "2x64:bf16", "us": []}]
    document = {"gpu": "é", "rows": rows, "long": {"of": {"all": [rows[0]] * 2}}}
    text = json_text(document)
    assert json.loads(text) == document
    lines = [line for line in text.splitlines() if "64:bf16" in line]
    assert [json.loads(line.strip().rstrip(",")) for line in lines] == [*rows, rows[0], rows[0]]


def test_paths_are_asked_once_per_kind_and_ours_per_strategy(tmp_path: Path) -> None:
    """A kind is a width with its dtypes. What is known is not asked again."""
    shapes = "1x64:bf16 2x64:bf16 3x64:bf16 4x64:bf16:fp32 5x64:fp32 6x96:bf16 7x96:bf16"
    some = [row(Problem.parse(shape)) for shape in shapes.split()]
    some[1]["strategy"] = "separate"
    for each in some[:-1]:
        each["ours_path"] = each["peers"]["aten"]["path"] = None
        each["peers"]["quack"]["us"] = None  # not measured
    asked = []
    comparison: Any = Comparison.__new__(Comparison)
    comparison.contenders = dict.fromkeys(("ours", "aten", "quack"))
    comparison.plan = SimpleNamespace(until=float("inf"))
    comparison._path = lambda name, problem: asked.append((name, problem.M)) or f"{name}{problem.M}"
    comparison.record_paths(Results(tmp_path / "h200.json", ENVIRONMENT, some))
    assert sorted(asked) == [
        *(("aten", M) for M in (1, 4, 5, 6)),
        *(("ours", M) for M in (1, 2, 4, 5, 6)),
    ]
    kinds = [f"ours{M}" for M in (1, 2, 1, 4, 5, 6)]
    assert [each["ours_path"] for each in some] == [*kinds, "kernel"]
    kinds = [f"aten{M}" for M in (1, 1, 1, 4, 5, 6)]
    assert [each["peers"]["aten"]["path"] for each in some] == [*kinds, "kernel"]
    assert {each["peers"]["quack"]["path"] for each in some} == {"kernel"}
