"""The rotary embedding alone, as the packages of rotated norms serve it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any, ClassVar

import torch

from ..operations import ROPE
from .library import Served
from .rope_checks import check_rotated, columns_of, turns_of
from .rope_node import FORMS, SERVED
from .rotary_node import formula, rotary_embedding
from .row_functions import RowFunctions


class RotaryFunctions(RowFunctions):
    """The function of the rotary embedding, and the forms of a package. Safe to use from several
    threads."""

    served: ClassVar[Served[Any]] = SERVED
    packages = "rope_packages"
    flags: Mapping[str, bool] = {}
    """The flags of the operations that a form sets."""

    def apply_rope(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rotary_dim: int | None = None,
        interleaved: bool = False,
    ) -> torch.Tensor:
        """Compute x * cos + rotate_half(x) * sin, as attention does with its queries and keys in
        Llama. Differentiable in x.

        Both directions are one kernel where one was tuned, else the formula in PyTorch. Under
        torch.compile it is an operator. Works under autocast (which changes nothing here),
        activation checkpointing and CUDA graphs. Under torch.func, and for tensor subclasses,
        PyTorch's operators serve.

        Args:
            x: (..., H, D), bf16, fp16 or fp32: H heads of each token. Heads of a packed projection
                are read where they lie.
            cos, sin, rotary_dim, interleaved: as of `rms_norm_rope`.

        Returns:
            y in x's shape and dtype, computed in fp32 and rounded once.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
        """
        check_rotated(x, None, cos, sin, 0.0, rotary_dim, interleaved)
        of_turns = turns_of(x, cos, sin, columns_of(x.shape[-1], rotary_dim))
        return rotary_embedding(x, *of_turns, 1.0, self.form_named(interleaved=interleaved))

    def form_named(self, joined: bool = False, interleaved: bool = False) -> str:
        """Return the name that operators know a form of these functions by."""
        if not (joined or interleaved):  # at every call
            return self.name
        return "+".join((self.name, *compress(FORMS, (joined, interleaved))))

    def of_form(self, form: str) -> Any:
        """Return these functions in another form. Raises LookupError for one that is not in
        FORMS."""
        if form not in FORMS:
            raise LookupError(form)
        made = object.__new__(type(self))
        flags = {**self.flags, form: True}
        vars(made).update(vars(self), name=f"{self.name}+{form}", flags=flags)
        self.served.add(made.name, made)
        return made

    def retire(self) -> None:
        """Forget the forms of these functions: another package has taken the name."""
        for form in FORMS:
            found = self.served.known.pop(f"{self.name}+{form}", None)
            if found is not None:
                found.retire()

    def rotates(self, x: torch.Tensor, rotation: str) -> bool:
        """Return True if there is a kernel for heads like x, which may be a fake of sizes that
        tracing does not know. rotation: as shape_names.py has it."""
        return self.have_kernels(x, None, (ROPE,), rotation=rotation)

    def rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float
    ) -> torch.Tensor:
        """Return y without gradients, of arguments as of `rotary_node.formula`."""
        server = self.server(ROPE)
        tensors = {"x": x, "cos": cos, "sin": sin, "sign": sign, **self.flags}
        if server.is_without_kernels(x):
            server.count_call(x, tensors)
            with torch.no_grad():
                return formula(x, cos, sin, sign, **self.flags)
        return server(tensors)["y"]
