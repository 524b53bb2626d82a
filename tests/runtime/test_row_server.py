"""Calls of an operation that has no functions of its own in the library: by a kernel, whose launch
computes from what the driver is given, and by the formula."""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from normforge.launch.driver import LaunchError
from normforge.launch.workspace import PER_THREAD
from normforge.operations import OPERATIONS, RMSNORM_ADD_FORWARD, RowOperation, Signature
from normforge.operations.formula import evaluate
from normforge.operations.tensor import (
    added_columns,
    added_rows,
    columns,
    copied_rows,
    number,
    row,
    rows,
    rows_out,
    sums,
)
from normforge.serve import rows as module
from normforge.serve.row_checks import check_tensors
from normforge.serve.rows import RowServer
from normforge.spec import plan_launch
from normforge.table import Table
from tests.support.entry_points import spied
from tests.support.fake_driver import (
    SPEC,
    TWO_KERNELS,
    ComputingDriver,
    FakeDevice,
    at_address,
    empty_on_cpu,
    entry,
    row_server,
    rows_at,
    stand_in,
    use_row_servers,
)

M, N = 24, 16
SHAPE = (4, 6, N)
BLEND = RowOperation(
    name="blend",
    signature=Signature(
        *(rows("a"), rows_out("p"), row("s", behind=True), rows("b"), columns("g")),
        *(sums("t", count=2), rows("c"), rows_out("q"), row("r")),
        *(number("h"), added_rows("d", option="residual"), added_columns("f")),
        copied_rows("e", "p", option="residual"),
        row_sums=1,
    ),
    terms=lambda a, b, c, f, g, r, s, h: {
        "p": (a * s, b * g, a * 0 + f),
        "q": (c * r, a * h),
        "t": (b * c, a * b),
    },
)
WIDE = replace(
    SPEC,
    **{"name": "k", "operation": "blend", **TWO_KERNELS, "dtype": "fp32"},
    **{"weight_dtype": "fp32", "N": N, "partial_columns": 2 * N, "partial_stride": 2 * N},
)


class Device(ComputingDriver):
    """Computes the operation from the arguments of its main kernel, in fp32."""

    residual = torch.float32

    def compute(self, function: str, args: Any) -> None:
        if function != "blend":
            return

        def put(name: str, found: torch.Tensor) -> None:
            place = at_address(getattr(args, name), found.numel(), found.dtype)
            place.copy_(found.flatten())

        given: dict[str, Any] = {
            name: torch.stack(rows_at(args, name, gap=getattr(args, f"{name}_gap")))
            for name in "abc"
        }
        given |= {name: at_address(getattr(args, name), args.rows) for name in "rs"}
        for name in "fg":
            address = getattr(args, name)
            given[name] = at_address(address, args.columns) if address else None
        given["d"] = torch.stack(rows_at(args, "d", self.residual)) if args.d else None
        given["h"] = args.h
        found = evaluate(BLEND, given)
        assert (args.p_stride, args.q_stride) == (args.columns, args.columns)
        for name in "pqt":
            put(name, found[name])
        if args.e:
            put("e", found["p"].to(self.residual))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    stand_in(monkeypatch, made)
    return made


