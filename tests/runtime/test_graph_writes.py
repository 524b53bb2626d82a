"""Nodes of a graph that write over what they take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from normforge.frontends.graph_writes import _WITH_PLACES, is_pure


@pytest.mark.parametrize("function", [*_WITH_PLACES], ids=lambda function: function.__name__)
def test_a_function_that_is_told_to_write_over_its_argument_is_not_pure(function: Any) -> None:
    """It is told by a keyword, or by an argument behind those that it takes otherwise."""
    graph, places = torch.fx.Graph(), _WITH_PLACES[function]
    x = graph.placeholder("x")
    for count in (1, places):
        assert is_pure(graph.call_function(function, (x,) * count))
    assert not is_pure(graph.call_function(function, (x,) * (places + 1)))
    assert not is_pure(graph.call_function(function, (x,), {"inplace": True}))
    try:
        names = [*inspect.signature(function).parameters]
    except ValueError:  # PyTorch has it in C++, and says its arguments in words
        assert "inplace" not in function.__doc__
    else:
        assert names.index("inplace") == places
