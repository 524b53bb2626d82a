"""A launch of RMSNorm with the rotary embedding computes from what the driver is given, as its
kernel does: numbers that the rows of a group share, and gradients of packed heads."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from normforge.operations import RMSNORM_ROPE_BACKWARD
from normforge.operations.formula import evaluate
from normforge.serve import groups as groups_module
from normforge.serve import rows as module
from normforge.serve.groups import matrices_of_groups
from normforge.serve.row_checks import check_tensors
from normforge.serve.rows import RowServer
from tests.support.entry_points import spied
from tests.support.fake_driver import (
    SPEC,
    ComputingDriver,
    FakeDevice,
    at_address,
    entry,
    row_server,
    rows_at,
    stand_in,
    use_row_servers,
)

B, S, H, N = 2, 3, 4, 16
M, HALF = B * S * H, N // 2
NAME = RMSNORM_ROPE_BACKWARD.name
OF_KERNEL: dict[str, Any] = {
    **{"name": "k", "operation": NAME, "dtype": "fp32", "weight_dtype": "fp32", "N": N},
    **{"partial_columns": N, "partial_stride": N, "way": "slices"},
}


class Device(ComputingDriver):
    """Computes the operation from the arguments of its kernel, in fp32. half: columns of cos;
    interleaved: whether neighbours are pairs."""

    half, interleaved = HALF, False

    def compute(self, function: str, args: Any) -> None:
        given: dict[str, Any] = {"eps": args.eps, "weight": at_address(args.weight, N)}
        for name in ("x", "dy"):
            given[name] = torch.stack(rows_at(args, name, gap=getattr(args, f"{name}_gap")))
        assert args.wide_groups == 1
        for name in ("cos", "sin"):
            address, stride = getattr(args, name), getattr(args, f"{name}_stride")
            assert address % 16 == stride * 4 % 16 == 0
            found = [row * args.group_factor >> 32 for row in range(args.rows)]
            places = [g - (g * args.period_factor >> 32) * args.period for g in found]
            at = [address + 4 * stride * place for place in places]
            given[name] = torch.stack([at_address(place, self.half) for place in at])
        found = evaluate(RMSNORM_ROPE_BACKWARD, given | {"interleaved": self.interleaved})
        at_address(args.dw, N).copy_(found["dw"])
        for place, row in zip(rows_at(args, "dx", gap=args.dx_gap), found["dx"], strict=True):
            place.copy_(row)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    stand_in(monkeypatch, made)
    return made


@pytest.fixture
def serve(driver: Device, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what serves calls by a kernel for CPU tensors: its outputs, or why there is none."""
    use_row_servers(monkeypatch, device)
    server = row_server(RMSNORM_ROPE_BACKWARD, entry(M, replace(SPEC, **OF_KERNEL)))

    def call(tensors: Any, **into: torch.Tensor) -> Any:
        return server._by_kernel(check_tensors(server.operation, tensors), tensors, 0.0, into)

    return call


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def plain(**change: Any) -> dict[str, Any]:
    given = {"x": random(B, S, H, N), "dy": random(B, S, H, N) + 1, "weight": random(N)}
    turns = {"cos": random(B, S, 1, HALF), "sin": random(B, S, 1, HALF) + 1}
    return given | turns | {"eps": 1e-6} | change


def check(found: Any, tensors: dict[str, Any]) -> None:
    assert isinstance(found, dict), found
    for name, exact in evaluate(RMSNORM_ROPE_BACKWARD, tensors).items():
        torch.testing.assert_close(found[name], exact)


FIRST_HALF = random(B, S, 1, N)[..., :HALF]
KINDS = {
    "of every token": (random(B, S, 1, HALF), B * S),
    "of a sequence": (random(1, S, 1, HALF), S),
    "without the batch": (random(S, 1, HALF), S),
    "of one token": (random(1, HALF), 1),
    "of each sequence": (random(B, 1, 1, HALF), B * S),
    "the first half": (FIRST_HALF, B * S),
    "expanded": (random(1, S, 1, HALF).expand(B, S, 1, HALF), B * S),
    "turned": (random(S, B, 1, HALF).transpose(0, 1), B * S),
    "columns apart": (random(S, 1, HALF, 2)[..., 0], S),
    "at an odd address": (random(S * HALF + 1)[1:].view(S, 1, HALF), S),
}


