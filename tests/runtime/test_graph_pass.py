"""The pass over FX graphs of training steps: what it marks or replaces, what it leaves alone."""

from __future__ import annotations

import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from normforge.api import Package
from normforge.frontends.graph_pass import (
    find_norms,
    getitems,
    make_backend,
    make_pass,
    norm_operators,
    route,
    tag,
)
from normforge.frontends.inductor import is_free
from normforge.frontends.library import VERSION, namespace
from normforge.frontends.operators import Operators
from tests.support.entry_points import (
    FORWARD_STAYS_WHOLE,
    needs_whole_forward,
    randn,
    spied,
    write_package,
)
from tests.support.graph_steps import ATEN, Step, results

pytestmark = pytest.mark.usefixtures("aten")


def forward_only(x: torch.Tensor, w: torch.Tensor) -> Any:
    return functional.rms_norm(x.sin(), (16,), w, 1e-5).cos()


def backward_only(x: torch.Tensor, w: torch.Tensor) -> Any:
    return masked(x, w, [True, True])


def masked(x: torch.Tensor, w: torch.Tensor, mask: list[bool]) -> Any:
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True))
    return ATEN._fused_rms_norm_backward(x.cos(), x, [16], rstd, w, mask)


def several(x: torch.Tensor, w: torch.Tensor) -> Any:
    """A training step: two norms with a weight, one without, and their backward."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    y = functional.rms_norm(x, (16,), w, 1e-5)
    y = functional.rms_norm(torch.tanh(y), (16,))
    y = functional.rms_norm(y + x, (16,), w)
    return torch.autograd.grad(y.square().sum(), (x, w))


def none(x: torch.Tensor, w: torch.Tensor) -> Any:
    return (x * w).tanh()


STEPS: dict[Step, int] = {
    forward_only: int(FORWARD_STAYS_WHOLE),
    backward_only: 1,
    several: 6 if FORWARD_STAYS_WHOLE else 3,
    none: 0,
}
"""The number of norms that a graph pass sees."""
ADDITIONS: dict[Step, int] = {several: 1 + FORWARD_STAYS_WHOLE}
"""The number of additions that become part of one."""


def trace(step: Step, mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(step, tracing_mode=mode)(randn(4, 16), randn(16, seed=1))


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where Inductor has no C++ compiler for the CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"needs a C++ compiler: {error}")


def spying() -> tuple[list[tuple[bool, list[str]]], Any]:
    """A custom pass for Inductor, and what it saw: config.epilogue_fusion, and what every graph
    calls. With it nothing is cached."""
    seen = []

    class Spy(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
            seen.append((config.epilogue_fusion, calls))

        def uuid(self) -> None:
            return None

    return seen, Spy()


def untouched(module: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """Every node that is neither a norm nor takes its results."""
    norms = find_norms(module.graph, Operators)
    skip = {*norms, *(item for norm in norms for item in getitems(norm))}
    return [(node.op, str(node.target)) for node in module.graph.nodes if node not in skip]


@pytest.mark.parametrize(
    ("step", "mode"),
    [*((step, "fake") for step in STEPS), (several, "symbolic"), (several, "real")],
)
def test_every_norm_is_routed_and_the_numbers_stay(package: Package, step: Step, mode: str) -> None:
    module = trace(step, mode)
    assert len(find_norms(module.graph, Operators)) == STEPS[step]
    inputs = (randn(4, 16, seed=2), randn(16, seed=3))
    wanted, others = module(*inputs), untouched(module)
    assert route(module, package.ops) is module
    assert find_norms(module.graph, Operators) == []
    mine = [n for n in module.graph.nodes if namespace in str(n.target)]
    assert len(mine) == STEPS[step]
    takers = {user for node in mine for user in node.users}
    assert all(user.target is operator.getitem for user in takers)
    rest = [(n.op, str(n.target)) for n in module.graph.nodes if n not in {*mine, *takers}]
    addition = ("call_function", "aten.add.Tensor")
    assert others.count(addition) - rest.count(addition) == ADDITIONS.get(step, 0)
    assert [n for n in rest if n != addition] == [n for n in others if n != addition]
    got = module(*inputs)
    torch.testing.assert_close(results(got), results(wanted), atol=1e-5, rtol=1e-5)


def test_routed_nodes_keep_what_tracing_knew(package: Package) -> None:
    module = route(trace(several), package.ops)
    for node in module.graph.nodes:
        if namespace in str(node.target):
            values = node.meta["val"]
            for user in node.users:
                # Tracing knows nothing of what the mask leaves out.
                value, mine = user.meta.get("val"), values[user.args[1]]
                assert value is None or (value.shape, value.dtype) == (mine.shape, mine.dtype)


@pytest.mark.parametrize("mask", [[True, False], [False, True]])
def test_gradients_that_the_mask_leaves_out_are_not_computed(
    package: Package, monkeypatch: pytest.MonkeyPatch, mask: list[bool]
) -> None:
    module = trace(lambda x, w: masked(x, w, mask))
    inputs = (randn(4, 16, seed=2), randn(16, seed=3))
    wanted = module(*inputs)
    asked = spied(monkeypatch, package.ops, "_backward", lambda _, o: [o.need_dx, o.need_dw])
    found = route(module, package.ops)(*inputs)
    assert asked == [mask]
    assert [result is not None for result in wanted] == mask
    for a, b in zip(found, wanted, strict=True):
        assert a is b is None or torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param("_fused_rms_norm", marks=needs_whole_forward), "_fused_rms_norm_backward"]
)
@pytest.mark.parametrize(
    ("weight", "served"),
    [(torch.bfloat16, True), (torch.float32, True), (torch.float16, False), (torch.float64, False)],
)
def test_weights_of_other_dtypes_stay_with_pytorch(
    package: Package, name: str, weight: torch.dtype, served: bool
) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        if name == "_fused_rms_norm":
            return ATEN._fused_rms_norm(x, [16], w, 1e-5)
        return ATEN._fused_rms_norm_backward(x, x, [16], x[:, :1].float(), w, [True, True])

    inputs = randn(4, 16).to(torch.bfloat16), randn(16, seed=1).to(weight)
    module = route(make_fx(step, tracing_mode="fake")(*inputs), package.ops)
    assert (find_norms(module.graph, Operators) == []) == served


@pytest.mark.parametrize("step", STEPS)
def test_tags_go_to_norms_and_their_getitems_only(step: Step) -> None:
    module = trace(step)
    before = str(module.graph)
    configs = {"max_autotune": True}
    assert tag(module, Operators, configs) is module
    configs["max_autotune"] = False  # the mark has a copy
    norms = find_norms(module.graph, Operators)
    wanted = {*norms, *(item for norm in norms for item in getitems(norm))}
    tagged = {n for n in module.graph.nodes if "compile_with_inductor" in n.meta.get("custom", {})}
    assert tagged == wanted
    assert len(wanted) >= 2 * STEPS[step]
    for node in tagged:
        mark = node.meta["custom"]["compile_with_inductor"]
        assert mark == {"inductor_configs": {"max_autotune": True}}
    assert str(module.graph) == before


@needs_whole_forward
def test_an_earlier_mark_is_replaced_but_for_its_region() -> None:
    module = trace(forward_only)
    (norm,) = find_norms(module.graph, Operators)
    shared = {"compile_with_inductor": {"inductor_region": 5, "inductor_configs": {"a": 1}}}
    for node in module.graph.nodes:
        node.meta["custom"] = shared
    norm.meta["custom"] = {**shared, "mine": 2}
    item, *more = getitems(norm)
    item.meta["custom"] = {"compile_with_inductor": {"inductor_region": 6}}
    before = {node: node.meta["custom"] for node in module.graph.nodes}
    tag(module, Operators, {"max_autotune": True})
    mark = {"inductor_configs": {"max_autotune": True}, "inductor_region": 5}
    assert norm.meta["custom"] == {"compile_with_inductor": mark, "mine": 2}
    assert item.meta["custom"] == {"compile_with_inductor": mark}
    others = [node for node in module.graph.nodes if node not in (norm, item, *more)]
    assert all(node.meta["custom"] is before[node] for node in others)
    assert shared["compile_with_inductor"]["inductor_configs"] == {"a": 1}


@needs_whole_forward
def test_settings_of_a_mark() -> None:
    def mark_of(*given: Any) -> Any:
        (norm,) = find_norms(tag(trace(forward_only), Operators, *given).graph, Operators)
        return norm.meta["custom"]["compile_with_inductor"]

    assert mark_of() == mark_of(None) == {}
    assert mark_of({}) == {"inductor_configs": {}}


@needs_whole_forward
def test_routed_nodes_have_no_mark_of_inductor(package: Package) -> None:
    """Another pass had marked the norms before."""
    from torch.fx.passes.regional_inductor import _RegionScooper

    module = route(tag(trace(several), Operators), package.ops)
    assert not any("compile_with_inductor" in n.meta.get("custom", {}) for n in module.graph.nodes)
    regions = _RegionScooper.scoop_regions(module)
    assert not [node for node in regions.graph.nodes if node.op == "call_module"]


def nested() -> torch.fx.GraphModule:
    """A graph whose norms lie in modules of its own: one that it calls, and the body of a
    higher-order operator, which it only holds."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    called = graph.call_module("called", (x, w))
    body = graph.get_attr("body")
    graph.output((graph.call_function(lambda run, *given: run(*given), (body, called, w)),))
    inner = {"called": trace(forward_only), "body": trace(forward_only)}
    return torch.fx.GraphModule(inner, graph)


