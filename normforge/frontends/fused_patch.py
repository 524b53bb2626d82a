"""`patch(model, fuse=True)`: modules of a model whose norms and what stands beside them are one
kernel."""

from __future__ import annotations

import logging
from importlib import import_module

import torch

from .layer_patch import LAYER, fuse_sums
from .patch import unpatch
from .rms_norm import Norm
from .rope_patch import ATTENTION, fuse_heads

_log = logging.getLogger(__name__)


def fuse(norm: Norm, rotated: str, model: torch.nn.Module, casting: str | None) -> list[str]:
    """Let a package serve attention with norms of heads, and layers with sums beside their norms;
    their names. norm: of the package; rotated: the module with its `rms_norm_rope`, "" for none;
    casting: as of `patch`."""
    if not rotated:
        _log.warning("patch fuses nothing: only normforge.patch has rms_norm_rope beside it")
        return []
    if casting == "llama":
        _log.warning("patch fuses nothing: the casting of Llama rounds between norm and product")
        return []
    names = fuse_heads(import_module(rotated).functions, model) + fuse_sums(norm, model)
    if not names:
        _log.warning("patch fuses nothing in this model: the log says why, at level INFO")
    return names


def unfuse(model: torch.nn.Module) -> list[str]:
    """Undo `fuse`; the names of the modules."""
    return unpatch(model, ATTENTION) + unpatch(model, LAYER)
