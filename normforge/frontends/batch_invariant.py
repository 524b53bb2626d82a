"""RMSNorm with bits that do not depend on the batch: the functions of such a package."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from typing import Any, overload

import torch

from ..api import Package
from ..serve.call import Call
from ..serve.call_cache import CallCache
from ..serve.forward import Forward
from ..serve.options import Arguments, Options
from ..serve.reference import Results
from ..serve.server import Server
from ..spec import KernelSpec, Launch, plan_launch
from .invariant_forward import (
    ADVICE,
    BatchInvariantForward,
    MatchingForward,
    advice_for,
    misplaced,
    placed,
)
from .matching import MatchingNorm, form_of
from .operators import Operators
from .rms_norm import NO_INVARIANT_BIAS, Norm


class InvariantNorm(Norm):
    """The norm of a batch-invariant package, and those beside it that match another."""

    def __init__(self, server: Server, forward: Forward, operators: Operators) -> None:
        super().__init__(server, forward, operators)
        self._by_name: dict[str, MatchingNorm] = {}
        self._by_form: dict[str, MatchingNorm] = {}
        self._lock = Lock()
        # A graph may ask for them before anybody here has.
        operators.of_form = lambda form: self.of_form(form).operators  # type: ignore[method-assign]
        operators.retire = self._forget_forms

    @overload
    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        bias: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        residual: None = None,
        add: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        residual_dtype: None = None,
        matches: str | None = None,
    ) -> torch.Tensor: ...

    @overload
    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *,
        bias: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        residual: torch.Tensor,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
        matches: str | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        eps: float | None = None,
        *others: Any,
        bias: torch.Tensor | None = None,
        weight_offset: float = 0.0,
        residual: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        residual_dtype: torch.dtype | None = None,
        matches: str | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute RMSNorm as `Norm.rms_norm` does, by batch-invariant kernels.

        Args:
            x, weight, eps, weight_offset, residual, add, out_dtype, residual_dtype: as there.
            bias: None. A gradient that PyTorch sums depends on the batch.
            matches: "vllm" for the bits of vLLM's batch-invariant `rms_norm` on this GPU, as the
                Triton compiles it that is installed here, or "vllm-triton3.7" as that version
                does. The gradients are the package's, from the rstd of this forward. The weight
                and y have x's dtype then, and there is no offset and no residual.

        Returns:
            As there.

        Raises:
            TypeError, ValueError: if the arguments do not fit together.
            RuntimeError: if there is no such kernel for a call on a GPU, or no Triton for "vllm".
        """
        if bias is not None:
            raise ValueError(NO_INVARIANT_BIAS)
        options: Any = {"weight_offset": weight_offset, "residual": residual, "add": add}
        options |= {"out_dtype": out_dtype, "residual_dtype": residual_dtype}
        if matches is not None:
            norm: Any = self.matching(matches)
            return norm.rms_norm(x, weight, eps, *others, **options)
        return super().rms_norm(x, weight, eps, *others, **options)

    def matching(self, name: str) -> Norm:
        """The norm whose forward has the bits that `name` stands for; see `rms_norm`."""
        found = self._by_name.get(name)
        return self._make(name) if found is None else found

    def forwards(self) -> tuple[Forward, ...]:
        return (self.forward, *(norm.forward for norm in tuple(self._by_form.values())))

    def _make(self, name: str) -> MatchingNorm:
        found = self._by_name[name] = self.of_form(form_of(name))
        return found

    def _forget_forms(self) -> None:
        """Leave the names of the forms to the package that has taken the name of this one."""
        for norm in tuple(self._by_form.values()):
            self.operators.served.known.pop(norm.operators.package, None)

    def of_form(self, form: str) -> MatchingNorm:
        """The norm whose forward adds in this form. Its operators have the form behind the name of
        the package."""
        server = self._server
        with self._lock:
            if form not in self._by_form:
                forward = MatchingForward(server._source, form)
                package = f"{self.operators.package}+{form}"
                operators = Operators(package, forward, server._run, server._quick)
                self._by_form[form] = MatchingNorm(server, forward, operators)
            return self._by_form[form]


