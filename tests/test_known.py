"""generator/runtime/known.py: calls that come back are recognised, of however many kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generator.runtime.known import _MISSES_TO_FORGET, _MOST, Known
from generator.runtime.options import PLAIN, Arguments, Options


class Call:
    """What serves a signature; `quick` marks it as one of the most frequent kind."""

    def __init__(self, quick: bool = True) -> None:
        self.quick = object() if quick else None


def given(M: int, N: int = 64, weight: bool = True) -> Arguments:
    x = torch.zeros(M, N)
    return Arguments(torch.zeros(M, N), x, torch.zeros(M), torch.zeros(N) if weight else None)


def plain_call(known: Known, call: Arguments) -> Any:
    """What the doors do first."""
    for same, quick in known.plain:
        if same(call.dy, call.x, call.rstd, call.weight):
            return quick
    return None


@pytest.fixture
def known() -> Known:
    return Known("cpu")


def test_frequent_calls_are_found_in_turn(known: Known) -> None:
    calls = [Call() for _ in range(_MOST)]
    for M, call in enumerate(calls, 1):
        known.add(call, given(M), PLAIN)
    assert [plain_call(known, given(M)) for M in range(1, _MOST + 1)] == [c.quick for c in calls]
    assert plain_call(known, given(99)) is None


def test_more_kinds_than_the_list_holds_are_found_by_shape(known: Known) -> None:
    calls = [Call() for _ in range(3 * _MOST)]
    for M, call in enumerate(calls, 1):
        known.add(call, given(M), PLAIN)
    assert len(known.plain) == _MOST
    for M, call in enumerate(calls, 1):
        found = plain_call(known, given(M)) or known.find(given(M), PLAIN)
        assert found in (call, call.quick), M
    assert known.find(given(99), PLAIN) is None


def test_list_is_renewed_by_calls_that_come_back(known: Known) -> None:
    for M in range(1, _MOST + 1):
        known.add(Call(), given(M), PLAIN)
    late = Call()
    known.add(late, given(99), PLAIN)
    for _ in range(_MISSES_TO_FORGET):
        assert plain_call(known, given(99)) is None or plain_call(known, given(99)) is late.quick
        assert known.find(given(99), PLAIN) is late
    assert plain_call(known, given(99)) is late.quick
    assert len(known.plain) < _MOST


def test_options_and_missing_tensors_keep_calls_apart(known: Known) -> None:
    wishes = Options(weight_offset=1.0)
    first, second = Call(), Call(quick=False)
    known.add(first, given(4), wishes)
    known.add(second, given(4, weight=False), PLAIN)
    assert not known.plain
    assert known.find(given(4), wishes) is first
    assert known.find(given(4, weight=False), PLAIN) is second
    assert known.find(given(4), PLAIN) is None


def test_dtype_and_strides_keep_calls_apart(known: Known) -> None:
    wishes = Options(need_dw=False)
    one, other = given(4), given(4)
    turned = Arguments(other.dy, torch.zeros(64, 4).T, other.rstd, other.weight)
    call = Call()
    known.add(call, one, wishes)
    assert known.find(turned, wishes) is None
    assert known.find(given(4), wishes) is call


def test_misaligned_call_is_not_recognised(known: Known) -> None:
    wishes = Options(need_dw=False)
    known.add(Call(), given(4), wishes)
    shifted = torch.zeros(4 * 64 + 1)[1:].view(4, 64)
    odd = given(4)
    assert known.find(Arguments(odd.dy, shifted, odd.rstd, odd.weight), wishes) is None


def test_calls_with_more_tensors_are_added_beside_plain_ones(known: Known) -> None:
    known.add(Call(), given(4), PLAIN)
    plain, summed = given(4), Call(quick=False)
    with_residual = Arguments(plain.dy, plain.x, plain.rstd, plain.weight, torch.zeros(4, 64))
    known.add(summed, with_residual, PLAIN)
    assert known.find(with_residual, PLAIN) is summed


def test_other_devices_are_not_kept() -> None:
    known = Known()
    known.add(Call(), given(4), PLAIN)
    assert not known.plain and known.find(given(4), PLAIN) is None


def test_memory_is_bounded(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("generator.runtime.known._MOST_KEYS", 16)
    for M in range(1, 100):
        known.add(Call(quick=False), given(M), PLAIN)
        assert len(known._others) <= 16


def test_list_holds_a_call_once_however_it_is_asked_for(known: Known) -> None:
    """Compositions ask `find` without a look at the list."""
    for M in range(1, _MOST + 1):
        known.add(Call(), given(M), PLAIN)
    late = Call()
    known.add(late, given(99), PLAIN)
    for _ in range(3 * _MISSES_TO_FORGET):
        assert known.find(given(99), PLAIN) is late
    assert [quick for _, quick in known.plain] == [late.quick]


def test_kinds_that_one_call_serves_are_all_in_the_list(known: Known) -> None:
    """Whether a tensor requires a gradient is part of the check, but not of what serves it."""
    call, other = Call(), given(4)
    assert other.weight is not None
    trained = Arguments(other.dy, other.x, other.rstd, torch.nn.Parameter(other.weight))
    known.add(call, other, PLAIN)
    known.add(call, trained, PLAIN)
    assert plain_call(known, other) is plain_call(known, trained) is call.quick
