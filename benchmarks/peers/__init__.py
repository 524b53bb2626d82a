"""Other people's kernels for the operations, behind one way to call them.

Every peer is called the way its own library calls it in a training step, with what its forward
saves, and does the whole operation: dx and the sums over rows, in the weight's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.peers.cudnn_plans import cudnn_best, cudnn_heuristic, cudnn_version
from benchmarks.peers.libraries import (
    liger_cutedsl,
    liger_layer_norm,
    liger_triton,
    quack,
    quack_layer_norm,
    quack_tuned,
)
from benchmarks.peers.peer import Gradients, Peer
from benchmarks.peers.pytorch import (
    aten,
    aten_layer_norm,
    decomposed_backward,
    decomposed_layer_norm,
    inductor,
)
from generator.errors import NormforgeError
from generator.problem import RMSNORM_BACKWARD

_LIGER = ("liger-kernel", "triton")
_CUTE = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
_QUACK = ("quack-kernels", *_CUTE)
_CUDNN = ("nvidia-cudnn-frontend",)

# One peer for both operations.
_QUACK_TUNED = Peer("quack_tuned", _QUACK, quack_tuned, tuned=True)
_CUDNN_PEERS = (
    Peer("cudnn_heuristic", _CUDNN, cudnn_heuristic, library=cudnn_version),
    Peer("cudnn", _CUDNN, cudnn_best, library=cudnn_version),
)


def _inductor(formula: Callable[..., Gradients]) -> tuple[Peer, Peer]:
    needs, best = ("torch", "triton"), "max-autotune-no-cudagraphs"
    return (
        Peer("inductor", needs, partial(inductor, formula, "default"), compiles="disk"),
        Peer("inductor_max", needs, partial(inductor, formula, best), tuned=True, compiles="disk"),
    )


PEERS: dict[str, tuple[Peer, ...]] = {
    RMSNORM_BACKWARD: (
        Peer("aten", ("torch",), lambda timer: aten),
        *_inductor(decomposed_backward),
        Peer("liger_triton", _LIGER, liger_triton, overwrites_dy=True, compiles="disk"),
        Peer("liger_cutedsl", ("liger-kernel", *_CUTE), liger_cutedsl, compiles="process"),
        Peer("quack", _QUACK, quack, compiles="disk"),
        _QUACK_TUNED,
        *_CUDNN_PEERS,
    ),
    "layernorm_backward": (
        Peer("aten", ("torch",), lambda timer: aten_layer_norm),
        *_inductor(decomposed_layer_norm),
        Peer("liger_triton", _LIGER, liger_layer_norm, compiles="disk"),
        Peer("quack", _QUACK, quack_layer_norm, compiles="disk"),
        _QUACK_TUNED,
        *_CUDNN_PEERS,
    ),
}
"""The peers of each operation."""


def choose_peers(names: str, operation: str = RMSNORM_BACKWARD) -> list[Peer]:
    """The peers of an operation for `all` or a comma-separated list of names. Raises NormforgeError
    for a name that is no peer's."""
    known = {peer.name: peer for peer in PEERS[operation]}
    if names == "all":
        return list(known.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise NormforgeError(f"unknown peer '{name}': use all or some of {', '.join(known)}")
    return [peer for peer in known.values() if peer.name in wanted]