class BatchInvariantPackage(Package):
    """A package of batch-invariant kernels, or those of several GPUs. dx of a row depends on that
    row, N, the dtypes and the options alone; dw on the rows in their order. No kernel of another
    order ever serves a CUDA call: what is not aligned is copied, and for what there is no kernel a
    call raises RuntimeError. After `install()`, norms over several dimensions stay PyTorch's. Off
    the GPU the formula serves, which promises nothing of the kind."""

    operation = "rmsnorm_invariant_backward"
    _forward_class = BatchInvariantForward
    _norm_class = InvariantNorm
    _norm: InvariantNorm
    _invariant, _advice = True, ADVICE
    _sm_margin = 0

    def use_native(self) -> None:
        """Raise RuntimeError: C++ would serve calls with `matches`, and with an SM margin, as all
        others.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("batch-invariant norms have no use_native(): go on without it")

    def set_sm_margin(self, sms: int) -> None:
        """Launch backwards with only as many CTAs as fit on `sms` SMs fewer, to make room for
        communication kernels. Takes effect with the next call, in every thread. No bit changes,
        because the order of every sum is the same with any grid.

        If several CTAs fit on an SM, the GPU may still spread the remaining ones over all SMs.
        Graphs that are already captured keep their grid, and forwards have no margin. Call it
        before training or between two steps.

        Args:
            sms: from 0, for the whole GPU, to one less than the GPU has.

        Raises:
            ValueError: for any other number.
        """
        most = int(self.table.target["sms"])
        if not isinstance(sms, int) or not 0 <= sms < most:
            raise ValueError(f"the margin must be 0 to {most - 1} SMs, got {sms}")
        self._sm_margin = sms
        # Known calls have launches with the previous margin.
        self._calls = CallCache()

    def _launch(self, spec: KernelSpec, rows: int) -> Launch:
        return plan_launch(replace(spec, sms=max(1, spec.sms - self._sm_margin)), rows)

    def _find(self, given: Arguments, options: Options) -> Call | str:
        found = super()._find(given, options)
        if isinstance(found, str):
            raise RuntimeError(f"{found}, and {advice_for(given.x, given.weight)}")
        return found

    def _with_kernel(self, given: Arguments, options: Options, device: int) -> Call | str:
        total = given.dw_out if options.accumulate else None
        if any(map(misplaced, (given.dy, given.x, given.weight, total))):
            return self._copied(options)
        return super()._with_kernel(given, options, device)

    def patch(
        self, model: torch.nn.Module, casting: str | None = None, *, fuse: bool = False
    ) -> list[str]:
        """Patch a model as `Package.patch` does, but for the casting "llama", whose product with
        the weight and its gradient are PyTorch's, and for `fuse`, whose kernels sum as the number
        of rows says. Raises ValueError for both."""
        if fuse:
            raise ValueError("no kernels of rms_norm_rope are batch-invariant: leave fuse out")
        if casting == "llama":
            raise ValueError(
                'with casting="llama" PyTorch computes the gradient of the weight, and its bits '
                'depend on the batch: take "torch", or None'
            )
        return super().patch(model, casting)

    def _copied(self, options: Options) -> Call:
        """Serve a call by the same kernel on copies, where another kernel would be needed, or dw be
        added up in another order."""

        def call(
            dy: Any, x: Any, rstd: Any, weight: Any, dresidual: Any, dw_out: Any, *others: Any
        ) -> Results:
            dy, x, weight = map(placed, (dy, x, weight))
            place = placed(dw_out) if options.accumulate else dw_out
            given = Arguments(dy, x, rstd, weight, dresidual, place, *others)
            dx, dw, *third = self._run(given, options)
            if place is not dw_out:
                with torch.no_grad():
                    dw = dw_out.copy_(place)
            return (dx, dw, *third)

        return call