@pytest.fixture
def tuned(driver: Device, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> RowServer:
    """One with kernels, which take CPU tensors."""
    monkeypatch.setitem(OPERATIONS, "blend", BLEND)
    use_row_servers(monkeypatch, device)
    made: RowServer = row_server(
        BLEND, entry(M, WIDE), entry(M, WIDE, residual="bf16", way="slices")
    )
    return made


@pytest.fixture
def serve(tuned: RowServer) -> Any:
    """Return what serves calls by a kernel for CPU tensors: its outputs, or why there is none."""
    return lambda tensors, *offset: tuned._by_kernel(
        check_tensors(BLEND, tensors), tensors, *offset
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-9, 10, shape, generator=generator).to(dtype)


def plain(**change: Any) -> dict[str, Any]:
    given = {name: random(*SHAPE) + i for i, name in enumerate("abc")}
    given |= {"s": random(*SHAPE[:-1]), "r": random(M, 1), "g": random(N), "f": random(N) + 1}
    return given | {"h": 3} | change


def check(found: Any, tensors: dict[str, Any]) -> None:
    assert isinstance(found, dict), found
    exact = evaluate(BLEND, tensors)
    for name, out in exact.items():
        torch.testing.assert_close(found[name], out, rtol=0, atol=0)
        assert found[name].is_contiguous()
    wide = {"p", "q", "t"} | ({"e"} if "d" in tensors else set())
    assert found.keys() == wide


PACKED = random(4, 10, 3, N)
KINDS = {
    "dense": random(*SHAPE),
    "strided": random(M, 2 * N)[:, N:].view(SHAPE),
    "heads": PACKED[:, :6, 0],
    "wide heads": random(4, 14, N)[:, 4:10],
    "turned": random(6, 4, N).transpose(0, 1),
    "one row": random(1, 1, N).expand(SHAPE),
    "by column": random(N, M).t().reshape(SHAPE[0], 6, N),
    "columns apart": random(*SHAPE, 2)[..., 1],
}


@pytest.mark.parametrize("c", KINDS)
@pytest.mark.parametrize("a", KINDS)
def test_rows_are_read_where_they_lie_or_copied(serve: Any, a: str, c: str) -> None:
    tensors = plain(a=KINDS[a], b=KINDS["heads"], c=KINDS[c])
    check(serve(tensors), tensors)


def test_rows_that_kernels_can_read_are_not_copied(serve: Any, driver: Device) -> None:
    tensors = plain(a=KINDS["heads"], b=KINDS["wide heads"], c=KINDS["dense"])
    serve(tensors)
    args = driver.launches[0].arguments
    for name in ("a", "b", "c", "g"):
        assert getattr(args, name) == tensors[name].data_ptr()
    assert (args.rows, args.columns) == (M, N)
    assert (args.a_stride, args.b_stride, args.c_stride) == (3 * N, N, N)
    assert (args.a_gap, args.b_gap, args.c_gap) == (12 * N, 8 * N, 0)
    assert args.dw_mode == 0 and args.weight_offset == 0


def test_numbers_of_rows_and_columns_have_any_strides(serve: Any) -> None:
    change = {"s": random(4, 6, 2)[..., 0], "r": torch.ones(1, 1).expand(M, 1) * 3}
    change |= {"g": random(1).expand(N).clone(), "r": random(1, 1).expand(M, 1)}
    check(serve(plain(**change)), plain(**change))
    for without in (plain(g=None), plain(f=None), plain(f=None, g=None)):
        check(serve(without), without)


BF16 = torch.bfloat16
RESIDUALS = {
    "dense": random(*SHAPE, dtype=BF16),
    "at a stride": random(M, 2 * N, dtype=BF16)[:, N:].view(SHAPE),
    "heads": random(4, 12, N, dtype=BF16)[:, :6],  # heads have two strides
    "at an odd address": random(M * N + 1, dtype=BF16)[1:].view(SHAPE),
    "at an odd stride": random(M, N + 2, dtype=BF16)[:, :N].view(SHAPE),
}


@pytest.mark.parametrize("kind", RESIDUALS)
def test_a_residual_of_another_dtype_has_an_output_of_its_own(
    serve: Any, driver: Device, kind: str
) -> None:
    """The kernel reads it in whole vectors and at one stride."""
    driver.residual, d = BF16, RESIDUALS[kind]
    tensors = plain(d=d)
    found = serve(tensors)
    args = driver.launches[0].arguments
    assert args.d % 16 == args.d_stride * 2 % 16 == 0
    assert (args.d == d.data_ptr()) is (kind in ("dense", "at a stride"))
    check(found, tensors)
    assert found["e"].dtype == torch.bfloat16
    assert torch.equal(found["e"], found["p"].bfloat16())


def test_the_second_kernel_sums_what_the_first_one_left(serve: Any, driver: Device) -> None:
    found = serve(plain())
    main, second = driver.launches
    assert (main.function, second.function) == ("blend", "sum_partials")
    plan = plan_launch(replace(WIDE, name="k"), M)
    places = (main.arguments.scratch, found["t"].data_ptr())
    assert second.arguments == (*places, plan.partials, 2 * N, 0, plan.group)
    assert (main.grid, second.grid) == (plan.grid, plan.sum_grid)


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float64])
def test_a_captured_call_has_memory_of_its_own(
    serve: Any, driver: Device, device: FakeDevice, monkeypatch: pytest.MonkeyPatch,
    default: torch.dtype,
) -> None:  # fmt: skip
    """The words are fp32, whatever PyTorch's default is."""
    made: list[torch.Tensor] = []

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(empty_on_cpu(size, stride, dtype))
        return made[-1]

    monkeypatch.setattr(module, "empty_strided", empty)
    before = torch.get_default_dtype()
    serve(plain())
    device.capturing = True
    torch.set_default_dtype(default)
    try:
        check(serve(plain()), plain())
    finally:
        torch.set_default_dtype(before)
    eager, _, captured, _ = (seen.arguments for seen in driver.launches)
    assert captured.scratch != eager.scratch
    needed = plan_launch(WIDE, M).scratch * 4
    assert made[-1].nbytes == needed and made[-1].data_ptr() == captured.scratch