@needs_whole_forward
def test_norms_inside_nested_modules(package: Package) -> None:
    inputs = (randn(4, 16, seed=2), randn(16, seed=3))
    module = nested()
    (wanted,) = module(*inputs)
    assert tag(module, Operators) is module
    marked = [n for each in (module.called, module.body) for n in find_norms(each.graph, Operators)]
    assert len(marked) == 2
    assert all("compile_with_inductor" in node.meta["custom"] for node in marked)
    assert route(module, package.ops) is module
    assert not any(find_norms(each.graph, Operators) for each in (module.called, module.body))
    assert torch.allclose(module(*inputs)[0], wanted, atol=1e-5)


def test_pass_fits_a_graph_trainer(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    """It is called with example inputs, switched off by its name, and says what it did."""
    example_inputs = (randn(4, 16), randn(16))
    passes = [make_pass(package.ops, "tag"), make_pass(package.ops)]
    assert [each.__name__ for each in passes] == ["normforge_tag", "normforge_route"]
    module = trace(several)
    with caplog.at_level("INFO"):
        for each in passes:
            assert each(module, example_inputs) is module
        passes[1](trace(none), example_inputs=example_inputs)
    told = [record.getMessage() for record in caplog.records if "RMSNorm" in record.getMessage()]
    assert told == [
        f"marked {STEPS[several]} RMSNorm nodes for Inductor",
        f"gave {STEPS[several]} RMSNorm nodes to {package.name}; "
        f"additions folded: {ADDITIONS[several]}",
    ]
    (norm,) = find_norms(passes[0](trace(backward_only)).graph, Operators)
    searched = {"max_autotune": True, "coordinate_descent_tuning": True}
    assert norm.meta["custom"]["compile_with_inductor"] == {"inductor_configs": searched}
    with pytest.raises(ValueError, match="'route' or 'tag', got 'both'"):
        make_pass(package.ops, "both")


def test_torchtitans_own_tests_of_its_pass(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They test the pass that tags norms, here with `tag` in its place."""
    import unittest

    where = "torchtitan.experiments.graph_trainer.tests.test_performance_passes"
    theirs: Any = pytest.importorskip(where, reason="torchtitan and its tests are not installed")

    def ours(module: Any, *_: Any, rmsnorm_compile_config: Any = None) -> Any:
        return make_pass(package.ops, "tag", rmsnorm_compile_config)(module)

    monkeypatch.setattr(theirs, "annotate_rmsnorm_for_regional_inductor_pass", ours)
    cases = unittest.defaultTestLoader.loadTestsFromTestCase(
        theirs.TestAnnotateRMSNormForRegionalInductorPass
    )
    done = unittest.TextTestRunner().run(cases)
    assert done.testsRun
    assert done.wasSuccessful(), done.failures + done.errors


@needs_whole_forward
def test_tagged_regions_are_what_regional_inductor_compiles() -> None:
    from torch.fx.passes.regional_inductor import _RegionScooper

    module = _RegionScooper.scoop_regions(tag(trace(several), Operators))
    regions = [n for n in module.graph.nodes if n.op == "call_module"]
    inside = [
        node.target
        for region in regions
        for node in getattr(module, region.target).graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    aten = {ATEN._fused_rms_norm.default, ATEN._fused_rms_norm_backward.default}
    assert len(inside) == STEPS[several]
    assert set(inside) == aten
    assert find_norms(module.graph, Operators) == []


@needs_whole_forward
@pytest.mark.parametrize("step", [forward_only, backward_only])
@pytest.mark.slow
def test_regional_inductor_compiles_what_is_tagged_as_the_tag_says(
    compiler: None, step: Step
) -> None:
    from torch._guards import TracingContext, tracing
    from torch.fx.passes.regional_inductor import regional_inductor

    module = trace(step)
    inputs = [randn(4, 16, seed=2), randn(16, seed=3)]
    wanted, others = module(*inputs), untouched(module)
    (mode,) = {n.meta["val"].fake_mode for n in module.graph.nodes if n.op == "placeholder"}
    seen, spy = spying()
    configs = {"epilogue_fusion": False, "post_grad_custom_post_pass": spy}
    with tracing(TracingContext(mode)):
        done = regional_inductor(tag(module, Operators, configs))
    assert find_norms(done.graph, Operators) == []
    assert {(node.op, str(node.target)) for node in done.graph.nodes} >= set(others)
    ((fusion, calls),) = seen  # one region
    assert fusion is False
    # Inductor took the norm apart, and saw none of its neighbours.
    assert calls
    others = {"aten.sin.default", "aten.cos.default"}
    assert not {*others, *map(str, norm_operators(Operators))} & set(calls)
    found = done(inputs)  # boxed: it takes a list
    torch.testing.assert_close(results(found), results(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "step", [pytest.param(forward_only, marks=needs_whole_forward), backward_only]
)
def test_routed_nodes_keep_their_meta(package: Package, step: Step) -> None:
    """The meta says where a node came from, and what other passes wrote; its values are those of
    the operator."""
    module = trace(step)
    (norm,) = find_norms(module.graph, Operators)
    norm.meta |= {"custom": {"region": 3}, "stack_trace": "model.py, line 7"}
    before = dict(norm.meta)
    route(module, package.ops)
    (routed,) = (n for n in module.graph.nodes if namespace in str(n.target))
    assert routed.meta.keys() == before.keys()
    assert all(routed.meta[name] == before[name] for name in before if name != "val")
    for mine, theirs in zip(routed.meta["val"], before["val"], strict=False):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


@needs_whole_forward
def test_norms_over_two_dimensions_stay_with_pytorch(package: Package) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        return ATEN._fused_rms_norm(x, [4, 16], None, 1e-5)[0]

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", lambda x, *_: (x + 0, x[:1, :1]), "CPU")
        module = trace(step)
    assert len(find_norms(route(module, package.ops).graph, Operators)) == 1


def norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Compute nothing but a norm, so that there is no code to compile."""
    return functional.rms_norm(x, (16,), w, 1e-5)


@needs_whole_forward
def test_backend_keeps_the_norm_whole_and_routes_it(
    package: Package, monkeypatch: pytest.MonkeyPatch, own_cache: None
) -> None:
    forwards, backwards = (spied(monkeypatch, package.ops, n) for n in ("_forward", "_backward"))
    compiled = torch.compile(norm, backend=make_backend(package.ops), fullgraph=True)
    x, w = randn(4, 16).requires_grad_(), randn(16, seed=1).requires_grad_()
    y, dy = compiled(x, w), randn(4, 16, seed=2)
    found = torch.autograd.grad(y, (x, w), dy)
    assert len(forwards) == len(backwards) == 1
    wanted = torch.autograd.grad(norm(x, w), (x, w), dy)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert is_free(config.post_grad_custom_pre_pass)  # for what is compiled without the backend


@needs_whole_forward
def test_settings_of_the_backend_are_those_of_inductor(package: Package, own_cache: None) -> None:
    seen, spy = spying()
    assert config.epilogue_fusion
    backend = make_backend(package.ops, epilogue_fusion=False, post_grad_custom_post_pass=spy)
    x, w = randn(4, 16).requires_grad_(), randn(16, seed=1).requires_grad_()
    torch.compile(norm, backend=backend, fullgraph=True)(x, w).sum().backward()
    assert [fusion for fusion, _ in seen] == [False, False]
    for (_, calls), name in zip(seen, ("rms_norm", "rms_norm_backward"), strict=True):
        assert f"{namespace}.{name}.{VERSION}" in calls
    assert config.epilogue_fusion


@pytest.mark.parametrize("fallback", [True, False])
def test_backend_decomposes_as_its_settings_say_all_but_norms(
    package: Package, monkeypatch: pytest.MonkeyPatch, fallback: bool
) -> None:
    from torch._inductor import compile_fx
    from torch._inductor.decomposition import select_decomp_table

    given: dict[str, Any] = {}
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_, **options: given.update(options))
    make_backend(package.ops, fallback_random=fallback)(trace(none), [])
    with config.patch(fallback_random=fallback):
        wanted = set(select_decomp_table())
    with config.patch(fallback_random=not fallback):
        assert wanted != set(select_decomp_table())
    assert wanted > set(norm_operators(Operators)) > set()
    assert set(given["decompositions"]) == wanted - set(norm_operators(Operators))


def test_caches_tell_packages_apart_and_those_that_add(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor keeps what it compiles under the pass's uuid: a graph that is routed to one package,
    or has additions folded into its norms, is no other's."""
    from torch._inductor import compile_fx

    given: dict[str, Any] = {}
    monkeypatch.setattr(compile_fx, "compile_fx", lambda *_, **options: given.update(options))

    def uuid(of: Package) -> Any:
        make_backend(of.ops)(trace(none), [])
        return given["config_patches"]["post_grad_custom_pre_pass"].uuid()

    assert uuid(package) == uuid(package) != uuid(write_package(tmp_path / "other"))
    found = []
    for missing in ("", "there is no package"):
        monkeypatch.setattr(package.ops, "norm_and_add", SimpleNamespace(missing=missing))
        found.append(uuid(package))
    assert found[0] != found[1]


def test_backend_refuses_another_pass_in_the_place_of_its_own(
    package: Package, own_cache: None
) -> None:
    _, spy = spying()
    told = "routes its norms in torch._inductor.config.post_grad_custom_pre_pass, where there is a"
    with pytest.raises(ValueError, match=told):
        make_backend(package.ops, post_grad_custom_pre_pass=spy)
    backend = make_backend(package.ops, post_grad_custom_pre_pass=None)
    compiled = torch.compile(norm, backend=backend, fullgraph=True)
    inputs = randn(4, 16), randn(16, seed=1)
    with config.patch(post_grad_custom_pre_pass=spy):
        compiled(*inputs)  # None: without that one
        backend = make_backend(package.ops)
        compiled = torch.compile(norm, backend=backend, fullgraph=True)
        with pytest.raises(Exception, match=told):
            compiled(*inputs)