@pytest.mark.parametrize("sin", KINDS)
@pytest.mark.parametrize("cos", KINDS)
def test_numbers_of_groups_are_read_where_they_lie_or_copied(
    serve: Any, driver: Device, cos: str, sin: str
) -> None:
    tensors = plain(cos=KINDS[cos][0], sin=KINDS[sin][0])
    check(serve(tensors), tensors)
    args = driver.launches[0].arguments
    period = max(KINDS[cos][1], KINDS[sin][1])
    assert args.period == (0 if period == B * S else period)
    lies = (
        "of every token",
        "of a sequence",
        "without the batch",
        "of one token",
        "the first half",
    )
    if cos in lies and KINDS[cos][1] == period:
        assert args.cos == tensors["cos"].data_ptr()


@pytest.mark.parametrize(
    ("half", "interleaved", "rotation"),
    [
        (HALF // 2, False, "rotary8"),
        (HALF // 2, True, "rotary8+interleaved"),
        (HALF, True, "interleaved"),
    ],
)
def test_heads_that_are_rotated_in_another_way_have_kernels_of_their_own(
    serve: Any, driver: Device, half: int, interleaved: bool, rotation: str
) -> None:
    driver.half, driver.interleaved = half, interleaved
    of_turns, found = {"cos": random(S, 1, half), "sin": random(S, 1, half) + 1}, []
    part = plain(**of_turns, interleaved=interleaved)
    spec = replace(SPEC, **OF_KERNEL, rotation=rotation)
    for tensors in (part, plain()):
        server = row_server(RMSNORM_ROPE_BACKWARD, entry(M, spec))
        found.append(server._by_kernel(check_tensors(server.operation, tensors), tensors))
    check(found[0], part)
    assert found[1].startswith("nothing like 24x16:fp32 was tuned")
    assert serve(part).startswith(f"nothing like 24x16:fp32+{rotation} was tuned")
    assert len(driver.launches) == 1 and driver.launches[0].arguments.cos_stride == half


def test_heads_of_a_packed_projection_are_read_where_they_lie(serve: Any, driver: Device) -> None:
    packed = random(B, S, 3 * H, N)
    tensors = plain(x=packed[:, :, H : 2 * H])
    check(serve(tensors), tensors)
    args = driver.launches[0].arguments
    assert args.x == tensors["x"].data_ptr()
    assert (args.rows, args.x_stride, args.x_gap, args.dy_gap) == (M, N, 2 * H * N, 0)


def test_a_call_that_differs_in_addresses_alone_is_laid_out_once(
    serve: Any, driver: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def aligned(*shape: int) -> torch.Tensor:
        made = torch.empty(prod(shape) + 8)
        first = -made.data_ptr() % 32 // 4
        return made[first : first + prod(shape)].view(shape).copy_(random(*shape))

    def packed() -> dict[str, Any]:
        x, dy = aligned(B, S, 2 * H, N)[:, :, H:], aligned(B, S, H, N) + 1
        of_turns = {name: aligned(1, S, 1, HALF) for name in ("cos", "sin")}
        return {
            "x": x,
            "dy": aligned(B, S, H, N).copy_(dy),
            "weight": aligned(N),
            "eps": 1e-6,
            **of_turns,
        }

    calls = [packed() for _ in range(3)]
    calls[2]["cos"] = aligned(B, S, 1, HALF)
    laid_out = spied(monkeypatch, module, "lay_out")
    for tensors in calls:
        dx = aligned(B, S, 2 * H, N)
        check(serve(tensors, dx=dx[:, :, :H]), tensors)
    assert len(laid_out) == 2
    first, second, _ = (launch.arguments for launch in driver.launches)
    assert first.cos != second.cos and first.dx != second.dx and first.period == second.period == S


@pytest.mark.parametrize("kind", ["packed", "dense", "columns apart", "at an odd address"])
@pytest.mark.parametrize("x_is_packed", [True, False])
def test_a_gradient_is_written_where_it_is_to_lie(
    serve: Any, driver: Device, x_is_packed: bool, kind: str
) -> None:
    """One that kernels cannot write there is copied, by a known call as by the first one."""
    dx = {
        "packed": torch.zeros(B, S, 3 * H, N)[:, :, H : 2 * H],
        "dense": torch.zeros(B, S, H, N),
        "columns apart": torch.zeros(B, S, H, N, 2)[..., 0],
        "at an odd address": torch.zeros(B, S, H, N, 2)[..., 1],
    }[kind]
    tensors = plain(x=random(B, S, 2 * H, N)[:, :, :H] if x_is_packed else random(B, S, H, N))
    for place in range(2):
        found = serve(tensors, dx=dx.zero_())
        check(found, tensors)
        assert found["dx"] is dx
        args = driver.launches[place].arguments
        assert (args.dx == dx.data_ptr()) is (kind in ("packed", "dense"))
        assert args.dx_gap == (2 * H * N if kind == "packed" else 0)
        if kind == "packed":
            assert not dx._base[:, :, :H].any() and not dx._base[:, :, 2 * H :].any()  # type: ignore[index]


def test_the_formula_writes_there_too() -> None:
    dx = torch.zeros(B, S, 2 * H, N)[:, :, :H]
    server, tensors = RowServer(RMSNORM_ROPE_BACKWARD, "no kernels"), plain()
    found = server(tensors, into={"dx": dx})
    assert found["dx"] is dx
    torch.testing.assert_close(dx, server(tensors)["dx"])


@pytest.mark.parametrize("heads", [1, 3])
def test_a_group_has_as_many_rows_as_there_are_heads(serve: Any, heads: int) -> None:
    shape = (B, S, heads, N)
    tensors = plain(x=random(*shape), dy=random(*shape) + 1)
    check(serve(tensors), tensors)


def test_tensors_of_two_dtypes_are_widened(serve: Any, driver: Device) -> None:
    narrow = random(S, 1, HALF, dtype=torch.bfloat16)
    matrices = matrices_of_groups(
        RMSNORM_ROPE_BACKWARD.signature, plain(cos=narrow), random(B, S, H, N)
    )
    assert [one.dtype for one in matrices.values()] == [torch.float32] * 2
    assert [one.shape for one in matrices.values()] == [(B * S, HALF)] * 2
    assert torch.equal(matrices["cos"][S:], narrow.float()[:, 0])


def test_narrow_tensors_are_read_where_they_are() -> None:
    numbers = {name: random(B, S, 1, HALF, dtype=torch.bfloat16) for name in ("cos", "sin")}
    matrices = matrices_of_groups(
        RMSNORM_ROPE_BACKWARD.signature, plain(**numbers), random(B, S, H, N)
    )
    found = {name: (one.dtype, one.data_ptr()) for name, one in matrices.items()}
    assert found == {name: (one.dtype, one.data_ptr()) for name, one in numbers.items()}


def test_a_period_by_which_no_factor_divides_is_written_out(
    serve: Any, driver: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups_module, "division_factor", lambda numbers, divisor: 0)
    tensors = plain(cos=random(S, 1, HALF), sin=random(S, 1, HALF))
    check(serve(tensors), tensors)
    assert driver.launches[0].arguments.period == 0


def test_more_rows_than_kernels_number_are_left_to_the_formula(
    serve: Any, driver: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("kernels cannot number 5 rows")

    monkeypatch.setattr(module, "extent_of", refuse)
    assert serve(plain()) == "kernels cannot number 5 rows"
    assert driver.launches == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cos": random(B, S, 1, N)}, "cos must have the shape (2, 3, 1, 8), or 1 where it"),
        ({"cos": random(B, S, 1, 2)}, "what groups share has equally many columns, got of cos 2,"),
        ({"cos": random(B, S, 1, 0)}, "or fewer columns where fewer are rotated, got (2, 3, 1, 0)"),
        ({"sin": random(HALF)}, "sin must have the shape (2, 3, 1, 8)"),
        ({"sin": random(B, S, H, HALF)}, "got (2, 3, 4, 8)"),
        ({"cos": random(B, B, 1, HALF)}, "got (2, 2, 1, 8)"),
        ({"cos": random(1, B, S, 1, HALF)}, "got (1, 2, 3, 1, 8)"),
        (
            {"cos": random(S, 1, HALF).double()},
            "cos must be of torch.float32 or x's dtype torch.float32",
        ),
        ({"cos": None}, "rmsnorm_rope_backward needs cos"),
        ({"interleaved": 1}, "interleaved must be True or False, got int"),
    ],
)
def test_what_groups_cannot_share_is_one_sentence(
    serve: Any, change: dict[str, Any], said: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(said)) as error:
        serve(plain(**change))
    assert "\n" not in str(error.value)