def test_a_captured_call_has_counters_of_its_own(
    serve: Any, driver: Device, device: FakeDevice
) -> None:
    """They are zero at every replay, whatever other calls do meanwhile."""
    driver.residual = torch.bfloat16
    tensors = plain(d=random(*SHAPE, dtype=torch.bfloat16))
    for device.capturing in (False, False, True):
        serve(tensors)
    first, second, captured = (seen.arguments for seen in driver.launches)
    assert first.counters == second.counters != captured.counters != 0


def moved(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors of the same kind, elsewhere."""
    return {k: t + 1 if isinstance(t, torch.Tensor) else t for k, t in tensors.items()}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The choices of a kernel."""
    return spied(monkeypatch, Table, "choose")


def test_calls_like_a_known_one_have_addresses_and_numbers_of_their_own(
    serve: Any, driver: Device, chosen: list[Any]
) -> None:
    first, other = plain(), plain(h=4)
    for tensors in (first, moved(first), other, moved(other), first, plain(a=KINDS["heads"])):
        check(serve(tensors), tensors)
    assert len(chosen) == 3
    with torch.enable_grad():
        wanting = first | {"a": first["a"].clone().requires_grad_()}
        found = serve(wanting)
    assert torch.equal(found["p"], evaluate(BLEND, first)["p"]) and len(chosen) == 4


def test_a_call_like_a_known_one_is_launched_at_once(
    serve: Any, tuned: RowServer, chosen: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments are not checked again, unless somebody collects, who hears of it first."""
    assert tuned.again(plain()) is None
    serve(plain())
    given = moved(plain())
    with monkeypatch.context() as patch:
        patch.setattr(module, "check_tensors", None)
        check(tuned(given), given)
    written = random(*SHAPE)
    serve(given, 0.0, {"p": written})
    found = tuned(given, 0.0, {"p": written})
    assert found["p"] is written and found["q"].data_ptr() != found["t"].data_ptr()
    check(found, given)
    monkeypatch.setattr(module, "current_device", lambda: 1)
    assert tuned.again(given) is None  # its kernel is loaded on another device
    monkeypatch.setattr(module, "current_device", lambda: 0)
    counted: list[Any] = []
    recorder = SimpleNamespace(count=lambda *of: counted.append(of))
    monkeypatch.setattr(module, "collecting", SimpleNamespace(recorder=recorder))
    assert tuned.again(given) is None
    tuned(given)
    check(serve(given), given)  # which was counted
    assert len(counted) == 1 and len(chosen) == 2


def test_tensors_in_other_places_are_another_call(tuned: RowServer) -> None:
    """Arguments are told apart though they are of one size."""
    calls, row = type(tuned._known)(), random(N)
    first = {"a": row, "h": 1.0, "g": row, "d": None}
    call: Any = object()
    calls.add(call, first, 0.0, {}, first)
    assert calls.find(first, 0.0, {}) is call
    for other in (
        first | {"g": None, "d": row},
        {"h": 1.0, "a": row, "d": None, "g": row},
        first | {"h": [1.0]},
        first | {"g": torch.nested.nested_tensor([row])},
    ):
        assert calls.find(other, 0.0, {}) is None


def test_what_lies_elsewhere_is_not_like_a_known_call(serve: Any, chosen: list[Any]) -> None:
    """Kernels read whole vectors, and copies are made anew."""
    tensors = plain()
    check(serve(tensors), tensors)
    for name in "fg":
        assert isinstance(serve(tensors | {name: random(N + 1)[1:]}), str)
    negated = [plain(c=torch.complex(random(*SHAPE), random(*SHAPE)).conj().imag)]
    negated += [{name: torch._neg_view(tensors[name])} for name in "abcrsgf"]
    for change in ({"b": KINDS["by column"]}, {"b": KINDS["columns apart"]}, *negated):
        for again in (tensors | change, moved(tensors) | change):
            check(serve(again), again)
    assert len(chosen) == 23


def test_a_known_call_follows_its_stream_and_its_scratch(
    serve: Any, tuned: RowServer, driver: Device, device: FakeDevice, chosen: list[Any]
) -> None:
    places = []
    for device.stream in (7, 8, 7):
        check(serve(plain()), plain())
        places.append(driver.launches[-2].arguments.scratch)
    assert places[0] == places[2] != places[1]
    tuned._workspaces.of_stream(0, 7).scratch_words = 0  # another call has needed more
    check(serve(plain()), plain())
    main, second = driver.launches[-2:]
    scratch = tuned._workspaces.of_stream(0, 7).scratch
    assert scratch != places[0] and main.arguments.scratch == second.arguments[0] == scratch
    assert len(chosen) == 1


def test_a_known_call_keeps_nothing_for_the_stream_that_every_thread_has(
    serve: Any, tuned: RowServer, device: FakeDevice
) -> None:
    device.stream = PER_THREAD
    for _ in range(2):
        check(serve(plain()), plain())
    known = tuned._known.find(plain(), 0.0, {})
    assert known is not None and known._bindings == {}


def test_a_known_call_keeps_bindings_of_so_many_streams(
    serve: Any, tuned: RowServer, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normforge.serve.row_calls.MOST_STREAMS", 3)
    kept = []
    for device.stream in (11, 11, 12, 13, 14, 15):
        check(serve(plain()), plain())
        known = tuned._known.find(plain(), 0.0, {})
        kept.append(sorted(stream for _, stream in known._bindings) if known else [])
    assert kept[-3:] == [[11, 12, 13], [14], [14, 15]]


def test_what_no_kernel_serves_is_said(serve: Any) -> None:
    for change in (
        {"d": random(*SHAPE)},  # a residual of fp32 has no kernel here
        {"g": random(N).double(), "f": None},
        {"g": random(N + 1)[1:]},
        {"a": random(M * N + 1)[1:].view(SHAPE)},
        {"c": random(M, N + 1)[:, :N].view(SHAPE)},
        {"a": KINDS["heads"], "b": random(4, 10 * N + 2)[:, : 6 * N].view(SHAPE)},
    ):
        assert isinstance(serve(plain(**change)), str), [*change]


def test_a_refused_launch_is_told(serve: Any, driver: Device) -> None:
    serve(plain())
    driver.status = driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(LaunchError, match="launching blend of k"):
        serve(plain())


# ---- By the formula ------------------------------------------------------------------------------


@pytest.fixture
def server() -> RowServer:
    return RowServer(BLEND, lambda index: None)  # type: ignore[arg-type, return-value]


def test_without_a_package_the_formula_serves_on_a_gpu_with_one_warning(
    server: RowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.missing == ""
    without = RowServer(BLEND, "there is no package of blend")
    assert without.explain(M, N, "bf16")["reason"] == without.missing
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(without, "_by_formula", lambda *given: "by the formula")
    rows = {name: one for name, one in plain().items() if name != "h"}
    with warnings.catch_warnings(record=True) as said, FakeTensorMode():
        warnings.simplefilter("always")
        there = {k: torch.empty(v.shape, device="cuda") for k, v in rows.items()}
        for _ in range(2):
            assert without({**there, "h": 3.0}) == "by the formula"
    words = "there is no package of blend; using the formula of blend in PyTorch"
    assert [str(one.message) for one in said] == [words]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("residual", [None, torch.bfloat16, torch.float32])
def test_results_have_the_dtypes_of_what_they_belong_to(
    server: RowServer, dtype: torch.dtype, residual: torch.dtype | None
) -> None:
    tensors = {name: one.to(dtype) if name in "abc" else one for name, one in plain().items()}
    if residual:
        tensors["d"] = random(*SHAPE, dtype=residual)
    exact, found = evaluate(BLEND, tensors), server(tensors)
    assert {name: out.dtype for name, out in found.items() if name in "pq"} == {
        "p": dtype,
        "q": dtype,
    }
    assert (found["t"].dtype, found["t"].shape) == (torch.float32, (2, N))
    assert ("e" in found) is (residual not in (None, dtype))
    copies = {"e": "p"}
    for name, out in found.items():
        assert torch.equal(out, exact[copies.get(name, name)].to(out.dtype)), name


def test_no_rows_have_sums_of_zero(server: RowServer) -> None:
    tensors = {name: torch.empty(0, N) for name in "abc"}
    others = {"s": torch.empty(0), "r": torch.empty(0), "g": random(N), "h": 1.5, "f": None}
    found = server(tensors | others)
    assert (found["p"].shape, found["t"].tolist()) == ((0, N), [[0.0] * N] * 2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another name": ({"x": random(*SHAPE)}, "blend takes no 'x'"),
    "one that is missing": ({"b": None}, "blend needs b"),
    "no number of each row": ({"s": None}, "blend needs s"),
    "no number of the call": ({"h": None}, "blend needs h"),
    "a tensor for a number": ({"h": random(1)}, "h must be a number, got Tensor"),
    "no tensor": ({"c": 3.0}, "c must be a tensor, got float"),
    "another shape": ({"b": random(M, N)}, "b must have the shape (4, 6, 16) of a, got (24, 16)"),
    "another dtype": ({"b": random(*SHAPE).half()}, "b must be of torch.float32, got"),
    "narrow numbers": ({"s": random(M).half()}, "s must be of torch.float32, got torch.float16"),
    "too few numbers": ({"s": random(6)}, "s must have one number for each row, got (6,)"),
    "columns of rows": ({"g": random(1, N)}, "g must have shape (16,), got (1, 16)"),
    "integer columns": ({"g": torch.ones(N, dtype=torch.int32)}, "g must be of"),
    "columns of two dtypes": (
        {"f": random(N).half()},
        "what all rows share must be of one dtype, got g of torch.float32, f of torch.float16",
    ),
    "a residual of rows": ({"d": random(N)}, "d must have the shape (4, 6, 16) of a, got (16,)"),
    "integers": (
        {name: torch.ones(SHAPE, dtype=torch.int64) for name in "abc"},
        "a must be floating rows of at least one element, got torch.int64 of shape (4, 6, 16)",
    ),
    "no columns": (
        {name: torch.ones(4, 0) for name in "abc"}
        | {"s": torch.ones(4), "r": torch.ones(4), "h": 1},
        "a must be floating rows of at least one element",
    ),
    "another device": ({"c": torch.empty(SHAPE, device="meta")}, "c is on meta and a on cpu"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_one_sentence(serve: Any, tuned: Any, name: str) -> None:
    """Also behind a call that is alike but for this."""
    change, said = WRONG[name]
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=re.escape(said)) as error:
            tuned(plain(**change))
        assert "\n" not in str(error.value)
        serve(plain())


def test_an_offset_is_added_to_the_columns(serve: Any, server: RowServer, driver: Device) -> None:
    """Kernels without that option get the columns with it, in fp32."""
    tensors = plain()
    moved = tensors | {"g": tensors["g"] + 2}
    check(serve(tensors, 2.0), moved)
    check(serve(plain(g=None), 2.0), moved | {"g": torch.full((N,), 3.0)})
    assert {
        seen.arguments.weight_offset for seen in driver.launches if seen.function == "blend"
    } == {0.0}
    for offset in (0.0, 1.0, 2.0):  # calls like those that came, with an offset of their own
        check(serve(tensors, offset), tensors | {"g": tensors["g"] + offset})
    exact = evaluate(BLEND, moved)
    for name, out in server(tensors, 2.0).items():
        assert torch.equal(out, exact[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_numbers_of_rows_are_an_output(dtype: torch.dtype) -> None:
    server = RowServer(RMSNORM_ADD_FORWARD, lambda index: None)  # type: ignore[arg-type, return-value]
    x, r = (random(*SHAPE).to(dtype) + i for i in range(2))
    found = server({"x": x, "r": r, "weight": None, "eps": 1.0})
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (found["rstd"].dtype, found["rstd"].shape) == (wide, (*SHAPE[:-1], 1))
    rstd = (x.to(wide).square().mean(-1, keepdim=True) + 1).rsqrt()
    torch.testing.assert_close(found["rstd"], rstd)
    assert torch.equal(found["y"], (x.to(wide) * found["rstd"] + r.to(wide)).to(dtype))
