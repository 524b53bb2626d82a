"""runtime/serve/call_cache.py: calls that come back are recognised, of however many kinds.

The entry points' own use of it is tested in runtime/test_recognised.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from normforge.serve import call_cache
from normforge.serve.call_cache import _MISSES_TO_FORGET, _MOST_OF_A_KEY, CallCache
from normforge.serve.call_cache import _MOST_RECENT as _MOST
from normforge.serve.options import PLAIN, Arguments, Options


class Call:
    """A call that serves a signature; `quick` marks it as one of the most frequent kind."""

    def __init__(self, quick: bool = True) -> None:
        self.quick = object() if quick else None


def given(M: int, N: int = 64, weight: bool = True) -> Arguments:
    x = torch.zeros(M, N)
    return Arguments(torch.zeros(M, N), x, torch.zeros(M), torch.zeros(N) if weight else None)


class Backward(CallCache):
    """A cache as the entry points of the backward use it."""

    def learn(self, call: Any, given: Arguments, options: Options = PLAIN) -> None:
        quick = call.quick if options == PLAIN else None
        self.add(kind_of(given, options), present(given), call, quick)

    def first(self, given: Arguments) -> Any:
        """Do what the entry points do first."""
        return self.find_recent((given.dy, given.x, given.rstd, given.weight))

    def then(self, given: Arguments, options: Options = PLAIN) -> Any:
        """Do what the entry points do next."""
        known = self.find(kind_of(given, options), present(given))
        return known and known.call


def kind_of(given: Arguments, options: Options) -> tuple[Any, ...]:
    here = (given.weight is None, given.dresidual is None, given.dw_out is None)
    return (*here, given.x.shape, options)


def present(given: Arguments) -> list[torch.Tensor]:
    return [tensor for tensor in vars(given).values() if tensor is not None]


@pytest.fixture
def known() -> Backward:
    cache = Backward()
    cache._device = ""
    return cache


def test_frequent_calls_are_found_in_turn(known: Backward) -> None:
    calls = [Call() for _ in range(_MOST)]
    for M, call in enumerate(calls, 1):
        known.learn(call, given(M))
    assert [known.first(given(M)) for M in range(1, _MOST + 1)] == [c.quick for c in calls]
    assert known.first(given(99)) is None


def test_more_kinds_than_the_list_holds_are_found_by_shape(known: Backward) -> None:
    calls = [Call() for _ in range(3 * _MOST)]
    for M, call in enumerate(calls, 1):
        known.learn(call, given(M))
    assert len(known.recent) == _MOST
    for M, call in enumerate(calls, 1):
        assert (known.first(given(M)) or call.quick) is call.quick, M
        assert known.then(given(M)) is call, M
    assert known.then(given(99)) is None


def test_list_is_renewed_by_calls_that_come_back(known: Backward) -> None:
    early = [Call() for _ in range(_MOST)]
    for M, call in enumerate(early, 1):
        known.learn(call, given(M))
    late = Call()
    known.learn(late, given(99))
    for _ in range(_MISSES_TO_FORGET):
        assert known.first(given(99)) in (None, late.quick)
        assert known.then(given(99)) is late
    assert known.first(given(99)) is late.quick
    assert len(known.recent) < _MOST
    for M, call in enumerate(early, 1):  # none of them has to be learned again
        assert known.then(given(M)) is call


def test_renewed_list_is_kept_as_long_as_the_one_before(known: Backward) -> None:
    for M in range(1, _MOST + 2):
        known.learn(Call(), given(M))
    for _ in range(_MISSES_TO_FORGET):
        known.then(given(_MOST + 1))
    assert len(known.recent) < _MOST
    for M in range(1, _MOST + 1):  # the last one finds the list full again
        known.then(given(M))
    assert len(known.recent) == _MOST


def test_options_and_missing_tensors_keep_calls_apart(known: Backward) -> None:
    call_options = Options(weight_offset=1.0)
    first, second = Call(), Call(quick=False)
    known.learn(first, given(4), call_options)
    known.learn(second, given(4, weight=False))
    assert not known.recent
    assert known.then(given(4), call_options) is first
    assert known.then(given(4, weight=False)) is second
    assert known.then(given(4)) is None


def test_calls_are_those_of_the_same_kind_only(known: Backward) -> None:
    call, options = Call(), Options(need_dx=False)
    known.learn(call, base := replace(given(4), dw_out=torch.zeros(64)), options)
    assert known.then(base, options) is call
    assert known.then(replace(base, dy=base.dy.clone()), options) is call
    assert known.then(base, Options(need_dx=False, accumulate=True)) is None
    assert known.then(replace(base, dw_out=None), options) is None
    weight, x = torch.zeros(64), torch.zeros(4, 64)
    for name, other in (
        ("x", torch.zeros(3, 64)),
        ("x", torch.zeros(64, 4).T),
        ("x", torch.zeros(4, 65)[:, :64]),
        ("x", torch.zeros(4 * 64 + 1)[1:].view(4, 64)),
        ("x", x.clone().requires_grad_()),
        ("x", x.to("meta")),
        ("dy", x.double()),
        ("weight", torch.nn.Parameter(weight)),
        ("weight", torch.nn.Parameter(weight, requires_grad=False)),
        ("dw_out", weight.bfloat16()),
    ):
        assert known.then(replace(base, **{name: other}), options) is None, (name, other)


def shifted(elements: int) -> Arguments:
    """A call whose x lies so many elements behind an aligned address."""
    rows = torch.zeros(4 * 64 + elements)[elements:].view(4, 64)
    return replace(given(4), x=rows)


def test_misaligned_calls_are_kept_apart_and_never_tried_in_turn(known: Backward) -> None:
    call, other = Call(), Call()
    known.learn(call, shifted(1))
    assert not known.recent
    assert known.then(shifted(1)) is call
    assert known.then(shifted(2)) is None and known.then(given(4)) is None
    known.learn(other, given(4))
    assert known.then(given(4)) is other and known.then(shifted(1)) is call
    found = known.find(kind_of(given(4), PLAIN), present(shifted(1)))
    assert found is not None and found.quick is None


def test_call_that_pytorch_has_no_check_for_is_compared_in_python(known: Backward) -> None:
    """Its checks refuse one tensor that is given twice."""
    call, x = Call(), torch.zeros(4, 64)
    twice = replace(given(4), dy=x, x=x)
    known.learn(call, twice)
    assert known.then(twice) is known.then(given(4)) is call
    assert known.first(replace(twice, rstd=[1.0])) is None
    for other in (x.double(), x.clone().requires_grad_(), torch._neg_view(x), x.to("meta"), x.T):
        assert known.then(replace(twice, dy=other)) is None


def test_other_devices_are_not_kept() -> None:
    known = Backward()
    known.learn(Call(), given(4))
    assert not known.recent and known.then(given(4)) is None


def test_memory_is_bounded(known: Backward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normforge.serve.call_cache._MOST_KEYS", 16)
    for M in range(1, 100):
        known.learn(Call(quick=M % 2 == 0), given(M))
        assert len(known._by_key) <= 16
    for start in range(1, 2 * _MOST_OF_A_KEY):  # kinds of one shape
        strided = torch.zeros(4, 64 + 4 * start)[:, :64]
        known.learn(Call(), replace(given(4), x=strided))
    assert max(map(len, known._by_key.values())) == _MOST_OF_A_KEY
    assert len(known.recent) == _MOST


def test_list_holds_a_call_once_however_it_is_asked_for(known: Backward) -> None:
    """Compositions ask `find` without a look at the list."""
    for M in range(1, _MOST + 1):
        known.learn(Call(), given(M))
    late = Call()
    known.learn(late, given(99))
    for _ in range(3 * _MISSES_TO_FORGET):
        assert known.then(given(99)) is late
    assert [quick for _, quick in known.recent] == [late.quick]


def test_call_that_only_the_list_kept_is_not_listed_twice(
    known: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("normforge.serve.call_cache._MOST_KEYS", 1)
    call = Call()
    for _ in range(3):
        known.learn(call, given(4))
        assert known.then(given(4)) is call
        known.learn(Call(quick=False), given(5))  # takes the place of the other key
        assert known.then(given(4)) is None
    assert [quick for _, quick in known.recent] == [call.quick]


def test_kinds_that_one_call_serves_are_all_in_the_list(known: Backward) -> None:
    """The check, but not what serves a call, depends on whether a tensor requires a gradient."""
    call, other = Call(), given(4)
    assert other.weight is not None
    trained = replace(other, weight=torch.nn.Parameter(other.weight))
    known.learn(call, other)
    known.learn(call, trained)
    assert known.first(other) is known.first(trained) is call.quick


@pytest.mark.parametrize("place", ["dy", "x"])
def test_nested_rows_are_no_known_call(
    known: Backward, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same_kind(*_: torch.Tensor) -> Any:
        """A check of the next calls. PyTorch's own ends the process at nested tensors."""
        return lambda *others: not any(other.is_nested for other in others) or pytest.fail("seen")

    monkeypatch.setattr(call_cache, "same_kind", same_kind)
    known.learn(Call(), given(2))
    nested = torch.nested.nested_tensor([torch.zeros(64), torch.zeros(64)])
    call = replace(given(2), **{place: nested})
    if place == "dy":
        assert known.first(call) is None
    assert known.find(kind_of(given(2), PLAIN), present(call)) is None
