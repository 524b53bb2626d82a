"""Questions that the runtime asks PyTorch by private names, where a PyTorch lacks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fresh import printed_by

SCRIPT = """
from pathlib import Path
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

owner, name = {owner}, "{name}"
kept = getattr(owner, name)
delattr(owner, name)  # while the runtime is imported, which is when it looks
import normforge.torch_internals as internals
setattr(owner, name, kept)
if name in ("_len_torch_dispatch_stack", "_are_functorch_transforms_active", "_current_level"):
    assert internals.watched()  # as far as anybody knows
from tests.support.entry_points import write_package

package = write_package(Path("{folder}"))
x, tangent, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)

def theirs(x):
    return torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)

def mine(x):
    return package.rms_norm(x, weight, 1e-6)

graph = make_fx(mine)(x).graph
assert any("normforge." in str(node.target) for node in graph.nodes), graph
close = lambda one, two: torch.allclose(one, two, atol=1e-5)
assert close(torch.func.jvp(mine, (x,), (tangent,))[1], torch.func.jvp(theirs, (x,), (tangent,))[1])
for enabled in (True, False):
    with forward_ad.dual_level(), torch.set_grad_enabled(enabled):
        dual = forward_ad.make_dual(x, tangent)
        assert close(*(forward_ad.unpack_dual(norm(dual)).tangent for norm in (mine, theirs)))
        try:
            package.rmsnorm_backward(dual, x, torch.ones(4, 1), weight)
        except RuntimeError as error:
            assert "differentiate the norm" in str(error)
        else:
            raise AssertionError("a tangent was lost")
loss = lambda norm: lambda x: norm(x).sin().sum()
wanted = torch.func.grad(loss(theirs))(x)
try:
    found = torch.func.grad(loss(mine))(x)
except RuntimeError as error:
    assert "setup_context" in str(error), error
else:
    assert close(found, wanted)
leaf = x.clone().requires_grad_()
loss(mine)(leaf).backward()
assert close(leaf.grad, wanted)
traced = torch.jit.trace(mine, x)
assert close(traced(tangent), theirs(tangent))
assert not any("normforge" in node.kind() for node in traced.graph.nodes())
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch._C", "_len_torch_dispatch_stack"),
        ("torch._C", "_get_tracing_state"),
        ("torch._C", "_are_functorch_transforms_active"),
        ("torch.autograd.forward_ad", "_current_level"),
        ("torch._C", "DispatchKeySet"),
    ],
)
def test_who_watches_operators_is_found_out_by_the_operators(
    tmp_path: Path, owner: str, name: str
) -> None:
    """PyTorch may refuse them instead, but nobody is passed over in silence."""
    printed_by(SCRIPT.replace("{owner}", owner).replace("{name}", name), tmp_path)


CUDA_SCRIPT = """
import torch

guards = torch._C._dynamo.guards
for owner, name in (
    (torch._C, "_cuda_getDevice"),
    (torch._C, "_cuda_getCurrentRawStream"),
    (torch._C, "_cuda_isCurrentStreamCapturing"),
    (guards, "_empty_strided_cuda"),
    (guards, "TensorGuards"),
):
    if hasattr(owner, name):
        delattr(owner, name)
import normforge.torch_internals as internals

assert internals.current_device is torch.cuda.current_device
assert internals.is_capturing is torch.cuda.is_current_stream_capturing
assert internals.raw_stream is internals._public_stream
assert internals.empty_strided is internals._public_empty
x = torch.randn(4, 8)
same = internals.same_kind(x)
assert same(torch.randn(4, 8))
others = (x.double(), x[:2], x.T.contiguous().T, x.clone().requires_grad_(), torch._neg_view(x))
for other in others:
    assert not same(other), other
"""


def test_missing_names_have_public_functions_in_their_place() -> None:
    printed_by(CUDA_SCRIPT)
