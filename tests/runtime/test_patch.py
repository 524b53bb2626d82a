"""`patch`: norms of models that have classes of their own for them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from normforge.api import Package
from normforge.frontends.tried import are_close
from tests.support.entry_points import equal_bits, grads, randn, spied
from tests.support.foreign_norms import (
    OTHER_NORMS,
    CentredRMSNorm,
    ColumnRMSNorm,
    OffsetRMSNorm,
    PickyRMSNorm,
    PlainRMSNorm,
)
from tests.support.layer_classes import model_of, step


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def filled(module: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    for parameter in module.parameters():
        parameter.data = randn(*parameter.shape, seed=7)
    return module.to(dtype)


def served(package: Package, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The offsets with which the package gets called."""
    return spied(
        monkeypatch, package._norm, "rms_norm", lambda *_, weight_offset=0.0, **__: weight_offset
    )


@pytest.mark.parametrize("kind", [PlainRMSNorm, OffsetRMSNorm, nn.RMSNorm])
def test_norms_are_served_and_given_back(
    package: Package, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = filled(nn.Sequential(kind(16), nn.Linear(16, 16), kind(16)))
    before, names = copy.deepcopy(model), list(model.state_dict())
    x = randn(4, 16).requires_grad_()
    wanted = [model(x), *grads(model(x), x, *model.parameters())]
    calls = served(package, monkeypatch)
    assert package.patch(model) == ["0", "2"]
    found = [model(x), *grads(model(x), x, *model.parameters())]
    assert calls == [float(kind is OffsetRMSNorm)] * 4
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert all(
        isinstance(model[i], kind) and type(model[i]).__name__ == kind.__name__ for i in (0, 2)
    )
    assert list(model.state_dict()) == names
    again = copy.deepcopy(model)
    assert torch.equal(again(x), model(x))
    assert package.unpatch(model) == ["0", "2"]
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    calls.clear()
    assert torch.equal(model(x), wanted[0])
    assert not calls
    assert package.unpatch(model) == []


class Rmsnorm(PlainRMSNorm):
    pass


class T5LayerNorm(PlainRMSNorm):
    """Hugging Face's name for the norm of T5, which computes an RMSNorm."""


class Scaled(nn.RMSNorm):
    pass


@pytest.mark.parametrize("kind", [Rmsnorm, T5LayerNorm, lambda: Scaled(16)])
def test_norms_under_other_names_are_served(package: Package, kind: Any) -> None:
    model = filled(nn.Sequential(kind()))
    x = randn(4, 16)
    wanted = model(x)
    assert package.patch(model) == ["0"]
    assert torch.allclose(model(x), wanted, atol=1e-5)
    assert package.unpatch(model) == ["0"]


class PreNorm(nn.Module):
    """A block that is called after its norm."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight, self.norm, self.eps = weight, PlainRMSNorm(), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(x)


@pytest.mark.parametrize("weight", [None, nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))])
def test_a_block_with_a_norm_in_its_name_is_left_alone(package: Package, weight: Any) -> None:
    """Its state is not asked for."""
    model = PreNorm(weight)

    def asked(*_: Any) -> None:
        raise AssertionError

    model.register_state_dict_pre_hook(asked)
    assert package.patch(model) == ["norm"]


@pytest.mark.parametrize("model", [None, torch.nn.Linear, [torch.nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused(package: Package, model: Any) -> None:
    for call in (package.patch, package.unpatch):
        with pytest.raises(TypeError, match=r"expected one torch\.nn\.Module, got"):
            call(model)


@pytest.mark.parametrize("kind", [*OTHER_NORMS, nn.LayerNorm])
@pytest.mark.parametrize("casting", [None, "llama", "gemma"])
def test_what_computes_anything_else_is_left_alone(
    package: Package, kind: Any, casting: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    norm = kind(16) if kind is nn.LayerNorm else kind()
    assert package.patch(nn.Sequential(norm), casting) == []
    assert type(norm) is kind
    said, summary = caplog.records
    assert f"leaves 0 ({kind.__name__})" in said.getMessage()
    assert summary.levelname == "WARNING"
    words = summary.getMessage()
    assert words.startswith("patch serves 0 RMSNorms and leaves 1 alone: 1 ")
    assert f"1 {kind.__name__} (it " in words
    pointer = "; normforge.layernorm.patch serves LayerNorms over one dimension"
    assert words.endswith(pointer) is (kind is nn.LayerNorm)


class DroppingRMSNorm(PlainRMSNorm):
    """A module of its own drops what comes out, while it trains."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(super().forward(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("trains", [False, True])
def test_a_norm_that_differs_while_it_trains_is_left_alone(package: Package, trains: bool) -> None:
    model = nn.Sequential(DroppingRMSNorm(0.5), DroppingRMSNorm(0.0)).train(trains)
    assert package.patch(model) == ["1"]


def test_a_patch_is_summed_up(package: Package, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(PlainRMSNorm(), OffsetRMSNorm(), CentredRMSNorm(), CentredRMSNorm())
    package.patch(model)
    last = caplog.records[-1]
    assert last.levelname == "INFO"
    assert last.getMessage() == (
        "patch serves 2 RMSNorms and leaves 2 alone: 2 CentredRMSNorm (it computes something "
        "else than xhat * w and xhat * (1 + w))"
    )
    assert str(model).count("by Normforge") == 2
    assert "(0): PlainRMSNorm(by Normforge)" in str(model)
    package.unpatch(model)
    assert "Normforge" not in str(model)
    package.patch(package.RMSNorm(16))  # it needs no patch
    assert caplog.records[-1].levelname == "INFO"


@pytest.mark.parametrize(("casting", "names"), [("llama", ["0"]), ("gemma", ["1"])])
def test_a_casting_holds_for_the_norms_that_have_it(
    package: Package, casting: str, names: list[str]
) -> None:
    model = nn.Sequential(PlainRMSNorm(), OffsetRMSNorm())
    assert package.patch(model, casting) == names


class NarrowedRMSNorm(PlainRMSNorm):
    """The result has the weight's dtype, as T5's has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        narrow = self.weight.dtype in (torch.float16, torch.bfloat16)
        return self.weight * (wide.to(self.weight.dtype) if narrow else wide)


@pytest.mark.parametrize("kind", [PlainRMSNorm, OffsetRMSNorm, NarrowedRMSNorm])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_keep_their_dtype(
    package: Package, kind: Any, weight_dtype: torch.dtype, x_dtype: torch.dtype
) -> None:
    norm, x = filled(kind(), weight_dtype), randn(64, 16).to(x_dtype)
    wanted = norm(x)
    assert package.patch(norm) == [""]
    assert norm(x).dtype == wanted.dtype
    torch.testing.assert_close(norm(x).float(), wanted.float(), rtol=2**-7, atol=2**-7)


class WideRMSNorm(PlainRMSNorm):
    """Never rounds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


class WideOffsetRMSNorm(OffsetRMSNorm):
    """The product is as wide as its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * (1.0 + self.weight)


@pytest.mark.parametrize("kind", [WideRMSNorm, WideOffsetRMSNorm])
def test_a_norm_whose_dtype_no_kernel_gives_is_left_alone(package: Package, kind: Any) -> None:
    norm = kind()
    assert package.patch(norm) == []
    assert package.patch(norm, "gemma" if kind is WideOffsetRMSNorm else "torch") == [""]


class PlacelessRMSNorm(PlainRMSNorm):
    """A norm that runs on a GPU only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:
            raise RuntimeError("x must be on a GPU")
        return super().forward(x)


class TrainingRMSNorm(PlainRMSNorm):
    """A norm that runs only while it trains."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            raise RuntimeError("another norm is for inference")
        return super().forward(x)


class InPlaceRMSNorm(PlainRMSNorm):
    """A norm for inference: nothing flows back through a tensor that is written to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return self.weight * x.mul_(torch.rsqrt(mean + self.variance_epsilon))


class InferenceRMSNorm(PlainRMSNorm):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class WrongInferenceRMSNorm(InferenceRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("kind", [InPlaceRMSNorm, InferenceRMSNorm])
def test_norms_for_inference_are_judged_by_their_results(package: Package, kind: Any) -> None:
    norm, x = filled(kind()), randn(2, 3, 16)
    wanted = norm(x.clone())
    assert package.patch(norm) == [""]
    torch.testing.assert_close(norm(x), wanted)
    assert package.patch(WrongInferenceRMSNorm()) == []


def test_an_eps_that_is_a_tensor_may_change_and_is_left_alone(package: Package) -> None:
    norm: Any = PlainRMSNorm()
    norm.variance_epsilon = torch.tensor(1e-4)
    assert package.patch(norm) == []


@pytest.mark.parametrize("kind", [PickyRMSNorm, PlacelessRMSNorm, TrainingRMSNorm])
def test_a_norm_that_cannot_be_tried_is_served_as_told(
    package: Package, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    norm = kind()
    assert package.patch(norm) == []
    assert "raises an error" in caplog.text
    assert package.patch(norm, "torch") == [""]


def test_a_norm_that_differs_before_it_raises_an_error_is_never_served(package: Package) -> None:
    class Both(ColumnRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dim() == 4:
                raise ValueError("x must have two or three dimensions")
            return super().forward(x)

    assert package.patch(Both(), "torch") == []


class CountedRMSNorm(PlainRMSNorm):
    """Counts how often it is tried, and may be another norm by an attribute."""

    tries = 0

    def __init__(self, width: int = 16, eps: float = 1e-4, **attributes: Any) -> None:
        super().__init__(width, eps)
        self.factor: Any = 1.0
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountedRMSNorm.tries += 1
        factor = self.factor["is"] if isinstance(self.factor, dict) else self.factor
        factor = 2.0 - self.training if factor == "1 in training" else factor
        return super().forward(x) * factor


def test_norms_that_are_alike_are_tried_once(package: Package) -> None:
    tries = []
    for copies in (1, 5):
        CountedRMSNorm.tries = 0
        package.patch(nn.Sequential(*[CountedRMSNorm() for _ in range(copies)]))
        tries.append(CountedRMSNorm.tries)
    assert tries[0] == tries[1] > 0


def test_norms_of_one_class_that_differ_are_each_tried(package: Package) -> None:
    buffered: Any = CountedRMSNorm()
    del buffered.factor
    buffered.register_buffer("factor", torch.tensor(2.0), persistent=False)
    model = nn.Sequential(
        CountedRMSNorm(),
        CountedRMSNorm(factor=2.0),
        CountedRMSNorm(32, factor=1.0),
        CountedRMSNorm(factor={"is": 1.0}),
        CountedRMSNorm(factor={"is": 2.0}),
        CountedRMSNorm(),
        buffered,
        CountedRMSNorm(16, 1.0),
        CountedRMSNorm(factor="1 in training").eval(),
        CountedRMSNorm(factor="1 in training"),
    )
    assert package.patch(model) == ["0", "2", "3", "5", "7"]


def test_norms_are_judged_in_inference_mode(package: Package) -> None:
    with torch.inference_mode():
        (detached,) = (k for k in OTHER_NORMS if k.__name__ == "DetachedStatisticRMSNorm")
        model = nn.Sequential(PlainRMSNorm(), detached())
        assert package.patch(model) == ["0"]


def test_an_eps_of_zero_is_none_at_all(package: Package) -> None:
    norm, x = filled(PlainRMSNorm(eps=0.0)), randn(4, 16)
    wanted = norm(x)
    assert package.patch(norm) == [""]
    torch.testing.assert_close(norm(x), wanted)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.device("meta"),
        FakeTensorMode,
        lambda: default_dtype(torch.bfloat16),
        lambda: default_dtype(torch.float64),
    ],
)
def test_a_model_is_patched_where_it_is_built(package: Package, around: Any) -> None:
    with around():
        model = nn.Sequential(PlainRMSNorm(), nn.RMSNorm(16), OffsetRMSNorm(), CentredRMSNorm())
        dtype = torch.get_default_dtype()
        assert package.patch(model) == ["0", "1", "2"]
        assert torch.get_default_dtype() == dtype


class Sharded:
    """A class that makes other objects than its own, as FSDPModule is one."""

    def __new__(cls) -> Any:
        made = object.__new__(cls.__mro__[2])
        made.__init__()
        return made


def test_sharded_norms_are_tried_without_making_new_ones(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm: Any = PlainRMSNorm()
    norm.__class__ = type("FSDPPlainRMSNorm", (Sharded, PlainRMSNorm), {})
    monkeypatch.delattr(PlainRMSNorm, "__init__")
    assert package.patch(norm) == [""]


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_casting_of_llama_has_its_bits(package: Package, weight_dtype: torch.dtype) -> None:
    norm = filled(PlainRMSNorm(), weight_dtype)
    x = randn(64, 16, dtype=torch.bfloat16)
    wanted = norm(x)
    package.patch(norm, casting="llama")
    assert norm(x).dtype == wanted.dtype
    assert torch.equal(norm(x), wanted)
    package.patch(norm, casting="torch")  # the last one counts
    assert norm(x).dtype == torch.bfloat16
    assert not torch.equal(norm(x), wanted)
    assert torch.allclose(norm(x).float(), wanted.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize("affine", [False, True])
def test_norms_of_pytorch_stay_what_they_are(package: Package, casting: str, affine: bool) -> None:
    norm = nn.RMSNorm(16, eps=1e-6, elementwise_affine=affine)
    x = randn(64, 16)
    wanted = norm(x)
    assert package.patch(norm, casting=casting) == [""]
    torch.testing.assert_close(norm(x), wanted)


def test_casting_of_gemma_has_its_bits(package: Package) -> None:
    norm = filled(OffsetRMSNorm(), torch.bfloat16)
    x = randn(64, 16, dtype=torch.bfloat16)
    wanted = norm(x)
    package.patch(norm, casting="gemma")
    assert torch.equal(norm(x), wanted)
    with pytest.raises(ValueError, match="casting must be one of llama, gemma, torch or None"):
        package.patch(norm, casting="t5")


def test_models_without_memory_yet(package: Package) -> None:
    with torch.device("meta"):
        model = nn.Sequential(PlainRMSNorm(), OffsetRMSNorm())
    assert package.patch(model) == ["0", "1"]
    assert model(torch.empty(4, 16, device="meta")).shape == (4, 16)
    filled(model.to_empty(device="cpu"))
    x = randn(4, 16)
    y = model(x)
    package.unpatch(model)
    assert torch.allclose(model(x), y, atol=1e-5)


def test_patched_models_compile(package: Package) -> None:
    model = filled(nn.Sequential(PlainRMSNorm(), OffsetRMSNorm()))
    package.patch(model)
    x = randn(4, 16).requires_grad_()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert equal_bits(grads(compiled(x), x), grads(model(x), x))


@pytest.mark.parametrize("casting", [None, "llama"])
@pytest.mark.parametrize("kind", [PlainRMSNorm, OffsetRMSNorm])
def test_heads_that_were_transposed_keep_their_order_in_memory(
    package: Package, kind: Any, casting: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class's own formula keeps it, so that nothing behind it has to copy heads."""
    if casting and kind is OffsetRMSNorm:
        pytest.skip("it is no norm of that casting")
    norm, heads = filled(kind()), randn(2, 3, 5, 16).requires_grad_()
    wanted = norm(heads.transpose(1, 2))
    exact = grads(wanted, heads)
    assert package.patch(norm, casting=casting) == [""]
    seen: list[torch.Tensor] = []
    rms_norm = package._norm.rms_norm

    def spy(x: torch.Tensor, *given: Any, **how: Any) -> Any:
        seen.append(x)
        return rms_norm(x, *given, **how)

    monkeypatch.setattr(package._norm, "rms_norm", spy)
    for run in (norm, torch.compile(norm, backend="aot_eager", fullgraph=True)):
        y = run(heads.transpose(1, 2))
        assert y.stride() == wanted.stride() != y.contiguous().stride()
        torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
        for one, other in zip(grads(y, heads), exact, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert seen and all(x.is_contiguous() for x in seen)
    for other in (heads, heads.permute(2, 1, 0, 3), heads.flatten(0, 1).transpose(0, 1)):
        assert norm(other).shape == other.shape
        assert seen[-1] is other


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma3", "Mistral", "Olmo2"])
def test_models_of_hugging_face(package: Package, name: str) -> None:
    model, ids = model_of(name), torch.randint(1, 32, (2, 9))
    wanted = step(model, ids)
    norms = [n for n, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")]
    assert package.patch(model) == norms != []
    torch.testing.assert_close(step(model, ids), wanted, rtol=1e-3, atol=1e-4)
    package.unpatch(model)
    assert equal_bits(step(model, ids), wanted)


def test_a_class_that_is_made_of_a_patched_one_stays(package: Package) -> None:
    """`fully_shard` and parametrizations make such a class."""
    x = randn(4, 16)
    sharded = PlainRMSNorm()
    package.patch(sharded)
    kind = sharded.__class__ = type("FSDPPlainRMSNorm", (type(sharded),), {})
    wanted = sharded(x)
    assert package.unpatch(sharded) == []
    package.patch(sharded)
    assert isinstance(sharded, kind)
    assert torch.equal(sharded(x), wanted)
    package.unpatch(sharded)
    assert type(sharded) is kind
    doubled: Any = PlainRMSNorm()
    package.patch(doubled)
    torch.nn.utils.parametrize.register_parametrization(doubled, "weight", Doubled())
    package.unpatch(doubled)
    assert torch.allclose(doubled(x), 2 * wanted)


def test_a_norm_with_a_forward_of_its_own_is_left_alone(package: Package) -> None:
    """accelerate's hooks replace a forward like this."""
    model: Any = nn.Sequential(PlainRMSNorm(), PlainRMSNorm())
    model[0].forward = lambda x: 3 * x
    assert package.patch(model) == ["1"]
    assert type(model[0]) is PlainRMSNorm


def test_a_norm_that_differs_where_it_can_be_tried_is_left_alone(package: Package) -> None:
    """It takes no four dimensions, as one for images takes no two. A casting is believed only of
    what cannot be tried, or fits wherever it can."""

    class NarrowRMSNorm(CentredRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dim() == 4:
                raise ValueError("rows of sequences only")
            return super().forward(x)

    assert package.patch(NarrowRMSNorm(), casting="torch") == []


@pytest.mark.parametrize("size", [1.0, 1e4])
def test_gradients_are_compared_by_the_size_of_their_rows(size: float) -> None:
    """The gradient of a row falls as the row grows, and a wrong one is wrong by as much of it."""
    x = size * randn(3, 8)
    y, dx, dw = randn(3, 8, seed=1), randn(3, 8, seed=2) / size, randn(8, seed=3)
    assert are_close((y, dx, dw), (y, dx * (1 + 1e-6), dw), x)
    assert not are_close((y, dx, dw), (y, dx * 1.01, dw), x)
    assert not are_close((y, dx, dw), (y, dx, dw * 1.01), x)
